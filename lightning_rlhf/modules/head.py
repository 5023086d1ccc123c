"""`LogProbHead`: the language-model head that returns log-probs and entropies and never holds the logits of a micro-batch.

For hidden state h, label y, and what models do to logits besides (scale, soft-cap):

    x = h Wᵀ      u = scale · (x + b)      c = cap · tanh(u / cap)  or u      z = c / temperature
    log p(y) = z_y - lse(z)      entropy = lse(z) - Σ_j p_j z_j      squares = Σ_j p_j²
    dx = (g_lp (onehot_y - p) - g_H p (log p + entropy)) · (scale / temperature) · (1 - (c/cap)²)

Forward takes some rows at a time, with all their columns, and keeps two floats per row. Backward makes the logits again, for some
columns of all rows at a time: such a tile completes its slice of the weight's gradient in one matrix product, and what is summed
over tiles is the gradient of the hidden states, (R, h), not the weight's, (V, h). A tile has `LogProbHead.tile_bytes` of logits,
in float32 as they were accumulated, never rounded to bfloat16. On CUDA the passes over a tile are one Triton kernel each way
(`head_triton`), elsewhere plain torch. With `LogProbHead.keep_logits` the Triton kernels find in backward what forward made.

Because the maths runs inside the head's own ``forward``, FSDP2's hooks have gathered ``weight``.
"""

from __future__ import annotations

import math
import sys
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class LogitMap(NamedTuple):
    """How h Wᵀ + b becomes the logits of the sampled distribution; see the module's first equation."""

    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0


def plain_log_probs(
    hidden: Float[Tensor, "R h"],
    weight: Float[Tensor, "V h"],
    bias: Float[Tensor, "V"] | None,
    labels: Int[Tensor, "R"],
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
) -> tuple[Float[Tensor, "R"], Float[Tensor, "R"]]:
    """(log-prob of the label, entropy) through full logits and autograd: the oracle of the tests."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    z = F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)) * scale
    if softcap is not None:
        z = torch.tanh(z / softcap) * softcap
    log_p = (z / temperature).log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)  # a banned token has p = 0, log p = -inf
    return log_p.gather(-1, labels[:, None]).squeeze(-1), entropy


# -- the passes over a tile, in plain torch; x is overwritten --------------------------------------------------------------


def row_statistics(
    x: Float[Tensor, "R V"],
    bias: Float[Tensor, "V"] | None,
    labels: Int[Tensor, "R"],
    to_logits: LogitMap,
    with_entropy: bool,
    with_squares: bool,
    with_top: bool,
) -> tuple[Float[Tensor, "R"], ...]:
    """Of whole rows: log-prob of the label; entropy, squares, whether no token is likelier (0 if not asked for); log-sum-exp."""
    z = _logits(x, bias, to_logits)
    lse = z.logsumexp(-1)
    own = z.gather(-1, labels[:, None]).squeeze(-1)
    log_probs, (entropy, squares, top) = own - lse, (torch.zeros_like(lse) for _ in range(3))
    if with_top:
        top = (own >= z.amax(-1)).float()
    if not (with_entropy or with_squares):
        return log_probs, entropy, squares, top, lse
    log_p = z.sub_(lse[:, None])
    p = log_p.exp()
    if with_squares:
        squares = torch.linalg.vector_norm(p, dim=-1).square()
    if with_entropy:
        log_p.masked_fill_(p == 0, 0.0)  # a banned token has p = 0, log p = -inf
        entropy = -p.mul_(log_p).sum(-1)
    return log_probs, entropy, squares, top, lse


def logit_gradient(
    x: Float[Tensor, "R v"],
    bias: Float[Tensor, "v"] | None,
    labels: Int[Tensor, "R"],
    lse: Float[Tensor, "R"],
    entropy: Float[Tensor, "R"],
    grad_log_probs: Float[Tensor, "R"],
    grad_entropy: Float[Tensor, "R"] | None,
    first: int,
    to_logits: LogitMap,
    dtype: torch.dtype,
) -> Float[Tensor, "R v"]:
    """dx of the columns from ``first`` on, rounded to ``dtype``."""
    z = _logits(x, bias, to_logits)
    slope = None
    if to_logits.softcap is not None:
        slope = (z * (to_logits.temperature / to_logits.softcap)).square_().neg_().add_(1.0)
    d = z.sub_(lse[:, None])  # log p
    if grad_entropy is None:
        d.exp_().mul_(-grad_log_probs[:, None])
    else:
        p = d.exp()
        d.masked_fill_(p == 0, 0.0).add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        d.sub_(grad_log_probs[:, None]).mul_(p)
    here = ((labels >= first) & (labels < first + x.shape[1])).nonzero().squeeze(-1)
    d[here, labels[here] - first] += grad_log_probs[here]
    if slope is not None:
        d.mul_(slope)
    if to_logits.scale != to_logits.temperature:
        d.mul_(to_logits.scale / to_logits.temperature)
    return d.to(dtype)


def _logits(x: Tensor, bias: Tensor | None, to_logits: LogitMap) -> Tensor:
    temperature, cap, scale = to_logits
    if bias is not None:
        x.add_(bias)
    if cap is not None:
        return x.mul_(scale / cap).tanh_().mul_(cap / temperature)
    return x if scale == temperature else x.mul_(scale / temperature)


# -- matrix products that accumulate and return float32 --------------------------------------------------------------------


def _mm(
    a: Float[Tensor, "i j"], b: Float[Tensor, "j k"], total: Float[Tensor, "i k"] | None = None
) -> Float[Tensor, "i k"]:
    """a b, added to ``total`` in place if there is one."""
    if a.is_cuda and a.dtype != torch.float32:
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return a.float() @ b.float() if total is None else total.addmm_(a.float(), b.float())


@cache
def _passes(device: str) -> ModuleType:
    """Whose `row_statistics` and `logit_gradient` to use: `head_triton` where it can run, else this module."""
    if device == "cuda" and find_spec("triton") is not None:
        from lightning_rlhf.modules import head_triton

        return head_triton
    if device == "cuda":
        rank_zero_warn("triton is not installed: the log-prob head takes several passes over its logits instead of one")
    return sys.modules[__name__]


def _tiles(length: int, width: int, tile_bytes: int) -> list[slice]:
    """Near-equal pieces of ``length``, so that ``width`` float32 for each of a piece are about ``tile_bytes``.

    A piece is a multiple of 64, for the alignment of the matrix products, except for the last.
    """
    count = max(1, math.ceil(4 * length * width / tile_bytes))
    step = 64 * max(1, math.ceil(length / count / 64))
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


class _TiledLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        to_logits: LogitMap,
        with_entropy: bool,
        with_squares: bool,
        with_top: bool,
        tile_bytes: int,
        passes: ModuleType,
        keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        labels = labels.contiguous()
        log_probs, entropy, squares, top, lse = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(5))
        logits = _mm(hidden, weight.t()) if keep else None
        for rows in [slice(None)] if keep else _tiles(len(hidden), len(weight), tile_bytes):
            x = _mm(hidden[rows], weight.t()) if logits is None else logits
            found = passes.row_statistics(x, bias, labels[rows], to_logits, with_entropy, with_squares, with_top)
            log_probs[rows], entropy[rows], squares[rows], top[rows], lse[rows] = found
            del x  # or it would live beside the next
        ctx.save_for_backward(hidden, weight, bias, labels, lse, entropy, logits)
        ctx.to_logits, ctx.tile_bytes, ctx.passes = to_logits, tile_bytes, passes
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(() if with_entropy else (entropy,)), squares, top)
        return log_probs, entropy, squares, top

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, lse, entropy, logits = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = None
        d_weight = torch.empty_like(weight) if need_weight else None
        d_bias = torch.empty_like(bias) if need_bias else None
        grad_log_probs = torch.zeros_like(lse) if grad_log_probs is None else grad_log_probs.contiguous()
        grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
        rows = (labels, lse, entropy, grad_log_probs, grad_entropy)
        for columns in _tiles(len(weight), len(hidden), ctx.tile_bytes):
            some = None if bias is None else bias[columns]
            x = _mm(hidden, weight[columns].t()) if logits is None else logits[:, columns]
            d = ctx.passes.logit_gradient(x, some, *rows, columns.start, ctx.to_logits, weight.dtype)
            del x
            if need_hidden:
                d_hidden = _mm(d, weight[columns], d_hidden)
            if d_weight is not None:
                torch.mm(d.t(), hidden, out=d_weight[columns])
            if d_bias is not None:
                d_bias[columns] = d.sum(0, dtype=torch.float32)
            del d
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias, *[None] * 8


class LogProbHead(nn.Linear):
    """Takes the place of ``lm_head``: the same parameters under the same names, ties kept.

    Args of ``forward``:
        hidden: final hidden states, (R, h), of the dtype of ``weight``.
        labels: (R,), every entry a token id. None: float32 logits of ``hidden``, any shape, as the model's own forward expects.
        temperature: divides the logits.
        with_entropy: False saves work; the entropies are then 0.
        with_squares: return the squares, too; they have no gradient.
        with_top: also say where no token is likelier than the label.

    Returns:
        log-prob of each label and entropy of each row, float32, (R,); with ``with_top`` 1 or 0 for each row besides. Gradients
        cannot be differentiated again.
    """

    softcap: float | None = None
    logit_scale: float = 1.0
    tile_bytes: int = 2**30
    """Of float32 logits that are held at a time; in backward as many bfloat16 are held besides."""

    keep_logits: bool = False
    """Of all rows, from forward to backward, 4 bytes each: a matrix product less. With the Triton kernels, below float32."""

    passes: ModuleType | None = None
    """Whose passes over a tile are used: this module's, `head_triton`'s, or chosen by the device."""

    @classmethod
    def replace(cls, model: nn.Module) -> LogProbHead:
        """Swap the head of a transformers causal LM, taking over the logit post-processing that the model does itself.

        Raises:
            NotImplementedError: the head is no plain linear layer, it is not the only thing after the backbone, or the
                model cuts logits off.
        """
        old = model.get_output_embeddings()  # type: ignore[operator]
        if type(old) is not nn.Linear:
            raise NotImplementedError(
                f"the language-model head is a {type(old).__name__}, it must be a plain nn.Linear: take another model"
            )
        others = [name for name, child in model.named_children() if child is not old and child is not model.base_model]
        if others:
            raise NotImplementedError(
                f"{type(model).__name__} has {', '.join(others)} beside its backbone and head: they would be ignored"
            )
        config = model.config.get_text_config()  # type: ignore[union-attr,operator]
        if (size := getattr(config, "unpadded_vocab_size", None) or old.out_features) != old.out_features:
            raise NotImplementedError(
                f"the model uses {size} of the {old.out_features} rows of its head, it must use all: cut the head's weight"
            )
        with torch.device("meta"):
            new = cls(old.in_features, old.out_features, bias=old.bias is not None)
        new.weight, new.bias = old.weight, old.bias
        new.softcap = getattr(config, "final_logit_softcapping", None)
        new.logit_scale = _logit_scale(config)
        model.set_output_embeddings(new)  # type: ignore[operator]
        return new

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = True,
        with_squares: bool = False,
        with_top: bool = False,
    ) -> Any:
        if labels is None:
            x = _mm(hidden.flatten(0, -2), self.weight.t()).unflatten(0, hidden.shape[:-1])
            return x if self.bias is None else x + self.bias
        to_logits = LogitMap(float(temperature), self.softcap, self.logit_scale)
        passes = self.passes or _passes(hidden.device.type)
        keep = self.keep_logits and torch.is_grad_enabled()
        # the others overwrite them
        keep = keep and passes is not sys.modules[__name__] and self.weight.dtype != torch.float32
        found = _TiledLogProbs.apply(
            *(hidden, self.weight, self.bias, labels, to_logits, with_entropy, with_squares, with_top),
            *(self.tile_bytes, passes, keep),
        )
        return tuple(values for values, asked in zip(found, (True, True, with_squares, with_top), strict=True) if asked)


def _logit_scale(config: Any) -> float:
    """Cohere, Falcon-H1, Muse: a factor; Granite: a divisor, which in HyperCLOVA X is a factor under the same name."""
    names = ("logit_scale", "lm_head_multiplier", "output_multiplier")
    scale = math.prod(float(getattr(config, name, None) or 1.0) for name in names)
    scaling = float(getattr(config, "logits_scaling", None) or 1.0)
    return scale * scaling if config.model_type == "hyperclovax" else scale / scaling
