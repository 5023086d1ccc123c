"""Time, MFU and memory of one optimizer step of a policy: forward, backward, clipping, AdamW. Random weights, full sequences.

python benchmarks/update.py --shape 1.5b --lengths 1024 8192 32768
python benchmarks/update.py --shape 1.5b --switches "{}" "{compile: true}" "{compile: true, liger: true}"
torchrun --nproc_per_node 4 benchmarks/update.py --shape 7b --lengths 1000000 --sp 4 --switches "{gradient_checkpointing: full}"

One row per length and set of switches (fields of `ModelSettings` as YAML). A micro-batch has ``--tokens`` tokens per GPU, or one
sequence where that is longer. MFU counts model FLOPs, nothing that is recomputed, on the two bases of `flops`.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import yaml
from random_model import SHAPES, config_of
from torch import Tensor, nn

from lightning_rlhf import FSDPUlyssesStrategy, LoRA, ModelSettings, Policy, build_policy, pack
from lightning_rlhf.flops import dims_of, frozen, peak_flops, training_flops
from lightning_rlhf.modules import policy as building
from lightning_rlhf.modules.adamw import ShardedAdamW
from lightning_rlhf.modules.gradients import clip_roles
from lightning_rlhf.modules.lora import trained_matrices


def draw(root: nn.Module, *_: Any) -> None:
    """Weights as they are before training, drawn on the device instead of read: small, so that activations stay finite."""
    with torch.no_grad():
        for parameter in root.parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)


def strategy_of(device: str, precision: str, **options: Any) -> FSDPUlyssesStrategy:
    """On the processes that are there: of torchrun, or this one."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    strategy = FSDPUlyssesStrategy(**options)
    trainer = pl.Trainer(
        accelerator=device,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        strategy=strategy,
        precision=precision,
        barebones=True,
    )
    trainer.strategy.connect(pl.LightningModule())
    trainer.strategy.setup_environment()
    return strategy


def measure(
    policy: Policy, strategy: FSDPUlyssesStrategy, length: int, count: int, arguments: argparse.Namespace
) -> tuple[float, float, float]:
    """(seconds, peak GiB of tensors, loss) of a step on micro-batches of ``count`` sequences on each data rank."""
    device = strategy.root_device
    generator = torch.Generator().manual_seed(strategy.dp_rank)
    vocabulary = policy.model.config.vocab_size
    sequences = [torch.randint(vocabulary, (length,), generator=generator) for _ in range(count)]
    packed = pack(sequences, [1] * count, strategy.sequence_parallel_size, strategy.sp_rank).to(device)
    group = {"params": [p for p in policy.parameters() if p.requires_grad], "role": "actor"}
    optimizer = ShardedAdamW([group], lr=1e-6, weight_decay=0.0, fused=True)
    scale = dist.get_world_size() / (arguments.micro_batches * count * length * strategy.dp_size)
    seconds, peak = [], 0.0

    def once() -> Tensor:
        for _ in range(arguments.micro_batches):
            loss = -policy(packed, 1.0)[0].sum() * scale
            loss.backward()
        clip_roles(optimizer.param_groups, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        return loss

    for step in range(arguments.steps + 1):  # the first compiles and allocates
        _wait(device)
        start = time.perf_counter()
        if device.type == "cuda" and step == 1:
            torch.cuda.reset_peak_memory_stats()
        loss = once()
        seconds.append(time.perf_counter() - start)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
    taken = median(seconds[1:] or seconds)
    if arguments.profile:
        with torch.profiler.profile() as trace:
            once()
        if dist.get_rank() == 0:
            key = f"self_{'device' if device.type == 'cuda' else 'cpu'}_time_total"
            events = [e for e in trace.key_averages() if e.device_type.name.lower() == device.type]
            busy = sum(getattr(event, key) for event in events) / 1e3
            print(f"  {busy:9.1f} ms {device.type} in a step of {1e3 * taken:.1f} ms without the profiler")
            for event in sorted(events, key=lambda e: -getattr(e, key))[:30]:
                print(f"  {getattr(event, key) / 1e3:9.1f} ms {event.count:6} x {event.key[:140]}")
    return taken, peak, float(loss.detach())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def rows(arguments: argparse.Namespace) -> None:
    """Print the table; a set of switches that runs out of memory is a row too."""
    strategy = strategy_of(
        arguments.device,
        arguments.precision,
        sequence_parallel_size=arguments.sp,
        data_parallel_replicate=arguments.replicas,
        prefetch=arguments.prefetch,
        reshard_after_forward=arguments.reshard_after_forward,
        min_num_params=arguments.min_num_params,
    )
    world = dist.get_world_size()
    peak = peak_flops(torch.cuda.get_device_name()) if arguments.device == "gpu" else None
    first = dist.get_rank() == 0
    if first:
        print(f"{arguments.shape}, {world} x {arguments.device}, sp {arguments.sp}, {arguments.precision}")
        print("length    tokens/step   s/step   tokens/s/GPU   MFU   with look-up   peak GiB   switches")
    for switches in arguments.switches:
        given = yaml.safe_load(switches) or {}
        lora = LoRA(**given.pop("lora")) if "lora" in given else None
        for length in arguments.lengths:
            count = max(1, arguments.tokens * arguments.sp // length)
            tokens = arguments.micro_batches * count * length * strategy.dp_size
            config = config_of(arguments.shape, max(arguments.lengths))
            with tempfile.TemporaryDirectory() as folder:
                config.save_pretrained(folder)
                policy = build_policy(ModelSettings(folder, lora=lora, **given), strategy)
            dims = dims_of(config) if lora is None else frozen(dims_of(config), *trained_matrices(policy))
            try:
                seconds, memory, _ = measure(policy, strategy, length, count, arguments)
            except torch.OutOfMemoryError:
                result = "out of memory"
            else:
                lengths = [length] * (tokens // length)
                work = [training_flops(dims, lengths, lookup=lookup) for lookup in (False, True)]
                shares = [f"{w / seconds / world / peak:.1%}" if peak else "-" for w in work]
                result = f"{seconds:7.3f}   {tokens / seconds / world:12,.0f}   {shares[0]:>5}   {shares[1]:>8}   {memory:10.1f}"
            if first:
                print(f"{length:7,}   {tokens:11,}   {result}   {switches}", flush=True)
            del policy
            gc.collect()
            if arguments.device == "gpu":
                torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--tokens", type=int, default=32768, help="per GPU and micro-batch")
    parser.add_argument("--micro_batches", type=int, default=1, help="per optimizer step")
    parser.add_argument("--switches", nargs="+", default=["{}"])
    parser.add_argument(
        "--steps", type=int, default=3, help="after one that compiles and allocates; 0: that one counts"
    )
    parser.add_argument("--sp", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--prefetch", type=int, default=0)
    parser.add_argument("--reshard_after_forward", type=yaml.safe_load, default=None)
    parser.add_argument("--min_num_params", type=int, default=600_000_000)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--profile", action="store_true", help="the kernels that take longest, of one more step")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    building.load_pretrained = draw
    rows(parser.parse_args())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
