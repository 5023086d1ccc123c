"""Write what a run trains as an ordinary Hugging Face folder, which transformers and vLLM load.

    <run folder>/hf/iteration_000200/    config.json, generation_config.json, tokenizer files, model*.safetensors (bf16)
                                         of LoRA the merged model, or: adapter_config.json, adapter_model.safetensors

The policy, or where there is none the reward model, as an ``AutoModelForSequenceClassification``.

All ranks gather the shards bucket by bucket; rank 0 keeps the full tensors on the host (2 bytes per parameter) and
writes. A folder appears under its name only when it is whole. An observer: removing it changes no result.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_rlhf.hf_config import HeadKind, class_of, load_config, padding_of


class HFExport(pl.Callback):
    """Exports the policy every n iterations and at the end of training.

    Args:
        every_n_iterations: between two exports; None exports at the end only.
        at_end: export after the last iteration.
        dirpath: local folder for the exports; None takes ``hf`` in the run's folder.
        adapter: of a run with LoRA export the adapter alone, in peft's format and the dtype it is trained in.

    Raises:
        ValueError: no export was asked for, the folder is not local, or there is no adapter.
    """

    def __init__(
        self,
        every_n_iterations: int | None = None,
        at_end: bool = True,
        dirpath: str | Path | None = None,
        adapter: bool = False,
    ) -> None:
        if every_n_iterations is not None and every_n_iterations < 1:
            raise ValueError(f"every_n_iterations must be at least 1, or null for none, got {every_n_iterations}")
        if every_n_iterations is None and not at_end:
            raise ValueError("HFExport would never export: set every_n_iterations or at_end")
        self.every_n_iterations = every_n_iterations
        self.at_end = at_end
        self.dirpath = dirpath
        self.adapter = adapter
        self._exported_at = 0

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        folder = trainer.log_dir or trainer.default_root_dir  # a collective: all ranks
        if self.dirpath is None:
            self.dirpath = os.path.join(folder, "hf")
        if not _is_local_file_protocol(self.dirpath):
            raise ValueError(f"HFExport writes to local folders only, got {str(self.dirpath)!r}: set its dirpath")
        self.dirpath = Path(self.dirpath).expanduser()
        if self.adapter and pl_module.settings.lora is None:
            raise ValueError("HFExport.adapter needs a run with LoRA: set model.lora, or leave it out")
        if self.adapter and "actor" not in pl_module.roles:
            raise ValueError("HFExport.adapter is for a policy, a reward model is written merged: leave it out")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.every_n_iterations and trainer.global_step % self.every_n_iterations == 0:
            try:
                self._export(trainer, pl_module)
            except ExportFailed as failure:
                rank_zero_warn(f"{failure}. The run goes on, the next one is tried when it is due")

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.at_end:
            try:
                self._export(trainer, pl_module)
            except ExportFailed as failure:
                raise ExportFailed(
                    f"{failure}: see to it and take `lightning-rlhf export` of the last checkpoint, which has the same"
                    " weights"
                ) from None

    def _export(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.fast_dev_run or self._exported_at == trainer.global_step:  # type: ignore[attr-defined]
            return
        assert self.dirpath is not None
        target = Path(self.dirpath) / f"iteration_{trainer.global_step:06d}"
        settings, tokenizer = pl_module.settings, pl_module.tokenizer
        changes, adapter = settings.config_overrides, self.adapter
        trust = settings.trust_remote_code
        export(pl_module.root, target, settings.path, tokenizer, trainer.strategy, trust, changes, adapter=adapter)
        self._exported_at = trainer.global_step


class ExportFailed(RuntimeError):
    """A folder could not be written; every rank raises it, and what was there before still is."""


def export(
    root: Any,
    target: Path,
    model_path: str,
    tokenizer: Any,
    strategy: Strategy,
    trust_remote_code: bool = False,
    config_overrides: Mapping[str, Any] | None = None,
    *,
    adapter: bool = False,
) -> None:
    """Gather the weights of ``root``, or with ``adapter`` of its adapter, and write them on rank 0: a collective.

    Raises:
        ExportFailed: on every rank if rank 0 could not write, so that none waits for it.
    """
    keep = strategy.is_global_zero
    if adapter:
        weights = gather_on_host(root.adapter.named_parameters(), None, keep)
    else:
        weights = gather_on_host(root.hf_named_parameters(), torch.bfloat16, keep)
        weights |= {name: buffer.cpu() for name, buffer in root.hf_named_buffers()}
    failure = None
    if strategy.is_global_zero:
        try:
            if adapter:
                write_adapter(target, weights, root.adapter, tokenizer)
            else:
                write_folder(
                    target, weights, model_path, tokenizer, trust_remote_code, config_overrides, head=root.head_kind
                )
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    failure = strategy.broadcast(failure)
    if failure is not None:
        raise ExportFailed(f"the Hugging Face export to {target} failed: {failure}")


def write_folder(
    target: Path,
    weights: Mapping[str, Tensor],
    model_path: str,
    tokenizer: Any,
    trust_remote_code: bool = False,
    config_overrides: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    head: HeadKind = "tokens",
) -> None:
    """Write weights, config, generation config and tokenizer under a temporary name, then rename.

    Args:
        target: the folder to write; one that is there is replaced.
        weights: full tensors by transformers' name; names that are tied to another one are dropped.
        model_path: folder with the config that the weights belong to.
        tokenizer: anything with ``save_pretrained``.
        trust_remote_code: the model's class comes with its folder.
        config_overrides: with which the model was built; they become part of its config.
        dtype: of the weights, for the config.
        head: what kind of model it is.
    """
    with _appearing_whole(target) as draft:
        model = _skeleton(model_path, trust_remote_code, config_overrides, dtype, head)
        if head != "tokens" and (unknown := sorted(weights.keys() - model.state_dict().keys())):
            raise NotImplementedError(
                f"transformers' {type(model).__name__} has no {unknown[0]}, it would lose the head"
            )
        if head == "score":
            model.config.get_text_config().pad_token_id = padding_of(model.config, tokenizer)
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        model.save_pretrained(draft, state_dict={n: t for n, t in weights.items() if n not in tied})
        tokenizer.save_pretrained(draft)
        for file in Path(model_path).glob("*processor_config.json"):  # of images, if the model takes some
            shutil.copyfile(file, draft / file.name)


def write_adapter(target: Path, weights: dict[str, Tensor], adapter: Any, tokenizer: Any) -> None:
    """Write an adapter in peft's format and the tokenizer, likewise.

    Args:
        weights: full tensors by the names of ``adapter.named_parameters``.
        adapter: see `modules.lora`.
    """
    with _appearing_whole(target) as draft:
        adapter.save(draft, weights)
        tokenizer.save_pretrained(draft)


@contextmanager
def _appearing_whole(target: Path) -> Iterator[Path]:
    """A folder that takes the name ``target`` once it was filled without an exception."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        yield draft
        draft.chmod(0o755)  # mkdtemp's folders are private
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _skeleton(
    model_path: str,
    trust_remote_code: bool,
    config_overrides: Mapping[str, Any] | None,
    dtype: torch.dtype,
    head: HeadKind,
) -> Any:
    """The model without weights: what `save_pretrained` needs to know of its class."""
    from transformers import GenerationConfig

    config = load_config(model_path, config_overrides, trust_remote_code)
    if head != "tokens":
        config.num_labels = 1
    with torch.device("meta"):
        model = class_of(config, head).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    if head == "tokens" and (Path(model_path) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(model_path)
    return model


def gather_on_host(
    named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, keep: bool = True
) -> dict[str, Tensor]:
    """Full tensors in host memory, empty without ``keep``; see `rollout.weights.gather`. Tied names share one tensor."""
    from lightning_rlhf.rollout.weights import gather

    kept = {}
    earlier: Callable[[], Tensor | None] = lambda: None  # noqa: E731
    for name, tensor in gather(named, dtype):
        if not keep:
            continue
        if earlier() is not tensor:
            earlier, copy = weakref.ref(tensor), tensor.to("cpu", copy=True)  # it may be the parameter itself
        kept[name] = copy
    return kept
