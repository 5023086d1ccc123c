r"""How many floating point operations an update is worth, and what the device could do at best.

    training   6·N·tokens + 6·Σ s²·head_dim·heads·layers       of which forward a third, backward two thirds
    N          parameters that are multiplied with each token: attention and MLP projections, and the output head

The second term is causal attention: 2 products, 2 operations each, half of the s² pairs, three times for training. A
layer with a sliding window w counts the pairs inside it, s²/2 -> w·s - w²/2. Recomputed activations do not count
(model FLOPs). A frozen matrix (LoRA) has no gradient of its own: 4 instead of 6 per parameter and token.

Two bases for N. Honest: the embedding look-up multiplies nothing. Conventional: it is counted like the head, which is
what most published MFU figures do; compare with those on that basis only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "MI300X": 1307.0,
}
"""Dense bf16 TFLOP/s (data sheets, without sparsity) by a word of the device's name, the more specific name first."""


@dataclass(frozen=True)
class Dims:
    """The sizes of a decoder that decide its FLOPs.

    Args:
        matmul_parameters: N of the honest basis; of a mixture of experts, those active for one token.
        lookup_parameters: size of the embedding table.
        heads: query heads.
        layers: attention layers that see the whole prefix.
        window_layers: attention layers with a sliding window.
        window: its size in tokens.
        frozen_parameters: those of ``matmul_parameters`` that are not trained.
    """

    matmul_parameters: int
    lookup_parameters: int
    heads: int
    head_dim: int
    layers: int
    window_layers: int = 0
    window: int = 0
    frozen_parameters: int = 0


class Passes(NamedTuple):
    """In its update, a model of size ``dims`` sees every sequence of the iteration this many times."""

    dims: Dims
    forward: float
    backward: float


def dims_of(config: Any, outputs: int | None = None) -> Dims:
    """The sizes of a Hugging Face decoder with softmax attention, dense or a mixture of experts.

    Args:
        config: the model's config; of a multimodal one the text part counts.
        outputs: width of the output head: the vocabulary by default, 1 for a critic.

    Raises:
        ValueError: the config lacks the sizes, or some layers are no softmax attention of one head size.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    try:
        hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
        kv_heads = _first(config, "num_key_value_heads") or heads
        head_dim = _first(config, "head_dim") or hidden // heads
        lookup = config.vocab_size * hidden
        mlp = sum(_mlp_parameters(config, layer) for layer in range(layers))
    except AttributeError as error:
        raise ValueError(f"the FLOPs of a {type(config).__name__} are not known: {error}") from error
    kinds, window = _attention_kinds(config)
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or _first(config, "kv_lora_rank"):
        raise ValueError(f"the FLOPs of a {type(config).__name__} are not known: its attention is of another kind")
    return Dims(
        matmul_parameters=layers * hidden * head_dim * 2 * (heads + kv_heads)
        + mlp
        + hidden * (outputs or config.vocab_size),
        lookup_parameters=lookup,
        heads=heads,
        head_dim=head_dim,
        layers=kinds.count("full_attention"),
        window_layers=kinds.count("sliding_attention"),
        window=window,
    )


def frozen(dims: Dims, trained: int, added: int) -> Dims:
    """The sizes of a model with an adapter.

    Args:
        dims: of the model without it.
        trained: parameters of the matrices that are trained.
        added: those of them that the model does not have.
    """
    total = dims.matmul_parameters + added
    return replace(dims, matmul_parameters=total, frozen_parameters=total - trained)


def training_flops(dims: Dims, lengths: Iterable[int], *, lookup: bool = False) -> float:
    """FLOPs of one forward and one backward pass, in which frozen matrices have no gradient of their own.

    Args:
        dims: of the model.
        lengths: tokens of each sequence.
        lookup: count the embedding look-up (the conventional basis).
    """
    lengths = list(lengths)
    untrained = dims.frozen_parameters + (dims.lookup_parameters if lookup and dims.frozen_parameters else 0)
    return 3.0 * forward_flops(dims, lengths, lookup=lookup) - 2.0 * untrained * sum(lengths)


def forward_flops(dims: Dims, lengths: Iterable[int], *, lookup: bool = False) -> float:
    """FLOPs of a forward pass alone."""
    parameters = dims.matmul_parameters + (dims.lookup_parameters if lookup else 0)
    tokens, pairs, window_pairs = 0, 0.0, 0.0
    for length in lengths:
        inside = min(length, dims.window)
        tokens += length
        pairs += length**2 / 2
        window_pairs += inside * length - inside**2 / 2
    attended = dims.layers * pairs + dims.window_layers * window_pairs
    return 2.0 * parameters * tokens + 4.0 * attended * dims.head_dim * dims.heads


def update_flops(passes: Iterable[Passes], lengths: list[int], *, lookup: bool = False) -> float:
    """FLOPs of all models in the update of an iteration whose sequences have the given lengths."""
    total = 0.0
    for work in passes:
        forward = forward_flops(work.dims, lengths, lookup=lookup)
        both = training_flops(work.dims, lengths, lookup=lookup)
        total += work.forward * forward + work.backward * (both - forward)
    return total


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by its name, None if it is not in the table."""
    for name, tera in PEAK_TFLOPS.items():
        if re.search(rf"\b{name}\b", device_name, re.IGNORECASE):
            return tera * 1e12
    return None


def _mlp_parameters(config: Any, layer: int) -> int:
    """Parameters of one layer's MLP that a token meets: of a mixture the router, chosen and shared experts."""
    hidden = config.hidden_size
    matrices = 2 if config.model_type in _UNGATED else 3
    if not _is_sparse(config, layer):
        return matrices * hidden * config.intermediate_size
    width = _first(config, "moe_intermediate_size", "intermediate_size")
    shared = _first(config, "shared_expert_intermediate_size") or (_first(config, "n_shared_experts") or 0) * width
    shared_gate = hidden if _first(config, "shared_expert_intermediate_size") else 0
    routed = config.num_experts_per_tok * width
    return matrices * hidden * (routed + shared) + hidden * _first(config, *_EXPERTS) + shared_gate


def _is_sparse(config: Any, layer: int) -> bool:
    if not _first(config, *_EXPERTS) or layer in (_first(config, "mlp_only_layers") or ()):
        return False
    dense_first, every = _first(config, "first_k_dense_replace") or 0, _first(config, "decoder_sparse_step") or 1
    return layer >= dense_first and (layer + 1) % every == 0


def _attention_kinds(config: Any) -> tuple[list[str], int]:
    """The kind of each layer's attention, and the window of those that have one."""
    windowed = getattr(config, "use_sliding_window", True)
    window = (_first(config, "sliding_window") or 0) if windowed else 0
    kinds = _first(config, "layer_types") or ["sliding_attention" if window else "full_attention"]
    return kinds if len(kinds) > 1 else kinds * config.num_hidden_layers, window


def _first(config: Any, *names: str) -> Any:
    """The first of the attributes that is there and not None or 0."""
    return next((value for name in names if (value := getattr(config, name, None))), None)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_UNGATED = frozenset({"gpt_neox", "nemotron", "phi", "starcoder2"})
"""Model types whose MLP has two matrices."""
