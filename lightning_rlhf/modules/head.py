"""`LogProbHead`: the language-model head that returns log-probs and entropies and never holds the logits of a micro-batch.

For hidden state h, label y, z = softcap(scale · h Wᵀ + b) / temperature:

    log p(y) = z_y - lse(z)            entropy = lse(z) - Σ_j p_j z_j
    dz       = g_lp (onehot_y - p) - g_H p (log p + entropy)

Forward keeps two floats per row; backward computes the logits of a chunk of rows again. Logits are accumulated in float32, not
rounded to bfloat16 first. Because the maths runs inside the head's own ``forward``, FSDP2's hooks have gathered ``weight``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def plain_log_probs(
    hidden: Float[Tensor, "R h"],
    weight: Float[Tensor, "V h"],
    bias: Float[Tensor, "V"] | None,
    labels: Int[Tensor, "R"],
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "R"], Float[Tensor, "R"]]:
    """(log-prob of the label, entropy) through full logits: the oracle, and the path for soft-capped heads."""
    z = _matmul_nt(hidden, weight)
    if bias is not None:
        z = z + bias.float()
    if softcap is not None:
        z = torch.tanh(z / softcap) * softcap
    log_p = (z / temperature).log_softmax(-1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)  # a banned token has p = 0, log p = -inf
    return log_p.gather(-1, labels[:, None]).squeeze(-1), entropy


def _matmul_nt(a: Float[Tensor, "R h"], b: Float[Tensor, "V h"]) -> Float[Tensor, "R V"]:
    """a bᵀ accumulated AND returned in float32, differentiable."""
    if a.dtype == torch.float32:
        return F.linear(a, b)
    if a.is_cuda and not torch.is_grad_enabled():
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    return F.linear(a.float(), b.float())


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        rows = hidden.shape[0]
        log_probs, entropy, lse = (hidden.new_zeros(rows, dtype=torch.float32) for _ in range(3))
        for start in range(0, rows, chunk):
            part = slice(start, min(start + chunk, rows))
            z = _logits(hidden[part], weight, bias, temperature)
            lse[part] = z.logsumexp(-1)
            log_probs[part] = z.gather(-1, labels[part, None]).squeeze(-1) - lse[part]
            if with_entropy:
                p = (z - lse[part, None]).exp_()
                z.masked_fill_(p == 0, 0.0)  # a banned token has p = 0, z = -inf
                entropy[part] = lse[part] - p.mul_(z).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, labels, lse, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_lp: Tensor | None, grad_h: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, lse, entropy = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if need_weight else None
        d_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if need_bias else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, min(start + ctx.chunk, hidden.shape[0]))
            dz = _logits(hidden[part], weight, bias, ctx.temperature).sub_(lse[part, None])
            if grad_h is None:
                dz.exp_().mul_(-grad_lp[part, None])  # type: ignore[index]
            else:
                p = dz.exp()
                dz.masked_fill_(p == 0, 0.0).add_(entropy[part, None]).mul_(grad_h[part, None])
                if grad_lp is not None:
                    dz.add_(grad_lp[part, None])
                dz.mul_(p).neg_()
            if grad_lp is not None:
                dz.scatter_add_(-1, labels[part, None], grad_lp[part, None])
            if ctx.temperature != 1.0:
                dz.div_(ctx.temperature)
            if d_bias is not None:
                d_bias += dz.sum(0)
            dz = dz.to(weight.dtype)
            if d_hidden is not None:
                d_hidden[part] = dz @ weight
            if d_weight is not None:
                d_weight += _matmul_tn(dz, hidden[part])
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    z = _matmul_nt(hidden, weight)
    if bias is not None:
        z += bias.float()
    return z if temperature == 1.0 else z.div_(temperature)


def _matmul_tn(a: Float[Tensor, "R V"], b: Float[Tensor, "R h"]) -> Float[Tensor, "V h"]:
    """aᵀ b in float32: the sum over rows runs over all chunks."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a.t(), b, out_dtype=torch.float32)
    return (a.t() @ b).float()


class LogProbHead(nn.Linear):
    """Takes the place of ``lm_head``: the same parameters under the same names, ties kept.

    Args of ``forward``:
        hidden: final hidden states, (R, h).
        labels: (R,), every entry a token id. None: float32 logits of ``hidden``, any shape, as the model's own forward expects.
        temperature: divides the logits.
        with_entropy: False saves two passes over the logits; the entropies are then 0.

    Returns:
        log-prob of each label and entropy of each row, float32, (R,).
    """

    softcap: float | None = None
    logit_scale: float = 1.0
    chunk: int = 4096

    @classmethod
    def replace(cls, model: nn.Module, chunk: int = 4096) -> LogProbHead:
        """Swap the head of a transformers causal LM, taking over the logit post-processing that the model does itself.

        (Gemma: ``final_logit_softcapping``; Cohere: ``logit_scale``; Granite: ``logits_scaling``.)

        Raises:
            NotImplementedError: the head is no plain linear layer (an adapter on it would be ignored), or not the only thing
                after the backbone.
        """
        old = model.get_output_embeddings()  # type: ignore[operator]
        if type(old) is not nn.Linear:
            raise NotImplementedError(
                f"the language-model head is a {type(old).__name__}, it must be a plain nn.Linear"
            )
        others = [name for name, child in model.named_children() if child is not old and child is not model.base_model]
        if others:
            raise NotImplementedError(
                f"{type(model).__name__} has {', '.join(others)} beside its backbone and head: they would be ignored"
            )
        config = model.config.get_text_config()  # type: ignore[union-attr,operator]
        with torch.device("meta"):
            new = cls(old.in_features, old.out_features, bias=old.bias is not None)
        new.weight, new.bias = old.weight, old.bias
        new.softcap = getattr(config, "final_logit_softcapping", None)
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        new.logit_scale = scale / float(getattr(config, "logits_scaling", None) or 1.0)
        new.chunk = chunk
        model.set_output_embeddings(new)  # type: ignore[operator]
        return new

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, temperature: float = 1.0, with_entropy: bool = True
    ) -> Any:
        if labels is None:
            return _logits(hidden.flatten(0, -2), self.weight, self.bias, 1.0).unflatten(0, hidden.shape[:-1])
        if self.softcap is None:  # the scale is not rounded into bfloat16 hidden states
            divisor = float(temperature) / self.logit_scale
            return _ChunkedLogProbs.apply(hidden, self.weight, self.bias, labels, divisor, self.chunk, with_entropy)
        if self.logit_scale != 1.0:
            hidden = hidden * self.logit_scale
        parts = [  # rare: leave the derivative to autograd
            checkpoint(plain_log_probs, h, self.weight, self.bias, y, temperature, self.softcap, use_reentrant=False)
            for h, y in zip(hidden.split(self.chunk), labels.split(self.chunk), strict=True)
        ]
        return torch.cat([lp for lp, _ in parts]), torch.cat([entropy for _, entropy in parts])
