"""Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476): groups whose responses all score the same teach nothing, so others
take their places.

    round 1, 2, …   the next batch of prompts → generate → score → keep the groups that differ
                    until they are as many as a batch has prompts; those beyond that are left out
    at the bound    dropped groups fill up, the first ones first: the iteration is then like one without a filter

Prompts are those of the epochs' batches, one batch after the other. Iteration k begins at batch k + e, where e counts the batches
that further rounds have taken before it. That number, of the iteration under way and of the next, is all that a checkpoint must
hold, no prompt is skipped, and since a batch is the same on any number of ranks, so is everything here. (Batches drawn large
enough for all rounds would need no state; they would skip what is not used.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from jsonargparse.typing import PositiveInt
from torch import Tensor

from lightning_rlhf.types import Completion, Prompts, Rollout, Scores


@dataclass(frozen=True)
class FilterGroups:
    """Groups of responses that all score the same are replaced; verl's ``filter_groups``.

    Args:
        metric: name of the reward function whose scores must differ; null is the whole reward.
        max_num_gen_batches: rounds of generation in an iteration, each of ``data.batch_size`` prompts.
    """

    metric: str | None = None
    max_num_gen_batches: PositiveInt = 4

    def check(self, names: Collection[str] | None) -> None:
        """Raise ValueError if ``metric`` is none of the reward functions' ``names``, as far as they are known."""
        if self.metric is not None and names is not None and self.metric not in names:
            raise ValueError(
                f"rollout.filter_groups.metric must be one of the reward functions {', '.join(names)}, got {self.metric!r}"
            )


@dataclass(frozen=True)
class _Group:
    """What all ranks know of the responses to one prompt: its row in the data set, whether they differ, rewards, failures."""

    row: int
    differs: bool
    total: float
    scored: int
    failed: int


class Rounds:
    """The rounds of one iteration, as one data rank sees them.

    Args:
        options: of the filter.
        all_gather: one picklable object per data rank -> their list.
        mask_truncated: responses that were cut at the length limit do not count.
        reward_clip: rewards beyond it are all the same.
    """

    def __init__(
        self,
        options: FilterGroups,
        all_gather: Callable[[Any], list[Any]],
        mask_truncated: bool = False,
        reward_clip: tuple[float, float] | None = None,
    ) -> None:
        self._options, self._all_gather, self._clip = options, all_gather, reward_clip
        self._unusable = {"abort", "length"} if mask_truncated else {"abort"}
        self._own: list[tuple[Rollout, Scores]] = []
        self._groups: list[list[_Group]] = []

    def add(self, rollout: Rollout, scores: Scores) -> None:
        """One more round, with the rewards of its responses. A collective of the data ranks.

        Raises:
            ValueError: ``metric`` is no reward function.
        """
        self._options.check(scores.parts)
        total = scores.total.cpu()
        values = total if self._clip is None else total.clamp(*self._clip)
        if self._options.metric is not None:
            values = scores.parts[self._options.metric].cpu()
        n = rollout.sampling.num_generations
        usable = [bool(c.token_ids) and c.finish_reason not in self._unusable for c in rollout.completions]
        counted = torch.tensor(usable, dtype=torch.bool) & values.isfinite() & total.isfinite()
        failed = _failed(scores)
        groups = []
        for i, row in enumerate(rollout.prompts.index.tolist()):
            here = slice(i * n, (i + 1) * n)
            rewards = total[here].double()
            rewards = rewards[rewards.isfinite()]
            differs = len(values[here][counted[here]].unique()) > 1
            groups.append(_Group(row, differs, float(rewards.sum()), len(rewards), int(failed[here].sum())))
        self._own.append((rollout, scores))
        self._groups.append([group for rank in self._all_gather(groups) for group in rank])

    def __len__(self) -> int:
        return len(self._own)

    @property
    def done(self) -> bool:
        """Whether no further round is needed, or allowed."""
        kept = sum(group.differs for group in self._first.values())
        return kept >= self._wanted or len(self) == self._options.max_num_gen_batches

    def result(self) -> tuple[Rollout, Scores]:
        """This data rank's share of the groups that are trained on."""
        ranked = sorted(self._first.items(), key=lambda entry: not entry[1].differs)  # stable: in their order otherwise
        chosen = {place for place, _ in ranked[: self._wanted]}
        keep = [
            [i for i, row in enumerate(rollout.prompts.index.tolist()) if (number, row) in chosen]
            for number, (rollout, _) in enumerate(self._own)
        ]
        rollouts, scores = zip(*self._own, strict=True)
        joined = joined_rollout(rollouts, keep)
        return joined, joined_scores(scores, keep, joined)

    @property
    def metrics(self) -> dict[str, float]:
        """Of all groups that were generated."""
        groups = [group for own in self._groups for group in own]
        scored = sum(group.scored for group in groups)
        return {
            "rollout/gen_batches": float(len(self)),
            "rollout/kept_groups": sum(group.differs for group in groups) / len(groups),
            "reward/failures": float(sum(group.failed for group in groups)),
            "reward/generated_mean": sum(group.total for group in groups) / scored if scored else torch.nan,
        }

    @property
    def _wanted(self) -> int:
        return len(self._groups[0])

    @property
    def _first(self) -> dict[tuple[int, int], _Group]:
        """Each by its round and row. A prompt that came twice, across the end of an epoch, counts once: where it differs."""
        found: dict[int, tuple[tuple[int, int], _Group]] = {}
        for number, groups in enumerate(self._groups):
            for group in groups:
                if group.row not in found or group.differs > found[group.row][1].differs:
                    found[group.row] = ((number, group.row), group)
        return dict(found.values())


def joined_rollout(rollouts: tuple[Rollout, ...], keep: list[list[int]]) -> Rollout:
    """One rollout of some prompts of each."""
    taken = [(rollout, i) for rollout, own in zip(rollouts, keep, strict=True) for i in own]
    parts = [rollout.prompts for rollout in rollouts]
    prompts = Prompts(
        ids=[r.prompts.ids[i] for r, i in taken],
        raw=[r.prompts.raw[i] for r, i in taken],
        columns={name: [r.prompts.columns[name][i] for r, i in taken] for name in parts[0].columns},
        index=torch.tensor([int(r.prompts.index[i]) for r, i in taken], dtype=torch.long),
        images=[r.prompts.images[i] if r.prompts.images else None for r, i in taken]
        if any(part.images for part in parts)
        else None,
    )
    completions = [completion for rollout, i in taken for completion in _responses(rollout, i)]
    return Rollout.build(prompts, completions, rollouts[0].sampling, rollouts[0].greedy is not None)


def _responses(rollout: Rollout, prompt: int) -> list[Completion]:
    """In the order of `Rollout.build`."""
    n = rollout.sampling.num_generations
    greedy = [] if rollout.greedy is None else [rollout.greedy.completions[prompt]]
    return rollout.completions[prompt * n : (prompt + 1) * n] + greedy


def joined_scores(scores: tuple[Scores, ...], keep: list[list[int]], rollout: Rollout) -> Scores:
    """Of the same prompts, those of ``rollout``; what a function logged is averaged over the rounds."""
    n = rollout.sampling.num_generations
    rows = [[i * n + k for i in own for k in range(n)] for own in keep]

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat([part[own] for part, own in zip(parts, rows, strict=True)])

    logged = dict.fromkeys(name for one in scores for name in one.metrics)
    columns = dict.fromkeys(name for one in scores for name in one.columns)
    none = [None] * max(len(one.total) for one in scores)
    tokens = None
    if any(one.tokens is not None for one in scores):
        tokens = torch.zeros_like(rollout.mask)
        given = [
            None if one.tokens is None else one.tokens[i] for one, own in zip(scores, rows, strict=True) for i in own
        ]
        for row, values in zip(tokens, given, strict=True):
            if values is not None:
                row[: len(values)] = values[: len(row)]  # beyond the longest response both are padding
    return Scores(
        total=joined([one.total for one in scores]),
        parts={name: joined([one.parts[name] for one in scores]) for name in scores[0].parts},
        metrics={name: mean([one.metrics[name] for one in scores if name in one.metrics]) for name in logged},
        columns={
            name: [one.columns.get(name, none)[i] for one, own in zip(scores, rows, strict=True) for i in own]
            for name in columns
        },
        failed=joined([_failed(one) for one in scores]),
        tokens=tokens,
    )


def _failed(scores: Scores) -> Tensor:
    return torch.zeros(len(scores.total), dtype=torch.bool) if scores.failed is None else scores.failed
