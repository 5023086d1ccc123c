"""What an iteration reports, in the metric names that every logger gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_rlhf.modules.metrics import Metrics
from lightning_rlhf.rewards import RewardError
from lightning_rlhf.types import Experience, Rollout, Sampling, Scores


def add_scores(metrics: Metrics, scores: Scores, logged: Sequence[str]) -> None:
    """Rewards of this data rank: total, each function's own, and what the functions logged.

    Args:
        logged: names that the functions logged on any rank.
    """
    valid = scores.total.isfinite()
    metrics.mean("reward/mean", scores.total, valid)
    metrics.mean("reward/square", scores.total.double().square(), valid)
    metrics.sum("reward/failures", float(scores.failures))
    abstained = (~valid).sum() - scores.failures
    metrics.mean("reward/abstained", abstained / max(1, len(valid)), float(len(valid)))
    for name, part in scores.parts.items():
        metrics.mean(f"reward/{name}/mean", part, part.isfinite())
    for name in logged:
        metrics.mean(f"reward/{name}", scores.metrics.get(name, 0.0), float(name in scores.metrics))


def add_completions(metrics: Metrics, rollout: Rollout) -> None:
    """Lengths of this data rank's responses, and how many were cut: at the limit, or by the engine."""
    lengths = rollout.mask.sum(1)
    metrics.mean("completions/mean_length", lengths)
    metrics.max("completions/max_length", lengths)
    for name, reason in (("clipped", "length"), ("aborted", "abort")):
        cut = [float(c.finish_reason == reason) for c in rollout.completions]
        metrics.mean(f"completions/{name}_ratio", torch.tensor(cut, device=lengths.device))


def add_mismatch(metrics: Metrics, log_probs: Tensor, sampler_log_probs: Tensor, mask: Tensor) -> None:
    """Engine against trainer on the tokens of one micro-batch, each (b, T); a log-prob that is no number is only counted."""
    finite = sampler_log_probs.isfinite()
    valid = mask * finite
    difference = torch.where(valid > 0, (log_probs - sampler_log_probs).abs(), 0)
    metrics.mean("rollout/logprob_diff_mean", difference, valid)
    metrics.max("rollout/logprob_diff_max", difference)
    metrics.mean("rollout/logprob_nonfinite_ratio", ~finite, mask)


def add_importance(metrics: Metrics, found: Tensor, weights: Tensor, cap: float) -> None:
    """Importance weights of the tokens of one micro-batch, each (b, T), averaged by their share in the loss."""
    metrics.mean("rollout/is_weight", found, weights)
    metrics.mean("rollout/is_weight_square", found.square(), weights)
    metrics.mean("rollout/is_capped_ratio", (found >= cap) | (found == 0), weights)


def constant_groups(experience: Experience) -> float:
    """Share of the groups whose usable responses all scored the same: nothing is learned from them. Groups without a usable
    response do not count; 1 if there are no others.
    """
    scores = experience.rewards.sum(1)
    index = experience.group.unique(return_inverse=True)[1]
    usable = experience.mask.any(1)
    lowest = torch.full_like(scores, torch.inf).scatter_reduce(0, index, scores.where(usable, torch.inf), "amin")
    highest = torch.full_like(scores, -torch.inf).scatter_reduce(0, index, scores.where(usable, -torch.inf), "amax")
    scored = lowest.isfinite()  # also leaves out the rows beyond the number of groups
    return float((lowest >= highest)[scored].float().mean()) if scored.any() else 1.0


def finish(reduced: dict[str, float]) -> dict[str, float]:
    """Deviation from the square, effective sample size (Kish) from that of the weights; a mean reward that no response has is
    NaN, not absent."""
    square = reduced.pop("reward/square", torch.nan)
    mean = reduced.setdefault("reward/mean", torch.nan)
    if "rollout/is_weight" in reduced:  # share of the tokens that as many equal weights would be worth
        reduced["rollout/is_ess"] = reduced["rollout/is_weight"] ** 2 / (reduced.pop("rollout/is_weight_square") or 1.0)
    variance = square - mean**2
    return reduced | {"reward/std": variance**0.5 if variance > 1e-14 * square else 0.0}  # less is rounding


class Alarms:
    """Loud warnings about what silently spoils a run, and an end to one in which no reward function ever worked."""

    def __init__(self) -> None:
        self._cut_in_a_row = self._flat = 0
        self._scored = self._varied = False

    def __call__(self, reduced: dict[str, float], sampling: Sampling) -> None:
        """Look at one iteration's metrics.

        Raises:
            RewardError: no response of the first iteration could be scored; later it may be an outage.
        """
        mean = reduced.get("reward/generated_mean", reduced.get("reward/mean", 0.0))
        self._scored |= not math.isnan(mean) or reduced["reward/abstained"] > 0.0
        if not self._scored:
            raise RewardError(
                "no response of the first iteration could be scored: mend the reward function that the warning above names, then"
                " try it with lightning-rlhf rewards"
            )
        if reduced.get("reward/abstained") == 1.0:
            rank_zero_warn(
                "every reward function abstained (None or NaN) on every response of an iteration, nothing is learned from it:"
                " try the functions with lightning-rlhf rewards"
            )
        cut = reduced["completions/clipped_ratio"] > 0.5 and not sampling.ignore_eos
        self._cut_in_a_row = self._cut_in_a_row + 1 if cut else 0
        if self._cut_in_a_row == 5:
            rank_zero_warn(
                "more than half of the responses were cut in 5 iterations in a row: raise"
                " rollout.sampling.max_completion_length, or set sampling.stop"
            )
        if reduced.get("rollout/logprob_diff_mean", 0.0) > 0.3:
            rank_zero_warn(
                f"the engine's log-probs differ from the trainer's by {reduced['rollout/logprob_diff_mean']:.2f} on"
                " average: the weight sync or the sampling settings are wrong, or the engine's precision is too low"
            )

    def look_at_rewards(self, experience: Experience) -> None:
        """Of an iteration, clipped and masked as the advantages see them, before the distance to the reference is taken off."""
        scores = experience.rewards.sum(1)[experience.mask.any(1)]
        if not len(scores):
            return
        alike = bool(scores.min() == scores.max())
        self._flat, self._varied = self._flat + alike, self._varied or not alike
        if self._flat == 5 and not self._varied:
            rank_zero_warn(
                f"all responses of the first 5 iterations had the reward {float(scores[0]):g}, which teaches nothing: try the"
                " reward functions with lightning-rlhf rewards, look whether model.reward_clip leaves a difference, or take"
                " prompts that are easier or harder"
            )


def outlive(loggers: Iterable[Logger]) -> None:
    """A logger that cannot write, on a full disk say, warns once and ends no run."""
    for logger in loggers:
        if "log_metrics" in vars(logger):  # by an earlier fit
            continue
        told: list[str] = []
        for name in ("log_metrics", "save", "finalize"):
            setattr(logger, name, _warning(getattr(logger, name), logger, told))


def _warning(method: Callable[..., Any], logger: Logger, told: list[str]) -> Callable[..., Any]:
    """``method``, whose first OSError is a warning, noted in ``told``, and others nothing."""

    @wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except OSError as error:
            if not told:
                told.append(method.__name__)
                rank_zero_warn(
                    f"{type(logger).__name__} could not write metrics to {logger.save_dir!r} ({type(error).__name__}: {error}):"
                    " free space there, or change trainer.logger. The run goes on, metrics may be missing"
                )

    return guarded
