"""The modules' options, each by the effect that it is there for."""

from __future__ import annotations

import json
import math
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from pyarrow.parquet import read_table
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from toys import TINY_MODULE, even_tokens, fit, quiet_trainer, recipe

from lightning_rlhf import (
    KL,
    Correction,
    FSDPUlyssesStrategy,
    GRPOLightningModule,
    IterationCheckpoint,
    LoRA,
    PPOLightningModule,
    PromptDataModule,
    RolloutCallback,
    Samples,
    Sampling,
    SFTDataModule,
    SFTLightningModule,
)
from lightning_rlhf.modules.advantages import grpo
from lightning_rlhf.rewards import RewardError
from lightning_rlhf.rollout import TransformersEngine
from lightning_rlhf.tiny import tiny_model
from lightning_rlhf.types import Experience, Scores

pytestmark = pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
COMMON = TINY_MODULE | {"reward": [even_tokens]}


def experience() -> Experience:
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    return Experience(
        sequences=[torch.zeros(4), torch.zeros(5)],
        prompt_lengths=[2, 2],
        group=torch.tensor([0, 1]),
        mask=mask,
        rewards=torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 4.0]]),
        temperature=1.0,
        max_length=3,
        values=torch.zeros(2, 3),
    )


def test_whitened_rewards_have_variance_one_and_keep_their_mean():
    """Token rewards 0, 1, 0, 0, 4: mean 1, unbiased variance 3."""
    module = PPOLightningModule("random:tiny", whiten_rewards=True, whiten_advantages=False, gamma=0.0, lam=0.0)
    advantages, _ = module.compute_advantages(experience())
    scaled = 1 + (torch.tensor([0.0, 1.0, 0.0, 0.0, 4.0]) - 1) / 3**0.5
    torch.testing.assert_close(advantages[experience().mask > 0], scaled)
    plain = PPOLightningModule("random:tiny", whiten_advantages=False, gamma=0.0, lam=0.0)
    assert plain.compute_advantages(experience())[0][experience().mask > 0].tolist() == [0, 1, 0, 0, 4]


def test_whitened_advantages_have_mean_zero_and_variance_one():
    module = PPOLightningModule("random:tiny", gamma=0.0, lam=0.0)
    taken = module.compute_advantages(experience())[0][experience().mask > 0]
    torch.testing.assert_close(taken, (torch.tensor([0.0, 1.0, 0.0, 0.0, 4.0]) - 1) / 3**0.5)


def nothing(completions, **_):
    """Without differences in reward an entropy bonus is all that is left to follow."""
    return [0.0] * len(completions)


def test_an_entropy_bonus_makes_the_policy_more_random(tmp_path):
    without, bonus = [
        fit(GRPOLightningModule(**TINY_MODULE, reward=[nothing], entropy_coef=c), tmp_path / str(c), 4)
        for c in (0.0, 0.1)
    ]
    assert all(row["actor/grad_norm"] == 0.0 for row in without)
    assert bonus[0]["actor/grad_norm"] > 0.0
    assert math.log(258) > bonus[-1]["actor/entropy"] > bonus[0]["actor/entropy"] + 0.005


def test_the_rate_follows_its_schedule(tmp_path):
    module = PPOLightningModule(**COMMON, critic_lr=1e-3, lr_schedule="linear", warmup_steps=2, min_lr_ratio=0.5)
    rows = fit(module, tmp_path, 4)
    shape = [0.5, 1.0, 1.0, 0.75]  # the logged rate is the one that the next iteration has; see below
    used = [shape[0], *[row["actor/lr"] / 3e-3 for row in rows[:-1]]]
    assert used == pytest.approx(shape)
    assert [row["critic/lr"] / row["actor/lr"] for row in rows] == pytest.approx([1 / 3] * 4)


class OwnGroups(PPOLightningModule):
    """Weights decay, vectors do not; the critic has a rate of its own."""

    def configure_optimizers(self):
        matrices = [p for p in self.actor.parameters() if p.ndim > 1]
        vectors = [p for p in self.actor.parameters() if p.ndim < 2]
        critic = {"params": list(self.critic.parameters()), "lr": 1e-2}
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}, critic]
        return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.0)


class OneGroup(PPOLightningModule):
    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)


def test_parameter_groups_of_ones_own_are_clipped_and_logged_by_role(tmp_path):
    usual = fit(PPOLightningModule(**COMMON, critic_lr=3e-3), tmp_path / "usual", 2)
    own = fit(OwnGroups(**COMMON), tmp_path / "own", 2)
    one = fit(OneGroup(**COMMON), tmp_path / "one", 2)
    assert [row["actor/lr"] for row in own] == pytest.approx([3e-3] * 2)
    assert [row["critic/lr"] for row in own] == pytest.approx([1e-2] * 2)
    for rows in (own, one):
        assert rows[0]["actor/grad_norm"] == pytest.approx(usual[0]["actor/grad_norm"])
        assert rows[0]["critic/grad_norm"] == pytest.approx(usual[0]["critic/grad_norm"])
    assert one[1]["reward/mean"] == usual[1]["reward/mean"]


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize(("count", "got"), [(0, "none"), (2, "2")])
def test_another_number_of_optimizers_is_refused(count, got, tmp_path):
    module = GRPOLightningModule(**COMMON)
    make = lambda: [torch.optim.SGD(module.actor.parameters(), 0.1) for _ in range(count)] or None  # noqa: E731
    module.configure_optimizers = make  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=f"configure_optimizers must give one optimizer, .* got {got}"):
        fit(module, tmp_path, 1)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_a_trainer_without_the_callback_or_the_data_says_what_is_missing():
    data = PromptDataModule(path="toys.prompts", batch_size=16)
    with pytest.raises(ValueError, match=r"no responses: put a lightning_rlhf\.RolloutCallback into Trainer"):
        quiet_trainer(max_steps=1).fit(GRPOLightningModule(**COMMON), data)
    with pytest.raises(ValueError, match="the batch has no prompts: take PromptDataModule"):
        quiet_trainer(RolloutCallback(), max_steps=1).fit(GRPOLightningModule(**COMMON), [{"prompt": ["say yes "]}])


def test_a_reward_that_never_works_ends_the_run_and_an_outage_does_not(tmp_path):
    calls = []

    def fails(completions, **columns):
        calls.append(len(completions))
        if len(calls) in outage:
            raise NameError("name 're' is not defined")
        return [1.0] * len(completions)

    outage = range(1, 100)
    with (
        pytest.warns(UserWarning, match="name 're' is not defined"),
        pytest.raises(RewardError, match="no response of the first"),
    ):
        fit(GRPOLightningModule(**TINY_MODULE, reward=[fails]), tmp_path / "never", 4)
    calls.clear()
    outage = range(2, 19)  # the second iteration's call and its 16 repetitions
    with pytest.warns(UserWarning, match="16 of 16 responses could not be scored"):
        rows = fit(GRPOLightningModule(**TINY_MODULE, reward=[fails]), tmp_path / "outage", 3)
    assert [row["reward/failures"] for row in rows] == [0.0, 16.0, 0.0]


def loss_that_logs(name):
    return lambda self, *tensors: (GRPOLightningModule.policy_loss(self, *tensors)[0], {name: 1.0})


def scores_with(**fields):
    return lambda self, rollout: Scores(torch.ones(len(rollout)), **fields)


@pytest.mark.parametrize(
    ("name", "gives", "said"),
    [
        (
            "score",
            lambda self, rollout: None,
            "score() must return a number or None for each of 64 responses, got NoneType",
        ),
        ("score", lambda self, rollout: ["a"] * 64, "for each of 64 responses, got a list of which"),
        ("score", lambda self, rollout: [1.0], "score() must return one reward per response: (64,), got (1,)"),
        ("score", lambda self, rollout: Scores([1.0] * 64), "one reward per response: (64,), got list"),
        (
            "score",
            scores_with(parts={"a": torch.ones(3)}),
            "Scores.parts['a'] with one row per response: (64,), got (3,)",
        ),
        ("score", scores_with(parts={"a": [1.0] * 64}), "Scores.parts['a'] with one row per response: (64,), got list"),
        (
            "score",
            scores_with(metrics={"mean": 1.0}),
            "Scores.metrics must not log 'mean': reward/mean is a metric of the",
        ),
        (
            "policy_loss",
            loss_that_logs("grad_norm"),
            "Own.policy_loss must not give the metric grad_norm: actor/grad_norm",
        ),
        ("score", scores_with(tokens=torch.ones(64)), "Scores.tokens with a reward for each token: (64, 6), got (64,)"),
        ("score", scores_with(tokens=torch.ones(64, 5)), "a reward for each token: (64, 6), got (64, 5)"),
        ("score", scores_with(tokens=[[1.0]] * 64), "a reward for each token: (64, 6), got list"),
        ("compute_advantages", lambda self, e: e.rewards, "both of the shape of experience.mask (64, 6), got (64, 6)"),
        ("compute_advantages", lambda self, e: (e.rewards.sum(1), e.rewards), "got (64,) and (64, 6)"),
        ("compute_advantages", lambda self, e: (e.rewards, None), "got (64, 6) and NoneType"),
    ],
)
def test_what_an_override_gives_is_checked(name, gives, said, tmp_path):
    own = type("Own", (GRPOLightningModule,), {name: gives})
    with pytest.raises(ValueError, match=re.escape(said)):
        fit(own(**COMMON), tmp_path, 1, num_generations=4)


class Judged(GRPOLightningModule):
    """Scored by a torch model, outside of ``torch.no_grad``."""

    def __init__(self, gives):
        super().__init__(**TINY_MODULE, mini_batches=2)
        self.gives, self.judge = gives, torch.tensor(0.25, requires_grad=True)

    def score(self, rollout):
        counts = torch.tensor([float(sum(c.token_ids) % 7) for c in rollout.completions])
        return self.gives(counts * self.judge)


def test_gradients_of_a_score_are_not_followed(tmp_path):
    gives = [lambda scores: scores.tolist(), lambda scores: scores, lambda scores: Scores(scores, {"judge": scores})]
    lists, *tensors = [
        fit(Judged(give), tmp_path / str(i), 2, num_generations=2)[-1]["actor/grad_norm"]
        for i, give in enumerate(gives)
    ]
    assert tensors == [lists, lists]


class Learned(Judged):
    """Its baseline is a torch model's."""

    def compute_advantages(self, experience):
        advantages, returns = super().compute_advantages(experience)
        return advantages - self.judge, returns - self.judge


def test_gradients_of_advantages_are_not_followed(tmp_path):
    learned, fixed = Learned(lambda scores: scores.tolist()), Learned(lambda scores: scores.tolist())
    fixed.judge = fixed.judge.detach()
    norms = [
        fit(one, tmp_path / str(i), 2, num_generations=2)[-1]["actor/grad_norm"]
        for i, one in enumerate((learned, fixed))
    ]
    assert norms[0] == norms[1]
    assert learned.judge.grad is None


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_resumed_run_has_the_rate_that_it_is_given(schedule, tmp_path):
    def rates(folder, new, ckpt_path=None):
        module = PPOLightningModule(**COMMON | {"lr": 1e-3, "critic_lr": 1e-2, "lr_schedule": schedule} | new)
        saver = IterationCheckpoint(dirpath=str(tmp_path / folder), every_n_train_steps=2, save_top_k=-1)
        rows = fit(module, tmp_path / folder, 4, callbacks=[saver], ckpt_path=ckpt_path)
        return [(row["actor/lr"], row["critic/lr"]) for row in rows]

    whole = rates("whole", {})
    saved = str(tmp_path / "whole" / "iteration-000002.ckpt")
    assert rates("same", {}, saved) == whole[2:]
    changed = rates("other", {"lr": 1e-4}, saved)
    assert [actor for actor, _ in changed] == pytest.approx([actor / 10 for actor, _ in whole[2:]])
    assert [critic for _, critic in changed] == [critic for _, critic in whole[2:]]
    assert rates("longer", {"warmup_steps": 5}, saved)[0] == pytest.approx(
        (1e-3 * 4 / 5, 1e-2 * 4 / 5)
    )  # of the next one


def test_a_resumed_run_has_the_options_of_the_optimizer_that_it_is_given(tmp_path, caplog):
    class Decays(GRPOLightningModule):
        """Only matrices have weight decay."""

        def __init__(self, decay, **options):
            super().__init__(**COMMON, optimizer=lambda groups: torch.optim.AdamW(groups, **options))
            self.decay = decay

        def parameter_groups(self):
            [group] = super().parameter_groups()
            matrices = [p for p in group["params"] if p.dim() > 1]
            others = [p for p in group["params"] if p.dim() == 1]
            return [group | {"params": matrices, "weight_decay": self.decay}, group | {"params": others}]

        def on_train_batch_end(self, *_):
            options = ("weight_decay", "betas", "eps")
            self.seen = [[group[name] for name in options] for group in self.optimizers().param_groups]

    def seen(folder, decay, iterations, ckpt_path=None, **options):
        module = Decays(decay, weight_decay=0.0, **options)
        saver = IterationCheckpoint(dirpath=str(tmp_path / folder), every_n_train_steps=1, save_top_k=-1)
        fit(module, tmp_path / folder, iterations, callbacks=[saver], ckpt_path=ckpt_path)
        return module.seen

    first = [[0.1, (0.9, 0.999), 1e-8], [0.0, (0.9, 0.999), 1e-8]]
    assert seen("first", 0.1, 1) == first
    saved = str(tmp_path / "first" / "iteration-000001.ckpt")
    caplog.set_level("INFO")
    assert seen("same", 0.1, 2, saved) == first
    assert "from here on" not in caplog.text
    given = {"betas": (0.8, 0.99), "eps": 1e-6}
    changed = [[0.2, (0.8, 0.99), 1e-6], [0.0, (0.8, 0.99), 1e-6]]
    assert seen("other", 0.2, 2, saved, **given) == changed
    assert "actor weight_decay: 0.1 in the checkpoint, 0.2 from here on" in caplog.text
    assert seen("again", 0.2, 3, str(tmp_path / "other" / "iteration-000002.ckpt"), **given) == changed


def test_a_schedule_of_ones_own_is_resumed_as_it_was(tmp_path):
    class Own(PPOLightningModule):
        def configure_optimizers(self):
            [optimizer], _ = super().configure_optimizers()
            halves = [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 9) for _ in range(2)]
            return [optimizer], [torch.optim.lr_scheduler.SequentialLR(optimizer, halves, [3])]

    def run(folder, ckpt_path=None):
        saver = IterationCheckpoint(dirpath=str(tmp_path / folder), every_n_train_steps=2, save_top_k=-1)
        return fit(Own(**COMMON), tmp_path / folder, 4, callbacks=[saver], ckpt_path=ckpt_path)

    whole = run("whole")
    rest = run("rest", str(tmp_path / "whole" / "iteration-000002.ckpt"))
    assert [row["actor/lr"] for row in rest] == [row["actor/lr"] for row in whole[2:]]


class OnPlateau(GRPOLightningModule):
    def configure_optimizers(self):
        [optimizer], _ = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=0)]


class ToldOfRate(OnPlateau):
    def step_schedulers(self):
        self.lr_schedulers().step(self.trainer.callback_metrics.get("actor/lr", 0.0))


def test_a_scheduler_that_asks_for_a_metric_is_refused_unless_it_is_handed_one(tmp_path):
    with pytest.raises(ValueError, match=r"gave a ReduceLROnPlateau, .* override step_schedulers\(\) to hand it one"):
        fit(OnPlateau(**COMMON), tmp_path, 1)
    rows = fit(ToldOfRate(**COMMON), tmp_path / "told", 4)  # 0, then the rate, which does not rise
    assert [row["actor/lr"] for row in rows] == pytest.approx([3e-3, 3e-3, 1.5e-3, 0.75e-3])


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_that_no_optimizer_has_are_told_of(frozen, tmp_path):
    module = GRPOLightningModule(**COMMON)
    module.judge = torch.nn.Linear(2, 1).requires_grad_(not frozen)
    warned = pytest.warns(UserWarning, match="GRPOLightningModule: no optimizer has the parameters of judge: freeze")
    with nullcontext() if frozen else warned:
        fit(module, tmp_path, 1)


@pytest.mark.parametrize("names", [1, 2], ids=["one name", "both names, as earlier versions wrote"])
def test_a_tied_parameter_is_written_once_and_read_from_whatever_names_it_has(names, tmp_path, monkeypatch):
    def run(folder, ckpt_path=None):
        module = GRPOLightningModule(**COMMON, ema_decay=0.9)
        saver = IterationCheckpoint(dirpath=str(tmp_path / folder), every_n_train_steps=2, save_top_k=-1)
        rows = fit(module, tmp_path / folder, 4, callbacks=[saver], ckpt_path=ckpt_path)
        names = ("reward/mean", "actor/grad_norm", "completions/mean_length")
        weights = [p.full_tensor() for p in module.parameters()]
        return [[row[name] for name in names] for row in rows], weights

    with monkeypatch.context() as patch:
        if names == 2:
            every = lambda self: get_model_state_dict(self.model)  # noqa: E731
            patch.setattr(FSDPUlyssesStrategy, "lightning_module_state_dict", every)
        rows, weights = run("whole")
    saved = str(tmp_path / "whole" / "iteration-000002.ckpt")
    tied = [
        n for n in FileSystemReader(saved).read_metadata().state_dict_metadata if "embed_tokens" in n or "lm_head" in n
    ]
    assert len([n for n in tied if n.startswith("state_dict.actor")]) == names
    assert len([n for n in tied if n.startswith("state_dict.average")]) == names
    rest, resumed = run("rest", saved)
    assert rest == rows[2:]
    assert all(torch.equal(*pair) for pair in zip(weights, resumed, strict=True))


def test_a_module_without_rollouts_refuses_the_callback():
    with pytest.raises(TypeError, match="SFTLightningModule draws no responses: leave RolloutCallback out"):
        quiet_trainer(RolloutCallback(), max_steps=1).fit(
            SFTLightningModule("random:tiny"), SFTDataModule([{"prompt": "a", "completion": "b"}], batch_size=1)
        )


@pytest.mark.parametrize(
    ("give", "got"),
    [
        (lambda losses, metrics: losses, r"\(16, 6\) without metrics"),
        (lambda losses, metrics: (losses.sum(), metrics), r"\(\)"),
    ],
)
def test_a_loss_is_one_of_each_token_with_metrics(give, got, tmp_path):
    class Wrong(GRPOLightningModule):
        def policy_loss(self, *tensors):
            return give(*super().policy_loss(*tensors))

    with pytest.raises(
        ValueError,
        match=rf"^Wrong\.policy_loss must give \(losses of the tokens \(16, 6\), a dict of metrics\), got {got}$",
    ):
        fit(Wrong(**COMMON), tmp_path, 1)


@pytest.mark.parametrize(("value", "logged"), [(2.0, 2.0), (torch.tensor(3.0), 3.0), (torch.full((16, 1), 4.0), 4.0)])
def test_a_loss_may_log_numbers(value, logged, tmp_path):
    class Own(GRPOLightningModule):
        def policy_loss(self, *tensors):
            return super().policy_loss(*tensors)[0], {"own": value}

    (row,) = fit(Own(**COMMON), tmp_path, 1)
    assert row["actor/own"] == logged


def test_a_metric_of_a_loss_that_would_be_spread_over_the_wrong_tokens_is_refused(tmp_path):
    class Wrong(GRPOLightningModule):
        def policy_loss(self, *tensors):
            losses, _ = super().policy_loss(*tensors)
            return losses, {"own": losses.mean(1)}

    with pytest.raises(
        ValueError,
        match=r"^Wrong\.policy_loss: the metric own must have the shape \(16, 6\), .*, or be one number, got \(16,\)$",
    ):
        fit(Wrong(**COMMON), tmp_path, 1)


def flat_loss(log_probs, old_log_probs, advantages, mask, **_):
    return -advantages * log_probs.detach(), {}


def by_name(*, log_probs, mask, **_):
    return -log_probs * mask, {}


def with_reference(log_probs, old_log_probs, advantages, mask, *, ref_log_probs, **_):
    return (log_probs - ref_log_probs) * mask, {}


@pytest.mark.parametrize(
    ("loss", "why"), [("by_name", "too many positional arguments"), ("with_reference", "missing .*ref_log_probs")]
)
def test_a_loss_that_cannot_be_called_is_refused(loss, why):
    called = r"is called with \(log_probs, old_log_probs, advantages, mask\), in this order"
    with pytest.raises(
        ValueError, match=f"^model.loss: {loss} {called}, .*: {why}.*; what else it needs is for a policy"
    ):
        GRPOLightningModule("random:tiny", loss=f"test_module.{loss}")


def test_a_subclass_may_call_its_loss_in_a_way_of_its_own(tmp_path):
    class Own(GRPOLightningModule):
        def policy_loss(self, log_probs, old_log_probs, token_advantages, mask, **_):
            return self.loss_function(log_probs=log_probs, mask=mask)

    (row,) = fit(Own(**COMMON, loss="test_module.by_name"), tmp_path, 1)
    assert row["actor/grad_norm"] > 0.0


def test_a_loss_without_a_gradient_is_named(tmp_path):
    message = r"^model\.loss: flat_loss gave losses without a gradient: compute them from log_probs"
    with pytest.raises(ValueError, match=message):
        fit(GRPOLightningModule(**COMMON, loss="test_module.flat_loss"), tmp_path, 1)
    (row,) = fit(GRPOLightningModule(**COMMON, loss="test_module.flat_loss", kl=KL(coef=0.1)), tmp_path, 1)
    assert row["actor/kl_loss"] >= 0.0


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")
def test_callbacks_that_copy_the_module_are_refused():
    averaging = pl.callbacks.WeightAveraging()
    with pytest.raises(TypeError, match=r"is sharded, it cannot be copied: .* model\.ema_decay keeps an average"):
        quiet_trainer(RolloutCallback(), averaging, max_steps=1).fit(
            GRPOLightningModule(**COMMON), PromptDataModule(path="toys.prompts", batch_size=16)
        )


def test_a_module_does_not_read_a_checkpoint_by_itself(tmp_path):
    saver = IterationCheckpoint(dirpath=str(tmp_path / "saved"))
    fit(GRPOLightningModule(**COMMON), tmp_path, 1, callbacks=[saver])
    path = str(tmp_path / "saved" / "iteration-000001.ckpt")
    with pytest.raises(
        TypeError, match=r"iteration-000001.ckpt holds shards, .* give them as ckpt_path to fit, validate"
    ):
        GRPOLightningModule.load_from_checkpoint(path)


class Broken(GRPOLightningModule):
    """Its loss is not finite in the iterations of ``broken``."""

    broken = range(1, 2)

    def policy_loss(self, *tensors):
        losses, metrics = super().policy_loss(*tensors)
        return losses * (float("nan") if self.trainer.global_step in self.broken else 1.0), metrics


def test_a_step_without_a_finite_gradient_changes_nothing_and_is_counted(tmp_path):
    module = Broken(**COMMON)
    versions = []
    module.on_train_batch_end = lambda *_: versions.append(  # type: ignore[method-assign]
        torch.cat([p.detach().full_tensor().flatten() for p in module.actor.parameters()])
    )
    rows = fit(module, tmp_path, 3, num_generations=4)
    assert [row["actor/skipped_steps"] for row in rows] == [0.0, 1.0, 0.0]
    assert torch.equal(versions[0], versions[1])
    assert not torch.equal(versions[1], versions[2])


def test_too_many_skipped_steps_in_a_row_end_the_run(tmp_path):
    module = Broken(**COMMON, max_skipped_steps=3)
    module.broken = range(1, 100)
    with pytest.raises(RuntimeError, match="not finite in 3 optimizer steps in a row: lower"):
        fit(module, tmp_path, 20, num_generations=4)
    assert module.trainer.global_step == 4


def test_metrics_that_are_not_measured_in_an_iteration_are_not_repeated(tmp_path):
    rows = fit(GRPOLightningModule(**COMMON), tmp_path, 4, {"log_probs_every": 2, "verify_sync_every": 3})
    assert ["rollout/logprob_diff_mean" in row for row in rows] == [True, False, True, False]
    assert [row.get("rollout/checksum_ok") for row in rows] == [1.0, None, None, 1.0]


@pytest.mark.parametrize("sleep_level", [0, 2])
def test_the_first_sync_of_each_run_is_verified(sleep_level, tmp_path):
    """Also where the engine is awake with weights of the same version, which are those of another module."""
    rollout = RolloutCallback(
        sampling=Sampling(num_generations=4, max_completion_length=6), sleep_level=sleep_level, verify_sync_every=2
    )
    verified = []
    for _ in range(2):
        trainer = quiet_trainer(rollout, max_steps=1, enable_checkpointing=False)
        data = PromptDataModule(path="toys.prompts", batch_size=16, max_prompt_length=32)
        trainer.fit(GRPOLightningModule(**COMMON), datamodule=data)
        verified.append(trainer.callback_metrics.get("rollout/checksum_ok"))
    assert verified == [1.0, 1.0]


def test_truncated_responses_teach_nothing_when_they_are_masked(tmp_path):
    masked, plain = [
        fit(GRPOLightningModule(**COMMON, mask_truncated=m), tmp_path / str(m), 1, num_generations=4, ignore_eos=True)
        for m in (True, False)
    ]
    assert masked[0]["completions/clipped_ratio"] == 1.0
    assert (masked[0]["actor/grad_norm"], masked[0]["actor/pg_loss"]) == (0.0, 0.0)
    assert plain[0]["actor/grad_norm"] > 0.0


def test_a_checkpoint_of_other_models_is_refused_in_one_line(tmp_path):
    saver = IterationCheckpoint(dirpath=str(tmp_path / "ck"))
    fit(PPOLightningModule(**COMMON), tmp_path / "ppo", 1, callbacks=[saver])
    (checkpoint,) = (tmp_path / "ck").glob("*.ckpt")
    others = {
        "which trains actor and critic, not by .*GRPOLightningModule with actor: set model.class_path as it was": (
            GRPOLightningModule(**COMMON)
        ),
        "was trained without LoRA: leave model.lora out": PPOLightningModule(**COMMON, lora=LoRA(r=4)),
    }
    for message, module in others.items():
        with pytest.raises(ValueError, match=message) as caught:
            fit(module, tmp_path / "other", 2, ckpt_path=str(checkpoint))
        assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_samples_are_labelled_with_the_iteration_of_the_weights(tmp_path):
    """Of a checkpoint, though its trainer has done none; else of the training before."""

    def trainer(name: str, steps: int, *callbacks: pl.Callback) -> pl.Trainer:
        return pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=FSDPUlyssesStrategy(),
            max_steps=steps,
            limit_val_batches=1,
            limit_test_batches=1,
            num_sanity_val_steps=0,
            check_val_every_n_epoch=100,
            logger=CSVLogger(str(tmp_path), name=name, version=""),
            log_every_n_steps=1,
            enable_checkpointing=bool(callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[RolloutCallback(sampling=Sampling(max_completion_length=4)), Samples(rows=0), *callbacks],
        )

    def data() -> PromptDataModule:
        return PromptDataModule(path="toys.prompts", batch_size=16, max_prompt_length=32, val_size=4)

    def samples(name: str) -> list[str]:
        files = sorted((tmp_path / name / "samples").iterdir())
        assert all(set(read_table(file)["iteration"].to_pylist()) == {int(file.stem[-6:])} for file in files)
        return [file.stem for file in files]

    first = trainer("first", 2, IterationCheckpoint(dirpath=str(tmp_path / "ck")))
    module = GRPOLightningModule(**COMMON)
    first.fit(module, datamodule=data())
    (found,) = first.test(module, datamodule=data(), verbose=False)
    assert {"/".join(name.split("/")[:2]) for name in found} == {"test/heldout", "step"}
    assert samples("first") == ["test_000002"]
    (checkpoint,) = (tmp_path / "ck").glob("*.ckpt")
    for verb, kind in (("validate", "validation"), ("test", "test")):
        run = getattr(trainer(verb, -1), verb)
        run(GRPOLightningModule(**COMMON), datamodule=data(), ckpt_path=checkpoint, weights_only=False, verbose=False)
        assert samples(verb) == [f"{kind}_000002"]


def test_what_is_said_of_the_policy_does_not_change_another_critic(tmp_path):
    """Overrides and names of layers are those of one model."""
    lora = LoRA(r=4, target_modules=["q_proj"], modules_to_save=["norm"])
    module = PPOLightningModule(
        **COMMON, critic="another/model", lora=lora, config_overrides={"rope_parameters": {"rope_theta": 1e6}}
    )
    critic = module.roles["critic"]
    assert (critic.model, critic.config_overrides) == ("another/model", None)
    assert critic.lora == LoRA(r=4)
    assert (critic.key, module.settings.key) == ("model.critic", "model.model")
    same = PPOLightningModule(**COMMON, lora=lora)
    assert same.roles["critic"] == same.settings


def test_the_model_of_a_critic_is_looked_for_once(tmp_path, looked_for):
    """On the hub that is a request, and each checkpoint says what its models are."""
    critic = str(shutil.copytree(tiny_model(), tmp_path / "critic"))
    saver = IterationCheckpoint(dirpath=tmp_path / "checkpoints", every_n_train_steps=1)
    fit(PPOLightningModule(**COMMON, critic=critic), tmp_path / "run", 3, callbacks=[saver])
    assert sorted(looked_for) == sorted(["random:tiny", critic])


def test_a_reference_that_is_not_there_is_not_offloaded_in_silence():
    with pytest.warns(UserWarning, match=r"model\.offload_reference moves nothing: model\.kl\.coef is 0"):
        GRPOLightningModule(**COMMON, offload_reference=True)


# -- losses and estimators by their settings ---------------------------------------------------------------------------------


def same(a: list[dict[str, float]], b: list[dict[str, float]]) -> None:
    for left, right in zip(a, b, strict=True):
        assert left.keys() == right.keys()
        for name in left:
            if name.startswith(("actor/", "reward/", "rollout/is_", "rollout/rejected")):
                assert left[name] == pytest.approx(right[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(
    ("loss", "args", "clip_low"),
    [("kl_cov", {"share": 0.1}, None), ("clip_cov", {"share": 0.1, "lowest": 0.0}, 0.2), ("gspo", {}, 0.2)],
)
def test_a_loss_over_more_than_a_token_does_not_depend_on_micro_batches(loss, args, clip_low, tmp_path):
    runs = [
        fit(
            GRPOLightningModule(
                **COMMON | {"micro_batch_tokens": tokens}, loss=loss, loss_args=args, mini_batches=2, clip_low=clip_low
            ),
            tmp_path / str(tokens),
            1,
            num_generations=4,
        )
        for tokens in (4096, 40)
    ]
    same(*runs)


class Choice(GRPOLightningModule):
    """Records the tokens that its loss was told to treat differently, by micro-batch, and how many it had."""

    def policy_loss(self, log_probs, old_log_probs, token_advantages, mask, **selected):
        self.found.append((int((selected["chosen"] * mask).sum()), int(mask.sum())))
        return super().policy_loss(log_probs, old_log_probs, token_advantages, mask, **selected)


def test_tokens_are_chosen_from_the_whole_optimizer_step(tmp_path):
    """A tenth of them, however few a micro-batch has; by the policy of that step."""
    module = Choice(**COMMON | {"micro_batch_tokens": 40}, loss="kl_cov", loss_args={"share": 0.1}, mini_batches=2)
    module.found = []
    fit(module, tmp_path, 1, num_generations=4)
    assert len(module.found) > 10
    chosen, tokens = (sum(column) for column in zip(*module.found, strict=True))
    assert tokens * 0.1 - 2 <= chosen <= tokens * 0.1
    assert len({a / b for a, b in module.found}) > 2


RECIPES = (
    *("dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "dapo", "gspo", "cispo"),
    "vapo",
)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains(name, tmp_path):
    """Its settings of the algorithm with another model and task, a critic that is warm already, and responses that are cut."""
    module, rollout = recipe(name, **COMMON)
    (row,) = fit(module, tmp_path, 1, rollout, num_generations=4)
    assert row["actor/grad_norm"] > 0.0
    assert row["actor/skipped_steps"] == 0.0


def test_an_aggregation_and_clips_that_are_not_set_are_the_losses_own():
    module = GRPOLightningModule("random:tiny", loss="gspo")
    assert (module.aggregation, module.loss_args) == ("seq-mean-token-mean", {"clip_dual": 3.0})
    module = GRPOLightningModule("random:tiny", loss="gspo", aggregation="token-mean", clip_high=0.1)
    assert (module.aggregation, module.loss_args["clip_high"]) == ("token-mean", 0.1)
    assert GRPOLightningModule("random:tiny").aggregation == "token-mean"


def own_loss(log_probs, old_log_probs, advantages, mask, *, power=1.0, **_):
    return -advantages * (log_probs - old_log_probs).exp() ** power, {"of_mine": mask}


def narrow(*, rewards, mask):
    return rewards * mask, rewards


def own_advantage(*, rewards, mask, shift, **_):
    shifted = (rewards.sum(1, keepdim=True) - shift) * mask
    return shifted, shifted


def test_a_loss_and_an_estimator_of_ones_own_have_options(tmp_path):
    module = GRPOLightningModule(
        **COMMON,
        loss="test_module.own_loss",
        loss_args={"power": 2.0},
        advantage="test_module.own_advantage",
        advantage_args={"shift": 0.5},
    )
    assert module.compute_advantages(experience())[0].tolist() == [[0.5, 0.5, 0.0], [3.5, 3.5, 3.5]]
    rows = fit(module, tmp_path, 1, num_generations=4)
    assert rows[0]["actor/of_mine"] == 1.0
    assert rows[0]["actor/grad_norm"] > 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "dro", "loss_args": {"bta": 1}}, r"model\.loss_args: dro has no option 'bta'; it has beta"),
        ({"loss_args": {"clip_low": 1}}, r"model\.loss_args: ppo has no option 'clip_low'; it has none"),
        ({"loss": "kl_cov", "loss_args": {"chosen": 1}}, "kl_cov has no option 'chosen'; it has coef, share"),
        ({"advantage_args": {"gamma": 0.9}}, r"model\.advantage_args: grpo has no option 'gamma'; it has std"),
        ({"advantage_args": {"std": "all"}}, r"model\.advantage_args\.std: got 'all', must be 'group' or 'batch'"),
        ({"loss": "kl_cov", "clip_low": 0.1}, r"model\.clip_low: kl_cov has no such bound, leave it out"),
        ({"loss": "gpg", "clip_high": 0.1}, r"model\.clip_high: gpg has no such bound, leave it out"),
        ({"loss": "value_loss"}, r"model\.loss: value_loss must end in \*\*_, since it is handed more than it lists"),
        ({"advantage": "test_module.narrow"}, r"model\.advantage: narrow must end in \*\*_"),
        ({"advantage": "gae"}, "gae needs values, which GRPOLightningModule does not have: take another one"),
    ],
)
def test_options_that_a_function_does_not_have_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GRPOLightningModule("random:tiny", **options)


def test_an_estimator_of_single_functions_has_no_sum_to_clip_or_to_take_kl_off():
    for options in ({"reward_clip": (-1.0, 1.0)}, {"kl": KL(coef=0.1, where="reward")}):
        with pytest.raises(ValueError, match="gdpo takes the reward functions one by one, not their sum"):
            GRPOLightningModule("random:tiny", advantage="gdpo", **options)


def twice(completion_ids, **_):
    return [2.0 * len(set(ids)) for ids in completion_ids]


def test_functions_are_normalised_one_by_one_and_rewards_clipped(tmp_path):
    functions = {"reward": [even_tokens, twice], "reward_weights": [1.0, 0.1]}
    module = GRPOLightningModule(**TINY_MODULE, **functions, advantage="gdpo")
    (row,) = fit(module, tmp_path / "gdpo", 1, num_generations=4)
    batch = module.last_experience
    alone = torch.stack(
        [grpo(rewards=p[:, None], mask=batch.mask[:, :1], groups=batch.group)[0][:, 0] for p in batch.parts.T]
    )
    summed = alone[0] + 0.1 * alone[1]
    torch.testing.assert_close(batch.advantages[:, 0], summed / summed.std(), atol=1e-4, rtol=1e-4)
    assert row["actor/grad_norm"] > 0.0
    clipped = GRPOLightningModule(**TINY_MODULE, **functions, reward_clip=(1.6, 1.7))
    (row,) = fit(clipped, tmp_path / "clip", 1, num_generations=4)
    totals = clipped.last_scores.total
    scores = clipped.last_experience.rewards.sum(1)
    torch.testing.assert_close(scores.sort().values, totals.clamp(1.6, 1.7).sort().values)
    assert totals.min() < 1.6 < 1.7 < totals.max()
    assert row["reward/mean"] == pytest.approx(totals.mean().item())


def test_options_of_gae_reach_it():
    module = PPOLightningModule("random:tiny", advantage_args={"length_alpha": 0.5, "lam_critic": 1.0})
    assert module.compute_advantages(experience())[1].tolist() == [[1.0, 1.0, 0.0], [4.0, 4.0, 4.0]]
    with pytest.raises(ValueError, match="gae has no option 'gamma'; it has lam_critic, length_alpha"):
        PPOLightningModule("random:tiny", advantage_args={"gamma": 0.9})


class Shifted(GRPOLightningModule):
    """As if the engine had given the first token of every response less than the trainer, by 0.5 nats."""

    def gather(self, rollout, scores):
        gathered = super().gather(rollout, scores)
        sampler = gathered.sampler_log_probs.clone()
        sampler[:, 0] -= 0.5
        return replace(gathered, sampler_log_probs=sampler)


def test_rejected_tokens_leave_the_loss_and_stay_in_the_baseline(tmp_path):
    """Six tokens a response: one is rejected, and weights of 1 and e^0.5 have their mean taken out."""
    correction = Correction(cap=10.0, normalize=True, reject={"token_k2": 0.1})
    module = Shifted(**COMMON, correction=correction)
    seen = []
    module.policy_loss = lambda *tensors: seen.append(tensors) or GRPOLightningModule.policy_loss(module, *tensors)
    (row,) = fit(module, tmp_path, 1, num_generations=4, ignore_eos=True)
    assert row["rollout/rejected_ratio"] == pytest.approx(1 / 6)
    assert all(not mask[:, 0].any() and mask[:, 1:].all() for *_, mask in seen)
    assert all(advantages.any() for _, _, advantages, _ in seen)
    assert row["rollout/is_weight"] == pytest.approx(1.0, abs=1e-4)  # of the tokens that are left
    experience = module.last_experience
    assert experience.advantages[:, 0].any()


def test_the_mean_weight_is_taken_over_the_whole_iteration(tmp_path):
    seen = []

    class Watched(Shifted):
        def correct(self, experience):
            seen.append(super().correct(experience))
            return seen[-1]

    module = Watched(**COMMON | {"micro_batch_tokens": 40}, correction=Correction(cap=10.0, normalize=True))
    fit(module, tmp_path, 1, num_generations=4, ignore_eos=True)
    assert seen[0].importance_mean == pytest.approx((5 + math.exp(0.5)) / 6, abs=1e-4)
    assert seen[0].mask.all()


@pytest.mark.parametrize(
    "option",
    [
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"min_completion_length": 2},
        {"extra": {"repetition_penalty": 1.1}},
    ],
    ids=str,
)
def test_draws_that_the_trainer_cannot_replay_are_not_corrected(option, tmp_path):
    with pytest.raises(ValueError, match=r"model\.correction needs responses that are drawn from all tokens: set"):
        fit(GRPOLightningModule(**COMMON, correction=Correction()), tmp_path, 1, num_generations=4, **option)


def test_a_first_token_without_eos_is_replayable_where_no_eos_ends_a_response(tmp_path):
    module = GRPOLightningModule(**COMMON, correction=Correction())
    (row,) = fit(module, tmp_path, 1, num_generations=4, min_completion_length=6, ignore_eos=True)
    assert row["rollout/logprob_diff_max"] < 1e-5


def test_log_probs_of_another_distribution_are_not_compared_with_the_trainer_s_and_not_asked_for(tmp_path):
    asked = []

    class Asked(TransformersEngine):
        def generate(self, *args, **options):
            asked.append(options["log_probs"])
            return super().generate(*args, **options)

    (row,) = fit(
        GRPOLightningModule(**COMMON), tmp_path, 1, {"engine": Asked()}, num_generations=4, min_completion_length=2
    )
    assert "rollout/logprob_diff_max" not in row
    assert asked == [False]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_the_coefficient_follows_its_target_and_a_resumed_run_goes_on_with_it(tmp_path):
    def module():
        return GRPOLightningModule(**COMMON | {"lr": 1e-2}, kl=KL(0.1, target=1e-4, horizon=100), mini_batches=2)

    saver = IterationCheckpoint(dirpath=str(tmp_path / "ck"))
    whole = fit(module(), tmp_path / "whole", 3, num_generations=4)
    coefs = [row["actor/kl_coef"] for row in whole]
    assert coefs[0] == pytest.approx(0.1)
    for row, coef in zip(whole, coefs[1:], strict=False):
        error = min(max(row["actor/kl"] / 1e-4 - 1, -0.2), 0.2)
        assert coef == pytest.approx(row["actor/kl_coef"] * (1 + error * 64 / 100))
    assert coefs[2] != coefs[1] != coefs[0]
    fit(module(), tmp_path / "first", 2, num_generations=4, callbacks=[saver])
    (checkpoint,) = (tmp_path / "ck").glob("*.ckpt")
    (last,) = fit(module(), tmp_path / "rest", 3, num_generations=4, ckpt_path=str(checkpoint))
    assert last["actor/kl_coef"] == pytest.approx(coefs[2], rel=1e-6)


def test_a_coefficient_stays_positive_however_many_responses_an_iteration_has():
    kl = KL(coef=0.1, target=1.0, horizon=100)
    assert kl.adapted(0.1, 0.0, 50) == pytest.approx(0.09)
    assert kl.adapted(0.1, 0.0, 100) == kl.adapted(0.1, 0.0, 1024) == pytest.approx(0.08)
    assert kl.adapted(0.1, 9.0, 1024) == pytest.approx(0.12)


def test_a_target_needs_a_coefficient_to_start_with():
    with pytest.raises(ValueError, match=r"model\.kl\.target steers model\.kl\.coef, which must not start at 0"):
        KL(target=0.1)


@pytest.mark.parametrize("rate", [0.0, -1e-6, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["lr", "critic_lr"])
def test_a_rate_that_is_none_is_refused_before_a_model_is_built(name, rate, tmp_path):
    module = PPOLightningModule(**TINY_MODULE | {"reward": [even_tokens], name: rate})
    with pytest.raises(ValueError, match=rf"^model\.{name} must be above 0 and finite, got {rate}$"):
        fit(module, tmp_path, 1)
    assert module.actor is None


def test_responses_end_with_the_ids_of_the_generation_config_or_without_one_of_the_model_config(tmp_path):
    def ids() -> tuple[int, ...]:
        return GRPOLightningModule(str(folder), reward=[even_tokens]).eos_token_ids

    folder = Path(shutil.copytree(tiny_model(), tmp_path / "model"))
    for name, listed in (("config", [1, 40]), ("generation_config", [1, 50, 60])):
        file = folder / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": listed}))
    assert ids() == (1, 50, 60)
    (folder / "generation_config.json").unlink()
    assert ids() == (1, 40)
