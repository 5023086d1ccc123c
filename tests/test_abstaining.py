"""Responses that no reward function has an opinion on: left out of their group, of the loss and of the means."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import TINY_MODULE, fit

from lightning_rlhf import Experience, GRPOLightningModule, PPOLightningModule
from lightning_rlhf.modules.experience import gather_experience
from lightning_rlhf.modules.metrics import Metrics
from lightning_rlhf.modules.report import add_scores, constant_groups, finish
from lightning_rlhf.types import Completion, Prompts, Rollout, Sampling, Scores

nan = math.nan
NAMES = "gae gdpo grpo dr_grpo rloo opo gpg grpo_passk reinforce_plus_plus "
NAMES += "reinforce_plus_plus_baseline remax optimal_token_baseline"
TOTALS = [1.0, 0.0, nan, 0.5] + [0.25, nan, 1.0, nan] + [nan] * 4
LENGTHS = [3, 2, 4, 1, 2, 3, 3, 1, 2, 2, 1, 4]


def experience(rows: list[int]) -> Experience:
    """Of 3 prompts with 4 responses each those of ``rows``, as every rank gets them."""
    prompts = Prompts([[1, 2]] * len(rows), ["p"] * len(rows), {}, torch.tensor([row // 4 for row in rows]))
    done = [Completion([7] * LENGTHS[row], "stop") for row in rows]
    totals = torch.tensor([TOTALS[row] for row in rows])
    scores = Scores(totals, parts={"a": totals * 0.25, "b": totals * 0.75})
    return gather_experience(Rollout.build(prompts, done, Sampling()), scores, lambda share: [share])


def advantages_of(name: str, batch: Experience) -> torch.Tensor:
    torch.manual_seed(3)
    per_token = torch.rand(12, 4).double()[: len(batch), : batch.mask.shape[1]].float()
    if name == "gae":
        module = PPOLightningModule("random:tiny", reward=[of_some, of_none], gamma=0.9, lam=0.8)
        return module.compute_advantages(replace(batch, values=torch.zeros_like(batch.mask)))[0]
    more = {"baselines": torch.full((len(batch),), 0.5), "old_log_probs": -per_token, "sum_pi_squared": per_token}
    needed = {"remax": ["baselines"], "optimal_token_baseline": ["old_log_probs", "sum_pi_squared"]}.get(name, [])

    class Module(GRPOLightningModule):
        advantage_inputs = GRPOLightningModule.advantage_inputs | set(needed)

        def estimator_inputs(self, experience: Experience) -> dict[str, Any]:
            return super().estimator_inputs(experience) | {key: more[key] for key in needed}

    return Module("random:tiny", reward=[of_some, of_none], advantage=name).compute_advantages(batch)[0]


@pytest.mark.parametrize("name", NAMES.split())
def test_estimators_are_finite_and_what_they_are_without_the_response(name: str) -> None:
    kept = [row for row, total in enumerate(TOTALS) if not math.isnan(total)]
    everything, without = advantages_of(name, experience(list(range(12)))), advantages_of(name, experience(kept))
    assert everything.isfinite().all()
    left_out = [row for row in range(12) if row not in kept]
    assert not everything[left_out].any()
    assert everything[kept].any()
    if name != "optimal_token_baseline":  # whose inputs here go by place
        torch.testing.assert_close(everything[kept, : without.shape[1]], without, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES.split())
def test_nothing_but_abstentions_is_all_zero(name: str) -> None:
    assert not advantages_of(name, experience([8, 9, 10, 11])).any()


def test_groups_that_abstain_altogether_are_not_constant_ones() -> None:
    batch = experience(list(range(12)))
    assert constant_groups(batch) == 0.0
    assert constant_groups(experience([0, 1, 8, 9, 7])) == 0.0
    assert constant_groups(experience([0, 8, 9])) == 1.0
    assert constant_groups(experience([8, 9])) == 1.0


def test_metrics_are_over_the_others_and_the_share_is_counted() -> None:
    metrics = Metrics()
    total = torch.tensor([1.0, nan, 0.0, nan, nan])
    scores = Scores(total, {"a": total}, failed=torch.tensor([False, True, False, False, False]))
    add_scores(metrics, scores, [])
    add_scores(metrics, Scores(torch.zeros(0), {"a": torch.zeros(0)}), [])  # a rank without responses
    reduced = finish(metrics.reduce())
    assert reduced == {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/a/mean": 0.5,
        "reward/failures": 1.0,
        "reward/abstained": pytest.approx(0.4),
    }


def of_some(completions: list[str], **_: Any) -> list[float | None]:
    """No opinion on the first two groups, nor on every second response of the others."""
    return [None if i < 8 or i % 2 else float(len(text)) + i for i, text in enumerate(completions)]


def of_none(completions: list[str], **_: Any) -> list[None]:
    return [None] * len(completions)


@pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
@pytest.mark.parametrize("kind", [GRPOLightningModule, PPOLightningModule])
def test_a_run_learns_from_the_others_only(kind: type, tmp_path: Path) -> None:
    (row,) = fit(kind(**TINY_MODULE, reward=[of_some]), tmp_path, 1, num_generations=4)
    assert row["reward/abstained"] == pytest.approx((8 + 28) / 64)
    assert math.isfinite(row["actor/pg_loss"])
    assert row["actor/grad_norm"] > 0.0


class Abstains(GRPOLightningModule):
    def score(self, rollout):
        return [None if i % 4 == 3 else float(i) for i in range(len(rollout))]


@pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
def test_a_score_of_ones_own_may_abstain(tmp_path: Path) -> None:
    (row,) = fit(Abstains(**TINY_MODULE), tmp_path, 1, num_generations=4)
    assert row["reward/abstained"] == 0.25
    assert row["reward/mean"] == sum(i for i in range(64) if i % 4 < 3) / 48
    assert row["actor/grad_norm"] > 0.0


@pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
def test_a_run_in_which_nothing_has_a_reward_goes_on(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="every reward function abstained"):
        (row,) = fit(GRPOLightningModule(**TINY_MODULE, reward=[of_none]), tmp_path, 1, num_generations=4)
    assert row["reward/abstained"] == 1.0
    assert row["actor/grad_norm"] == 0.0
    assert row["actor/pg_loss"] == 0.0
