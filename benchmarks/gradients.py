"""How far gradients are from those of a plain model: one row for every mesh, switch and attention kernel that runs here.

python benchmarks/gradients.py --device cpu
torchrun --nproc_per_node 4 benchmarks/gradients.py --device cpu
torchrun --nproc_per_node 2 benchmarks/gradients.py

    loss = Σ_t w_t · (-A_t · log p_t - 0.1 · H_t)      A of GRPO, w = 1 / tokens of the whole optimizer step

The same 16 ragged sequences are cut and packed as training does it. The oracle is transformers' own model in float64 (its norms
and rotary tables stay float32), one unpacked sequence at a time, with full logits. Columns, each the largest over the ranks:

    parameter    max over parameters of |g - g*| / |g*|      1 - cosine    of all gradients as one vector
    norm, loss   |x - x*| / |x*|

In bf16-mixed, the first rows are transformers' own model in bfloat16, again one sequence at a time: what bfloat16 itself costs.
Exits with 1 if a row is further off than the limit.
"""

from __future__ import annotations

import argparse
import gc
import re
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from importlib.util import find_spec
from math import inf
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from random_model import SHAPES, config_of
from torch import Tensor
from transformers import AutoModelForCausalLM
from update import strategy_of

from lightning_rlhf import FSDPUlyssesStrategy, ModelSettings, build_policy
from lightning_rlhf.kernels import MissingKernel, choose_kernel
from lightning_rlhf.modules.advantages import grpo
from lightning_rlhf.modules.batching import Split, micro_batches
from lightning_rlhf.modules.execution import HostActivations
from lightning_rlhf.modules.gradients import clip_roles
from lightning_rlhf.modules.losses import token_weights
from lightning_rlhf.modules.settings import Recomputed
from lightning_rlhf.packing import attention_cost, plan
from lightning_rlhf.types import Experience, right_pad

FLOAT32_LIMIT = 1e-4
"""Rounding makes 2e-6; one token of the 2,097 left out of the loss makes 5e-2."""

BFLOAT16_FACTOR = 1.5
"""Times the parameter error of transformers' own model with bfloat16 weights: rounding in another order is about as large."""

LENGTHS = (300, 290, 270, 256, 231, 200, 190, 170, 128, 127, 113, 97, 90, 77, 64, 33)
CUDA_KERNELS = ("padded", "flash_attention_2", "flash_attention_3", "flash_attention_4")


class Row(NamedTuple):
    """Arguments of `ModelSettings`, of the strategy, and the micro-batches of each data rank."""

    name: str
    settings: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    micro: int = 1


class Result(NamedTuple):
    gradients: dict[str, Tensor]
    norm: float
    loss: float


def rows(world: int, half_on_cuda: bool) -> list[Row]:
    """Those that fit so many processes."""
    sp, replicas, kept = "sequence_parallel_size", "data_parallel_replicate", "reshard_after_forward"
    kernels = ("reference", *(CUDA_KERNELS if half_on_cuda else ()))
    combined = {"gradient_checkpointing": "selective", "compile": True}
    found = [
        Row("base"),
        *(Row(f"{n} micro-batches", micro=n) for n in (2, 4)),
        *(Row(f"recomputed: {which}", {"gradient_checkpointing": which}) for which in get_args(Recomputed)[1:]),
        Row("tiled MLP", {"tiled_mlp": 100}),
        Row("offloaded activations", {"offload_activations": True}),
        Row("compiled", {"compile": True}),
        *(Row(f"attention: {kernel}", {"attention": kernel}) for kernel in kernels),
        *(Row(f"{kept}: {value}", sizes={kept: value}, micro=2) for value in (False, True)),
        Row("gathered as a whole", sizes={"min_num_params": 10**9}, micro=2),
        *(Row(f"sequence parallel {n}", sizes={sp: n}) for n in (2, 4)),
        Row("2 replicas", sizes={replicas: 2}),
        Row("sequence parallel 2, 2 replicas", sizes={sp: 2, replicas: 2}),
        Row("sequence parallel 2, selective, compiled", combined, {sp: 2}, micro=2),
    ]
    if half_on_cuda:  # last: Liger's rotary embedding stays for every model that is built later
        found += [Row("Liger", {"liger": True}), Row("Liger, compiled", {"liger": True, "compile": True})]
    return [row for row in found if world % (row.sizes.get(sp, 1) * row.sizes.get(replicas, 1)) == 0]


def installed(settings: dict[str, Any], device: torch.device) -> bool:
    """Whether the packages that a row needs are there."""
    try:
        choose_kernel(settings.get("attention", "auto"), device)
    except MissingKernel:
        return False
    return not settings.get("liger") or find_spec("liger_kernel") is not None


def write(shape: str, folder: str) -> None:
    """A random model whose biases and norms are not trivial and whose attention is not uniform."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder)


def experience(vocabulary: int) -> Experience:
    """4 prompts x 4 responses, a random reward each."""
    generator = torch.Generator().manual_seed(0)
    prompts = [1 + n // 5 for n in LENGTHS]
    mask = right_pad([[1.0] * (n - p) for n, p in zip(LENGTHS, prompts, strict=True)])
    rewards, group = torch.zeros_like(mask), torch.arange(len(LENGTHS)) % 4
    rewards[:, 0] = torch.randn(len(LENGTHS), generator=generator)
    sequences = [torch.randint(3, vocabulary, (n,), generator=generator) for n in LENGTHS]
    advantages, _ = grpo(rewards=rewards, mask=mask, groups=group)
    return Experience(sequences, prompts, group, mask, rewards, 0.8, mask.shape[1], advantages=advantages)


def weighted_loss(data: Experience, log_probs: Tensor, entropy: Tensor, chosen: Any) -> Tensor:
    """What the ``chosen`` entries of (G, T) tensors add to the loss."""
    weights = token_weights(data.mask, "token-mean")[chosen]
    return -(weights * (data.advantages[chosen] * log_probs + 0.1 * entropy)).sum()


def stock(folder: str, data: Experience, device: torch.device, dtype: torch.dtype, autocast: bool = False) -> Result:
    """Of transformers' own model; gradients of the sequences are added in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    names, parameters = zip(*model.named_parameters(), strict=True)
    totals, loss = [torch.zeros_like(p, dtype=torch.float64) for p in parameters], 0.0
    for i, (sequence, prompt) in enumerate(zip(data.sequences, data.prompt_lengths, strict=True)):
        ids = sequence.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            logits = model(ids[None], use_cache=False).logits[0, prompt - 1 : -1]
        z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / data.temperature
        log_p = z.log_softmax(-1)
        log_probs, entropy = log_p.gather(-1, ids[prompt:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        part = weighted_loss(data, log_probs, entropy, (i, slice(len(log_probs))))
        for total, gradient in zip(totals, torch.autograd.grad(part, parameters), strict=True):
            total += gradient
        loss += float(part.detach())
    norm = torch.stack([total.norm() for total in totals]).norm()
    return Result(dict(zip(names, totals, strict=True)), float(norm), loss)


def packed(row: Row, folder: str, data: Experience, strategy: FSDPUlyssesStrategy, budget: int) -> Result:
    """Of our policy: loaded, sharded, packed and accumulated as in training."""
    policy = build_policy(ModelSettings(folder, **row.settings), strategy)
    parameters = dict(policy.model.named_parameters())  # the shards: after forward a root may hold gathered ones
    split = Split(
        data_ranks=strategy.dp_size,
        data_rank=strategy.dp_rank,
        sequence_ranks=strategy.sequence_parallel_size,
        sequence_rank=strategy.sp_rank,
        tokens=budget // strategy.sequence_parallel_size,
        cost=attention_cost(policy.hidden_size),
        device=strategy.root_device,
    )
    total = torch.zeros((), device=strategy.root_device)
    for batch in micro_batches(data, range(len(data)), split)[0]:
        log_probs, entropy = policy(batch.packed, data.temperature, True)
        loss = weighted_loss(data, log_probs, entropy, (batch.rows, slice(batch.width)))
        (loss * dist.get_world_size()).backward()  # FSDP2 averages over all ranks
        total += loss.detach()
    norm = clip_roles([{"params": list(parameters.values()), "role": "actor"}], None)["actor"]
    gradients = {name: p.grad.full_tensor().double() for name, p in parameters.items()}
    return Result(gradients, inf if norm is None else float(norm), float(strategy.all_reduce_dp(total)))


def token_budget(data_ranks: int, micro: int, hidden_size: int) -> int | None:
    """The smallest with which each data rank gets ``micro`` micro-batches; None if none does."""
    budgets = range(max(LENGTHS), sum(LENGTHS) + 4, 4)  # multiples of every sequence-parallel size here
    counts = ((n, len(plan(LENGTHS, data_ranks, n, attention_cost(hidden_size))[0])) for n in budgets)
    return next((n for n, count in counts if count == micro), None)


def errors(got: Result, oracle: Result) -> list[float]:
    """(parameter, 1 - cosine, norm, loss), the largest over the ranks; NaN counts as infinite."""
    pairs = [(got.gradients[name], want) for name, want in oracle.gradients.items()]
    parameter = torch.stack([(g - want).norm() / want.norm() for g, want in pairs]).max()
    one, other = (torch.cat([pair[i].flatten() for pair in pairs]) for i in (0, 1))
    cosine = one.dot(other) / (one.norm() * other.norm())
    found = [float(parameter), 1 - float(cosine), abs(got.norm / oracle.norm - 1), abs(got.loss / oracle.loss - 1)]
    worst = torch.tensor(found, dtype=torch.float64, device=one.device).nan_to_num(nan=inf)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.tolist()


def table(arguments: argparse.Namespace, folder: str) -> int:
    """Print it row by row; 1 if a row is over the limit."""
    strategies = cache(partial(strategy_of, arguments.device, arguments.precision))
    base = strategies()
    device, world, half = base.root_device, dist.get_world_size(), arguments.precision != "32-true"
    config = config_of(arguments.shape)
    if base.is_global_zero:
        write(arguments.shape, folder)
    folder = base.broadcast(folder)
    data = experience(config.vocab_size).to(device)
    oracle = stock(folder, data, device, torch.float64)
    limit, over = FLOAT32_LIMIT, []

    def show(*cells: object) -> None:
        if base.is_global_zero:
            print(f"| {' | '.join(map(str, cells))} |", flush=True)

    def compare(result: Result, *cells: object) -> list[float]:
        found = errors(result, oracle)
        show(*cells, *(f"{error:.1e}" for error in found))
        return found

    show(
        f"{world} x {device.type}, {arguments.precision}", "dp x sp", "micro", "parameter", "1 - cosine", "norm", "loss"
    )
    show(*["---"] * 7)
    if half:
        autocast = stock(folder, data, device, torch.float32, autocast=True)
        compare(autocast, "transformers, bfloat16 autocast", "", "")
        plain = stock(folder, data, device, torch.bfloat16)
        limit = BFLOAT16_FACTOR * compare(plain, "transformers, bfloat16 weights", "", "")[0]
    for row in rows(world, half and device.type == "cuda"):
        strategy = strategies(**{"min_num_params": 0} | row.sizes)
        budget = token_budget(strategy.dp_size, row.micro, config.hidden_size)
        if budget is None or not re.search(arguments.rows, row.name):
            continue
        if not installed(row.settings, device):
            show(row.name, "not installed", *[""] * 5)
            continue
        result = packed(row, folder, data, strategy, budget)
        found = compare(result, row.name, f"{strategy.dp_size} x {strategy.sequence_parallel_size}", row.micro)
        over += [row.name] if max(found) > limit else []
        del result
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if base.is_global_zero:
        print(f"\nlimit {limit:.1e}: {'over it: ' + '; '.join(over) if over else 'all within'}")
    return int(bool(over))


def main(line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--rows", default="", help="only those in whose name this regular expression is found")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), help="default: float32 on cpu only")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    arguments = parser.parse_args(line)
    arguments.precision = arguments.precision or ("32-true" if arguments.device == "cpu" else "bf16-mixed")
    HostActivations.smallest = 0  # streams are short here
    with tempfile.TemporaryDirectory() as folder:
        failed = table(arguments, folder)
        dist.barrier()  # all read the weights of the first rank
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
