"""Write the policy as an ordinary Hugging Face folder, which transformers and vLLM load.

    <run folder>/hf/iteration_000200/    config.json, generation_config.json, tokenizer files, model*.safetensors (bf16)

All ranks gather the shards bucket by bucket; rank 0 keeps the full tensors on the host (2 bytes per parameter) and
writes. A folder appears under its name only when it is whole. An observer: removing it changes no result.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_rlhf.images import auto_class


class HFExport(pl.Callback):
    """Exports the policy every n iterations and at the end of training.

    Args:
        every_n_iterations: between two exports; None exports at the end only.
        at_end: export after the last iteration.
        dirpath: local folder for the exports; None takes ``hf`` in the run's folder.

    Raises:
        ValueError: no export was asked for, or the folder is not local.
    """

    def __init__(
        self, every_n_iterations: int | None = None, at_end: bool = True, dirpath: str | Path | None = None
    ) -> None:
        if every_n_iterations is not None and every_n_iterations < 1:
            raise ValueError(f"every_n_iterations must be at least 1, or null for none, got {every_n_iterations}")
        if every_n_iterations is None and not at_end:
            raise ValueError("HFExport would never export: set every_n_iterations or at_end")
        self.every_n_iterations = every_n_iterations
        self.at_end = at_end
        self.dirpath = dirpath
        self._exported_at = 0

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        folder = trainer.log_dir or trainer.default_root_dir  # a collective: all ranks
        if self.dirpath is None:
            self.dirpath = os.path.join(folder, "hf")
        if not _is_local_file_protocol(self.dirpath):
            raise ValueError(f"HFExport writes to local folders only, got {str(self.dirpath)!r}: set its dirpath")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.every_n_iterations and trainer.global_step % self.every_n_iterations == 0:
            self._export(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.at_end:
            self._export(trainer, pl_module)

    def _export(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.fast_dev_run or self._exported_at == trainer.global_step:  # type: ignore[attr-defined]
            return
        self._exported_at = trainer.global_step
        assert self.dirpath is not None
        target = Path(self.dirpath) / f"iteration_{trainer.global_step:06d}"
        settings = pl_module.settings
        export(
            pl_module.actor, target, settings.path, pl_module.tokenizer, trainer.strategy, settings.trust_remote_code
        )


def export(
    actor: Any, target: Path, model_path: str, tokenizer: Any, strategy: Strategy, trust_remote_code: bool = False
) -> None:
    """Gather the weights of ``actor`` and write them on rank 0: a collective, see `write_folder`.

    Raises:
        RuntimeError: on every rank if rank 0 could not write, so that none waits for it.
    """
    weights = _gather_on_first_rank(actor, strategy.is_global_zero)
    failure = None
    if strategy.is_global_zero:
        try:
            write_folder(target, weights, model_path, tokenizer, trust_remote_code)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    failure = strategy.broadcast(failure)
    if failure is not None:
        raise RuntimeError(f"the Hugging Face export to {target} failed: {failure}")


def write_folder(
    target: Path, weights: Mapping[str, Tensor], model_path: str, tokenizer: Any, trust_remote_code: bool = False
) -> None:
    """Write weights, config, generation config and tokenizer under a temporary name, then rename.

    Args:
        target: the folder to write; one that is there is replaced.
        weights: full tensors by transformers' name; names that are tied to another one are dropped.
        model_path: folder with the config that the weights belong to.
        tokenizer: anything with ``save_pretrained``.
        trust_remote_code: the model's class comes with its folder.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        model = _skeleton(model_path, trust_remote_code)
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        model.save_pretrained(draft, state_dict={n: t for n, t in weights.items() if n not in tied})
        tokenizer.save_pretrained(draft)
        for file in Path(model_path).glob("*processor_config.json"):  # of images, if the model takes some
            shutil.copyfile(file, draft / file.name)
        draft.chmod(0o755)  # mkdtemp's folders are private
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _skeleton(model_path: str, trust_remote_code: bool) -> Any:
    """The model without weights: what `save_pretrained` needs to know of its class."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=torch.bfloat16, trust_remote_code=trust_remote_code)
    if (Path(model_path) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(model_path)
    return model


def _gather_on_first_rank(actor: Any, keep: bool) -> dict[str, Tensor]:
    from lightning_rlhf.rollout.weights import gather

    kept = {}
    for name, tensor in gather(actor.hf_named_parameters(), torch.bfloat16):
        if keep:
            kept[name] = tensor.to("cpu", copy=True)  # it may be the parameter itself
    return kept
