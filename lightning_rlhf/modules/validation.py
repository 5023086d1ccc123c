"""What a validation loop reports of n responses to each prompt, in ``val/<set>/…``, a test in ``test/<set>/…``.

    reward, <function>   mean over the responses that have one
    std@n                deviation of the rewards of one prompt's responses (ddof 0)
    mean@n               share of the responses that solve their prompt: reward (or one function's) ≥ success
    pass@k               that one of k responses does: 1 - C(n-c, k) / C(n, k) for c that do, which is unbiased
                         (Chen et al. 2021, arXiv:2107.03374)
    best@k, worst@k      highest and lowest reward of k responses
    maj@k                that the answer which most of k responses give solves the prompt

for k = 1, 2, 4, … and n; the last three are trivial for k = 1. They are means over 1000 draws of k from the n responses WITH
replacement, as verl takes them: the same draws for every prompt, run and rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from math import comb, nan

import numpy
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_rlhf.types import Scores

_DRAWS, _SEED = 1000, 42  # verl's


def pass_at_k(solved: int, n: int, k: int) -> float:
    """Probability that one of ``k`` of the ``n`` responses is among the ``solved`` ones, without replacement."""
    return 1.0 - comb(n - solved, k) / comb(n, k)


@lru_cache(maxsize=64)
def draws(n: int, k: int) -> Int[Tensor, "draws k"]:
    """``k`` of ``n`` with replacement, 1000 times."""
    return torch.from_numpy(numpy.random.RandomState(_SEED).choice(n, size=(_DRAWS, k)))


def majority(values: Float[Tensor, "n"], answers: Sequence[Hashable], k: int) -> Float[Tensor, "draws"]:
    """In each of the `draws`, the value of the first response that gives the commonest answer; of equally common answers it
    is the one that was drawn first.
    """
    drawn = draws(len(answers), k)
    answer = torch.tensor([answers.index(one) for one in answers])[drawn]
    first = (answer[:, :, None] == answer[:, None, :]).sum(-1).argmax(1, keepdim=True)
    return values[drawn].gather(1, first)[:, 0]


class ValidationMetrics(Metric):
    """The metrics of one validation set over all ranks.

    The state is a row per prompt, and each prompt counts once: ranks may have different numbers of them, or none, and those
    that several ranks have (of a sequence-parallel group, or where a sampler filled its last batch up) make no difference.

    Args:
        name: of the set.
        success: a response with at least this reward solves its prompt.
        metric: name of the reward function whose values these are; None is the whole reward.
    """

    full_state_update = False
    index: list[Tensor]
    rows: list[Tensor]

    def __init__(self, name: str, success: float, metric: str | None = None) -> None:
        super().__init__()
        self.name, self.success, self.metric = name, success, metric
        self.keys: list[str] = []
        self.add_state("index", [], dist_reduce_fx="cat")
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, index: Int[Tensor, "P"], scores: Scores, n: int, answers: Sequence[Hashable] = ()) -> None:
        """Add a batch, which may be empty on this rank.

        Args:
            index: tells prompts apart.
            scores: of ``n`` responses to each, prompt-major. NaN is unsolved, and left out of everything else.
            answers: of each response; not needed for one response per prompt.
        """
        totals = scores.total.cpu().view(-1, n)
        solved = (scores.judged_by(self.metric).cpu().view(-1, n) >= self.success).float()
        rewards = [row[row.isfinite()] for row in totals]
        votes = [answers[start : start + n] for start in range(0, totals.numel(), n)]
        parts = {"reward/reward" if name == "reward" else name: part for name, part in scores.parts.items()}
        columns = {name: part.cpu().view(-1, n) for name, part in parts.items()}
        columns |= {"reward": totals, f"mean@{n}": solved.mean(1)}
        if n > 1:
            columns[f"std@{n}"] = torch.tensor([float((own - own.mean()).square().mean().sqrt()) for own in rewards])
        for k in [*(2**i for i in range((n - 1).bit_length())), n]:
            columns[f"pass@{k}"] = torch.tensor([pass_at_k(int(row.sum()), n, k) for row in solved])
            if k > 1:
                drawn = [own[draws(len(own), k)] if len(own) else torch.full((1, k), nan) for own in rewards]
                columns[f"best@{k}"] = torch.tensor([float(own.amax(1).mean()) for own in drawn])
                columns[f"worst@{k}"] = torch.tensor([float(own.amin(1).mean()) for own in drawn])
                won = [majority(*of_prompt, k) for of_prompt in zip(solved, votes, strict=True)]
                columns[f"maj@{k}"] = torch.tensor([float(own.mean()) for own in won])
        self.keys = list(columns)
        self.index.append(index.to(self.device))
        self.rows.append(torch.stack([_sum_and_count(column) for column in columns.values()], 1).to(self.device))

    def compute(self) -> dict[str, float]:
        """``<name>/<metric>`` over all ranks; NaN where no response has any."""
        once = {prompt: row for row, prompt in enumerate(dim_zero_cat(self.index).tolist())}
        totals = dim_zero_cat(self.rows).cpu().double()[list(once.values())].sum(0).tolist()
        pairs = zip(self.keys, totals, strict=True)
        return {f"{self.name}/{key}": total / count if count else nan for key, (total, count) in pairs}


def _sum_and_count(values: Float[Tensor, "P *m"]) -> Float[Tensor, "P 2"]:
    """Of what is finite of each prompt."""
    own = values[:, None].flatten(1)
    return torch.stack([torch.where(own.isfinite(), own, 0.0).sum(1), own.isfinite().float().sum(1)], 1)
