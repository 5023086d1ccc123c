"""A checkpoint of one mesh goes on on any other: the same parameters, optimizer state and data, to the bit.

A renewed reference and the average of the weights are among the parameters.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from toys import TINY_MODULE, even_tokens, quiet_trainer, spawn

from lightning_rlhf import KL, FSDPUlyssesStrategy, PPOLightningModule, PromptDataModule, RolloutCallback, Sampling

WORLD = 4
MESHES = [(1, 1, 1), (2, 2, 1), (2, 1, 2), (4, 1, 1), (4, 2, 2)]
"""Ranks, sequence_parallel_size, data_parallel_replicate."""
WAYS = [((4, 2, 1), mesh) for mesh in MESHES] + [((1, 1, 1), (1, 1, 1)), ((1, 1, 1), (4, 2, 2))]
"""Who writes a checkpoint, who goes on from it."""


@dataclass
class Seen:
    """Hashes of parameters and optimizer state when training starts and ends, rows of each iteration, metrics of the last."""

    states: list[str] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class Look(pl.Callback):
    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.seen.states.append(digest(trainer, pl_module))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        shares = pl_module.strategy.all_gather_objects_dp(pl_module.last_experience.group.tolist())
        self.seen.rows.append(sorted({row for share in shares for row in share}))
        own = ("actor/", "critic/", "reward/", "completions/")
        self.seen.metrics = {name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith(own)}

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.seen.states.append(digest(trainer, pl_module))


def digest(trainer: pl.Trainer, module: pl.LightningModule) -> str:
    names = {parameter: name for name, parameter in module.named_parameters()}
    optimizer = trainer.optimizers[0]
    tensors = dict(module.named_parameters())
    for parameter, state in optimizer.state.items():
        tensors |= {f"{names[parameter]} {key}": value for key, value in state.items()}
    found = hashlib.sha256()
    for name in sorted(tensors):
        whole = tensors[name].full_tensor() if isinstance(tensors[name], DTensor) else tensors[name]
        found.update(name.encode() + whole.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return f"{len(tensors)} tensors {found.hexdigest()}"


def fit(mesh: tuple[int, int, int], steps: int, checkpoint: str | None, save: str | None = None) -> Seen:
    ranks, sp, replicas = mesh
    seen = Seen()
    pl.seed_everything(1, verbose=False)
    trainer = quiet_trainer(
        RolloutCallback(sampling=Sampling(max_completion_length=6, num_generations=2)),
        Look(seen),
        devices=ranks,
        strategy=FSDPUlyssesStrategy(sequence_parallel_size=sp, data_parallel_replicate=replicas),
        max_steps=steps,
        enable_checkpointing=False,
    )
    followers = {"kl": KL(coef=0.01, refresh_every=2), "ema_decay": 0.9}
    module = PPOLightningModule(**TINY_MODULE, **followers, reward=[even_tokens], mini_batches=2)
    trainer.fit(module, datamodule=PromptDataModule(path="toys.prompts", batch_size=8), ckpt_path=checkpoint)
    if save:
        trainer.save_checkpoint(save)
    return seen


def lives(rank: int, folder: str) -> dict[Any, Seen | None]:
    """Two iterations and a checkpoint on each mesh that writes one; the third iteration on each that goes on from it."""
    dist.barrier()
    dist.destroy_process_group()
    seen: dict[Any, Seen | None] = {}
    for writer, mesh in WAYS:
        path = f"{folder}/{'-'.join(map(str, writer))}.ckpt"
        if (writer, "writes") not in seen:
            seen[writer, "writes"] = on_ranks(rank, writer, folder, 2, None, path)
        seen[writer, mesh] = on_ranks(rank, mesh, folder, 3, path)
    return seen


def on_ranks(rank: int, mesh: tuple[int, int, int], folder: str, *args: Any) -> Seen | None:
    """`fit` on the first ranks, the others wait."""
    on_ranks.calls = getattr(on_ranks, "calls", 0) + 1  # type: ignore[attr-defined]
    call, ranks = f"{folder}/{on_ranks.calls}", mesh[0]  # type: ignore[attr-defined]
    seen = None
    if rank < ranks:
        os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
        os.environ["TORCHELASTIC_RUN_ID"] = "reshard"
        dist.init_process_group("gloo", init_method=f"file://{call}", rank=rank, world_size=ranks)
        seen = fit(mesh, *args)
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{call}.all", rank=rank, world_size=WORLD)
    dist.barrier()
    dist.destroy_process_group()
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Seen]:
    ranks = spawn(lives, WORLD, str(tmp_path_factory.mktemp("reshard")))
    for other in ranks[1:]:
        for key, value in other.items():
            assert value is None or value.states == ranks[0][key].states
    return ranks[0]


@pytest.mark.parametrize(("writer", "mesh"), WAYS, ids=str)
def test_parameters_and_optimizer_are_what_the_other_mesh_wrote(seen, writer, mesh):
    assert seen[writer, mesh].states[0] == seen[writer, "writes"].states[-1]


@pytest.mark.parametrize(("writer", "mesh"), WAYS, ids=str)
def test_data_and_training_go_on_where_the_other_mesh_was(seen, writer, mesh):
    one = seen[(1, 1, 1), (1, 1, 1)]
    assert seen[writer, mesh].rows == one.rows
    assert len(one.rows) == 1
    assert len(one.rows[0]) == 8
    assert not set(one.rows[0]) & set(seen[writer, "writes"].rows[-1])
    assert seen[writer, mesh].metrics == pytest.approx(one.metrics, rel=2e-5, abs=2e-5)
    assert seen[writer, mesh].states[1] != seen[writer, mesh].states[0]
