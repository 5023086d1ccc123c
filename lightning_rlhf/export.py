"""From a checkpoint to a Hugging Face folder, in one process: no run, no data, no GPU, no process group.

    meta.pt: what the run was (`manifest`) ─▶ the actor's model on the meta device: names and shapes
    DCP shards, bucket by bucket ─▶ full tensors, an adapter merged ─▶ dtype ─▶ what `HFExport` writes during training

One copy of the model in the dtype of the export is in memory, and the tensors at hand, `_BUCKET` bytes or one larger. What was
not trained is in no checkpoint: it is read tensor by tensor from the model that the run started from.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import yaml
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_rlhf import restricted
from lightning_rlhf.callbacks.hf_export import gather_on_host, write_adapter, write_folder
from lightning_rlhf.hf_config import HeadKind
from lightning_rlhf.manifest import RUN
from lightning_rlhf.modules.critic import UnshardedCritic, scored_parameters
from lightning_rlhf.modules.loading import pretrained_tensors
from lightning_rlhf.modules.lora import Adapter, hf_name, parameters_with_names
from lightning_rlhf.modules.policy import saved_buffers, unsharded_actor
from lightning_rlhf.modules.settings import LoRA, ModelSettings
from lightning_rlhf.paths import local_path
from lightning_rlhf.plan.offline import precision_name
from lightning_rlhf.precision import FSDP2Precision
from lightning_rlhf.tiny import TINY

_BUCKET = 1 << 28
"""Bytes that are read from a checkpoint at once."""


def export_checkpoint(
    checkpoint: str,
    out: str,
    adapter: bool = False,
    dtype: str | None = None,
    model: str | None = None,
    config: str | None = None,
    average: bool = False,
    role: str | None = None,
) -> str:
    """Write a model of a checkpoint as a Hugging Face folder; returns what was written, in words.

    Args:
        checkpoint: folder or URL that the strategy wrote, of any mesh.
        out: local folder, which must not exist or be empty.
        adapter: of LoRA only the adapter, in peft's format; otherwise it is merged.
        dtype: of the tensors; by default bfloat16, of an adapter the one it was trained in.
        model: where the model that the run started from is now, if not where it was.
        config: YAML of the run, for checkpoints that do not say what the run was.
        average: the moving average of the weights instead of the last ones.
        role: actor, critic or reward_model; by default the first of them that the run trained.

    Raises:
        FileNotFoundError: there is no complete checkpoint, or no model.
        ValueError: it is damaged, not of this model, has no adapter, or ``out`` is taken.
    """
    from transformers import AutoTokenizer

    target = Path(out).expanduser()
    _check_target(out, target)
    metadata, index = restricted.read(checkpoint, trusted=False)
    run = _from_config(config) if config else metadata.get(RUN)
    if run is None:
        raise ValueError(f"{checkpoint!r} does not say what run it is of: give the run's YAML with --config")
    name = role or next(iter(run["roles"]))
    if name not in run["roles"]:
        raise ValueError(f"--role: {checkpoint!r} has no {name}, it has {' and '.join(run['roles'])}")
    if adapter and name != "actor":
        raise ValueError(f"--adapter is for the actor, the {name} is written merged: leave --adapter out")
    of_run = run["roles"][name]
    if adapter and of_run["lora"] is None:
        raise ValueError(f"{checkpoint!r} has no adapter, it was trained without LoRA: leave --adapter out")
    where = model or of_run["folder"] or of_run["model"]
    settings, precision = _settings(of_run, where), FSDP2Precision(run["precision"])
    head: HeadKind = "tokens"
    root: nn.Module
    if average and name != "actor":
        raise ValueError(f"--average is of the actor, the {name} has none: leave --average out")
    if name == "actor":
        reader = _Reader(checkpoint, index, "state_dict.actor.model.", "state_dict.average.model." if average else None)
        root, lora = unsharded_actor(settings, precision, None if where == TINY else model or of_run["model"])
    else:
        reader = _Reader(checkpoint, index, f"state_dict.{name}.")
        head = "values" if "value_head.bias" in reader.tensors else "score"
        root = UnshardedCritic(settings, precision, bias=head == "values")
        lora = root.adapter
    value, buffers = _values(reader, root, settings, where)
    tokenizer = AutoTokenizer.from_pretrained(settings.path, trust_remote_code=settings.trust_remote_code)
    asked = None if dtype is None else getattr(torch, dtype)
    if adapter:
        assert lora is not None
        tensors = gather_on_host(((name, value(p)) for name, p in lora.named_parameters()), asked)
        write_adapter(target, tensors, lora, tokenizer)
        what = f"LoRA adapter (r={lora.lora.r})"
    else:
        kind = asked or torch.bfloat16
        tensors = gather_on_host(_named(root, lora, value), kind)
        tensors |= buffers()
        trust, changes = settings.trust_remote_code, settings.config_overrides
        write_folder(target, tensors, settings.path, tokenizer, trust, changes, kind, head)
        what = (type(root).__name__ if head == "tokens" else name) + (" with its adapter merged" if lora else "")
    what = f"average of {what}" if average else what
    return f"{what} of iteration {metadata['global_step']} in {target}"


def _named(
    root: nn.Module, adapter: Adapter | None, value: Callable[[nn.Parameter], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """What the role's ``hf_named_parameters`` gives in a run."""
    if isinstance(root, UnshardedCritic):
        yield from scored_parameters(root, value)
        return
    if adapter is not None:
        yield from adapter.merged(value)
        return
    for names, parameter in parameters_with_names(root):
        tensor = value(parameter)
        yield from ((name, tensor) for name in names)


class _Reader(restricted.Reader):
    """Of a checkpoint's tensors.

    Args:
        prefix: of the tensors of a role.
        average: of moving averages, which take the places of what they are of.

    Attributes:
        tensors: shapes and dtypes of those of one role, by their names without ``prefix``.
    """

    def __init__(self, path: str, index: Any, prefix: str, average: str | None = None) -> None:
        super().__init__(path, index)
        self.name = path
        entries, self._keys = index.state_dict_metadata, dict[str, str]()
        for begin in (prefix,) if average is None else (prefix, average):
            own = [key for key in entries if key.startswith(begin) and isinstance(entries[key], TensorStorageMetadata)]
            self._keys |= {key.removeprefix(begin): key for key in own}
        if average is not None and not own:
            raise ValueError(f"{path!r} has no average, it was trained without model.ema_decay: leave --average out")
        self.tensors = {name: entries[key] for name, key in self._keys.items()}

    def load(self, entries: Mapping[str, TensorStorageMetadata]) -> dict[str, Tensor]:
        """Full tensors, put together from whatever shards there are."""
        tensors = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in entries.items()}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process.*")  # it is
                dcp.load({self._keys[n]: t for n, t in tensors.items()}, storage_reader=self, no_dist=True)
        except CheckpointException as error:
            for failure, _ in error.failures.values():
                if isinstance(failure, restricted.DamagedCheckpoint):
                    raise failure from None
            reason = next((f"{type(e).__name__}: {e}" for e, _ in error.failures.values()), str(error))
            raise ValueError(f"{self.name!r} cannot be read: {reason.splitlines()[0]}") from error
        return tensors


def _values(
    reader: _Reader, root: nn.Module, settings: ModelSettings, where: str
) -> tuple[Callable[[nn.Parameter], Tensor], Callable[[], dict[str, Tensor]]]:
    """Functions that read a parameter of an unsharded role, and its buffers by transformers' name.

    What is in the checkpoint is read ahead in the model's own order; the rest is in the model that training started from.
    """

    def outside(name: str) -> str:
        if isinstance(root, UnshardedCritic) and name.startswith("model."):
            return root.prefix + hf_name(name.removeprefix("model."))
        return hf_name(name)

    stored = reader.tensors
    names = {id(parameter): same for same, parameter in parameters_with_names(root)}
    known = {key: next((name for name in same if name in stored), same[0]) for key, same in names.items()}
    own_buffers = dict(saved_buffers(root))
    _check_tensors(reader, root, own_buffers)
    read = _read_ahead(reader, [name for name in (*known.values(), *own_buffers) if name in stored])
    untrained = {known[key]: same for key, same in names.items() if known[key] not in stored}
    if untrained:
        base = replace(settings, model=local_path(where, settings.trust_remote_code))
        pretrained = pretrained_tensors(root, untrained, base, outside)

    def value(parameter: nn.Parameter) -> Tensor:
        name = known[id(parameter)]
        return read(name) if name in stored else pretrained(name)

    return value, lambda: {outside(n): read(n) if n in stored else buffer for n, buffer in own_buffers.items()}


def _read_ahead(reader: _Reader, names: list[str]) -> Callable[[str], Tensor]:
    """A function that reads each of ``names`` once, best in their order: the next `_BUCKET` bytes come with one that is due."""
    waiting, held = names[::-1], dict[str, Tensor]()

    def read(name: str) -> Tensor:
        while name not in held:
            bucket: dict[str, TensorStorageMetadata] = {}
            size = 0
            while waiting and (not bucket or size < _BUCKET):
                entry = reader.tensors[waiting[-1]]
                bucket[waiting.pop()] = entry
                size += entry.size.numel() * entry.properties.dtype.itemsize
            held.update(reader.load(bucket))
        return held.pop(name)

    return read


def _check_tensors(reader: _Reader, root: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless all that the checkpoint has of the policy is part of ``root``, and some of its parameters are."""
    own = {**dict(root.named_parameters(remove_duplicate=False)), **buffers}
    for name, entry in reader.tensors.items():
        if name not in own or own[name].shape != entry.size:
            here = f"{tuple(own[name].shape)} in the model" if name in own else "unknown to the model"
            raise ValueError(
                f"{reader.name!r} is of another model: {hf_name(name)} has shape {tuple(entry.size)}, it is {here}"
            )
    if not reader.tensors.keys() - buffers.keys():
        raise ValueError(f"{reader.name!r} holds no model: it was not written by a module of this package")


def _check_target(out: str, target: Path) -> None:
    if not _is_local_file_protocol(out):
        raise ValueError(f"an export goes to a local folder, got {out!r}: copy it from there")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{out!r} exists and is not an empty folder: give another one")


def _settings(role: Mapping[str, Any], where: str) -> ModelSettings:
    """Of the actor, without how its passes were run; only configuration and tokenizer are fetched."""
    trust = bool(role["trust_remote_code"])
    try:
        folder = local_path(where, trust, weights=False, key="the model that the run started from")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}: say with --model where it is") from error
    lora = None if role["lora"] is None else LoRA(**{**role["lora"], "adapter": None})
    kept = {name: role[name] for name in ("config_overrides", "freeze_vision")}
    return ModelSettings(folder, trust_remote_code=trust, lora=lora, **kept)


def _from_config(path: str) -> dict[str, Any]:
    """What a checkpoint says of its run, from the YAML of the run."""
    config = yaml.safe_load(Path(path).read_text())
    run = config.get("fit", config)
    given = run.get("model") or {}
    given = {**given, **given.get("init_args", {})}
    if "model" not in given:
        raise ValueError(f"--config: {path} has no model.model, it must be the YAML of a run")
    defaults = {
        "folder": None,
        "lora": None,
        "config_overrides": None,
        "trust_remote_code": False,
        "freeze_vision": True,
    }
    role = {"model": given["model"], **{name: given.get(name, value) for name, value in defaults.items()}}
    return {"precision": precision_name((run.get("trainer") or {}).get("precision")), "roles": {"actor": role}}
