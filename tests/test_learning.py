"""It must learn: each algorithm raises an easy reward with the random tiny model, on the CPU, in seconds."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import mean

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_rlhf import (
    KL,
    FSDPUlyssesStrategy,
    GRPOLightningModule,
    PPOLightningModule,
    PromptDataModule,
    RLHFLightningModule,
    RolloutCallback,
    Sampling,
)

pytestmark = pytest.mark.filterwarnings("ignore:more than half of the responses were cut")


def prompts():
    return [{"prompt": f"say {word} "} for word in ("yes", "no", "a", "b", "one", "two", "three", "four") * 4]


def even_tokens(completion_ids, **_):
    """Share of even token ids: 0.5 for a policy that draws at random."""
    return [mean(t % 2 == 0 for t in ids) for ids in completion_ids]


def rewards_of(module: RLHFLightningModule, folder: Path, iterations: int, **sampling) -> list[float]:
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=FSDPUlyssesStrategy(),
        max_steps=iterations,
        logger=CSVLogger(str(folder), name="", version=""),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[RolloutCallback(sampling=Sampling(max_completion_length=6, **sampling))],
    )
    data = PromptDataModule(path="test_learning.prompts", batch_size=16, max_prompt_length=32)
    trainer.fit(module, datamodule=data)
    with (folder / "metrics.csv").open(newline="") as file:
        return [float(row["reward/mean"]) for row in csv.DictReader(file)]


COMMON = {"model": "random:tiny", "reward": [even_tokens], "lr": 3e-3, "micro_batch_tokens": 4096}


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_group_relative_policies_learn(advantage, tmp_path):
    module = GRPOLightningModule(**COMMON, advantage=advantage)
    rewards = rewards_of(module, tmp_path, 32, num_generations=4)
    assert mean(rewards[:3]) < 0.62
    assert mean(rewards[-3:]) > 0.9


def test_ppo_learns_with_critic_reference_and_several_updates_per_rollout(tmp_path):
    module = PPOLightningModule(**COMMON, critic_lr=3e-3, mini_batches=2, ppo_epochs=2, kl=KL(coef=0.001))
    rewards = rewards_of(module, tmp_path, 15, num_generations=2)
    assert mean(rewards[:2]) < 0.65
    assert mean(rewards[-3:]) > 0.9
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["critic/explained_variance"]) > float(rows[0]["critic/explained_variance"])


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
    rewards = rewards_of(ScoresItself("random:tiny", lr=1e-2, micro_batch_tokens=4096), tmp_path, 25, num_generations=8)
    assert mean(rewards[-3:]) > 5 * max(0.02, mean(rewards[:3]))


def test_an_estimator_that_needs_a_critic_is_refused_without_one():
    with pytest.raises(ValueError, match="gae needs values, which GRPOLightningModule does not have"):
        GRPOLightningModule("random:tiny", advantage="gae")
