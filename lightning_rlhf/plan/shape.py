"""A model in numbers: built on the meta device from its configuration, and run there once. No weights, no GPU, no time.

    parameters      every tensor's shape, and the FSDP units they are gathered in
    activations     what autograd keeps of a forward pass over packed streams, by asking autograd itself

A forward pass on meta tensors runs the model's real code, so the bytes are exact for any architecture. As a formula, for
a layer of the Llama kind in bfloat16 (hidden h, MLP width f, Hq and Hkv heads of size D), per token:

    16 h + 8    two norms: the float32 copy, its normalised bfloat16, the output; a float32 scale
    8 f         gate, silu(gate), up, and their product: of one tile where the MLP is tiled
    4 Hq D + 4 Hkv D + 4 Hq     attention: q, its output, k, v, and the float32 log-sum-exp

Liger keeps a norm's input and output (8 h + 8), and gate, up and their product (6 f): its own autograd functions are run, but no
kernel is launched.

(cf. Korthikanti et al. 2022, arXiv:2205.05198, who count 34 h + 5 a s/h for GPT with dropout and stored scores.)
Recomputed layers keep their input only. FSDP's gathered parameters are freed after use and do not count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rlhf.hf_config import check_class
from lightning_rlhf.images import auto_class, is_vision_language
from lightning_rlhf.modules.execution import use_liger
from lightning_rlhf.modules.lora import Adapter
from lightning_rlhf.modules.settings import LoRA
from lightning_rlhf.ulysses import head_plan, set_attention

_TOKENS = 1024
"""Of the probe: enough that what does not grow with tokens rounds away."""


@dataclass(frozen=True)
class Shape:
    """What memory estimates need to know of a model.

    Args:
        model_class: of transformers.
        sizes: shape of each parameter, tied ones once.
        trained: of those with a gradient: all without LoRA.
        units: parameters of each FSDP group besides the root: layers, and an untied embedding and head.
        layers: decoder layers.
        hidden: width.
        vocabulary: width of the head's output; 0 without a head.
        kv_elements: of the cache, per token, all layers.
        attention_bytes: what attention returns in one layer, per token.
        layer_bytes: kept for backward, per token: the largest layer.
        mlp_bytes: of these, what the MLP keeps besides its input: a tiled one keeps it of one tile; 0 without an MLP.
        saved_bytes: kept for backward, per token: all layers and what is around them, without the head.
        tower_layer_bytes: kept for backward by the largest block of a trained vision tower, per token of an image.
        tower_bytes: the same by all of the tower; 0 if there is none or it is frozen.
    """

    model_class: str
    sizes: tuple[torch.Size, ...]
    trained: tuple[torch.Size, ...]
    units: tuple[int, ...]
    layers: int
    hidden: int
    vocabulary: int
    kv_elements: int
    attention_bytes: int
    layer_bytes: float
    mlp_bytes: float
    saved_bytes: float
    tower_layer_bytes: float = 0.0
    tower_bytes: float = 0.0

    @property
    def parameters(self) -> int:
        return sum(size.numel() for size in self.sizes)

    @property
    def root(self) -> int:
        """Parameters that stay gathered through forward and backward."""
        return self.parameters - sum(self.units)

    def shard(self, ranks: int) -> int:
        """Elements on one of ``ranks``."""
        return _shard(self.sizes, ranks)

    def trained_shard(self, ranks: int) -> int:
        """Elements with a gradient on one of ``ranks``."""
        return _shard(self.trained, ranks)


def _shard(sizes: tuple[torch.Size, ...], ranks: int) -> int:
    """FSDP2 splits dimension 0 like `torch.chunk` and pads."""
    return sum(-(-size[0] // ranks) * (size.numel() // size[0]) for size in sizes)


def shape_of(
    config: Any,
    dtype: torch.dtype,
    *,
    sequence_ranks: int = 1,
    head: bool = True,
    trust_remote_code: bool = False,
    lora: LoRA | None = None,
    freeze_vision: bool = True,
    liger: bool = False,
) -> Shape:
    """The shape of a causal language model that computes in ``dtype``.

    Args:
        config: of transformers.
        sequence_ranks: GPUs that share a stream; the saved bytes are per token of one GPU's piece.
        head: False for a critic's backbone, a value head included.
        freeze_vision: the tower of a vision-language model has no gradients.
        liger: with Liger's modules in place of the model's own.

    Raises:
        NotImplementedError: the model is of another vision-language family or cannot attend over packed streams.
        ValueError: it is no causal language model.
    """
    check_class(config)
    config = deepcopy(config)  # the model keeps it and writes into it
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        backbone = model if head else model.base_model
        value_head = () if head else (torch.Size((1, config.get_text_config().hidden_size)), torch.Size((1,)))
        if lora is not None:
            Adapter(model, lora, dtype, part=None if head else backbone)  # gathered in it, whatever it is stored in
    tower = model.base_model.visual if is_vision_language(config) else None
    if tower is not None and freeze_vision:
        tower.requires_grad_(False)
    decoder = model.base_model if tower is None else model.base_model.language_model
    set_attention(model if tower is None else decoder, f"plan_sp{sequence_ranks}", _attention(sequence_ranks))
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [m for m in decoder.modules() if type(m).__name__ in names]
    units = list(layers)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if head and output.weight is not embedding.weight:
        units += [output, embedding]
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    with _liger_modules(model) if liger else nullcontext():
        layer_bytes, mlp_bytes, saved_bytes = _decoder_bytes(decoder, layers)
    tower_bytes = (0.0, 0.0) if tower is None or freeze_vision else _tower_bytes(tower)
    return Shape(
        model_class=type(model).__name__,
        sizes=(*(p.shape for p in backbone.parameters()), *value_head),
        trained=(*(p.shape for p in backbone.parameters() if p.requires_grad), *value_head),
        units=(*map(_count, units), *_tower_units(tower), *((text.hidden_size + 1,) * (not head))),
        layers=len(layers),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size if head else 0,
        kv_elements=2 * text.num_hidden_layers * kv_heads * head_dim,
        attention_bytes=_attention_bytes(heads, kv_heads, head_dim, dtype.itemsize, sequence_ranks),
        layer_bytes=layer_bytes,
        mlp_bytes=mlp_bytes,
        saved_bytes=saved_bytes,
        tower_layer_bytes=tower_bytes[0],
        tower_bytes=tower_bytes[1],
    )


def _attention_bytes(heads: int, kv_heads: int, head_dim: int, size: int, ranks: int) -> int:
    """Output and float32 log-sum-exp; of several ranks also what the all-to-alls return: q, k, v, and the output once more."""
    if ranks == 1:
        return heads * (head_dim * size + 4)
    repeat, pad = head_plan(heads, kv_heads, ranks)
    exchanged = 2 * (heads + pad) + 2 * (kv_heads * repeat + pad) + heads
    return exchanged * head_dim * size + (heads + pad) * 4


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _tower_units(tower: Any) -> tuple[int, ...]:
    """Each block of a vision tower, and what is around them."""
    if tower is None:
        return ()
    blocks = [_count(block) for block in tower.blocks]
    return (*blocks, _count(tower) - sum(blocks))


class SavedBytes:
    """Bytes of the storages that autograd keeps, each counted once; parameters and buffers of ``model`` are not."""

    def __init__(self, model: nn.Module) -> None:
        self.total = 0
        self._seen: dict[int, Tensor] = {}  # the tensors too: a freed storage's address is used again
        for tensor in (*model.parameters(), *model.buffers()):
            self._seen[tensor.untyped_storage()._cdata] = tensor

    def __call__(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = tensor
            self.total += storage.nbytes()
        return tensor


def _saved_bytes(model: nn.Module, layers: list[nn.Module], **inputs: Any) -> tuple[int, int, int]:
    """(largest layer, largest MLP in a layer besides its input, everything), in bytes, of one forward pass."""
    saved, at, mlps = SavedBytes(model), [0], [0]
    hooks = [layer.register_forward_hook(lambda *_: at.append(saved.total)) for layer in layers]

    def enter(mlp: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mlps.append(-saved.total - [*args, *kwargs.values()][0].nbytes)

    def leave(*_: Any) -> None:
        mlps[-1] += saved.total

    for mlp in (mlp for layer in layers if isinstance(mlp := getattr(layer, "mlp", None), nn.Module)):
        hooks += [mlp.register_forward_pre_hook(enter, with_kwargs=True), mlp.register_forward_hook(leave)]
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return max((b - a for a, b in pairwise(at[1:])), default=at[-1]), max(mlps), saved.total


def _decoder_bytes(decoder: nn.Module, layers: list[nn.Module]) -> tuple[float, ...]:
    """See `_saved_bytes`: per token of one GPU's piece of a stream."""
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    bounds = torch.zeros(2, dtype=torch.int32, device="meta")
    found = _saved_bytes(
        decoder,
        layers,
        input_ids=ids,
        position_ids=ids,
        use_cache=False,
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=_TOKENS,
        max_length_k=_TOKENS,
    )
    return tuple(size / _TOKENS for size in found)


def _tower_bytes(tower: Any) -> tuple[float, float]:
    """(largest block, everything) of one picture, per token that the language model sees of it."""
    set_attention(tower, "plan_tower", _attention(1))
    config, side = tower.config, 16 * tower.spatial_merge_size
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    patches, grid = torch.zeros(side * side, width, device="meta"), torch.tensor([[1, side, side]])
    # sizes of pictures are read on the host, what is computed from them is not
    tower.rotary_pos_emb.register_forward_pre_hook(lambda _, args: tuple(arg.to("meta") for arg in args))
    block, _, everything = _saved_bytes(tower, list(tower.blocks), hidden_states=patches, grid_thw=grid)
    return block / 16**2, everything / 16**2


@contextmanager
def _liger_modules(model: nn.Module) -> Iterator[None]:
    """Liger in ``model``, its Triton kernels without effect; the architecture's module is as before afterwards."""
    from triton.runtime.jit import KernelInterface

    source, launch = vars(sys.modules[type(model).__module__]), KernelInterface.__getitem__
    stock = dict(source)
    KernelInterface.__getitem__ = lambda self, grid: lambda *args, **kwargs: None
    try:
        use_liger(model)
        for name, module in model.named_modules():
            if name.endswith("experts"):  # Liger's read the routing on the host: the model's own stand in
                vars(module).pop("forward", None)
        yield
    finally:
        KernelInterface.__getitem__ = launch
        source.update(stock)


class _FlashLike(torch.autograd.Function):
    """Keeps what FlashAttention keeps: q, k, v, the output and a float32 log-sum-exp per head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2], dtype=torch.float32))
        return out


def _attention(ranks: int) -> Callable[..., tuple[Tensor, None]]:
    """`ulysses.packed_attention` without its values: the same tensors, on the meta device."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        if ranks == 1:
            return _FlashLike.apply(q, k, v)[None], None
        repeat, pad = head_plan(q.shape[1], k.shape[1], ranks)
        count = q.shape[1] + pad, k.shape[1] * repeat + pad, v.shape[1] * repeat + pad
        # after the all-to-all: all tokens of a share of the heads, in the numbers of one rank
        split = [_Exchange.apply(t, n) for t, n in zip((q, k, v), count, strict=True)]
        return _Exchange.apply(_FlashLike.apply(*split), q.shape[1])[None], None

    return attention


class _Exchange(torch.autograd.Function):
    """An all-to-all is a new tensor that keeps nothing of the old one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: int) -> Tensor:
        return x.new_empty(x.shape[0], heads, x.shape[2])
