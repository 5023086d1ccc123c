"""Actor, reference and critic as FSDP2 roots. Parallelism ends here: nothing above this file sees a shard.

    forward(packed, …) -> (b, T) tensors aligned with the responses, whole on every rank of a sequence-parallel group

A transformers model is built on the meta device, its attention made packed (`ulysses`), its head replaced (`LogProbHead`), then
sharded, allocated, and every rank reads its own slices of the safetensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from lightning_rlhf.modules.head import LogProbHead
from lightning_rlhf.packing import Packed
from lightning_rlhf.ulysses import check_packable, gather_sequence, group_size, shard_sequence, use_packed_attention

if TYPE_CHECKING:
    from lightning_rlhf.strategy import FSDPUlyssesStrategy


@dataclass(frozen=True)
class ModelSettings:
    """How transformers models are built.

    Args:
        path: local folder with config and safetensors.
        attention: kernel, see `kernels.choose_kernel`.
        gradient_checkpointing: recompute every layer in backward.
        trust_remote_code: run the model code that the folder brings along.
    """

    path: str
    attention: str = "auto"
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False


class _PackedModel(nn.Module):
    """A transformers causal LM (or its backbone) over packed, sequence-sharded streams."""

    def __init__(self, model: nn.Module, strategy: FSDPUlyssesStrategy, kernel: str) -> None:
        super().__init__()
        self.model = model
        self._group = strategy.sp_group
        self._device = strategy.root_device
        dtype = model.dtype if model.dtype != torch.float32 else strategy.precision_plugin.compute_dtype
        use_packed_attention(model, kernel, strategy.root_device, self._group, dtype)  # type: ignore[arg-type]

    @property
    def backbone(self) -> nn.Module:
        return self.model.base_model  # type: ignore[return-value]

    @property
    def hidden_size(self) -> int:
        return self.model.config.get_text_config().hidden_size  # type: ignore[union-attr,operator]

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers: transformers names the modules that must not be split."""
        names = set(getattr(self.model, "_no_split_modules", None) or ())
        return [m for m in self.backbone.modules() if type(m).__name__ in names]

    def hidden_rows(self, packed: Packed) -> tuple[Float[Tensor, "R_P h"], Packed, Tensor]:
        """Final hidden states at this rank's response positions; the batch on the device; those positions in the piece."""
        size, rank = group_size(self._group), 0 if self._group is None else torch.distributed.get_rank(self._group)
        piece = len(packed.input_ids) // size
        rows = packed.rows[(packed.rows >= rank * piece) & (packed.rows < (rank + 1) * piece)] - rank * piece
        rows = rows.to(self._device, non_blocking=True)
        packed = packed.to(self._device, non_blocking=True)
        output = self.backbone(
            input_ids=shard_sequence(packed.input_ids, self._group)[None],
            position_ids=shard_sequence(packed.position_ids, self._group)[None],
            use_cache=False,
            cu_seq_lens_q=packed.cu_seqlens,
            cu_seq_lens_k=packed.cu_seqlens,
            max_length_q=packed.max_length,
            max_length_k=packed.max_length,
        )
        return output.last_hidden_state[0].index_select(0, rows), packed, rows

    def align(self, values: Float[Tensor, "R_P"], packed: Packed, rows: Tensor) -> Float[Tensor, "b T"]:
        """Values at this rank's response positions -> response-aligned, gathered over the sequence-parallel group."""
        piece = len(packed.input_ids) // group_size(self._group)
        stream = values.new_zeros(piece).index_copy(0, rows, values)
        return packed.unpack(gather_sequence(stream, self._group))


class Policy(_PackedModel):
    """The actor or the reference.

    ``forward(packed, temperature, with_entropy)`` returns log-probs of the response tokens and entropies of their
    distributions (0 without ``with_entropy``), float32, (b, T).
    """

    def __init__(self, model: nn.Module, strategy: FSDPUlyssesStrategy, kernel: str = "auto") -> None:
        super().__init__(model, strategy, kernel)
        self._head = [LogProbHead.replace(model)]  # in a list: it is a submodule of the model already

    def forward(self, packed: Packed, temperature: float, with_entropy: bool = False) -> tuple[Tensor, Tensor]:
        hidden, packed, rows = self.hidden_rows(packed)
        labels = shard_sequence(packed.labels, self._group).index_select(0, rows)
        log_probs, entropy = self._head[0](hidden, labels, temperature, with_entropy)
        return self.align(log_probs, packed, rows), self.align(entropy, packed, rows)

    def hf_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(transformers name, shard) pairs; a tied parameter comes under each of its names."""
        yield from self.model.named_parameters(remove_duplicate=False)

    @property
    def units(self) -> list[nn.Module]:
        """FSDP groups besides the root; a tied embedding stays in the root's."""
        embedding = self.model.get_input_embeddings()  # type: ignore[operator]
        untied = [] if self._head[0].weight is embedding.weight else [self._head[0], embedding]
        return self.layers + untied


class Critic(_PackedModel):
    """A backbone with a value head; ``forward(packed)`` returns values of the states before each response token, (b, T).

    The head is float32 with float32 output: bfloat16 steps near 1 are 0.008, coarser than the advantages.
    """

    def __init__(self, model: nn.Module, strategy: FSDPUlyssesStrategy, kernel: str = "auto") -> None:
        super().__init__(model, strategy, kernel)
        self.value_head = nn.Linear(self.hidden_size, 1, dtype=torch.float32)

    @property
    def backbone(self) -> nn.Module:
        return self.model

    def forward(self, packed: Packed) -> Float[Tensor, "b T"]:
        hidden, packed, rows = self.hidden_rows(packed)
        return self.align(self.value_head(hidden).squeeze(-1).float(), packed, rows)

    @property
    def units(self) -> list[nn.Module]:
        return self.layers


def build_policy(settings: ModelSettings, strategy: FSDPUlyssesStrategy, *, frozen: bool = False) -> Policy:
    """The actor, or with ``frozen`` a reference in bfloat16 without gradients."""
    dtype = torch.bfloat16 if frozen else strategy.precision_plugin.param_dtype
    with meta_parameters():
        model = _causal_lm(settings, dtype, strategy)
    policy = Policy(model, strategy, settings.attention)
    if settings.gradient_checkpointing and not frozen:
        _checkpoint_layers(model)
    strategy.shard(policy, policy.units, frozen=frozen)
    strategy.materialize(policy)
    model.tie_weights()  # type: ignore[operator]  # allocating visits each name on its own
    load_pretrained(policy, settings, strategy, lambda name: name.removeprefix("model."))
    return policy.eval() if frozen else policy.train()


def build_critic(settings: ModelSettings, strategy: FSDPUlyssesStrategy) -> Critic:
    """A critic whose backbone starts from ``settings.path`` and whose values start at 0."""
    with meta_parameters():
        causal = _causal_lm(settings, strategy.precision_plugin.param_dtype, strategy)
        critic = Critic(causal.base_model, strategy, settings.attention)  # type: ignore[arg-type]
    prefix = f"{causal.base_model_prefix}."
    if settings.gradient_checkpointing:
        _checkpoint_layers(critic.model)
    strategy.shard_float32(critic.value_head)
    strategy.shard(critic, critic.units)
    strategy.materialize(critic)
    load_pretrained(critic, settings, strategy, lambda name: prefix + name.removeprefix("model."), ("value_head.",))
    with torch.no_grad():
        for parameter in critic.value_head.parameters():
            parameter.zero_()
    return critic.train()


def _causal_lm(settings: ModelSettings, dtype: torch.dtype, strategy: FSDPUlyssesStrategy) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(settings.path, trust_remote_code=settings.trust_remote_code)
    check_packable(config, strategy.sequence_parallel_size)
    for holder in {id(c): c for c in (config, config.get_text_config())}.values():
        if getattr(holder, "output_router_logits", False):
            raise NotImplementedError(
                "output_router_logits adds an auxiliary loss that is not trained here: set it to false"
            )
        for name, value in holder.to_dict().items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(holder, name, 0.0)  # log-probs of rollout and update must be of one distribution
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=settings.trust_remote_code)
    model.tie_weights()
    return model


def _checkpoint_layers(model: nn.Module) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]


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
    stored = _stored_names(settings.path)
    seen: dict[int, str] = {}
    state = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if name in wanted and id(parameter) not in seen and hf_name(name) in stored:
            seen[id(parameter)] = name
            state[hf_name(name)] = wanted[name]
    missing = [n for n, p in root.named_parameters() if n in wanted and id(p) not in seen]
    if not missing:
        dcp.load(state, storage_reader=HuggingFaceStorageReader(settings.path))
    else:
        _broadcast_pretrained(root, settings, strategy, hf_name, skip)
    strategy.reshard(root)


def _stored_names(path: str) -> set[str]:
    from safetensors import safe_open

    names: set[str] = set()
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            names.update(handle.keys())
    return names


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
    """All of ``root``'s parameters as transformers loads them, in ``root``'s names and dtypes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        settings.path, dtype=torch.float32, trust_remote_code=settings.trust_remote_code
    )
    source = model.state_dict()
    own = {n: p.dtype for n, p in root.named_parameters(remove_duplicate=False) if not n.startswith(skip or ("\0",))}
    lost = sorted(n for n in own if hf_name(n) not in source)
    if lost:
        raise KeyError(f"the checkpoint has no {', '.join(map(hf_name, lost[:3]))}")
    return {n: source[hf_name(n)].to(dtype) for n, dtype in own.items()}
