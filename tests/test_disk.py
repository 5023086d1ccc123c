"""What checkpoints will take on the disk, against what they take; a run that has no room for them says so at its start."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._pytree import tree_leaves
from toys import TINY_MODULE, even_tokens, fit

from lightning_rlhf import KL, GRPOLightningModule, IterationCheckpoint, LoRA, PPOLightningModule, RolloutCallback
from lightning_rlhf.background import Background
from lightning_rlhf.callbacks import planning
from lightning_rlhf.callbacks.disk import checkpoint_bytes
from lightning_rlhf.host_memory import local_of

pytestmark = pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
COMMON = TINY_MODULE | {"reward": [even_tokens]}


@pytest.mark.parametrize("weights_only", [False, True], ids=["all", "weights"])
@pytest.mark.parametrize(
    "module",
    [
        lambda: PPOLightningModule(**COMMON),
        lambda: GRPOLightningModule(**COMMON, lora=LoRA(r=4)),
        lambda: GRPOLightningModule(**COMMON, ema_decay=0.9, kl=KL(coef=0.1, refresh_every=2)),
    ],
    ids=["actor, critic", "adapter", "average, reference"],
)
def test_the_size_of_a_checkpoint_is_known_before_it_is_written(module, weights_only, tmp_path):
    built = module()
    saver = IterationCheckpoint(tmp_path / "c", save_weights_only=weights_only)
    fit(built, tmp_path, 1, callbacks=[saver])
    (folder,) = (tmp_path / "c").glob("*.ckpt")
    parts = FileSystemReader(folder).read_metadata().state_dict_metadata.values()
    tensors = [part for part in parts if isinstance(part, TensorStorageMetadata)]
    size = sum(part.size.numel() * part.properties.dtype.itemsize for part in tensors)
    assert size == pytest.approx(checkpoint_bytes(built, weights_only), rel=2e-3)  # and counters of steps


class Planned(pl.Callback):
    """What the plan says of the host's copy."""

    def on_train_start(self, trainer, module):
        rollout = next(c for c in trainer.callbacks if isinstance(c, RolloutCallback))
        self.size = planning.plan_of(trainer, module, rollout, 0).host["checkpoint"]


@pytest.mark.parametrize(
    "options",
    [{}, {"kl": KL(coef=0.1, refresh_every=2)}, {"ema_decay": 0.9}, {"lora": LoRA(r=4)}],
    ids=["actor", "reference", "average", "adapter"],
)
def test_the_copy_that_is_written_meanwhile_is_as_large_as_planned(options, tmp_path, monkeypatch):
    copies, copied, planned = [], Background.copied, Planned()
    monkeypatch.setattr(Background, "copied", lambda *args: copies.append(copied(*args)) or copies[-1])
    saver = IterationCheckpoint(tmp_path / "c", async_save=True)
    fit(GRPOLightningModule(**COMMON, **options), tmp_path, 1, callbacks=[saver, planned])
    tensors = [leaf for leaf in tree_leaves(copies[0]) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    assert sum(local_of(tensor).nbytes for tensor in tensors) == planned.size


def test_a_disk_without_room_is_told_of_at_the_start(tmp_path, monkeypatch, recwarn):
    free = [2.5]

    def usage(path):
        return SimpleNamespace(free=free[0] * checkpoint_bytes(modules[-1], False))

    def warnings_of(steps, **options):
        recwarn.clear()
        modules.append(GRPOLightningModule(**COMMON))
        fit(modules[-1], tmp_path, steps, callbacks=[IterationCheckpoint(tmp_path / "c", **options)])
        return [str(w.message) for w in recwarn if "a checkpoint takes" in str(w.message)]

    monkeypatch.setattr(shutil, "disk_usage", usage)
    modules = []
    assert not warnings_of(1)  # one, and the next before it goes
    free[0] = 1.5
    assert not warnings_of(1)  # one is there
    shutil.rmtree(tmp_path / "c")
    (line,) = warnings_of(1)
    size = checkpoint_bytes(modules[-1], False) / 2**20
    assert line.startswith(f"a checkpoint takes {size:.1f} MiB and 2 must fit into")
    assert f"where {1.5 * size:.1f} MiB are free: " in line
    assert "free space there, lower save_top_k, set save_weights_only" in line
    assert not warnings_of(1, save_top_k=-1)
    free[0] = 0.5
    assert len(warnings_of(1, save_top_k=-1)) == 1
    assert not warnings_of(1, save_top_k=0)
