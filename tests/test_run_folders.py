"""Runs that start at the same time have a folder each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from toys import TINY_MODULE, even_tokens

from lightning_rlhf import (
    FSDPUlyssesStrategy,
    GRPOLightningModule,
    IterationCheckpoint,
    PromptDataModule,
    RolloutCallback,
    Sampling,
)
from lightning_rlhf.run_folders import take_folders


def overtaken(kind: Any, folder: Path, **options: Any) -> Any:
    """A logger whose number somebody else takes between its look and its use."""

    class Overtaken(kind):  # type: ignore[misc]
        def _get_next_version(self) -> int:
            number: int = super()._get_next_version()
            other = kind(str(folder), name="run")
            take_folders([other])
            assert other.version == number
            (Path(other.log_dir) / "metrics.csv").write_text("of another run")
            return number

    return Overtaken(str(folder), name="run", **options)


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_number_that_was_taken_meanwhile_is_left_alone(kind: Any, tmp_path: Path) -> None:
    logger = overtaken(kind, tmp_path)
    take_folders([logger])
    assert logger.version == 1
    assert Path(logger.log_dir) == tmp_path / "run/version_1"
    assert Path(logger.log_dir).is_dir()


@pytest.mark.parametrize("version", [0, "mine", ""])
def test_a_folder_that_was_named_is_taken_as_it_is(version: Any, tmp_path: Path) -> None:
    logger = CSVLogger(str(tmp_path), name="run", version=version)
    take_folders([logger])
    assert logger.version == version
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_made_is_the_loggers_to_complain_of(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    logger = CSVLogger(str(tmp_path / "run"), name="name", version=None)
    take_folders([logger])
    assert logger.version == 0


def test_a_run_that_looks_for_its_last_checkpoint_writes_into_no_folder_of_another(tmp_path: Path) -> None:
    """The look comes long before the number is taken."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=FSDPUlyssesStrategy(),
        max_steps=1,
        logger=overtaken(CSVLogger, tmp_path),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[RolloutCallback(sampling=Sampling(max_completion_length=4)), IterationCheckpoint()],
    )
    module = GRPOLightningModule(**TINY_MODULE, reward=[even_tokens])
    with pytest.warns(UserWarning, match="there is no last checkpoint available"):
        trainer.fit(module, datamodule=PromptDataModule(path="toys.prompts", batch_size=4), ckpt_path="last")
    others = [tmp_path / f"run/version_{number}" for number in range(int(Path(str(trainer.log_dir)).name[8:]))]
    assert len(others) >= 1
    for folder in others:
        assert [path.name for path in folder.iterdir()] == ["metrics.csv"]
        assert (folder / "metrics.csv").read_text() == "of another run"
    assert (Path(str(trainer.log_dir)) / "checkpoints/iteration-000001.ckpt").is_dir()
