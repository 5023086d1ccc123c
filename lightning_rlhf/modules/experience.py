"""From the responses of each data rank to the whole iteration's `Experience`, equal on every rank."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_rlhf.types import Experience, Rollout, Scores, right_pad


def gather_experience(
    rollout: Rollout,
    scores: Scores,
    all_gather: Callable[[Any], list[Any]],
    *,
    baselines: Float[Tensor, "P"] | None = None,
    mask_truncated: bool = False,
    reward_clip: tuple[float, float] | None = None,
    judge: str | None = None,
    data_rank: int = 0,
) -> Experience:
    """Token ids and scalars of all data ranks, ordered by group: megabytes, whatever the model's size. Pictures stay.

    The order, and so everything computed from it, does not depend on the number of data ranks. Rows that cannot be learned
    from get mask 0: empty and aborted responses, and responses whose score or baseline is NaN.

    Args:
        all_gather: one picklable object per data rank -> their list.
        baselines: scores of the greedy responses.
        mask_truncated: rows cut at the length limit get mask 0 too.
        reward_clip: lowest and highest score of a response; what is over is taken off at its last token.
        judge: name of the reward function that says which responses are right; None is the whole reward.
        data_rank: this one.
    """
    n = rollout.sampling.num_generations
    prompts = [ids for ids in rollout.prompts.ids for _ in range(n)]
    unusable = {"abort", "length"} if mask_truncated else {"abort"}
    shares = all_gather(
        {
            "ids": _tokens(
                part for p, c in zip(prompts, rollout.completions, strict=True) for part in (p, c.token_ids)
            ),
            "prompt_lengths": [len(p) for p in prompts],
            "lengths": [len(c.token_ids) for c in rollout.completions],
            "masks": _rows(rollout.mask, rollout) if rollout.several_turns else None,
            "usable": [c.finish_reason not in unusable for c in rollout.completions],
            "group": rollout.group.cpu(),
            "total": scores.total.cpu(),
            "judged": scores.judged_by(judge).cpu(),
            "baselines": None if baselines is None else baselines.cpu().repeat_interleave(n),
            "parts": [part.cpu() for part in scores.parts.values()],
            "tokens": None if scores.tokens is None else _rows(scores.tokens, rollout),
            "has_images": rollout.prompts.images is not None,
            "sampler": None if rollout.sampler_log_probs is None else _rows(rollout.sampler_log_probs, rollout),
        }
    )
    group = torch.cat([s["group"] for s in shares])
    order = torch.sort(group, stable=True).indices
    prompt_lengths = [n for s in shares for n in s["prompt_lengths"]]
    lengths = [n for s in shares for n in s["lengths"]]
    ids = torch.cat([s["ids"] for s in shares])
    sequences = ids.split([p + n for p, n in zip(prompt_lengths, lengths, strict=True)])
    total = torch.cat([s["total"] for s in shares]).float()[order]
    parts = [torch.cat(values).float()[order] for values in zip(*(s["parts"] for s in shares), strict=True)]
    keep = torch.tensor([u for s in shares for u in s["usable"]])[order] & total.isfinite()
    everyones = None
    if baselines is not None:
        everyones = torch.cat([s["baselines"] for s in shares]).float()[order]
        keep &= everyones.isfinite()
    rows = order.tolist()
    long = torch.tensor(lengths)[order]
    mask = (torch.arange(max(1, int(long.max()))) < (long * keep)[:, None]).float()
    if any(s["masks"] for s in shares):
        masks = [row for s in shares for row in s["masks"] or [torch.ones(n) for n in s["lengths"]]]
        mask *= right_pad([masks[i] for i in rows])
    if reward_clip is not None:
        total = total.clamp(*reward_clip)
    per_token = torch.zeros(())
    if any(s["tokens"] for s in shares):
        tokens = [row for s in shares for row in s["tokens"] or [torch.zeros(n) for n in s["lengths"]]]
        per_token, total = _summable(right_pad([tokens[i] for i in rows]) * mask, total, group[order])
    sampler = [row for s in shares for row in s["sampler"] or ()]
    home = [rank for rank, s in enumerate(shares) for _ in s["lengths"]]
    own = [one for one in rollout.prompts.images or () for _ in range(n)]
    first = home.index(data_rank) if own else 0
    images = {
        place: one for place, i in enumerate(rows) if 0 <= i - first < len(own) and (one := own[i - first]) is not None
    }
    return Experience(
        sequences=[sequences[i] for i in rows],
        prompt_lengths=[prompt_lengths[i] for i in rows],
        group=group[order],
        mask=mask,
        rewards=per_token + last_token_rewards(total - per_token.sum(-1), mask),
        scores=torch.cat([s["judged"] for s in shares]).float()[order],
        parts=torch.stack(parts, 1) if parts else None,
        temperature=rollout.sampling.temperature,
        max_length=rollout.sampling.max_completion_length,
        baselines=everyones,
        sampler_log_probs=right_pad([sampler[i] for i in rows]) if len(sampler) == len(rows) else None,
        home=[home[i] for i in rows] if any(s["has_images"] for s in shares) else None,
        images=images,
    )


def last_token_rewards(scores: Float[Tensor, "G"], mask: Float[Tensor, "G T"]) -> Float[Tensor, "G T"]:
    """A response's score at its last token, 0 elsewhere and on rows without any token."""
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1, keepdim=True)
    return torch.zeros_like(mask).scatter(1, last, torch.where(mask.gather(1, last) > 0, scores[:, None], 0.0))


def _summable(
    tokens: Float[Tensor, "G T"], scores: Float[Tensor, "G"], group: Int[Tensor, "G"]
) -> tuple[Float[Tensor, "G T"], Float[Tensor, "G"]]:
    """Both rounded, by 1e-7 of a group's largest, to multiples of a power of two: all sums of them are exact in float32.

    Equal scores then stay equal, however they are spread over tokens; `grpo` would make something of what rounding leaves.
    """
    index = group.unique(return_inverse=True)[1]
    size = tokens.abs().sum(1) + scores.nan_to_num(0.0, 0.0, 0.0).abs()
    largest = torch.zeros_like(size).scatter_reduce(0, index, size, "amax")[index]
    step = torch.ldexp(torch.ones_like(size), largest.frexp().exponent - 22)
    return (tokens / step[:, None]).round() * step[:, None], (scores / step).round() * step


def _tokens(parts: Iterable[Sequence[int]]) -> Int[Tensor, "n"]:
    """One after the other."""
    joined = array("q")
    for part in parts:
        joined.extend(part)
    return torch.frombuffer(joined, dtype=torch.int64) if joined else torch.zeros(0, dtype=torch.int64)


def _rows(padded: Float[Tensor, "B T"], rollout: Rollout) -> list[Tensor]:
    return [row[: len(c.token_ids)] for row, c in zip(padded.cpu(), rollout.completions, strict=True)]
