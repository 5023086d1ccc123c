"""LoRA by `peft`: a frozen model and small trained matrices beside it, in one sharded root.

    y = W x + s · B A x        A (r, in) uniform, B (out, r) zero: training starts at the base;  s = alpha / r

W is stored in the compute dtype (bfloat16 under bf16-mixed), A, B and `modules_to_save` in the dtype of the optimizer. peft puts
its layers INTO the transformers model, so that all else still sees that model; names of parameters in it:

    q_proj.weight   ->  q_proj.base_layer.weight, q_proj.lora_A.default.weight, q_proj.lora_B.default.weight
    lm_head.weight  ->  lm_head.original_module.weight, lm_head.modules_to_save.default.weight      (modules_to_save)
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lightning_rlhf.images import is_vision_language
from lightning_rlhf.modules.settings import LoRA

TOWER = r"(.*\.)?visual(\..*)?"
"""Names of the vision tower of a vision-language model and of modules in it: it has no adapters."""


class Adapter:
    """The adapter of a transformers model, which it is put into.

    Args:
        model: on the meta device, unsharded, its head in place.
        lora: what to train.
        dtype: of the trained parameters.
        source: where the base comes from, noted in an exported adapter.
        part: what is used of the model, e.g. its backbone; the names in ``lora`` are those in the model all the same.

    Raises:
        ValueError: names that no module has, a module that would be trained although it is tied to another, or a rank that
            none of the matrices can have.
        NotImplementedError: a target that cannot be merged into the weights that engines get.
    """

    def __init__(
        self,
        model: nn.Module,
        lora: LoRA,
        dtype: torch.dtype,
        source: str | None = None,
        part: nn.Module | None = None,
    ) -> None:
        from peft import get_peft_model
        from peft.utils import ModulesToSaveWrapper
        from transformers.pytorch_utils import Conv1D

        _check_names(model, lora)
        config = lora.config()
        config.exclude_modules = TOWER if is_vision_language(model.config) else None
        config.fan_in_fan_out = any(isinstance(module, Conv1D) for module in model.modules())
        self.model, self.lora = part or model, lora
        with warnings.catch_warnings():  # of transformers 5.24 to peft
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
            self.peft: Any = get_peft_model(model, config, autocast_adapter_dtype=False)
        # peft takes the folder that the config is from
        self.peft.peft_config["default"].base_model_name_or_path = source
        self.layers = _layers(self.model)
        self.copies = [m for m in self.model.modules() if isinstance(m, ModulesToSaveWrapper)]
        for _, parameter in self.named_parameters():
            parameter.data = parameter.data.to(dtype)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is trained, by its name in the model with the adapter."""
        return ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The model is the base inside; for forward passes without gradients."""
        trained = [parameter for _, parameter in self.named_parameters()]
        with self.peft.disable_adapter():
            # peft freezes the adapter meanwhile, and FSDP2 takes the dtype that gradients are reduced in, for good, from what
            # is not frozen in the first forward pass of all, which this may be
            for parameter in trained:
                parameter.requires_grad_(True)
            yield

    # -- start -------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, seed: int) -> None:
        """Fill the trained parameters of a sharded model whose base is loaded: equal for any number of ranks."""
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            full = nn.init.kaiming_uniform_(torch.empty(a.shape), math.sqrt(5), generator=generator)  # as peft does
            full = full.to(a.device, a.dtype)
            a.copy_(distribute_tensor(full, a.device_mesh, a.placements, src_data_rank=None))
            b.zero_()
        for copy in self.copies:
            base = dict(copy.original_module.named_parameters())
            for name, parameter in copy.modules_to_save["default"].named_parameters():
                parameter.copy_(base[name])
        if self.lora.adapter is not None:
            self._load(Path(self.lora.adapter))

    def _load(self, folder: Path) -> None:
        from safetensors import safe_open

        own = {_peft_name(name): parameter.detach() for name, parameter in self.named_parameters()}
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        wrong = sorted(n for n in own.keys() | stored.keys() if n not in own or stored.get(n) != tuple(own[n].shape))
        if wrong:
            raise ValueError(
                f"model.lora.adapter: {folder} and model.lora differ in {len(wrong)} tensors, the first is {wrong[0]}: set"
                " target_modules and modules_to_save as it was trained, with the model that it belongs to"
            )
        dcp.load(own, storage_reader=HuggingFaceStorageReader(str(folder)))

    # -- what leaves the trainer -------------------------------------------------------------------

    def merged(self, value: Callable[[nn.Parameter], Tensor] = lambda p: p) -> Iterator[tuple[str, Tensor]]:
        """(transformers name, shard) of the model with the adapter merged in float32; nothing in the model changes.

        Names that share a parameter come one after the other. A collective over the parameters' mesh.

        Args:
            value: of a parameter of the model, where that is on the meta device; asked for once each.
        """
        layers = {id(layer.get_base_layer().weight): layer for layer in self.layers}
        left_out = {id(p) for layer in self.layers for m in (layer.lora_A, layer.lora_B) for p in m.parameters()}
        left_out |= {id(p) for copy in self.copies for p in copy.original_module.parameters()}
        for names, parameter in parameters_with_names(self.model):
            if id(parameter) not in left_out:
                layer = layers.get(id(parameter))
                tensor = value(parameter) if layer is None else _merge(layer, value)
                yield from ((hf_name(name), tensor) for name in names)

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Write an adapter folder in peft's format.

        Args:
            tensors: full tensors by the names of `named_parameters`.
        """
        state = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
        self.peft.save_pretrained(str(folder), state_dict=state, save_embedding_layers=False)


def parameters_with_names(model: nn.Module) -> Iterator[tuple[list[str], nn.Parameter]]:
    """Each parameter once, with all its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    yield from ((names[id(parameter)], parameter) for parameter in model.parameters())


def hf_name(name: str) -> str:
    """A parameter's name in the model with the adapter -> its name in the checkpoint of the base."""
    for inner in ("base_layer", "original_module", "modules_to_save.default"):
        name = name.replace(f".{inner}.", ".")
    return name


def trained_matrices(root: nn.Module) -> tuple[int, int]:
    """(parameters of all matrices that are trained, those of them that are added to the model by an adapter)."""
    trained = sum(m.weight.numel() for m in root.modules() if isinstance(m, nn.Linear) and m.weight.requires_grad)
    return trained, sum(p.numel() for name, p in root.named_parameters() if ".lora_" in name)


def _merge(layer: Any, value: Callable[[nn.Parameter], Tensor]) -> Tensor:
    """W + s·B·A in float32, sharded as W is. Its rows are those of B, so only A travels."""
    weight, a, b = (
        value(m.weight).detach().float()
        for m in (layer.get_base_layer(), layer.lora_A["default"], layer.lora_B["default"])
    )
    if isinstance(a, DTensor):
        a = a.redistribute(placements=[Replicate()] * a.device_mesh.ndim)
    delta = b @ a
    if layer.fan_in_fan_out:  # GPT-2 keeps its matrices the other way round
        delta = delta.t()
        if isinstance(delta, DTensor):
            delta = delta.redistribute(placements=weight.placements)  # type: ignore[attr-defined]
    return weight + layer.scaling["default"] * delta


def _layers(model: nn.Module) -> list[Any]:
    """peft's layers in the model, all of them linear ones that can be merged."""
    from peft.tuners.lora import Linear, LoraLayer

    layers: dict[str, Any] = {n: module for n, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, layer in layers.items():
        if type(layer) is not Linear:
            raise _not_linear(name, layer.get_base_layer())
    most = max(int(min(layer.base_layer.weight.shape)) for layer in layers.values())
    if (r := max(layer.r["default"] for layer in layers.values())) > most:
        raise ValueError(f"model.lora.r: {r} is more than the rank of any target can be, at most {most}: lower it")
    return list(layers.values())


def _not_linear(name: str, module: nn.Module) -> NotImplementedError:
    return NotImplementedError(
        f"model.lora.target_modules: {name} is no linear layer ({type(module).__name__}): name linear layers only, of a mixture"
        " of experts for example [q_proj, k_proj, v_proj, o_proj]"
    )


def _check_names(model: nn.Module, lora: LoRA) -> None:
    """Names that match nothing, which peft passes over, and what would not be what it was any more."""
    from transformers.pytorch_utils import Conv1D

    tower = re.compile(TOWER) if is_vision_language(model.config) else None
    inside = [name for name, _ in model.named_modules() if tower and tower.fullmatch(name)]
    modules = [(name, module) for name, module in model.named_modules() if name not in inside]
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    ends = [name for name, module in modules if module is head or module is embeddings]
    targets = [] if lora.target_modules == "all-linear" else lora.target_modules
    for key, wanted in (("target_modules", targets), ("modules_to_save", lora.modules_to_save or [])):
        lost = [w for w in wanted if not any(_is_called(name, w) for name, _ in modules)]
        if lost:
            linear = {n.rpartition(".")[2] for n, m in modules if isinstance(m, nn.Linear | Conv1D) and m is not head}
            raise ValueError(
                f"model.lora.{key}: no module is called {', '.join(lost)}; linear layers: {', '.join(sorted(linear))}"
            )
    for saved in lora.modules_to_save or ():  # peft saves whatever has a name that ends so
        if both := next((name for name in inside if name.endswith(saved)), None):
            own = next(name for name, _ in modules if _is_called(name, saved))
            raise ValueError(
                f"model.lora.modules_to_save: {saved} is in the vision tower, too ({both}), which stays as it is: name what is"
                f" to be trained in full, such as {own}"
            )
    tied = head.weight is embeddings.weight
    if tied and any(end.endswith(w) for end in ends for w in lora.modules_to_save or ()):
        raise ValueError(
            "model.lora.modules_to_save: the model's head is tied to its embeddings, a copy of one of them would untie"
            " them: leave both out"
        )
    for end in ends:
        if any(_is_called(end, w) for w in targets):
            remedy = "leave it out" if tied else "name it in model.lora.modules_to_save instead"
            raise ValueError(f"model.lora.target_modules: {end} cannot have an adapter, {remedy}")
    for target in targets:
        other = [(n, m) for n, m in modules if _is_called(n, target) and not isinstance(m, nn.Linear | Conv1D)]
        if other:
            raise _not_linear(*other[0])


def _is_called(name: str, wanted: str) -> bool:
    return f".{name}".endswith(f".{wanted}")


def _peft_name(name: str) -> str:
    """The name in an adapter's file: without the name that peft gives an adapter in memory."""
    return "base_model.model." + name.replace(".modules_to_save.default.", ".").replace(".default.", ".")
