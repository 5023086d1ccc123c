"""How the layers of a built model run: memory and speed switches, none of which changes a result.

    Liger kernels → tiled MLP → recomputation → compilation → offloaded activations      then `fully_shard`

Each one wraps ``forward`` of a layer (or of its MLP), on the instance. FSDP2's hooks surround ``forward``, so a recomputation
in backward neither gathers parameters again nor reduces a gradient twice. Wrappers are functions bound to their module, not
closures: with a closure per layer dynamo would compile every layer anew.

Sources: selective recomputation, Korthikanti et al. 2022, arXiv:2205.05198; tiled MLP, Arctic Long Sequence Training, Bekman et
al. 2025, arXiv:2506.13996.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_rlhf.modules.settings import ModelSettings


def check_execution(settings: ModelSettings, device: torch.device, config: Any) -> None:
    """Refuse, before a model is built, what cannot run on ``device`` or with this architecture.

    Raises:
        ValueError: Liger kernels or kept logits without CUDA.
        NotImplementedError: Liger has no kernels for the architecture.
    """
    for name in ("liger", "keep_logits"):
        if getattr(settings, name) and device.type != "cuda":
            raise ValueError(f"model.{name} needs a CUDA device, got {device.type}: set it to false")
    if not settings.liger:
        return
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise NotImplementedError(f"model.liger: Liger has no kernels for {config.model_type}, set it to false")


def check_layers(model: nn.Module, layers: list[nn.Module], settings: ModelSettings) -> None:
    """Refuse switches that a model's layers cannot take.

    Raises:
        NotImplementedError: the model does not say what its layers are, or has no MLP that can be tiled.
    """
    per_layer = [settings.tiled_mlp, settings.recomputed != "off", settings.compile, settings.offload_activations]
    if any(per_layer) and not layers:
        raise NotImplementedError(
            f"{type(model).__name__} does not name its layers (_no_split_modules): gradient_checkpointing, tiled_mlp, compile"
            " and offload_activations of model cannot be used"
        )
    for layer in layers if settings.tiled_mlp is not None else []:
        mlp = getattr(layer, "mlp", None)
        if mlp is None:
            raise NotImplementedError(f"model.tiled_mlp: {type(layer).__name__} has no mlp, set it to null")
        if any(hasattr(module, "experts") for module in mlp.modules()):
            raise NotImplementedError(
                f"model.tiled_mlp: {type(mlp).__name__} routes tokens to experts and cannot be tiled, set it to null"
            )


def apply_execution(
    model: nn.Module, layers: list[nn.Module], settings: ModelSettings, device: torch.device, trained: bool
) -> None:
    """Apply the switches of ``settings`` to a model that is not sharded yet.

    Args:
        model: the transformers model.
        layers: its decoder layers, in order.
        trained: False for a model that never runs backward: nothing is saved, so nothing is recomputed or offloaded.

    Raises:
        NotImplementedError: see `check_layers`.
    """
    check_layers(model, layers, settings)
    if settings.liger:
        use_liger(model)
    if settings.tiled_mlp is not None:
        for layer in layers:
            _tile_mlp(layer, settings.tiled_mlp)
    if trained:
        _recompute(layers, settings.recomputed)
    if settings.compile and settings.liger:
        # Liger keeps what it found out about the device in such a function: nothing for users to do
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`", UserWarning)
    if settings.compile:
        _compile(layers, fullgraph=not settings.liger and _is_traceable(model, settings.attention))
    if trained and settings.offload_activations:
        host = HostActivations(device)
        for layer in layers:
            host.wrap(layer)


# -- recomputation -----------------------------------------------------------------------------------------------------


def _recompute(layers: list[nn.Module], which: str) -> None:
    if which == "off":
        return
    forward = _recomputed_but_attention if which == "selective" else _recomputed
    for layer in layers[:: 2 if which == "every_second" else 1]:
        layer.forward = MethodType(forward, layer)


def _recomputed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a layer that keeps its inputs only and runs again in backward."""
    forward = partial(type(self).forward, self, **kwargs)
    if not (self.training and torch.is_grad_enabled()):
        return forward(*args)
    # every dropout is 0: there is no generator state to keep
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)


def _recomputed_but_attention(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Like `_recomputed`, but what attention and its collectives returned is kept."""
    forward = partial(type(self).forward, self, **kwargs)
    if not (self.training and torch.is_grad_enabled()):
        return forward(*args)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_attention_contexts)


def _attention_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_attention)


_KEPT = ("all_to_all", "varlen", "flash_attn", "flash_attention", "efficient_attention", "cudnn_attention")
"""Parts of the names of operators whose outputs are kept: our collective, torch's fused and variable-length attention, and the
operators that flash-attn registers."""


def _keep_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_kept(op) else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _is_kept(op: Any) -> bool:
    return any(part in str(op) for part in _KEPT) and "backward" not in str(op)


# -- tiled MLP ---------------------------------------------------------------------------------------------------------


def _tile_mlp(layer: nn.Module, tokens: int) -> None:
    """Run the layer's MLP over tiles of ``tokens`` tokens, each recomputed in backward: its inner activations, several times
    as wide as the stream, exist for one tile at a time.

    A weight is used once per tile inside one forward, so autograd sums its gradient before FSDP2 sees it.
    """
    mlp: Any = layer.mlp
    whole = mlp.forward

    def tiled(hidden: Tensor) -> Tensor:
        if hidden.shape[-2] <= tokens:
            return whole(hidden)
        tiles = hidden.split(tokens, dim=-2)
        if not torch.is_grad_enabled():
            return torch.cat([whole(tile) for tile in tiles], dim=-2)
        run = partial(checkpoint, whole, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([run(tile) for tile in tiles], dim=-2)

    mlp.forward = tiled


# -- compilation -------------------------------------------------------------------------------------------------------


def _compile(layers: list[nn.Module], fullgraph: bool) -> None:
    """`torch.compile` of each layer's forward with the number of tokens and of sequences as symbols.

    All layers share dynamo's cache, so streams of any length run one graph per kind of pass, and one more once the longest
    sequence changes its power of two. Kinds multiply: with and without gradients, an adapter on or off, a reference in
    bfloat16, a critic of another width, sliding and full attention, streams of one token: more than dynamo's default of 8.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    for layer in layers:
        layer.forward = _along_stream(torch.compile(layer.forward, fullgraph=fullgraph))


def _is_traceable(model: nn.Module, attention: str) -> bool:
    """Whether a layer is one graph for sure. Routing to experts depends on data; soft-capping and sinks take the reference
    kernel, which reads lengths on the host; other kernels are foreign extensions: there the graph may be cut in pieces."""
    names = [name for name, _ in model.named_parameters()]
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)  # type: ignore[union-attr,operator]
    own = attention in ("auto", "torch", "padded")
    return own and softcap is None and not any("experts" in name or "sinks" in name for name in names)


def _along_stream(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the sizes that change from stream to stream; everything else may be specialised on."""

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens = hidden.shape[-2]
        for leaf in tree_leaves((hidden, args, kwargs)):
            if isinstance(leaf, Tensor):
                for dim, size in enumerate(leaf.shape):
                    if size == tokens or leaf.dim() == 1:  # positions in the stream, or the sequences' offsets
                        torch._dynamo.maybe_mark_dynamic(leaf, dim)
        return compiled(hidden, *args, **kwargs)

    return forward


def bucketed(length: int) -> int:
    """The next power of two: kernels take an upper bound, and a compiled layer is not specialised on each length."""
    return 1 << max(0, length - 1).bit_length()


# -- Liger kernels -----------------------------------------------------------------------------------------------------


def use_liger(model: nn.Module) -> None:
    """Liger's RMSNorm and gated MLP on this instance, and its rotary embedding.

    The rotary function is looked up in the architecture's module, so it changes for every model of that architecture in this
    process. The classes that Liger replaces there are put back: models built later are stock.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    source = vars(sys.modules[type(model).__module__])
    classes = {name: value for name, value in source.items() if isinstance(value, type)}
    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    source.update(classes)


# -- activations on the host -------------------------------------------------------------------------------------------


class HostActivations:
    """Keeps what layers save for backward in pinned host memory; copies run on a stream of their own.

    A layer's tensors leave while the next layers compute, each once however many operators save it. In backward, a layer that
    needs its own also calls back those of the layer before it, which arrive while it computes. With recomputation a layer saves
    its input only; without, everything above ``smallest`` bytes travels. On the CPU tensors stay where they are.

    Attributes:
        moved_bytes: what has gone to the host so far.
    """

    smallest = 1 << 20

    def __init__(self, device: torch.device) -> None:
        self.moved_bytes = 0
        self._kind = device.type
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: weakref.ref[_Saved] | None = None

    def wrap(self, layer: nn.Module) -> None:
        """Offload what ``layer.forward`` saves; its parameters, saved too, stay."""
        inner = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            saved = _Saved(self._last)
            self._last = weakref.ref(saved)
            kept = {p.untyped_storage().data_ptr() for p in layer.parameters()}
            with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, saved, kept), self._unpack):
                return inner(*args, **kwargs)

        layer.forward = forward

    def _pack(self, saved: _Saved, kept: set[int], tensor: Tensor) -> Tensor | _Copy:
        size = tensor.numel() * tensor.element_size()
        if size < self.smallest or tensor.device.type != self._kind or tensor.untyped_storage().data_ptr() in kept:
            return tensor
        storage = StorageWeakRef(tensor.untyped_storage())
        key = storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
        copy = saved.copies.get(key)
        if copy is None:
            host = self._to_host(tensor)
            if host.stride() != tensor.stride():  # compiled code relies on the strides of what it saved
                return tensor
            self.moved_bytes += size
            copy = saved.copies[key] = _Copy(saved, host, storage)
        return copy

    def _to_host(self, tensor: Tensor) -> Tensor:
        if self._stream is None:
            return tensor
        # torch keeps freed pinned memory for the next micro-batch
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is free for others once the copy is done
        return host

    def _unpack(self, packed: Tensor | _Copy) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        saved = packed.saved
        self._call_back(saved)
        before = saved.before() if saved.before is not None else None
        if before is not None:
            self._call_back(before)
        if saved.ready is not None:
            torch.cuda.current_stream().wait_event(saved.ready)
        return packed.tensor

    def _call_back(self, saved: _Saved) -> None:
        if saved.called_back:
            return
        saved.called_back = True
        if self._stream is None:
            return
        copies = list(saved.copies.values())
        back = [torch.empty_like(copy.tensor, device=self._stream.device) for copy in copies]
        self._stream.wait_stream(torch.cuda.current_stream())  # the memory's last user may still run
        with torch.cuda.stream(self._stream):
            for copy, tensor in zip(copies, back, strict=True):
                tensor.copy_(copy.tensor, non_blocking=True)
                copy.tensor = tensor  # torch reuses the pinned memory only after the transfer
        saved.ready = self._stream.record_event()


class _Saved:
    """What one call of a layer saved; a chain of weak references leads back through the forward pass."""

    def __init__(self, before: weakref.ref[_Saved] | None) -> None:
        self.before = before
        self.copies: weakref.WeakValueDictionary[tuple[Any, ...], _Copy] = weakref.WeakValueDictionary()
        self.called_back = False
        self.ready: torch.cuda.Event | None = None


class _Copy:
    """A tensor on the host and, once called back, on the device. It is held by the operators that saved it and goes with the
    last one's backward.

    ``source``: while it is held no other storage takes the number that stands in the key of `_Saved.copies`; an address would
    be used again as soon as the tensor's memory is free.
    """

    def __init__(self, saved: _Saved, host: Tensor, source: StorageWeakRef) -> None:
        self.saved, self.tensor, self.source = saved, host, source
