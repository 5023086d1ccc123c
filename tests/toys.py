"""What several tests need: processes over gloo, the comparison with stock models, short runs of the tiny model."""

from __future__ import annotations

import csv
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

import lightning_rlhf
from lightning_rlhf import (
    KL,
    FilterGroups,
    FSDPUlyssesStrategy,
    PromptDataModule,
    RLHFLightningModule,
    RolloutCallback,
    Sampling,
)
from lightning_rlhf.modules.critic import Critic
from lightning_rlhf.modules.policy import Policy
from lightning_rlhf.packing import Packed
from lightning_rlhf.rollout.sharing import Pool
from lightning_rlhf.types import Completion

mp.get_context("forkserver").set_forkserver_preload(["lightning_rlhf.cli", "transformers.models.qwen2.modeling_qwen2"])
TINY_MODULE = {"model": "random:tiny", "lr": 3e-3, "micro_batch_tokens": 4096}


def spawn(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """Run ``function(rank, *args)`` in ``world`` processes with a gloo group; returns what each rank returned.

    ``function`` must be importable (a module-level function). An exception in any rank is raised here. The processes are forks of
    a server that has imported the package and done nothing else.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as results:
        entered = (world, port, dict(os.environ), function, args, results)
        mp.start_processes(_enter, entered, nprocs=world, start_method="forkserver")
        return [torch.load(f"{results}/{rank}", weights_only=False) for rank in range(world)]


def command(*line: str, ranks: int = 1) -> str:
    """What ``lightning-rlhf LINE`` prints in ``ranks`` processes, as torchrun would start them, forks like those of `spawn`.

    Raises:
        AssertionError: a process failed, or did not end in four minutes.
    """
    with socket.socket() as free, tempfile.NamedTemporaryFile("r") as printed:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "TORCHELASTIC_RUN_ID": "test"}
        shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
        free.close()
        context, own = (
            mp.get_context("forkserver"),
            [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)],
        )
        environments = [dict(os.environ) | (shared | rank if ranks > 1 else {}) for rank in own]
        processes = [context.Process(target=_command, args=(e, line, printed.name)) for e in environments]
        for process in processes:
            process.start()
        end = time.monotonic() + 240
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()
        text = printed.read()
    assert [process.exitcode for process in processes] == [0] * ranks, text[-3000:]
    return text


def _command(environment: dict[str, str], line: Sequence[str], output: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = ["lightning-rlhf", *line]
    from lightning_rlhf.cli import main

    main()


def _enter(
    rank: int,
    world: int,
    port: int,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    results: str,
) -> None:
    os.environ.clear()  # of the server
    os.environ.update(environment)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world)
    )
    torch.set_num_threads(1)
    meeting = f"file://{results}/meeting"  # a port that was free when it was chosen may be taken by now
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    try:
        torch.save(function(rank, *args), f"{results}/{rank}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


Results = tuple[dict[int, tuple[Tensor, Tensor, Tensor]], dict[str, Tensor], dict[str, Tensor]]
"""Log-probs, entropies and values by sequence; gradients of the actor's and of the critic's parameters."""


def packed_results(actor: Policy, critic: Critic, packed: Packed, rows: Sequence[int], ranks: int) -> Results:
    """Of this rank's ``rows`` in packed and sharded models; the gradients are of a loss over all of them."""
    with torch.no_grad():
        for parameter in critic.value_head.parameters():
            parameter.fill_(0.1)
    log_probs, entropy = actor(packed, 0.7, True)
    values = critic(packed)
    ((log_probs.sin() + 0.3 * entropy).sum() * ranks).backward()
    (values.square().sum() * ranks).backward()
    trained = actor.hf_named_parameters() if actor.adapter is None else actor.adapter.named_parameters()
    grads = {n: p.grad.full_tensor() for n, p in trained if p.grad is not None}
    critic_grads = {n: p.grad.full_tensor() for n, p in critic.named_parameters() if p.grad is not None}
    outputs = {i: (log_probs[k].detach(), entropy[k].detach(), values[k].detach()) for k, i in enumerate(rows)}
    return outputs, grads, critic_grads


def stock_results(
    model: nn.Module, backbone: nn.Module, sequences: Iterable[tuple[Tensor, int, dict[str, Tensor]]]
) -> Results:
    """The same of stock models, one unpadded sequence at a time.

    Args:
        sequences: token ids, length of the prompt, other inputs.
    """
    outputs = {}
    for i, (ids, prompt, others) in enumerate(sequences):
        log_p = (model(ids[None], use_cache=False, **others).logits[0, prompt - 1 : -1] / 0.7).log_softmax(-1)
        log_probs = log_p.gather(-1, ids[prompt:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        hidden = backbone(ids[None], use_cache=False, **others).last_hidden_state[0, prompt - 1 : -1]
        values = 0.1 * hidden.sum(-1) + 0.1
        ((log_probs.sin() + 0.3 * entropy).sum() + values.square().sum()).backward()
        outputs[i] = (log_probs.detach(), entropy.detach(), values.detach())
    grads = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    return outputs, grads, {f"model.{n}": p.grad for n, p in backbone.named_parameters() if p.grad is not None}


def assert_equal_to_stock(results: list[Results], stock: Results, frozen: str = "\0") -> None:
    """Results of all ranks; no parameter with ``frozen`` in its name has a gradient."""
    outputs, *stock_grads = stock
    for own, *all_grads in results:
        for i, values in own.items():
            for got, want in zip(values, outputs[i], strict=True):
                torch.testing.assert_close(got[: len(want)], want, rtol=1e-4, atol=1e-5)
                assert not got[len(want) :].any()
        for grads, wanted, atol in zip(all_grads, stock_grads, (1e-5, 1e-4), strict=True):
            assert {n for n in grads if "value_head" not in n} == {n for n in wanted if frozen not in n}
            for name in grads.keys() & wanted.keys():
                torch.testing.assert_close(grads[name], wanted[name], rtol=1e-4, atol=atol, msg=name)
        assert all_grads[1]["value_head.weight"].any()
    assert set().union(*(own for own, *_ in results)) == outputs.keys()


def pooled(pool: Pool, *args: Any, **kwargs: Any) -> list[Completion]:
    """The responses to this data rank's requests, as the `RolloutCallback` gets them."""
    run, own = pool.share(*args, **kwargs)
    return pool.collect(run)[own]


def prompts() -> list[dict[str, str]]:
    """32 prompts of three or four tokens."""
    return [{"prompt": f"say {word} "} for word in ("yes", "no", "a", "b", "one", "two", "three", "four") * 4]


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Share of even token ids: 0.5 for a policy that draws at random."""
    return [mean(t % 2 == 0 for t in ids) for ids in completion_ids]


def recipe(name: str, **options: Any) -> tuple[RLHFLightningModule, dict[str, Any]]:
    """The module of ``configs/NAME.yaml`` with other ``options``, and arguments of the `RolloutCallback`.

    The critic is warm already, no function decides alone, and responses that are cut count: those of a few tokens nearly all are.
    """
    config = yaml.safe_load((Path(__file__).parent.parent / "configs" / f"{name}.yaml").read_text())
    own = config["model"].get("init_args", config["model"])
    own = {key: KL(**value) if key == "kl" else value for key, value in own.items()}
    own |= dict.fromkeys(own.keys() & {"critic_warmup", "mask_truncated", "warmup_steps"}, 0) | {"val_metric": None}
    kind = config["model"].get("class_path", "lightning_rlhf.PPOLightningModule").rpartition(".")[2]
    groups = config["rollout"].get("filter_groups")
    rollout = {} if groups is None else {"filter_groups": FilterGroups(**groups | {"metric": None})}
    return getattr(lightning_rlhf, kind)(**own | options), rollout


def quiet_trainer(
    *callbacks: pl.Callback, devices: int = 1, strategy: FSDPUlyssesStrategy | None = None, **options: Any
) -> pl.Trainer:
    """On the CPU under the strategy, without logger, progress bar and summary."""
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy or FSDPUlyssesStrategy(),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )


def fit(
    module: RLHFLightningModule,
    folder: Path,
    iterations: int,
    rollout: dict[str, Any] | None = None,
    accelerator: str = "cpu",
    callbacks: Sequence[pl.Callback] = (),
    ckpt_path: str | None = None,
    precision: str = "32-true",
    **sampling: Any,
) -> list[dict[str, float]]:
    """Train with 16 prompts an iteration and responses of 6 tokens; the metrics of each iteration."""
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=1,
        strategy=FSDPUlyssesStrategy(),
        max_steps=iterations,
        precision=precision,
        logger=CSVLogger(str(folder), name="", version=""),
        log_every_n_steps=1,
        enable_checkpointing=any(isinstance(c, pl.callbacks.ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            RolloutCallback(sampling=Sampling(max_completion_length=6, **sampling), **(rollout or {})),
            *callbacks,
        ],
    )
    data = PromptDataModule(path="toys.prompts", batch_size=16, max_prompt_length=32)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
