"""Advantage estimators against reference numbers, and the cases that went wrong elsewhere."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from test_goldens import GROUPS, MASK, OLD, REWARDS, VALUES
from torch import Tensor

from lightning_rlhf.modules import advantages

NAMES = ["grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk"]
ZERO_ESTIMATORS = [getattr(advantages, name) for name in NAMES]
"""Those that give 0 where all members of a group score the same."""
GROUP_ESTIMATORS = [*ZERO_ESTIMATORS, advantages.reinforce_plus_plus_baseline, advantages.optimal_token_baseline]
ESTIMATORS = [advantages.gae, advantages.reinforce_plus_plus, advantages.remax, *GROUP_ESTIMATORS]


def fixture(**changes: Any) -> dict[str, Any]:
    """Everything that any estimator needs."""
    batch = {"rewards": REWARDS, "values": VALUES, "mask": MASK, "groups": GROUPS, "old_log_probs": OLD}
    more = {"baselines": torch.tensor([0.25, 0.25, 0.5, 0.0]).double(), "sum_pi_squared": OLD.exp().square() + 0.05}
    return batch | more | changes


def outcome(scores: list[float], lengths: list[int], groups: list[int], dtype: torch.dtype = torch.float32) -> dict:
    """Rewards on the last token of responses of the given lengths."""
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).to(dtype)
    rewards = torch.zeros_like(mask)
    for i, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        rewards[i, max(length - 1, 0)] = score
    zeros = dict.fromkeys(("values", "old_log_probs", "sum_pi_squared"), torch.zeros_like(mask))
    return {
        "rewards": rewards,
        "mask": mask,
        "groups": torch.tensor(groups),
        "baselines": zeros["values"][:, 0],
        **zeros,
    }


def close(got: Tensor, want: Any, mask: Tensor | None = None, atol: float = 2e-6) -> None:
    want = torch.as_tensor(want, dtype=got.dtype)
    torch.testing.assert_close(got, want if mask is None else want * mask, atol=atol, rtol=0)


def test_grpo_divides_by_the_deviation_of_the_batch_as_trl_does() -> None:
    scores, lengths, groups = [1.0, 0.0, 3.0, 3.0, 7.0], [2, 1, 3, 2, 0], [0, 0, 1, 1, 1]  # the last one is left out
    batch = outcome(scores, lengths, groups)
    got = advantages.grpo(**batch, std="batch")[0]
    deviation = statistics.stdev(scores[:4]) + 1e-6
    close(got, torch.tensor([0.5, -0.5, 0.0, 0.0, 0.0])[:, None] / deviation, batch["mask"])
    lonely = advantages.grpo(**outcome([0.7], [2], [4]), std="batch")[0]
    close(lonely, torch.full((1, 2), 0.7), atol=1e-6)


def test_the_only_response_to_a_prompt_has_its_score_or_is_told_to_teach_nothing() -> None:
    batch = outcome([1.0, 0.0, 3.0], [2, 1, 3], [4, 7, 9])
    parts = {"parts": torch.tensor([[1.0], [0.0], [3.0]]), "part_weights": [1.0]}
    for estimator in [*GROUP_ESTIMATORS, advantages.gdpo]:
        got = estimator(**batch, **parts)[0][:, 0]
        assert bool(got.any()) == (estimator.__name__ not in advantages.NOTHING_ALONE)
        if estimator in (advantages.grpo, advantages.dr_grpo, advantages.rloo, advantages.opo):
            close(got, [1.0, 0.0, 3.0], atol=1e-5)


def test_gae_equals_a_loop_over_tokens() -> None:
    torch.manual_seed(0)
    rewards, values = torch.randn(3, 7, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)
    mask = (torch.rand(3, 7) > 0.4).double()
    got, returns = advantages.gae(rewards=rewards, values=values, mask=mask, gamma=0.9, lam=0.8, whiten=False)
    for i in range(3):
        on = [t for t in range(7) if mask[i, t]]
        advantage = next_value = 0.0
        for t in reversed(on):
            advantage = float(rewards[i, t] + 0.9 * next_value - values[i, t]) + 0.9 * 0.8 * advantage
            next_value = float(values[i, t])
            assert got[i, t] == pytest.approx(advantage, abs=1e-12)
            assert returns[i, t] == pytest.approx(advantage + next_value, abs=1e-12)


def test_whitening_is_of_sampled_tokens_only_and_returns_are_taken_before_it() -> None:
    batch = fixture()
    raw, raw_returns = advantages.gae(**batch, whiten=False)
    white, returns = advantages.gae(**batch, whiten=True)
    on = batch["mask"] > 0
    assert white[on].mean().item() == pytest.approx(0, abs=1e-12)
    assert white[on].var().item() == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(returns, raw_returns, atol=0, rtol=0)
    torch.testing.assert_close(raw + batch["values"] * batch["mask"], raw_returns * batch["mask"])


def test_the_only_member_of_a_group_keeps_its_score() -> None:
    alone = torch.tensor([10, -3, 7, 99])
    batch = fixture(groups=alone)
    score = batch["rewards"].sum(1, keepdim=True) * batch["mask"]
    for estimator in (advantages.dr_grpo, advantages.rloo, advantages.opo):
        torch.testing.assert_close(estimator(**batch)[0], score)


def test_rloo_is_the_score_minus_the_mean_of_the_others() -> None:
    scores = [0.3, 1.0, -2.0, 0.5, 4.0]
    got = advantages.rloo(**outcome(scores, [2] * 5, [1, 1, 0, 1, 0], torch.float64))[0][:, 0]
    want = [0.3 - 0.75, 1.0 - 0.4, -6.0, 0.5 - 0.65, 6.0]
    close(got, want, atol=1e-12)


PER_TOKEN = ("rewards", "values", "old_log_probs", "sum_pi_squared")


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_anything_on_masked_tokens_changes_nothing(estimator: Any) -> None:
    mask = fixture()["mask"].clone()
    mask[0, 2] = 0
    clean = estimator(**fixture(mask=mask))
    for junk in (1e3, float("nan"), float("inf")):
        batch = fixture(mask=mask)
        for name in PER_TOKEN:
            batch[name] = torch.where(mask > 0, batch[name], junk)
        for got, want in zip(estimator(**batch), clean, strict=True):
            torch.testing.assert_close(got, want, atol=0, rtol=0)
            assert not got[mask == 0].any()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_inserted_observation_tokens_leave_the_action_tokens_alone(estimator: Any) -> None:
    batch = fixture()
    want = estimator(**batch, gamma=0.9, lam=0.7)[0]
    keep = [0, 2, 3, 5, 7]
    wide = {n: torch.full((4, 8), 1e3, dtype=torch.float64) for n in (*PER_TOKEN, "mask")}
    wide["mask"].zero_()
    for name, tensor in wide.items():
        tensor[:, keep] = batch[name]
    got = estimator(**batch | wide, gamma=0.9, lam=0.7)[0]
    torch.testing.assert_close(got[:, keep], want)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_response_without_tokens_is_left_out_of_its_group(estimator: Any) -> None:
    scores, groups = [1.0, 0.0, 0.5], [4, 4, 4]
    want = estimator(**outcome(scores, [3, 2, 1], groups))[0]
    got = estimator(**outcome([*scores, 50.0], [3, 2, 1, 0], [*groups, 4]))[0]
    torch.testing.assert_close(got[:3], want, atol=0, rtol=0)
    assert not got[3].any()


@pytest.mark.parametrize("estimator", ZERO_ESTIMATORS)
@pytest.mark.parametrize("score", [0.1, 1.0, -0.7, 1e4 / 3])
@pytest.mark.parametrize("members", [2, 3, 7])
def test_equal_rewards_give_exactly_zero(estimator: Any, score: float, members: int) -> None:
    batch = outcome([score] * members + [2.0, 3.0], [3] * members + [2, 2], [5] * members + [1, 1])
    assert not estimator(**batch)[0][:members].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rewards_that_differ_by_rounding_do_not_explode(dtype: torch.dtype) -> None:
    batch = outcome([1.0, 1.0 + 1e-7, 1.0, 1.0 + 1e-7], [2] * 4, [0] * 4, dtype)
    assert advantages.grpo(**batch)[0].abs().max() < 0.1


def test_opo_weighs_scores_by_length() -> None:
    """Baseline of 1 and 0.5 at 3 and 2 tokens: (3 + 1) / 5; the third response is in a group of its own."""
    got = advantages.opo(**outcome([1.0, 0.5, 4.0], [3, 2, 1], [0, 0, 7], torch.float64))[0]
    close(got, [[0.2] * 3, [-0.3, -0.3, 0], [4.0, 0, 0]], atol=1e-12)


def test_pass_at_k_learns_from_the_one_best_response_only() -> None:
    scores = [1.0, 3.0, 2.0, 5.0, 5.0, 1.0]
    batch = outcome(scores, [1] * 6, [0, 0, 0, 1, 1, 1], torch.float64)
    close(advantages.grpo_passk(**batch, scale=False)[0][:, 0], [0, 1.0, 0, 0, 0, 0], atol=0)
    close(advantages.grpo_passk(**outcome([7.0], [1], [3]))[0], [[0.0]], atol=0)


def test_rewards_without_a_group_are_scaled_by_gpg() -> None:
    """Two of four responses are rewarded: a factor of 2."""
    batch = outcome([1.0, 0.0, 3.0, 0.0], [1] * 4, [0, 0, 0, 0], torch.float64)
    close(advantages.gpg(**batch)[0][:, 0], [0.0, -2.0, 4.0, -2.0], atol=1e-12)


def test_lambda_by_length_and_a_lambda_of_the_critic() -> None:
    """VAPO: 1 - 1 / (α l) for the policy, returns of another λ for the critic."""
    batch = fixture() | {"whiten": False, "gamma": 0.9}
    got, returns = advantages.gae(**batch, length_alpha=0.5, lam_critic=1.0)
    for row, length in enumerate((5, 3, 4, 2)):
        close(got[row], advantages.gae(**batch, lam=1 - 1 / (0.5 * length))[0][row], atol=1e-12)
    close(returns, advantages.gae(**batch, lam=1.0)[1], atol=1e-12)
    short = advantages.gae(**batch, length_alpha=0.1)[0]  # 1 - 1 / (α l) < 0
    close(short, advantages.gae(**batch, lam=0.0)[0], atol=1e-12)


def test_the_token_baseline_is_that_of_the_responses_still_running() -> None:
    """Three responses of 3, 2 and 1 tokens by a loop; at the third token one is left, and it has no baseline."""
    torch.manual_seed(3)
    batch = outcome([1.0, 0.5, -1.0], [3, 2, 1], [4, 4, 4], torch.float64)
    batch |= {"old_log_probs": -torch.rand(3, 3).double(), "sum_pi_squared": torch.rand(3, 3).double()}
    importance = torch.rand(3, 3).double()
    got, returns = advantages.optimal_token_baseline(**batch, importance=importance)
    weight = torch.zeros(3, dtype=torch.float64)
    for t in range(3):
        variance = 1 - 2 * batch["old_log_probs"][:, t].exp() + batch["sum_pi_squared"][:, t]
        weight = weight + variance * importance[:, t] ** 2 * batch["mask"][:, t]
        to_go = batch["rewards"][:, t:].sum(1)
        baseline = 0.0 if t == 2 else (to_go * weight).sum() / (weight.sum() + 1e-8)
        close(got[:, t], (to_go - baseline) * batch["mask"][:, t], atol=1e-12)
        close(returns[:, t], to_go, atol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_order_of_responses_does_not_matter(estimator: Any) -> None:
    torch.manual_seed(1)
    lengths = [4, 1, 3, 5, 2, 5]
    batch = outcome(torch.randn(6).tolist(), lengths, [9, -2, 9, 9, -2, 7], torch.float64)
    batch["values"] = torch.randn_like(batch["mask"])
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    want = estimator(**batch)[0][order]
    torch.testing.assert_close(estimator(**{k: v[order] for k, v in batch.items()})[0], want)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_float_type_is_taken_and_given_back(estimator: Any, dtype: torch.dtype) -> None:
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in fixture().items()}
    got, returns = estimator(**batch)
    assert got.dtype == returns.dtype == dtype
    close(got.double(), estimator(**fixture())[0], atol={2: 2e-2, 4: 1e-5, 8: 1e-12}[dtype.itemsize])


def test_statistics_of_a_large_group_are_not_rounded_to_bf16() -> None:
    batch = outcome([0.0, 1.0] * 600, [1] * 1200, [0] * 1200, torch.bfloat16)  # bf16 cannot count beyond 256
    close(advantages.dr_grpo(**batch)[0][:2].double(), [[-0.5], [0.5]], atol=1e-6)
    close(advantages.grpo(**batch)[0][:2].double(), [[-1.0], [1.0]], atol=5e-3)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("tokens", [0, 1])
def test_a_batch_with_almost_nothing_in_it_is_finite(estimator: Any, tokens: int) -> None:
    batch = outcome([1.0, 2.0], [tokens, 0], [0, 0]) if tokens else fixture(mask=torch.zeros(4, 5))
    for result in estimator(**batch):
        assert torch.isfinite(result).all()
    if not tokens:
        assert not estimator(**batch)[0].any()


def test_group_statistics_are_those_of_each_group() -> None:
    torch.manual_seed(2)
    scores, groups = torch.randn(40, dtype=torch.float64), torch.randint(-5, 5, (40,))
    valid = torch.rand(40) > 0.2
    centred, std, size = advantages.group_statistics(scores, groups, valid)
    for i in range(40):
        members = scores[valid & (groups == groups[i])]
        assert size[i] == len(members)
        if len(members) > 1:
            assert centred[i].item() == pytest.approx((scores[i] - members.mean()).item(), abs=1e-12)
            assert std[i].item() == pytest.approx(members.std().item(), abs=1e-12)


def test_group_statistics_keep_small_differences_of_large_scores() -> None:
    scores = torch.tensor([4096.0, 4096.0, 4096.0, 4096.0 + 2**-11])
    one, every = torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.bool)
    centred, std, _ = advantages.group_statistics(scores, one, every)
    torch.testing.assert_close(centred.double(), scores.double() - scores.double().mean(), rtol=1e-6, atol=0)
    torch.testing.assert_close(std[0].double(), scores.double().std(), rtol=1e-6, atol=0)


def test_gdpo_is_trls_normalize_then_sum_over_a_whole_batch() -> None:
    """Its formula on (prompts, responses, functions), with this package's epsilon; NaN abstains."""
    torch.manual_seed(5)
    parts = torch.randn(12, 3, dtype=torch.float64) * torch.tensor([0.1, 1.0, 50.0])
    parts[1, 0] = parts[4:8, 1] = parts[9, 2] = torch.nan
    weights = [1.0, 0.5, 2.0]
    grouped = parts.view(3, 4, 3)
    count = grouped.isfinite().sum(1, keepdim=True)
    mean = grouped.nanmean(1, keepdim=True)
    std = ((grouped - mean).square().nansum(1, keepdim=True) / (count - 1)).sqrt()
    summed = (((grouped - mean) / (std + 1e-6)).view(12, 3) * torch.tensor(weights)).nansum(1)
    want = (summed - summed.mean()) / (summed.std() + 1e-6)
    batch = outcome([0.0] * 12, [2] * 12, [5] * 4 + [1] * 4 + [9] * 4, torch.float64)
    order = torch.randperm(12)  # members of a group anywhere
    moved = {k: v[order] for k, v in batch.items()}
    got = advantages.gdpo(**moved, parts=parts[order], part_weights=weights)[0][:, 0]
    close(got, want[order], atol=1e-9)


def test_gdpo_tells_combinations_apart_that_have_one_sum() -> None:
    """The paper's example: of (0, 1), (0, 2) and (1, 1), the sums 1, 2, 2 make two advantages of three combinations."""
    parts = torch.tensor([[0.0, 1.0], [0.0, 2.0], [1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    batch = outcome(parts.sum(1).tolist(), [1] * 4, [0] * 4, torch.float64)
    assert len(set(advantages.grpo(**batch)[0][:, 0].tolist())) == 2
    separate = torch.cat([parts, torch.tensor([[0.0, 2.0], [1.0, 1.0]]).double()])
    batch = outcome([0.0] * 6, [1] * 6, [0] * 6, torch.float64)
    got = advantages.gdpo(**batch, parts=separate * torch.tensor([1.0, 3.0]), part_weights=[1.0, 2.0])[0][:, 0]
    assert len({round(x, 6) for x in got.tolist()}) == 3
    assert not advantages.gdpo(**batch, parts=torch.ones(6, 2), part_weights=[1.0, 1.0])[0].any()
    with pytest.raises(ValueError, match="gdpo needs reward functions"):
        advantages.gdpo(**batch, parts=None, part_weights=[])
