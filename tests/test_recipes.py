"""What an algorithm needs besides its formulas: responses, statistics and decisions of the loop, each against an oracle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from toys import TINY_MODULE, even_tokens, fit, quiet_trainer
from transformers import AutoModelForCausalLM

from lightning_rlhf import (
    KL,
    GRPOLightningModule,
    IterationCheckpoint,
    LoRA,
    PPOLightningModule,
    PromptDataModule,
    RolloutCallback,
    Sampling,
)
from lightning_rlhf.export import export_checkpoint
from lightning_rlhf.modules.correction import Correction
from lightning_rlhf.rollout import TransformersEngine
from lightning_rlhf.tiny import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
COMMON = TINY_MODULE | {"reward": [even_tokens]}


def of_both(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Depends on the prompt, too: an untrained policy repeats the last token of any, if it is greedy."""
    return [
        sum(ids) / len(ids) + sum(map(ord, prompt)) % 97 for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


class Noting(TransformersEngine):
    """Notes the greedy response to each prompt, from a generation of its own."""

    greedy: dict[tuple[int, ...], list[int]]

    def generate(self, prompts, sampling, *, seeds, **arguments):
        unique = list(dict.fromkeys(map(tuple, prompts)))
        alone = super().generate(unique, sampling.greedy, seeds=[0] * len(unique))
        self.greedy = dict(zip(unique, [c.token_ids for c in alone], strict=True))
        self.requests = len(prompts)
        return super().generate(prompts, sampling, seeds=seeds, **arguments)


@pytest.mark.parametrize("async_level", [0, 1])
def test_the_baseline_of_remax_is_the_score_of_the_greedy_response_and_takes_part_in_nothing_else(
    tmp_path, async_level
):
    engine = Noting()
    options = {"correction": Correction()} if async_level else {}
    module = GRPOLightningModule(**COMMON | {"reward": [of_both]}, advantage="remax", **options)
    rollout = {"engine": engine, "async_level": async_level}
    *_, row = fit(module, tmp_path, 1 + async_level, rollout=rollout, num_generations=2)
    assert row.get("rollout/staleness", 0) == async_level
    experience = module.last_experience
    assert (engine.requests, engine.context.max_num_seqs, len(experience)) == (48, 48, 32)
    prompts = [tuple(s[:n].tolist()) for s, n in zip(experience.sequences, experience.prompt_lengths, strict=True)]
    texts = [module.tokenizer.decode(prompt) for prompt in prompts]
    expected = torch.tensor(of_both(texts, [engine.greedy[prompt] for prompt in prompts]))
    assert len(expected.unique()) > 3
    torch.testing.assert_close(experience.baselines, expected)
    scores = experience.rewards.sum(1)
    wanted = (scores - expected)[:, None] * experience.mask
    torch.testing.assert_close(experience.advantages, wanted, rtol=1e-4, atol=1e-4)
    assert row["reward/greedy_mean"] == pytest.approx(float(expected.mean()))
    assert row["reward/mean"] == pytest.approx(float(scores.mean()))
    assert module.last_scores.total.shape == (32,)
    assert row["actor/grad_norm"] > 0


class Aborting(TransformersEngine):
    """Gives up every third greedy response."""

    def generate(self, prompts, sampling, *, seeds, **arguments):
        done = super().generate(prompts, sampling, seeds=seeds, **arguments)
        greedy = [i for i, seed in enumerate(seeds) if seed is None][::3]
        return [replace(c, finish_reason="abort") if i in greedy else c for i, c in enumerate(done)]


def test_a_prompt_whose_greedy_response_was_aborted_is_left_out_and_rewards_are_logged_as_they_were_given(tmp_path):
    module = GRPOLightningModule(**COMMON | {"reward": [of_both]}, advantage="remax", reward_clip=(0.0, 260.0))
    rollout = {"engine": Aborting()}
    (row,) = fit(module, tmp_path, 1, rollout=rollout, num_generations=2)
    experience = module.last_experience
    left = experience.mask.any(1)
    assert torch.equal(left, experience.baselines.isfinite())
    assert int(left.sum()) == 20
    assert row["reward/greedy_mean"] == pytest.approx(float(experience.baselines.nanmean()))
    assert 0 < int((experience.baselines > 260).sum()) < 20
    wanted = experience.scores.clamp(max=260) - experience.baselines.clamp(max=260)
    found = experience.advantages.sum(1) / experience.mask.sum(1)
    torch.testing.assert_close(found[left], wanted[left], rtol=1e-4, atol=1e-4)


def test_the_optimal_token_baseline_gets_the_squared_probabilities_of_the_old_policy(tmp_path):
    module = GRPOLightningModule(**COMMON | {"lr": 1e-30}, advantage="optimal_token_baseline", mini_batches=2)
    (row,) = fit(module, tmp_path, 1, num_generations=3, temperature=0.7)
    experience = module.last_experience
    stock = AutoModelForCausalLM.from_pretrained(tiny_model())
    for i, (ids, begin) in enumerate(zip(experience.sequences, experience.prompt_lengths, strict=True)):
        probs = (stock(ids[None]).logits[0, begin - 1 : -1] / 0.7).softmax(-1)
        length = len(ids) - begin
        squares, old = experience.sum_pi_squared[i, :length], experience.old_log_probs[i, :length]
        torch.testing.assert_close(squares, probs.square().sum(-1), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(old, probs.gather(-1, ids[begin:, None])[:, 0].log(), rtol=1e-4, atol=1e-5)
    assert row["actor/grad_norm"] > 0


def test_an_estimator_that_lists_importance_weights_gets_those_of_the_correction(tmp_path):
    seen = []

    def estimator(*, rewards, mask, importance=None, **_):
        seen.append(importance)
        return rewards, rewards

    for correction in (None, Correction()):
        module = GRPOLightningModule(**COMMON, advantage=estimator, correction=correction)
        fit(module, tmp_path / str(correction), 1, num_generations=2)
    assert seen[0] is None
    torch.testing.assert_close(seen[1], module.last_experience.mask, rtol=1e-3, atol=1e-3)


# -- what follows the actor --------------------------------------------------------------------------------------------


def weights(root: Any) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().clone() for name, p in root.named_parameters()}


class Followed(GRPOLightningModule):
    """Notes actor, reference and average after each iteration."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**COMMON | {"lr": 1e-2}, **options)
        self.seen: list[dict[str, dict[str, torch.Tensor]]] = []

    def follow_actor(self) -> None:
        super().follow_actor()
        roots = {"actor": self.actor, "reference": self.reference, "average": self.average}
        self.seen.append({name: weights(root) for name, root in roots.items() if root is not None})


def resumed(make: Any, folder: Path, iterations: int, at: int) -> tuple[Any, Any, list[Any], list[Any]]:
    """(module, metrics) of a run, and of one that goes on from a checkpoint of it."""
    saver = IterationCheckpoint(dirpath=str(folder / "ck"), every_n_train_steps=at, save_top_k=-1)
    whole, rest = make(), make()
    rows = fit(whole, folder / "whole", iterations, num_generations=4, callbacks=[saver])
    checkpoint = str(folder / f"ck/iteration-{at:06d}.ckpt")
    return whole, rest, rows, fit(rest, folder / "rest", iterations, num_generations=4, ckpt_path=checkpoint)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_the_reference_becomes_the_actor_every_n_iterations_and_a_resumed_run_has_it(tmp_path):
    kl = KL(coef=0.1, refresh_every=2)
    whole, rest, rows, again = resumed(lambda: Followed(kl=kl), tmp_path, 5, 3)
    for i, source in ((1, 1), (2, 1), (3, 3), (4, 3)):
        for name, tensor in whole.seen[i]["reference"].items():
            assert torch.equal(tensor, whole.seen[source]["actor"][name].bfloat16()), (i, name)
    first, second = whole.seen[0]["reference"], whole.seen[1]["reference"]
    assert not all(torch.equal(first[name], second[name]) for name in first)
    assert rows[2]["actor/kl_loss"] < 0.01 * rows[1]["actor/kl_loss"], "nearly on the reference again"
    for left, right in zip(whole.seen[3:], rest.seen, strict=True):
        for root, tensors in left.items():
            assert all(torch.equal(tensor, right[root][name]) for name, tensor in tensors.items())
    assert [row["actor/kl_loss"] for row in again] == [row["actor/kl_loss"] for row in rows[3:]]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_the_average_of_the_actor_is_kept_goes_on_and_is_exported(tmp_path):
    whole, rest, *_ = resumed(lambda: Followed(ema_decay=0.6), tmp_path, 4, 2)
    stock = AutoModelForCausalLM.from_pretrained(tiny_model())
    expected = {name: parameter.detach() for name, parameter in stock.named_parameters()}
    for i, seen in enumerate(whole.seen):
        for name, tensor in seen["actor"].items():
            mean = 0.6 * expected[name.removeprefix("model.")] + 0.4 * tensor
            torch.testing.assert_close(seen["average"][name], mean)
            expected[name.removeprefix("model.")] = mean
            assert i < 2 or torch.equal(rest.seen[i - 2]["average"][name], seen["average"][name])
    checkpoint = str(tmp_path / "ck/iteration-000004.ckpt")
    said = export_checkpoint(checkpoint, str(tmp_path / "out"), average=True, dtype="float32")
    assert said.startswith("average of Qwen2ForCausalLM of iteration 4")
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters():
        assert torch.equal(tensor, whole.seen[-1]["average"][f"model.{name}"])


class Held(pl.Callback):
    """Notes the engine's weights in training and in validation, and those that are meant."""

    def __init__(self) -> None:
        self.found: list[tuple[str, bool, bool]] = []

    def look(self, trainer: pl.Trainer, module: Any, phase: str) -> None:
        (rollout,) = (c for c in trainer.callbacks if isinstance(c, RolloutCallback))
        held = rollout.engine.model.get_parameter("model.norm.weight")
        meant = (module.actor, module.average)
        names = (dict(root.named_parameters())["model.model.norm.weight"].full_tensor() for root in meant)
        self.found.append((phase, *(torch.equal(held, tensor) for tensor in names)))

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.look(trainer, pl_module, "validation")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.look(trainer, pl_module, "training")


@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
def test_validation_draws_from_the_average_and_training_from_the_policy(tmp_path):
    held = Held()
    rollout = RolloutCallback(
        sampling=Sampling(num_generations=2, max_completion_length=4), val_average=True, sleep_level=0
    )
    options = {"max_steps": 3, "val_check_interval": 1, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    trainer = quiet_trainer(rollout, held, **options)
    data = PromptDataModule(path="toys.prompts", batch_size=8, val_size=4)
    trainer.fit(GRPOLightningModule(**COMMON | {"lr": 1e-2}, ema_decay=0.5), datamodule=data)
    train, validation = ("training", True, False), ("validation", False, True)
    assert held.found == [("training", True, True), validation, train, validation, train, validation]
    with pytest.raises(ValueError, match=r"set model\.ema_decay"):
        fit(GRPOLightningModule(**COMMON), tmp_path, 1, {"val_average": True})


def test_the_average_of_an_adapter_is_exported_merged(tmp_path):
    saver = IterationCheckpoint(dirpath=str(tmp_path / "ck"))
    module = GRPOLightningModule(**COMMON | {"lr": 3e-2}, lora=LoRA(r=4), ema_decay=0.5)
    fit(module, tmp_path / "run", 3, num_generations=4, callbacks=[saver])
    export_checkpoint(str(tmp_path / "ck/iteration-000003.ckpt"), str(tmp_path / "out"), average=True, dtype="float32")
    trained = {name: p for name, p in module.actor.named_parameters() if p.requires_grad}
    averages = dict(module.average.named_parameters())
    assert trained.keys() == averages.keys()
    with torch.no_grad():
        assert any(not torch.equal(p.full_tensor(), averages[name].full_tensor()) for name, p in trained.items())
        for name, parameter in trained.items():
            parameter.copy_(averages[name])
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        for name, tensor in module.actor.hf_named_parameters():
            torch.testing.assert_close(exported.get_parameter(name), tensor.full_tensor())


def test_a_checkpoint_without_an_average_has_none_to_export(tmp_path):
    fit(Followed(), tmp_path / "run", 1, callbacks=[IterationCheckpoint(dirpath=str(tmp_path / "ck"))])
    with pytest.raises(ValueError, match=r"has no average, it was trained without model\.ema_decay: leave --average"):
        export_checkpoint(str(tmp_path / "ck/iteration-000001.ckpt"), str(tmp_path / "out"), average=True)


# -- the loop ----------------------------------------------------------------------------------------------------------


def test_an_iteration_ends_where_the_policy_has_moved_beyond_its_bound(tmp_path):
    """Steps of a hundred times the rate: the KL of the first is 0, that of the next far above the bound."""
    options = COMMON | {"lr": 0.1, "mini_batches": 4}
    taken: list[int] = []

    class Counting(GRPOLightningModule):
        def policy_loss(self, *args: Any, **selected: Any) -> Any:
            losses, metrics = super().policy_loss(*args, **selected)
            return losses - losses.detach() + 1.0, metrics

        def step_optimizer(self, metrics: Any, last: bool) -> None:
            self.before = weights(self.actor)
            super().step_optimizer(metrics, last)
            same = all(torch.equal(tensor, self.before[name]) for name, tensor in weights(self.actor).items())
            taken.append(0 if same else 1)

    module = Counting(**options, target_kl=0.01)
    rows = fit(module, tmp_path / "bound", 3, num_generations=4)
    assert taken == [1, 0] * 3
    assert [row["actor/kl_skipped_steps"] for row in rows] == [3.0] * 3
    assert module.trainer.global_step == 3
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert [row["actor/pg_loss"] for row in rows] == pytest.approx([1.0] * 3), "the mean of the two that were computed"
    assert [(work.forward, work.backward) for work in module.flops] == [(0.5, 0.5)]
    taken.clear()
    rows = fit(Counting(**options | {"lr": 1e-4}, target_kl=0.01), tmp_path / "free", 1, num_generations=4)
    assert taken == [1] * 4
    assert rows[0]["actor/kl_skipped_steps"] == 0.0
    with pytest.raises(
        ValueError, match=r"model\.target_kl ends an iteration of several optimizer steps, there is one"
    ):
        GRPOLightningModule("random:tiny", target_kl=0.01)


def test_an_update_is_worth_what_its_trained_roles_compute(tmp_path):
    class Noting(PPOLightningModule):
        def on_train_batch_end(self, *_: Any) -> None:
            worth.append(len(self.flops))

    worth: list[int] = []
    fit(Noting(**COMMON, critic_warmup=1), tmp_path, 2, num_generations=2)
    assert worth == [1, 2]


def test_the_likelihood_of_right_responses_is_a_mean_over_their_tokens(tmp_path):
    """Without another loss its gradient is that of stock log-probs."""

    def right(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(ids[0] % 3 == 0) for ids in completion_ids]

    class Gradient(GRPOLightningModule):
        def policy_loss(self, log_probs, *others, **selected):
            return 0.0 * log_probs, {}

        def step_optimizer(self, metrics: Any, last: bool) -> None:
            self.found = {name: p.grad.full_tensor().clone() for name, p in self.actor.named_parameters()}
            super().step_optimizer(metrics, last)

    def shaped(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [-0.1 * len(ids) for ids in completion_ids]

    small = COMMON | {"reward": [right, shaped], "micro_batch_tokens": 64}
    module = Gradient(**small, positive_coef=0.1, val_metric="right")
    (row,) = fit(module, tmp_path, 1, num_generations=4, stop_token_ids=tuple(range(2, 80)))  # of unequal lengths
    stock, experience = AutoModelForCausalLM.from_pretrained(tiny_model()), module.last_experience
    terms = []
    for ids, begin in zip(experience.sequences, experience.prompt_lengths, strict=True):
        if ids[begin] % 3 == 0:
            log_p = stock(ids[None]).logits[0, begin - 1 : -1].log_softmax(-1)
            terms.append(-log_p.gather(-1, ids[begin:, None])[:, 0])
    assert 5 < len(terms) < len(experience) / 2
    loss = torch.cat(terms).mean()
    (0.1 * loss).backward()
    assert row["actor/positive_loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(module.found[f"model.{name}"], parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KL(refresh_every=3), r"model\.kl\.refresh_every renews the reference, which needs model\.kl\.coef"),
        (
            lambda: GRPOLightningModule("random:tiny", kl=KL(0.1, refresh_every=3), lora=LoRA()),
            "does not change: leave out",
        ),
    ],
)
def test_what_cannot_be_renewed_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_an_average_that_a_resumed_run_adds_starts_from_its_actor_and_a_renewed_reference_from_the_model(tmp_path):
    saver = IterationCheckpoint(dirpath=str(tmp_path / "ck"))
    fit(whole := Followed(kl=KL(0.1)), tmp_path / "run", 2, num_generations=4, callbacks=[saver])
    rest, checkpoint = Followed(kl=KL(0.1, refresh_every=2), ema_decay=0.6), str(tmp_path / "ck/iteration-000002.ckpt")
    with pytest.warns(
        UserWarning, match=r"refresh_every None \(here 2\), model\.ema_decay None \(here 0\.6\): this run goes on"
    ):
        fit(rest, tmp_path / "rest", 4, num_generations=4, ckpt_path=checkpoint)
    expected = whole.seen[-1]["actor"]
    for seen in rest.seen:
        expected = {name: 0.6 * expected[name] + 0.4 * tensor for name, tensor in seen["actor"].items()}
        torch.testing.assert_close(seen["average"], expected)
    for name, tensor in rest.seen[0]["reference"].items():
        assert torch.equal(tensor, whole.seen[-1]["reference"][name])
        assert torch.equal(rest.seen[1]["reference"][name], rest.seen[1]["actor"][name].bfloat16())


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_run_that_goes_on_without_the_renewed_reference_says_so(tmp_path):
    saver = IterationCheckpoint(dirpath=str(tmp_path / "ck"))
    fit(GRPOLightningModule(**COMMON, kl=KL(0.1, refresh_every=1)), tmp_path / "run", 1, callbacks=[saver])
    checkpoint = str(tmp_path / "ck/iteration-000001.ckpt")
    with pytest.warns(UserWarning, match=r"written with model\.kl\.refresh_every 1 \(here None\): this run goes on"):
        fit(GRPOLightningModule(**COMMON, kl=KL(0.1)), tmp_path / "rest", 2, ckpt_path=checkpoint)
