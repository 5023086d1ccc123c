"""Attention kernels over packed streams: (tokens, heads, head_dim) tensors whose sequences begin at ``cu_seqlens``.

    reference      one sequence at a time; any device, dtype and feature: the oracle
    padded         one batched call over right-padded sequences: the CPU path
    torch          torch.nn.attention.varlen, CUDA and half precision: the default there
    flash_attention_2, 3, 4    through transformers, where the package is installed

All take ``(q, k, v, cu_seqlens, max_length, *, causal, scale, window, softcap, sinks)``; ``window`` counts the token itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

Kernel = Callable[..., Tensor]


def reference_kernel(
    q: Float[Tensor, "S Hq D"],
    k: Float[Tensor, "S Hkv D"],
    v: Float[Tensor, "S Hkv Dv"],
    cu_seqlens: Int[Tensor, "N_1"],
    max_length: int,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, "Hq"] | None = None,
) -> Float[Tensor, "S Hq Dv"]:
    """One sequence at a time; any device and dtype, every feature: the oracle of the tests."""
    lengths = cu_seqlens.diff().tolist()
    out = []
    for *parts, n in zip(q.split(lengths), k.split(lengths), v.split(lengths), lengths, strict=True):
        qi, ki, vi = (t.transpose(0, 1)[None] for t in parts)
        mask = _window_mask(n, window, causal, q.device)
        if softcap is None and sinks is None:
            o = F.scaled_dot_product_attention(
                qi,
                ki,
                vi,
                attn_mask=mask,
                is_causal=causal and mask is None and n > 1,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        else:
            o = _explicit_attention(qi, ki, vi, mask, causal, scale, softcap, sinks)
        out.append(o[0].transpose(0, 1))
    return torch.cat(out)


def padded_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The CPU path: one batched call over right-padded sequences, which is exact when attention is causal.

    Falls back to `reference_kernel` where the padding would outweigh the tokens, and for features that need a mask.
    """
    lengths = cu_seqlens.diff()
    rows = len(lengths) * max_length
    wasteful = not torch.compiler.is_compiling() and rows > 2 * len(q)  # a loop over sequences has no graph
    if not causal or softcap is not None or sinks is not None or wasteful:
        features: dict[str, Any] = {"causal": causal, "scale": scale, "window": window}
        return reference_kernel(q, k, v, cu_seqlens, max_length, softcap=softcap, sinks=sinks, **features)
    # token t of sequence i, which begins at cu_seqlens[i], goes to row i·max_length
    tokens = torch.arange(len(q), device=q.device, dtype=cu_seqlens.dtype)
    i = torch.searchsorted(cu_seqlens[1:], tokens, right=True)
    taken = tokens - cu_seqlens[i] + i * max_length

    def pad(t: Tensor) -> Tensor:
        padded = t.new_zeros(rows, *t.shape[1:]).index_copy(0, taken, t)
        return padded.view(len(lengths), max_length, *t.shape[1:]).transpose(1, 2)

    mask = _window_mask(max_length, window, causal, q.device)
    out = F.scaled_dot_product_attention(
        pad(q), pad(k), pad(v), attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, taken)


def _window_mask(n: int, window: int | None, causal: bool, device: torch.device) -> Tensor | None:
    if window is None or n <= window:
        return None
    i = torch.arange(n, device=device)
    near = i[:, None] - i[None, :] < window
    return near & (i[:, None] >= i[None, :]) if causal else near


def _explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    n, members = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(members, 1), v.repeat_interleave(members, 1)
    scores = q @ k.transpose(-1, -2) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None and causal:
        mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:  # one extra logit per head that takes probability mass but has no value
        extra = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(1, -1, n, 1)
        scores = torch.cat([scores, extra], dim=-1)
    return scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)[..., :n] @ v


@cache
def _varlen() -> tuple[Callable[..., Any], bool]:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def torch_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``torch.nn.attention.varlen`` (CUDA, half precision): the FlashAttention-2 that torch ships, no extra package."""
    if softcap is not None or sinks is not None:
        raise NotImplementedError("attention: torch has neither soft-capping nor sinks, choose flash_attention_3 or 4")
    varlen_attn, has_gqa_flag = _varlen()
    d, dv, dtype = q.shape[-1], v.shape[-1], q.dtype
    if dtype == torch.float32:  # the kernel takes half precision only; some models upcast q and k in their norms
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    if d != dv:  # multi-head latent attention
        v = F.pad(v, (0, d - dv))
    # transformers counts the window with the token itself, the kernel counts tokens to the left
    left_right = (-1, -1) if not causal else (-1, 0) if window is None else (window - 1, 0)
    kwargs: dict[str, Any] = {"scale": scale, "window_size": left_right}
    if has_gqa_flag:  # torch 2.11 has no flag, its kernel takes grouped heads as they are
        kwargs["enable_gqa"] = q.shape[1] != k.shape[1]
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_length, max_length, **kwargs)[..., :dv].to(dtype)


def transformers_kernel(implementation: str) -> Kernel:
    """flash_attention_2/3/4 through transformers' own dispatcher, which maps soft-cap, sinks and window names."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_length: int,
        *,
        causal: bool = True,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        d, dv = q.shape[-1], v.shape[-1]
        if d != dv:
            v = F.pad(v, (0, d - dv))
        out = _flash_attention_forward(
            q[None],
            k[None],
            v[None],
            None,
            q.shape[0],
            causal,
            softmax_scale=scale,
            sliding_window=window,
            softcap=softcap,
            s_aux=sinks,
            cu_seq_lens_q=cu_seqlens,  # type: ignore[arg-type]
            cu_seq_lens_k=cu_seqlens,  # type: ignore[arg-type]
            max_length_q=max_length,
            max_length_k=max_length,
            attn_implementation=implementation,
        )
        return out[0, ..., :dv]

    return kernel


def check_kernel(name: str) -> None:
    """Raise ValueError unless `choose_kernel` knows ``name``."""
    if name not in ("auto", "torch", "padded", "reference") and not name.startswith("flash_attention_"):
        raise ValueError(
            f"model.attention must be auto, torch, padded, reference, or a transformers name such as flash_attention_3,"
            f" got {name!r}"
        )


def choose_kernel(name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Kernel:
    """``auto`` is torch's varlen kernel on CUDA in half precision, else the padded one; other names choose explicitly."""
    check_kernel(name)
    own = {"reference": reference_kernel, "padded": padded_kernel, "torch": torch_kernel}
    own["auto"] = torch_kernel if device.type == "cuda" and dtype != torch.float32 else padded_kernel
    return own[name] if name in own else transformers_kernel(name)
