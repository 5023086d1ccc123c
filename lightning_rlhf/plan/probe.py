"""What a forward pass leaves for backward, by asking autograd: the model's real code runs once on meta tensors.

The bytes are exact for any architecture. As a formula, for a layer of the Llama kind in bfloat16 (hidden h, MLP width f, Hq and
Hkv heads of size D), per token:

                                                              as it is                  with Liger or compiled
    two norms: float32 copy, its normalised bfloat16, output  16 h + 8                  8 h + 8
    gate, silu(gate), up, and their product                   8 f                       6 f
    attention: q, its output, k, v, and the log-sum-exp       4 Hq D + 4 Hkv D + 4 Hq   the same

Both keep less of a norm and activate the gate again in backward. Of Liger its own autograd functions are run, but no kernel is
launched. Compiled layers are traced and divided into forward and backward as for code generation, but no code is generated.
Recomputed layers, compiled or not, keep their input and, if selective, what attention returned.

(cf. Korthikanti et al. 2022, arXiv:2205.05198, who count 34 h + 5 a s/h for GPT with dropout and stored scores.)
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_rlhf.modules.execution import use_liger
from lightning_rlhf.ulysses import gather_heads, scatter_heads, set_attention

_TOKENS = 1024
"""Of the probe: enough that what does not grow with tokens rounds away."""


class Kept(NamedTuple):
    """Bytes for backward, per token of one GPU's piece of a stream: the largest layer, of these the largest MLP's without
    its input, and everything."""

    layer: float
    mlp: float
    everything: float


def decoder_bytes(decoder: nn.Module, layers: list[nn.Module]) -> Kept:
    """Of the layers as they are."""
    mlps = [mlp for layer in layers if isinstance(mlp := getattr(layer, "mlp", None), nn.Module)]
    return _kept(decoder, layers, mlps, _TOKENS, **_stream())


def compiled_bytes(decoder: nn.Module, layers: list[nn.Module]) -> Kept | None:
    """Of layers as `torch.compile` divides them, which they are afterwards; None where they cannot be traced. What of it is an
    MLP's is not known."""
    # beyond its limits dynamo runs layers as they are, and says so in a log only
    limits = {"recompile_limit": 256, "accumulated_recompile_limit": 1024}
    try:
        with warnings.catch_warnings(), torch._dynamo.config.patch(limits):
            warnings.simplefilter("ignore")  # dynamo's, of code that it cannot see into
            for layer in layers:
                layer.forward = torch.compile(layer.forward, dynamic=False, backend="aot_eager_decomp_partition")
            return _kept(decoder, layers, [], _TOKENS, **_stream())
    except Exception:  # of the compiler or of any model's code
        return None


def tower_bytes(tower: Any) -> Kept:
    """Of a vision tower's blocks, for one picture, per token that the language model sees of it."""
    set_attention(tower, "plan_tower", attention(1))
    config, side = tower.config, 16 * tower.spatial_merge_size
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    patches, grid = torch.zeros(side * side, width, device="meta"), torch.tensor([[1, side, side]])
    # sizes of pictures are read on the host, what is computed from them is not
    tower.rotary_pos_emb.register_forward_pre_hook(lambda _, args: tuple(arg.to("meta") for arg in args))
    return _kept(tower, list(tower.blocks), [], 16**2, hidden_states=patches, grid_thw=grid)


def _stream() -> dict[str, Any]:
    """Arguments of a decoder for a stream of one sequence."""
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    bounds = torch.zeros(2, dtype=torch.int32, device="meta")
    return {
        "input_ids": ids,
        "position_ids": ids,
        "use_cache": False,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": _TOKENS,
        "max_length_k": _TOKENS,
    }


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


def _kept(model: nn.Module, layers: list[nn.Module], mlps: list[nn.Module], tokens: int, **inputs: Any) -> Kept:
    """Of one forward pass over ``tokens`` tokens. A layer's is what comes between its end and that of the one before."""
    saved, at, inner = SavedBytes(model), [0], [0]
    hooks = [layer.register_forward_hook(lambda *_: at.append(saved.total)) for layer in layers]

    def enter(mlp: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inner.append(-saved.total - [*args, *kwargs.values()][0].nbytes)

    def leave(*_: Any) -> None:
        inner[-1] += saved.total

    for mlp in mlps:
        hooks += [mlp.register_forward_pre_hook(enter, with_kwargs=True), mlp.register_forward_hook(leave)]
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        model(**inputs)
    for hook in hooks:
        hook.remove()
    layer = max((b - a for a, b in pairwise(at[1:])), default=at[-1])
    return Kept(layer / tokens, max(inner) / tokens, saved.total / tokens)


@contextmanager
def liger_modules(model: nn.Module) -> Iterator[None]:
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


# -- attention without its values ------------------------------------------------------------------------------------------


def attention(ranks: int) -> Callable[..., tuple[Tensor, None]]:
    """`ulysses.packed_attention` over streams that ``ranks`` GPUs share, for meta tensors: there its collectives need no
    group, and its kernel computes nothing."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        if ranks == 1:
            return _varlen(q, k, v)[0][None], None
        q, k, v, heads = scatter_heads(q, k, v, ranks, "")
        return gather_heads(_varlen(q, k, v)[0], heads, ranks, "")[None], None

    return attend


def _forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""
    return q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[:2], dtype=torch.float32)


def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


# operators, as FlashAttention's are: a compiler does not look inside, and keeps what they return
_varlen = torch.library.custom_op("lightning_rlhf::plan_varlen", _forward, mutates_args=())
_varlen_backward = torch.library.custom_op("lightning_rlhf::plan_varlen_backward", _backward, mutates_args=())
_varlen.register_fake(_forward)
_varlen_backward.register_fake(_backward)
_varlen.register_autograd(
    lambda ctx, grad, _: _varlen_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)
