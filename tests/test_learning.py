"""It must learn: each algorithm raises an easy reward with the random tiny model, on the CPU, in seconds."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
from toys import TINY_MODULE, even_tokens, fit, recipe

from lightning_rlhf import KL, GRPOLightningModule, PPOLightningModule, RLHFLightningModule

pytestmark = pytest.mark.filterwarnings("ignore:more than half of the responses were cut")


def rewards_of(module: RLHFLightningModule, folder: Path, iterations: int, **sampling) -> list[float]:
    return [row["reward/mean"] for row in fit(module, folder, iterations, **sampling)]


COMMON = TINY_MODULE | {"reward": [even_tokens]}


RECIPES = [
    "grpo",
    *[
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            *("ppo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "dapo", "gspo"),
            *("cispo", "vapo"),
        )
    ],
]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_learns(name, tmp_path):
    """Its YAML with a model, a task and rates for a few seconds: from chance to nearly all that there is."""
    critic = {"critic_lr": 3e-3} if name in ("ppo", "vapo") else {}
    module, rollout = recipe(name, **COMMON, **critic)
    rows = fit(module, tmp_path, 44, rollout, num_generations=4)
    rewards = [row.get("reward/generated_mean", row["reward/mean"]) for row in rows]
    assert mean(rewards[:2]) < 0.62
    assert mean(rewards[-3:]) > 0.9


def test_ppo_learns_with_critic_reference_and_several_updates_per_rollout(tmp_path):
    module = PPOLightningModule(**COMMON, critic_lr=3e-3, mini_batches=2, ppo_epochs=2, kl=KL(coef=0.001))
    rows = fit(module, tmp_path, 15, num_generations=2)
    rewards = [row["reward/mean"] for row in rows]
    assert mean(rewards[:2]) < 0.65
    assert mean(rewards[-3:]) > 0.9
    assert rows[-1]["critic/explained_variance"] > rows[0]["critic/explained_variance"]


def test_kl_in_the_reward_holds_the_policy_near_the_reference(tmp_path):
    free, held = [
        rewards_of(GRPOLightningModule(**COMMON, kl=kl), tmp_path / name, 20, num_generations=4)
        for name, kl in (("free", KL()), ("held", KL(coef=5.0, where="reward")))
    ]
    assert mean(held[-3:]) < mean(free[-3:]) - 0.1


class ScoresItself(GRPOLightningModule):
    """The subclass of the README: five lines that override `score`."""

    def score(self, rollout):
        return [text.count("e") / max(1, len(text)) for text in self.decode(rollout)]


def test_a_subclass_that_overrides_score_learns(tmp_path):
    rewards = rewards_of(ScoresItself(**TINY_MODULE | {"lr": 1e-2}), tmp_path, 25, num_generations=8)
    assert mean(rewards[-3:]) > 5 * max(0.02, mean(rewards[:3]))


def test_an_estimator_that_needs_a_critic_is_refused_without_one():
    with pytest.raises(ValueError, match="gae needs values, which GRPOLightningModule does not have"):
        GRPOLightningModule("random:tiny", advantage="gae")
