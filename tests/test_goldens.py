"""Every formula against the reference numbers of goldens/rl_math.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_validation
import torch
from test_flops import qwen_7b
from test_schedules import rates
from torch import Tensor

from lightning_rlhf.flops import training_flops
from lightning_rlhf.modules import advantages, losses
from lightning_rlhf.modules.correction import Correction, importance_weights, kept, mean_weight, off_policy
from lightning_rlhf.modules.kl import KL
from lightning_rlhf.modules.metrics import Metrics
from lightning_rlhf.modules.report import add_importance, finish
from lightning_rlhf.packing import attention_cost, plan

GOLDEN = json.loads((Path(__file__).parent / "goldens" / "rl_math.json").read_text())
FIXTURE = {
    k: v if k in "BT" else torch.tensor(v, dtype=torch.float64) for k, v in GOLDEN["fixture"].items() if k != "group"
}
MASK, VALUES, REWARDS = FIXTURE["mask"], FIXTURE["values"], FIXTURE["rewards"]
GROUPS = torch.tensor([0, 0, 1, 1])
ROW, TOKEN = torch.arange(4)[:, None].double(), torch.arange(5)[None].double()
OLD = -(0.2 + 0.9 * ((3 * ROW + 2 * TOKEN + 1) % 7) / 7)
NEW = OLD + 0.35 * ((5 * ROW + 3 * TOKEN) % 5 - 2) / 2
REF = OLD + 0.2 * ((2 * ROW + 4 * TOKEN + 1) % 5 - 2) / 2
SAMPLER = OLD + 0.1 * ((4 * ROW + TOKEN + 2) % 5 - 2) / 2
ADVANTAGES = torch.tensor([1.2, -0.7, 0.4, -1.5], dtype=torch.float64)[:, None].expand(4, 5)

CHECKS: dict[str, Callable[[Any], None]] = {}
"""What tests a row, by ``section/row``, or ``section`` where that is no table; called with what the file has."""


def covers(*rows: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def register(check: Callable[[Any], None]) -> Callable[[Any], None]:
        CHECKS.update(dict.fromkeys(rows, check))
        return check

    return register


def rows_of(section: str) -> list[str]:
    """A table's rows have a name of their own; a single result is one row."""
    table = GOLDEN[section]
    return [f"{section}/{row}" for row in table] if isinstance(table, dict) and section not in SINGLE else [section]


SINGLE = {"kk_balance_k2_equal"}
ROWS = [row for section in GOLDEN if section not in ("about", "fixture") for row in rows_of(section)]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_row_is_reproduced(row: str) -> None:
    section, _, name = row.partition("/")
    CHECKS[row](GOLDEN[section][name] if name else GOLDEN[section])


def test_no_row_is_without_a_test() -> None:
    assert set(ROWS) == CHECKS.keys()


def test_the_fixture_is_its_closed_form() -> None:
    for name, formula in {"old": OLD, "new": NEW, "ref": REF, "rollout": SAMPLER}.items():
        close(formula, FIXTURE[name])
    close(MASK.sum(1), FIXTURE["lens"])
    close((REWARDS * MASK).sum(1), FIXTURE["score"])


def close(got: Tensor | float, want: Any, atol: float = 1e-8) -> None:
    """To a unit of the eighth decimal, the last one printed."""
    got, want = (torch.as_tensor(x, dtype=torch.float64) for x in (got, want))
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


# -- advantages -----------------------------------------------------------------------------------------------------------


def estimate(name: str, **options: Any) -> tuple[Tensor, Tensor]:
    batch = {"rewards": REWARDS, "values": VALUES, "mask": MASK, "groups": GROUPS}
    return getattr(advantages, name)(**batch | options)


def estimator(row: str, name: str, atol: float = 1e-8, **options: Any) -> None:
    """A row with advantages, or with advantages and returns."""

    def check(want: Any) -> None:
        mask = options.get("mask", MASK)
        got, returns = estimate(name, **options)
        if isinstance(want, dict):
            close(returns, torch.tensor(want["ret"], dtype=torch.float64) * mask)
            want = want.get("adv", want.get("adv_masked"))
        close(got, torch.tensor(want, dtype=torch.float64) * mask, atol)

    covers(f"advantages/{row}")(check)


WITH_OBSERVATION = MASK.clone()
WITH_OBSERVATION[0, 2] = 0

estimator("gae_g1_l1", "gae", gamma=1.0, lam=1.0)
estimator("gae_obs_token_masked_g.99_l.95", "gae", gamma=0.99, lam=0.95, mask=WITH_OBSERVATION)
estimator("grpo_std", "grpo")
estimator("grpo_nostd(dr.grpo)", "dr_grpo")
estimator("grpo_singleton_group", "grpo", atol=6e-8, groups=torch.arange(4))  # in float32 there
estimator("grpo_passk", "grpo_passk")
estimator("rloo", "rloo")
estimator("gpg", "gpg")
estimator("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline")
estimator("reinforce_plus_plus_g.9", "reinforce_plus_plus", gamma=0.9)
estimator("remax_baseline[.25,.25,.5,0]", "remax", baselines=torch.tensor([0.25, 0.25, 0.5, 0], dtype=torch.float64))
estimator(
    "otb_sumpi2=exp(old)^2+.05",
    "optimal_token_baseline",
    old_log_probs=OLD,
    sum_pi_squared=OLD.exp().square() + 0.05,
)


# -- losses ---------------------------------------------------------------------------------------------------------------

NAMES = {"vanilla": "ppo", "geo_mean": "gmpo"}
OPTIONS = {"clip_ratio_low": "clip_low", "clip_ratio_high": "clip_high", "clip_ratio_c": "cap", "dro_beta": "beta"}
OPTIONS |= {"kl_cov_ratio": "share", "ppo_kl_coef": "coef"}
METRICS = {"pg_clipfrac": "clip_fraction", "ppo_kl": "ppo_kl", "pg_clipfrac_lower": "clip_fraction_lower"}


def policy_loss(row: str) -> None:
    name, options, printed = row.split("|")
    function = getattr(losses, NAMES.get(name, name))
    chosen = {OPTIONS[option]: value for option, value in json.loads(options).items()}

    @covers(f"policy_loss_adv[1.2,-.7,.4,-1.5]/{row}")
    def check(want: dict[str, Any]) -> None:
        mode = losses.OWN_AGGREGATION.get(function, "token-mean")
        assert mode == printed or name == "geo_mean"  # which averages over responses whatever it is told
        new = NEW.clone().requires_grad_()
        token_losses, metrics = function(new, OLD, ADVANTAGES, MASK, **chosen)
        loss = losses.aggregate(token_losses, MASK, mode)
        loss.backward()
        close(loss.detach(), want["loss"])
        assert new.grad is not None
        close(new.grad, want["grad"])
        close(new.grad.abs().sum(), want["grad_l1"])
        for metric, value in want["metrics"].items():
            ours = METRICS[metric.removeprefix("actor/")]
            assert ours in metrics or value == 0.0  # a clip that the loss does not have
            close(losses.aggregate(metrics.get(ours, torch.zeros_like(MASK)), MASK, "token-mean"), value)


for golden in GOLDEN["policy_loss_adv[1.2,-.7,.4,-1.5]"]:
    policy_loss(golden)


def distance(kind: Any) -> None:
    @covers(f"kl/{kind}")
    def check(want: dict[str, Any]) -> None:
        new = NEW.clone().requires_grad_()
        found = losses.kl_estimate(new, REF, kind)
        close(found[0].detach(), want["row0"])
        close(losses.aggregate(found, MASK, "token-mean").detach(), want["token_mean"])
        losses.aggregate(found, MASK, "token-sum").backward()
        assert new.grad is not None
        close(new.grad.abs().sum(), want["grad_abs_sum"])


for golden in GOLDEN["kl"]:
    distance(golden)


@covers("adaptive_kl(init.2,target.1,h1e4;kl=.05,.3,.1;n=1024)")
def adaptive_kl(want: list[float]) -> None:
    setting, coef, found = KL(0.2, target=0.1, horizon=10000), 0.2, []
    for measured in (0.05, 0.3, 0.1):
        found.append(coef := setting.adapted(coef, measured, 1024))
    assert found == pytest.approx(want, rel=1e-12)


def aggregation(mode: Any) -> None:
    """Of one batch, and of two data ranks that hold it each: the shares of both add up to the loss."""

    @covers(f"agg_of_new_logprob/{mode}")
    def check(want: dict[str, float]) -> None:
        close(losses.aggregate(NEW, MASK, mode), want["local"])
        weights = losses.token_weights(torch.cat([MASK, MASK]), mode)
        ranks = [(weights[rows] * NEW).sum() for rows in (slice(0, 4), slice(4, 8))]
        close(sum(ranks), want["dp2_N28_gb8"])


for golden in GOLDEN["agg_of_new_logprob"]:
    if "scale" not in golden:
        aggregation(golden)


@covers("agg_of_new_logprob/seq-mean-token-sum-norm_scale1024")
def norm_length(want: float) -> None:
    close(losses.aggregate(NEW, MASK, "seq-mean-token-sum-norm", 1024), want)


@covers("value_loss/clip.2_token-mean(vpreds=vals+.5new,returns=rf++)")
def value_loss(want: list[float]) -> None:
    returns = estimate("reinforce_plus_plus", gamma=0.9)[1]
    token_losses, metrics = losses.value_loss(VALUES + 0.5 * NEW, VALUES, returns, MASK, clip=0.2)
    close(losses.aggregate(token_losses, MASK, "token-mean"), want[0])
    close(losses.aggregate(metrics["clip_fraction"], MASK, "token-mean"), want[1])


# -- rollout correction ---------------------------------------------------------------------------------------------------


def importance(row: str) -> None:
    level, bounds, normalize = row.split("|")
    floor, cap = [None, *map(float, bounds.split("_"))][-2:]
    correction = Correction(level, cap, floor, normalize=normalize == "bn=True")  # type: ignore[arg-type]

    @covers(f"rollout_correction/{row}")
    def check(want: dict[str, Any]) -> None:
        weights = importance_weights(OLD, SAMPLER, MASK, correction)
        mean = mean_weight(weights, MASK, correction) if correction.normalize else 1.0
        close(weights / mean, want["w"])
        metrics = Metrics()
        add_importance(metrics, weights, losses.token_weights(MASK, "token-mean"), correction.cap)
        reduced = finish(metrics.reduce())
        close(reduced["rollout/is_weight"], want["mean"])
        close(reduced["rollout/is_ess"], want["ess"], 3e-8)  # there with 1e-8 in denominators


def rejection(row: str) -> None:
    measure, bound = row.removeprefix("RS ").split()
    limits = [float(x) for x in bound.split("_")]
    correction = Correction(reject={measure: limits if len(limits) == 2 else limits[0]})

    @covers(f"rollout_correction/{row}")
    def check(want: list[list[float]]) -> None:
        close(kept(OLD, SAMPLER, MASK, correction), want, 0)


for golden in GOLDEN["rollout_correction"]:
    if golden.startswith("RS "):
        rejection(golden)
    elif golden != "offpolicy":
        importance(golden)


@covers("rollout_correction/offpolicy")
def mismatch(want: dict[str, float]) -> None:
    found, metrics = off_policy(OLD, SAMPLER, MASK), Metrics()
    for name, (values, weights) in found.items():
        metrics.mean(name, values, weights)
    difference = found["log_ppl_diff"][0]
    got = metrics.reduce() | {"log_ppl_diff_max": difference.max().item(), "log_ppl_diff_min": difference.min().item()}
    assert got == pytest.approx(want, abs=6e-9)


# -- validation, schedules, FLOPs, balance ------------------------------------------------------------------------------------


def of_validation(row: str) -> None:
    covers(f"validation_n4/{row}")(lambda want: test_validation.test_goldens(row))


for golden in GOLDEN["validation_n4"]:
    of_validation(golden)


@covers("lr/const_w3")
def constant(want: list[float]) -> None:
    """There the first iteration has rate 0: ours are one ahead while it warms up."""
    assert rates("constant", 3, 8, 0.0, 7) == pytest.approx(want[1:], abs=1e-6)


@covers("lr/cos_w2_T8_min.1")
def cosine(want: list[float]) -> None:
    """After the warm-up the same iterations have the same rates."""
    assert rates("cosine", 2, 8, 0.1, 8)[2:] == pytest.approx(want[2:], abs=1e-6)


@covers("lr/cos_w2_T8_min.1_1idx")
def cosine_counted_from_one(want: list[float]) -> None:
    ours = rates("cosine", 2, 8, 0.1, 9)
    assert ours[:2] == pytest.approx(want[:2], abs=1e-6)
    assert ours[2:] == pytest.approx(want[1:], abs=1e-6)


@covers("flops_qwen2.5-7b_tflops(1seq 4096tok,1s)")
def flops_of_one_sequence(want: float) -> None:
    assert training_flops(qwen_7b(), [4096], lookup=True) / 1e12 == pytest.approx(want, rel=1e-12)


@covers("flops_qwen2.5-7b_tflops(8x512,1s)")
def flops_of_a_batch(want: float) -> None:
    assert training_flops(qwen_7b(), [512] * 8, lookup=True) / 1e12 == pytest.approx(want, rel=1e-12)


LENGTHS = GOLDEN["kk_balance_k2_equal"]["seqlens"]


def heaviest(parts: list[list[int]]) -> float:
    return max(sum(attention_cost(4096)(LENGTHS[i]) for i in part) for part in parts)


def is_balanced_as_well(parts: list[list[int]]) -> None:
    """Ours is another method, bound by a token budget and not by counts; ranks must wait no longer for the slowest."""
    ours = [[i for step in rank for i in step] for rank in plan(LENGTHS, len(parts), 4000, attention_cost(4096))]
    assert sorted(i for rank in ours for i in rank) == list(range(8))
    assert heaviest(ours) <= heaviest(parts) * 1.001


@covers("kk_balance_k2_equal")
def balance_of_two(want: dict[str, Any]) -> None:
    cost = attention_cost(4096)
    assert [cost(n) / cost(100) for n in LENGTHS] == pytest.approx([w / want["workload"][0] for w in want["workload"]])
    is_balanced_as_well(want["parts"])


covers("kk_balance_k4_equal")(is_balanced_as_well)
