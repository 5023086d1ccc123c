"""Attention kernels over packed streams: (tokens, heads, head_dim) tensors whose sequences begin at ``cu_seqlens``.

    reference      one sequence at a time; any device, dtype and feature: the oracle
    padded         one batched call over right-padded sequences: the CPU path
    torch          torch.nn.attention.varlen, for a long sequence cuDNN; CUDA and half precision: the default there
    flash_attention_2, 3, 4    through transformers, where the package is installed

All are called as ``kernel(q, k, v, cu_seqlens, max_length, features)``. What a kernel cannot do is refused by `choose_kernel`,
before a model is loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn


@dataclass(frozen=True)
class Features:
    """What a layer asks of its attention.

    Args:
        causal: a token sees no later one.
        scale: of the scores; None is head_dim ** -0.5.
        window: how many tokens one sees, itself included; None is all.
        softcap: c in c · tanh(score / c).
        sinks: one more score per query head that takes probability but has no value.
    """

    causal: bool = True
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Float[Tensor, "Hq"] | None = None


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, Features], Tensor]


def reference_kernel(
    q: Float[Tensor, "S Hq D"],
    k: Float[Tensor, "S Hkv D"],
    v: Float[Tensor, "S Hkv Dv"],
    cu_seqlens: Int[Tensor, "N_1"],
    max_length: int,
    features: Features,
) -> Float[Tensor, "S Hq Dv"]:
    """One sequence at a time; any device and dtype, every feature: the oracle of the tests."""
    lengths = cu_seqlens.diff().tolist()
    out = []
    for *parts, n in zip(q.split(lengths), k.split(lengths), v.split(lengths), lengths, strict=True):
        qi, ki, vi = (t.transpose(0, 1)[None] for t in parts)
        mask = _window_mask(n, features, q.device)
        if features.softcap is None and features.sinks is None:
            o = F.scaled_dot_product_attention(
                qi,
                ki,
                vi,
                attn_mask=mask,
                is_causal=features.causal and mask is None and n > 1,
                scale=features.scale,
                enable_gqa=_is_grouped(q, k),
            )
        else:
            o = _explicit_attention(qi, ki, vi, mask, features)
        out.append(o[0].transpose(0, 1))
    return torch.cat(out)


def padded_kernel(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, features: Features) -> Tensor:
    """The CPU path: one batched call over right-padded sequences, which is exact when attention is causal.

    Falls back to `reference_kernel` where the padding would outweigh the tokens, and for features that need a mask.
    """
    lengths = cu_seqlens.diff()
    rows = len(lengths) * max_length
    explicit = features.softcap is not None or features.sinks is not None
    wasteful = not torch.compiler.is_compiling() and rows > 2 * len(q)  # a loop over sequences has no graph
    if not features.causal or explicit or wasteful:
        return reference_kernel(q, k, v, cu_seqlens, max_length, features)
    # token t of sequence i, which begins at cu_seqlens[i], goes to row i·max_length
    tokens = torch.arange(len(q), device=q.device, dtype=cu_seqlens.dtype)
    i = torch.searchsorted(cu_seqlens[1:], tokens, right=True)
    taken = tokens - cu_seqlens[i] + i * max_length

    def pad(t: Tensor) -> Tensor:
        padded = t.new_zeros(rows, *t.shape[1:]).index_copy(0, taken, t)
        return padded.view(len(lengths), max_length, *t.shape[1:]).transpose(1, 2)

    mask = _window_mask(max_length, features, q.device)
    out = F.scaled_dot_product_attention(
        pad(q),
        pad(k),
        pad(v),
        attn_mask=mask,
        is_causal=mask is None,
        scale=features.scale,
        enable_gqa=_is_grouped(q, k),
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, taken)


def _is_grouped(q: Tensor, k: Tensor) -> bool:
    """Fewer key/value heads than query heads, dimension 1. A branch, so that dynamo settles it: once models with different
    numbers of heads were compiled in a process these are symbols, and a comparison is no bool."""
    if q.shape[1] != k.shape[1]:  # noqa: SIM103
        return True
    return False


def _window_mask(n: int, features: Features, device: torch.device) -> Tensor | None:
    if features.window is None or n <= features.window:
        return None
    i = torch.arange(n, device=device)
    near = i[:, None] - i[None, :] < features.window
    return near & (i[:, None] >= i[None, :]) if features.causal else near


def _explicit_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, features: Features) -> Tensor:
    n, members = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(members, 1), v.repeat_interleave(members, 1)
    scores = q @ k.transpose(-1, -2) * (features.scale if features.scale is not None else q.shape[-1] ** -0.5)
    if features.softcap is not None:
        scores = torch.tanh(scores / features.softcap) * features.softcap
    if mask is None and features.causal:
        mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if features.sinks is not None:
        extra = features.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(1, -1, n, 1)
        scores = torch.cat([scores, extra], dim=-1)
    return scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)[..., :n] @ v


# -- torch's own FlashAttention --------------------------------------------------------------------


_HAS_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.11 has no flag: its kernel takes grouped heads as they are."""


_LONG = 16384
"""Tokens from which a stream of one sequence goes to cuDNN: building its plan for a length costs 0.1 s once."""


def torch_kernel(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, features: Features) -> Tensor:
    """What torch ships for half precision on CUDA: ``torch.nn.attention.varlen``, which is FlashAttention-2, and cuDNN's
    attention where the stream is one long sequence: figures in docs/benchmarks.md."""
    if features.softcap is not None:
        raise NotImplementedError("attention: torch has no soft-capping, choose flash_attention_2")
    d, dv, dtype = q.shape[-1], v.shape[-1], q.dtype
    if dtype == torch.float32:  # the kernel takes half precision only; some models upcast q and k in their norms
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    if d != dv:  # multi-head latent attention
        v = F.pad(v, (0, d - dv))
    plain = features.causal and features.window is None and features.sinks is None
    if plain and len(cu_seqlens) == 2 and len(q) >= _LONG and d <= 128:
        return _one_sequence(q, k, v, features.scale)[..., :dv].to(dtype)
    # transformers counts the window with the token itself, the kernel counts tokens to the left
    left = -1 if features.window is None else features.window - 1
    window = (left, 0) if features.causal else (-1, -1)
    if features.sinks is not None:
        flash = (cu_seqlens, max_length, window, features.scale)
        out = WithSinks.apply(q, k, v, features.sinks, partial(_flash, *flash), partial(_flash_backward, *flash))
    else:
        kwargs: dict[str, Any] = {"scale": features.scale, "window_size": window}
        if _HAS_GQA_FLAG:
            kwargs["enable_gqa"] = _is_grouped(q, k)
        out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_length, max_length, **kwargs)
    return out[..., :dv].to(dtype)


def _one_sequence(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention by ``scaled_dot_product_attention`` with cuDNN, where it supports the device.

    Padded at the end to a multiple of 1,024 tokens, which no real token sees: cuDNN builds a plan for every length.
    """
    n = len(q)
    q, k, v = (F.pad(t, (0, 0, 0, 0, 0, -n % 1024)).transpose(0, 1)[None] for t in (q, k, v))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=_is_grouped(q, k))
    return out[0].transpose(0, 1)[:n]


class WithSinks(torch.autograd.Function):
    """Sinks s on top of a kernel that has none, from its output and log-sum-exp; exact.

        lse' = logaddexp(lse, s)         out' = out · exp(lse - lse')
        dq, dk, dv = the kernel's own backward, given (out', lse')       ds = -Σ_t exp(s - lse'_t) · (dout_t · out'_t)

    An autograd function, because the kernel's autograd ignores the gradient of its log-sum-exp.

    Args of ``apply``:
        q, k, v, sinks: (S, Hq, D), (S, Hkv, D), (S, Hkv, D), (Hq,).
        forward: (q, k, v) -> (out (S, Hq, D), lse (Hq, S) float32).
        backward: (grad of out, q, k, v, out, lse) -> (dq, dk, dv).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
    ) -> Tensor:
        out, lse = forward(q, k, v)
        total = torch.logaddexp(lse, sinks[:, None].to(lse.dtype))
        out = (out * (lse - total).exp().t()[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, total)
        ctx.kernel_backward = backward
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, total = ctx.saved_tensors
        dq, dk, dv = ctx.kernel_backward(grad.contiguous(), q, k, v, out, total)
        taken = (sinks[:, None].to(total.dtype) - total).exp()  # the sink's share of each token's attention
        d_sinks = -(taken * (grad.to(total.dtype) * out).sum(-1).t()).sum(1)
        return dq, dk, dv, d_sinks.to(sinks.dtype), None, None


def _flash(
    cu: Tensor, longest: int, window: tuple[int, int], scale: float | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """What ``varlen_attn`` calls, with its log-sum-exp."""
    left, right = window
    options: dict[str, Any] = {"scale": scale, "window_size_left": left, "window_size_right": right}
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu, cu, longest, longest, 0.0, window == (-1, 0), return_debug_mask=False, **options
    )
    return out, lse


def _flash_backward(
    cu: Tensor, longest: int, window: tuple[int, int], scale: float | None, grad: Tensor, *saved: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    left, right = window
    options: dict[str, Any] = {"scale": scale, "window_size_left": left, "window_size_right": right}
    rng = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # of dropout, which is 0
    return torch.ops.aten._flash_attention_backward(
        grad, *saved, cu, cu, longest, longest, 0.0, window == (-1, 0), rng, grad.new_empty(0), **options
    )


# -- packages, through transformers ----------------------------------------------------------------


def transformers_kernel(implementation: str) -> Kernel:
    """flash_attention_2/3/4 through transformers' own dispatcher, which maps soft-cap, sinks and window names."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    def kernel(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, features: Features) -> Tensor:
        d, dv = q.shape[-1], v.shape[-1]
        if d != dv:
            v = F.pad(v, (0, d - dv))
        out = _flash_attention_forward(
            q[None],
            k[None],
            v[None],
            None,
            q.shape[0],
            features.causal,
            softmax_scale=features.scale,
            sliding_window=features.window,
            softcap=features.softcap,
            s_aux=features.sinks,
            cu_seq_lens_q=cu_seqlens,  # type: ignore[arg-type]
            cu_seq_lens_k=cu_seqlens,  # type: ignore[arg-type]
            max_length_q=max_length,
            max_length_k=max_length,
            attn_implementation=implementation,
        )
        return out[0, ..., :dv]

    # FlashAttention-4 builds its kernels in Python, which dynamo would trace
    return torch.compiler.disable(kernel) if implementation == "flash_attention_4" else kernel


class MissingKernel(ValueError):
    """A kernel whose package is not installed here."""


_PACKAGES = {
    "flash_attention_2": ("flash_attn", "pip install 'lightning-rlhf[flash-attn]'"),
    "flash_attention_3": (
        "flash_attn_interface",
        "install flash-attn-3, which is built from flash-attention's hopper folder",
    ),
    "flash_attention_4": ("flash_attn.cute", "pip install flash-attn-4"),
}
"""Module with ``flash_attn_varlen_func``, and how to get it."""

_DESCRIPTIONS = {
    "reference": "reference (one sequence at a time)",
    "padded": "padded (one batched call)",
    "torch": "torch varlen (FlashAttention-2)",
}


def describe(name: str) -> str:
    """A kernel's name for the log."""
    return _DESCRIPTIONS.get(name, name)


def check_kernel(name: str) -> None:
    """Raise ValueError unless `choose_kernel` knows ``name``."""
    if name not in ("auto", *_DESCRIPTIONS, *_PACKAGES):
        raise ValueError(
            f"model.attention must be auto, torch, padded, reference, flash_attention_2, flash_attention_3 or"
            f" flash_attention_4, got {name!r}"
        )


def choose_kernel(
    name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16, needs: Features = Features()
) -> tuple[str, Kernel]:
    """(its own name, kernel). ``auto`` is torch's varlen kernel on CUDA in half precision, else the padded one.

    Args:
        needs: the features that some layer of the model uses.

    Raises:
        ValueError: the kernel does not run on ``device`` in ``dtype``, its package is missing, or it lacks a feature.
    """
    check_kernel(name)
    half_on_cuda = device.type == "cuda" and dtype != torch.float32
    if name == "auto":
        name = "torch" if half_on_cuda else "padded"
    if name in ("reference", "padded"):
        return name, reference_kernel if name == "reference" else padded_kernel
    if not half_on_cuda:
        raise ValueError(
            f"model.attention: {name} runs on CUDA in half precision, this model computes in {str(dtype)[6:]} on"
            f" {device.type}: set auto"
        )
    # transformers would leave out in silence what a package's function does not take
    known = {"s_aux"} if name == "torch" else set(inspect.signature(_varlen_function(name)).parameters)
    lacks = ["soft-capped scores"] if needs.softcap is not None and "softcap" not in known else []
    lacks += ["attention sinks"] if needs.sinks is not None and not known & {"s_aux", "learnable_sink"} else []
    if lacks:
        raise ValueError(
            f"model.attention: {describe(name)} has no {' and no '.join(lacks)}, which this model needs: set"
            f" {'torch' if lacks == ['attention sinks'] else 'flash_attention_2 (or 4)'}, or reference (slow, and its memory"
            " grows with the square of the length)"
        )
    return name, torch_kernel if name == "torch" else transformers_kernel(name)


def _varlen_function(name: str) -> Callable[..., Any]:
    module, remedy = _PACKAGES[name]
    try:
        return import_module(module).flash_attn_varlen_func
    except (ImportError, AttributeError) as error:
        raise MissingKernel(
            f"model.attention: {name} needs the package {module} ({error}): {remedy}, or set auto"
        ) from None
