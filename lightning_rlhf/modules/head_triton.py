"""Triton kernels of the log-prob head: one read of the logits forward, one read and one write of half the size backward.

The matrix products stay in cuBLAS; these are the passes between them. Both take x = h Wᵀ in float32 and make of it

    u = scale · (x + b)      c = cap · tanh(u / cap)  or u      z = c / temperature

in registers. They are limited by memory: 4 bytes per logit forward, 6 backward (bfloat16). Offsets are 64-bit, rows x vocabulary
passes 2³¹. Imported by `head` on CUDA; ``TRITON_INTERPRET=1`` runs them on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_rlhf.modules.head import LogitMap

BLOCK = 4096
"""Columns that a program has in registers at a time."""
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}


@triton.jit
def _capped(u, cap, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    if HAS_CAP:  # tanh by the sigmoid: libdevice's would not run interpreted; off by at most cap · 2⁻²³
        return cap * (2.0 * tl.sigmoid(2.0 * u / cap) - 1.0)
    return u


@triton.jit
def _row_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    bias_ptr,
    labels_ptr,
    log_probs_ptr,
    entropy_ptr,
    squares_ptr,
    top_ptr,
    lse_ptr,
    stride,
    scale,
    cap,
    temperature,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WITH_SQUARES: tl.constexpr,
    WITH_TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride
    peak = -1e30  # finite: a block of banned tokens only is -inf throughout, and -inf - -inf is no number
    total = 0.0  # Σ exp(z - peak)
    moment = 0.0  # Σ exp(z - peak) (z - peak)
    squares = 0.0  # Σ exp(z - peak)²
    own = float("-inf")  # z of the label
    label = tl.load(labels_ptr + row)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < COLUMNS
        u = tl.load(x_ptr + column, mask=inside, other=0.0)
        if HAS_BIAS:
            u += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        z = tl.where(inside, _capped(u * scale, cap, HAS_CAP) / temperature, float("-inf"))
        higher = tl.maximum(peak, tl.max(z, 0))
        shrink = tl.exp(peak - higher)
        e = tl.exp(z - higher)
        if WITH_ENTROPY:
            moment = shrink * (moment + total * (peak - higher)) + tl.sum(tl.where(e > 0, e * (z - higher), 0.0), 0)
        if WITH_TOP:
            own = tl.maximum(own, tl.max(tl.where(column == label, z, float("-inf")), 0))
        if WITH_SQUARES:
            squares = shrink * shrink * squares + tl.sum(e * e, 0)
        total = shrink * total + tl.sum(e, 0)
        peak = higher
    lse = peak + tl.log(total)
    known = (label >= 0) & (label < COLUMNS)
    u = tl.load(x_ptr + label, mask=known, other=float("nan"))  # no token id: a log-prob that no check overlooks
    if HAS_BIAS:
        u += tl.load(bias_ptr + label, mask=known, other=0.0).to(tl.float32)
    tl.store(log_probs_ptr + row, _capped(u * scale, cap, HAS_CAP) / temperature - lse)
    tl.store(lse_ptr + row, lse)
    if WITH_ENTROPY:
        tl.store(entropy_ptr + row, tl.log(total) - moment / total)
    if WITH_TOP:
        tl.store(top_ptr + row, tl.where(own >= peak, 1.0, 0.0))
    if WITH_SQUARES:
        tl.store(squares_ptr + row, squares / (total * total))


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    d_ptr,
    bias_ptr,
    labels_ptr,
    lse_ptr,
    entropy_ptr,
    grad_log_probs_ptr,
    grad_entropy_ptr,
    stride,
    d_stride,
    columns,
    first,
    scale,
    cap,
    temperature,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    u = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0)
    if HAS_BIAS:
        u += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    c = _capped(u * scale, cap, HAS_CAP)
    log_p = c / temperature - tl.load(lse_ptr + row)
    p = tl.exp(log_p)
    label = tl.load(labels_ptr + row) - first
    d = tl.load(grad_log_probs_ptr + row) * (tl.where(column == label, 1.0, 0.0) - p)
    spread = tl.where(p > 0, p * (log_p + tl.load(entropy_ptr + row)), 0.0)  # a banned token: p = 0, log p = -inf
    d = (d - tl.load(grad_entropy_ptr + row) * spread) * (scale / temperature)
    if HAS_CAP:
        d *= 1.0 - (c / cap) * (c / cap)
    tl.store(d_ptr + row * d_stride + column, d.to(d_ptr.dtype.element_ty), mask=inside)


def row_statistics(
    x: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    to_logits: LogitMap,
    with_entropy: bool,
    with_squares: bool,
    with_top: bool,
) -> tuple[Tensor, ...]:
    """As `head.row_statistics`, x is left as it is."""
    log_probs, entropy, squares, top, lse = (x.new_zeros(len(x)) for _ in range(5))
    if len(x):
        with torch.cuda.device_of(x):
            _row_kernel[(len(x),)](
                x,
                x if bias is None else bias,
                labels,
                log_probs,
                entropy,
                squares,
                top,
                lse,
                x.stride(0),
                *_numbers(to_logits),
                COLUMNS=x.shape[1],
                HAS_BIAS=bias is not None,
                HAS_CAP=to_logits.softcap is not None,
                WITH_ENTROPY=with_entropy,
                WITH_SQUARES=with_squares,
                WITH_TOP=with_top,
                BLOCK=BLOCK,
                **OPTIONS,
            )
    return log_probs, entropy, squares, top, lse


def logit_gradient(
    x: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    first: int,
    to_logits: LogitMap,
    dtype: torch.dtype,
) -> Tensor:
    """As `head.logit_gradient`; in place where ``dtype`` is float32, as no element depends on another."""
    d = x if dtype == torch.float32 else torch.empty(x.shape, dtype=dtype, device=x.device)
    if len(x):
        with torch.cuda.device_of(x):
            _gradient_kernel[(len(x), triton.cdiv(x.shape[1], BLOCK))](
                x,
                d,
                x if bias is None else bias,
                labels,
                lse,
                entropy,
                grad_log_probs,
                torch.zeros_like(lse) if grad_entropy is None else grad_entropy,
                x.stride(0),
                d.stride(0),
                x.shape[1],
                first,
                *_numbers(to_logits),
                HAS_BIAS=bias is not None,
                HAS_CAP=to_logits.softcap is not None,
                BLOCK=BLOCK,
                **OPTIONS,
            )
    return d


def _numbers(to_logits: LogitMap) -> tuple[float, float, float]:
    return float(to_logits.scale), float(to_logits.softcap or 1.0), float(to_logits.temperature)
