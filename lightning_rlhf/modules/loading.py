"""Models on the meta device, filled after they are sharded: no rank ever holds more than its shard and one file's slice.

meta_parameters():  build, shard, allocate  ─▶  load_pretrained: every rank reads its own slices of the safetensors
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from lightning_rlhf.images import auto_class
from lightning_rlhf.modules.lora import parameters_with_names
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.modules.vision import original_name

if TYPE_CHECKING:
    from lightning_rlhf.strategy import FSDPUlyssesStrategy


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Modules built inside have their parameters on the meta device and real buffers.

    (Rotary frequencies are in no checkpoint, so buffers must be computed, not loaded.)
    """
    register: Callable[..., None] = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # one on meta may be tied: it stays the same object
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(self, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def check_shapes(
    model: nn.Module, path: str, hf_name: Callable[[str], str], skip: Container[str], key: str = "model.model"
) -> None:
    """Compare parameters, which may be on the meta device, with what the safetensors of a folder say of themselves.

    Where the names in the folder are not the model's, transformers converts: nothing is compared.

    Args:
        hf_name: name in ``model`` -> name in the folder.
        skip: names that are not in the folder.
        key: of the configuration, for errors.

    Raises:
        ValueError: a tensor has another shape.
    """
    from safetensors import safe_open

    stored, shapes = stored_names(path), {}
    for file in set(stored.values()):
        with safe_open(file, framework="pt") as handle:
            shapes.update({name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()})  # noqa: SIM118
    wrong = []
    for names, parameter in parameters_with_names(model):
        if names[0] in skip:
            continue
        known = [k for name in names if (k := _known_as(hf_name(name), stored)) in stored]
        if not known:
            return
        if shapes[known[0]] != tuple(parameter.shape):
            wrong.append(f"{known[0]} is {shapes[known[0]]} and must be {tuple(parameter.shape)}")
    if wrong:
        raise ValueError(
            f"{key}: shapes in {path} are not what its config and model.config_overrides make them, {len(wrong)} in all:"
            f" {wrong[0]}"
        )


def load_pretrained(
    root: nn.Module,
    settings: ModelSettings,
    strategy: FSDPUlyssesStrategy,
    hf_name: Callable[[str], str],
    skip: tuple[str, ...] = (),
) -> None:
    """Fill a sharded root from a folder of safetensors; each rank reads its own slices, dtypes are converted.

    Where the names in the folder are not the module's (fused experts, other file formats), rank 0 loads the model with
    transformers and broadcasts it.

    Args:
        hf_name: name in ``root`` -> name in the checkpoint.
        skip: prefixes of names that are not in the checkpoint.
    """
    wanted = {n: t for n, t in get_model_state_dict(root).items() if not n.startswith(skip or ("\0",))}
    stored = stored_names(settings.path)

    def in_checkpoint(name: str) -> str:
        return _known_as(hf_name(name), stored)

    seen: dict[int, str] = {}
    state = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        known_as = in_checkpoint(name)
        if name in wanted and id(parameter) not in seen and known_as in stored:
            seen[id(parameter)] = name
            state[known_as] = wanted[name]
    missing = [n for n, p in root.named_parameters() if n in wanted and id(p) not in seen]
    for name, _ in root.named_buffers():  # the persistent ones: a router's correction of its scores, for instance
        known_as = in_checkpoint(name)
        if name in wanted and known_as in stored:
            state[known_as] = wanted[name]
    if not missing:
        dcp.load(state, storage_reader=HuggingFaceStorageReader(settings.path))
    else:
        _broadcast_pretrained(root, settings, strategy, hf_name, skip)
    strategy.reshard(root)


def pretrained_tensors(
    root: nn.Module, names: Mapping[str, list[str]], settings: ModelSettings, hf_name: Callable[[str], str]
) -> Callable[[str], Tensor]:
    """A function that reads one full tensor of an unsharded ``root`` from ``settings.path``, in the dtype it has in ``root``.

    Where the names in the folder are not the module's, transformers loads the whole model, as in `load_pretrained`.

    Args:
        names: what will be read, and all names of it in ``root``.
        hf_name: name in ``root`` -> name in the folder.
    """
    from safetensors import safe_open

    stored = stored_names(settings.path)
    dtypes = {name: parameter.dtype for name, parameter in root.named_parameters(remove_duplicate=False)}
    places = {n: [k for name in same if (k := _known_as(hf_name(name), stored)) in stored] for n, same in names.items()}
    if not all(places.values()):
        others = tuple(n for n in dtypes if n not in {name for same in names.values() for name in same})
        return _full_state(root, settings, hf_name, others).__getitem__

    def read(name: str) -> Tensor:
        known_as = places[name][0]
        with safe_open(stored[known_as], framework="pt") as handle:
            return handle.get_tensor(known_as).to(dtypes[name])

    return read


def _known_as(name: str, stored: Container[str]) -> str:
    """A transformers name as a folder with the names ``stored`` has it."""
    return name if name in stored else original_name(name)


def stored_names(path: str) -> dict[str, Path]:
    """The file that each tensor is in."""
    from safetensors import safe_open

    files: dict[str, Path] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            files.update(dict.fromkeys(handle.keys(), file))
    return files


def _broadcast_pretrained(
    root: nn.Module,
    settings: ModelSettings,
    strategy: FSDPUlyssesStrategy,
    hf_name: Callable[[str], str],
    skip: tuple[str, ...],
) -> None:
    full: dict[str, Any] = {}
    failure = None
    if strategy.is_global_zero:
        try:
            full = _full_state(root, settings, hf_name, skip)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    if failure := strategy.broadcast(failure):  # on all ranks: the others would wait for the weights
        raise RuntimeError(f"{settings.path} cannot be loaded: {failure}")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(root, full, options=options)


def _full_state(
    root: nn.Module, settings: ModelSettings, hf_name: Callable[[str], str], skip: tuple[str, ...]
) -> dict[str, Tensor]:
    """All of ``root``'s parameters and persistent buffers as transformers loads them, in ``root``'s names and dtypes."""
    config = deepcopy(settings.config)
    model, report = auto_class(config).from_pretrained(
        settings.path,
        config=config,
        dtype=torch.float32,
        trust_remote_code=settings.trust_remote_code,
        output_loading_info=True,
    )
    random = report["missing_keys"]
    source = {name: tensor for name, tensor in model.state_dict().items() if name not in random}
    own = {n: p.dtype for n, p in root.named_parameters(remove_duplicate=False) if not n.startswith(skip or ("\0",))}
    lost = sorted(n for n in own if hf_name(n) not in source)
    if lost:
        raise ValueError(
            f"it has no {', '.join(map(hf_name, lost[:3]))}: it is not complete, or not of this model and config_overrides"
        )
    own |= {n: b.dtype for n, b in root.named_buffers() if hf_name(n) in source}
    return {n: source[hf_name(n)].to(dtype) for n, dtype in own.items()}
