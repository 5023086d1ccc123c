"""Short runs of SFT, reward model and DPO on the tiny model, for the tests of them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_rlhf import (
    DPOLightningModule,
    FSDPUlyssesStrategy,
    IterationCheckpoint,
    PreferenceDataModule,
    RewardModelLightningModule,
    SFTDataModule,
    SFTLightningModule,
)

OPTIONS = {"lr": 3e-3, "micro_batch_tokens": 120}
KINDS = {
    "sft": (SFTLightningModule, SFTDataModule, "classical.demonstrations"),
    "reward": (RewardModelLightningModule, PreferenceDataModule, "classical.pairs"),
    "dpo": (DPOLightningModule, PreferenceDataModule, "classical.pairs"),
}


def demonstrations() -> list[dict[str, Any]]:
    """24 conversations of one or two turns."""
    asked = [f"{a}+{b}" for a in (2, 31, 7, 5) for b in (4, 50, 6, 9, 8, 13)]
    rows = [[{"role": "user", "content": q}, {"role": "assistant", "content": str(eval(q))}] for q in asked]
    return [{"messages": row if i % 3 else row + rows[i - 1]} for i, row in enumerate(rows)]


def pairs() -> list[dict[str, Any]]:
    """24 pairs of unlike lengths with margins."""
    asked = [f"{a}+{b}=" for a in (2, 31, 7, 5) for b in (4, 50, 6, 9, 8, 13)]
    return [
        {"prompt": q, "chosen": str(eval(q[:-1])), "rejected": "no" * (1 + i % 4), "margin": 0.1 * (i % 3)}
        for i, q in enumerate(asked)
    ]


def train(
    kind: str, folder: Path | str, steps: int, *, ckpt_path: str | None = None, save: bool = False, **options: Any
) -> tuple[Any, list[dict[str, float]]]:
    """The module and its logged rows; options are the trainer's, ``strategy``, ``data`` and ``model`` those of the others."""
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    module, data, rows = KINDS[kind]
    model = module(**{"model": "random:tiny", **OPTIONS, **options.pop("model", {})})
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=FSDPUlyssesStrategy(**options.pop("strategy", {})),
        max_steps=steps,
        num_sanity_val_steps=0,
        logger=CSVLogger(str(folder), name="", version=""),
        log_every_n_steps=1,
        enable_checkpointing=save,
        callbacks=[IterationCheckpoint(dirpath=f"{folder}/ck")] if save else [],
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"devices": 1, **{k: v for k, v in options.items() if k != "data"}},
    )
    data = data(**{"path": rows, "batch_size": 9, "val_size": 4, **options.get("data", {})})
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    if not trainer.is_global_zero:
        return model, []
    with Path(folder, "metrics.csv").open(newline="") as file:
        return model, [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def learned(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """What of the metrics depends on no clock."""
    return [
        {k: v for k, v in row.items() if k.startswith(("train/", "val/", "actor/", "reward_model/"))} for row in rows
    ]


def head_of(module: Any) -> torch.Tensor:
    return module.reward_model.value_head.weight.detach().full_tensor()[0].clone()
