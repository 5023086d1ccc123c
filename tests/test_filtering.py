"""Dynamic sampling: what is kept, what fills up, and that a run that stops and goes on, or has more ranks, is the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from toys import TINY_MODULE, quiet_trainer, spawn

from lightning_rlhf import FSDPUlyssesStrategy, GRPOLightningModule, PromptDataModule, RolloutCallback, Sampling
from lightning_rlhf.callbacks.filtering import FilterGroups, Rounds
from lightning_rlhf.modules.metrics import Metrics
from lightning_rlhf.modules.report import add_scores
from lightning_rlhf.types import Completion, Prompts, Rollout, Scores

FAILED = -77.0


def add(rounds: Rounds, rewards: dict[int, list[float]], reason: str = "stop", **parts: list[float]) -> None:
    """A round of prompts by their rows, with the rewards of their two responses."""
    prompts = Prompts([[r] for r in rewards], [str(r) for r in rewards], {"a": list(rewards)}, torch.tensor([*rewards]))
    completions = [Completion([r, i], reason) for r in rewards for i in (0, 1)]  # type: ignore[arg-type]
    given = torch.tensor([float(x) for own in rewards.values() for x in own])
    failed, total = given == FAILED, given.where(given != FAILED, math.nan)
    own = {name: torch.tensor(part) for name, part in parts.items()}
    scores = Scores(total, own, {"logged": total[0].item()}, failed=failed if failed.any() else None)
    rounds.add(Rollout.build(prompts, completions, Sampling(num_generations=2)), scores)


def prompt(row: int) -> Prompts:
    return Prompts([[row]], [str(row)], {}, torch.tensor([row]))


def one_rank(**options: Any) -> Rounds:
    return Rounds(FilterGroups(**options), lambda own: [own])


def rows(rounds: Rounds) -> list[int]:
    rollout, scores = rounds.result()
    assert rollout.prompts.columns["a"] == rollout.prompts.index.tolist()
    assert [c.token_ids[0] for c in rollout.completions] == rollout.group.tolist()
    assert len(scores.total) == len(rollout)
    return rollout.prompts.index.tolist()


def test_groups_that_differ_are_kept_in_their_order_and_no_more_than_a_batch_has():
    rounds = one_rank()
    add(rounds, {5: [1, 1], 3: [0, 1], 8: [0, 0]})
    assert not rounds.done
    add(rounds, {1: [1, 0], 2: [1, 1], 9: [2, 1]})
    assert rounds.done
    add(rounds, {4: [0, 1]})
    assert rows(rounds) == [3, 1, 9]
    assert rounds.result()[1].total.tolist() == [0, 1, 1, 0, 2, 1]
    assert rounds.metrics == {
        "rollout/gen_batches": 3,
        "rollout/kept_groups": 4 / 7,
        "reward/failures": 0,
        "reward/generated_mean": 10 / 14,
    }


def test_at_the_bound_the_first_dropped_groups_fill_up():
    rounds = one_rank(max_num_gen_batches=2)
    add(rounds, {5: [1, 1], 3: [0, 0], 8: [0, 0]})
    add(rounds, {1: [1, 0], 2: [1, 1], 9: [1, 1]})
    assert rounds.done
    assert rows(rounds) == [5, 3, 1]
    assert rounds.result()[1].metrics == {"logged": 1.0}


def test_a_prompt_that_comes_twice_counts_once():
    rounds = one_rank()
    add(rounds, {5: [0, 1], 3: [0, 0]})
    add(rounds, {5: [0, 1], 4: [0, 0]})
    assert not rounds.done
    add(rounds, {7: [0, 1]})
    assert rounds.done
    assert rows(rounds) == [5, 7]


def test_a_prompt_that_comes_twice_counts_where_its_responses_differ():
    rounds = one_rank()
    add(rounds, {5: [0, 1], 3: [0, 0]})
    add(rounds, {5: [1, 1], 3: [2, 3]})
    assert rounds.done
    assert rows(rounds) == [5, 3]
    assert rounds.result()[1].total.tolist() == [0, 1, 2, 3]


def test_only_responses_that_count_are_compared():
    nan = math.nan
    rounds = one_rank()
    add(rounds, {5: [nan, 1], 3: [0, 1]}, "stop")
    assert rows(rounds) == [5, 3]
    assert rounds.metrics["reward/generated_mean"] == pytest.approx(2 / 3)
    add(rounds, {7: [0, 1], 8: [0, 1]}, "abort")
    assert rounds.metrics["rollout/kept_groups"] == 1 / 4
    empty = one_rank()
    rollout = Rollout.build(prompt(4), [Completion([1], "stop"), Completion([], "stop")], Sampling(num_generations=2))
    empty.add(rollout, Scores(torch.tensor([0.0, 1.0])))
    assert empty.metrics["rollout/kept_groups"] == 0.0
    for truncated, kept in ((False, 1.0), (True, 0.0)):
        rounds = Rounds(FilterGroups(), lambda own: [own], mask_truncated=truncated)
        add(rounds, {7: [0, 1]}, "length")
        assert rounds.metrics["rollout/kept_groups"] == kept


def test_failures_among_dropped_responses_are_counted_and_no_abstentions():
    rounds = one_rank()
    add(rounds, {5: [FAILED, FAILED], 3: [0, 1], 4: [math.nan, 1]})
    add(rounds, {8: [FAILED, 1], 9: [0, 1]})
    assert rounds.metrics["reward/failures"] == 3
    rollout, scores = rounds.result()
    assert rollout.prompts.index.tolist() == [5, 3, 9]
    assert scores.failed.tolist() == [True, True, False, False, False, False]
    metrics = Metrics()
    add_scores(metrics, scores, [])
    assert metrics.reduce()["reward/abstained"] == 0.0


def test_the_metric_may_be_one_reward_function():
    rounds = one_rank(metric="right")
    add(rounds, {5: [0.1, 0.2], 3: [0.1, 0.1]}, right=[1.0, 1.0, 0.0, 1.0])
    assert rows(rounds) == [5, 3]
    assert rounds.result()[1].parts["right"].tolist() == [1, 1, 0, 1]
    abstained = one_rank(metric="right")
    add(abstained, {5: [0.1, 0.2], 3: [math.nan, 0.1]}, right=[math.nan, 1.0, 0.0, 1.0])
    assert abstained.metrics["rollout/kept_groups"] == 0.0
    with pytest.raises(ValueError, match="must be one of the reward functions right, got 'wrong'"):
        add(one_rank(metric="wrong"), {5: [0, 1]}, right=[0.0, 1.0])


def test_rewards_beyond_the_clip_are_equal():
    rounds = Rounds(FilterGroups(), lambda own: [own], reward_clip=(-1.0, 1.0))
    add(rounds, {5: [2, 3], 3: [0, 3]})
    assert rounds.metrics["rollout/kept_groups"] == 0.5
    assert rounds.metrics["reward/generated_mean"] == 2.0


def test_rewards_of_tokens_go_with_their_responses():
    rounds = one_rank(max_num_gen_batches=3)
    given = {5: [[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]], 3: None, 4: [[7.0, 8.0], [9.0, 0.0]]}
    for longest, row in ((3, 5), (2, 3), (2, 4)):
        completions = [Completion([1] * longest, "stop"), Completion([1], "stop")]
        tokens = None if given[row] is None else torch.tensor(given[row])
        rollout = Rollout.build(prompt(row), completions, Sampling(num_generations=2))
        rounds.add(rollout, Scores(torch.tensor([6.0, 4.0]), tokens=tokens))
    rounds._groups[0] *= 3  # a batch of three prompts
    rollout, scores = rounds.result()
    assert rollout.prompts.index.tolist() == [5, 3, 4]
    assert scores.tokens.tolist() == [[1, 2, 3], [4, 0, 0], [0, 0, 0], [0, 0, 0], [7, 8, 0], [9, 0, 0]]


def test_what_functions_log_of_each_response_goes_with_it():
    rounds = one_rank(max_num_gen_batches=2)
    for row, columns in ((5, {"a": ["x", "y"]}), (3, {"b": [1, 2]})):
        rollout = Rollout.build(prompt(row), [Completion([1], "stop")] * 2, Sampling(num_generations=2))
        rounds.add(rollout, Scores(torch.tensor([0.0, 1.0]), columns=columns))
    rounds._groups[0] *= 2  # a batch of two prompts
    assert rounds.result()[1].columns == {"a": ["x", "y", None, None], "b": [None, None, 1, 2]}


def test_each_data_rank_has_its_share_of_what_is_chosen_among_all():
    shares: list[Any] = []
    first, second = {5: [0, 1], 3: [0, 0]}, {8: [1, 1], 1: [0, 1]}
    for part in (first, second):
        add(Rounds(FilterGroups(), lambda own: shares.append(own) or [own]), part)
    found = []
    for part in (first, second):
        rounds = Rounds(FilterGroups(max_num_gen_batches=1), lambda own: shares)
        add(rounds, part)
        assert rounds.done
        found.append(rows(rounds))
    assert found == [[5, 3], [8, 1]]


def test_a_data_rank_may_have_none_of_what_is_chosen():
    here, there = [{5: [0, 1], 3: [1, 0]}, {6: [0, 1], 7: [0, 1]}], [{8: [1, 1], 1: [0, 0]}, {2: [1, 1], 4: [0, 1]}]
    shares: list[Any] = []
    for number in (0, 1):
        for part in (here, there):
            add(Rounds(FilterGroups(), lambda own: shares.append(own) or [own]), part[number])
    found = []
    for part in (here, there):
        gathered = iter((shares[:2], shares[2:]))
        rounds = Rounds(FilterGroups(), lambda own, gathered=gathered: next(gathered))
        for own in part:
            assert not rounds or not rounds.done
            add(rounds, own)
        assert rounds.done
        found.append(rows(rounds))
    assert found == [[5, 3, 6, 7], []]
    rollout, scores = rounds.result()
    assert (rollout.mask.shape, rollout.group.shape, scores.total.shape) == ((0, 1), (0,), (0,))


# -- in a run ----------------------------------------------------------------------------------------------------------


def prompts() -> list[dict[str, str]]:
    return [{"prompt": f"say {number} "} for number in range(46)]


def first_is_even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """0 or 1: of two responses every second pair is equal."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


class Watched(GRPOLightningModule):
    """Notes the rows of each round that is scored, and of each iteration that is trained on."""

    def __init__(self) -> None:
        super().__init__(**TINY_MODULE | {"lr": 1e-2}, reward=[first_is_even], advantage="remax")
        self.scored: list[list[int]] = []
        self.trained: list[list[int]] = []
        self.shares: list[float] = []
        self.norms: list[float] = []

    def score(self, rollout: Rollout) -> Any:
        if rollout.greedy is not None:  # of those alone only what is kept is scored
            self.scored.append(rollout.prompts.index.tolist())
        return super().score(rollout)

    def on_train_batch_end(self, *_: Any) -> None:
        self.trained.append(self.last_experience.group[::2].tolist())
        self.shares.append(float(self.trainer.callback_metrics["reward/frac_zero_std"]))
        self.norms.append(float(self.trainer.callback_metrics["actor/grad_norm"]))


class Save(pl.Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def filtering() -> RolloutCallback:
    sampling = Sampling(num_generations=2, max_completion_length=2)
    return RolloutCallback(sampling=sampling, filter_groups=FilterGroups())


def fit(
    iterations: int,
    *callbacks: pl.Callback,
    ckpt_path: Path | None = None,
    devices: int = 1,
    sp: int = 1,
    rollout: RolloutCallback | None = None,
) -> Any:
    """(module, its weights at the end): 8 prompts an iteration, two short responses each."""
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    module, rollout = Watched(), rollout or filtering()
    strategy = FSDPUlyssesStrategy(sequence_parallel_size=sp)
    trainer = quiet_trainer(
        rollout, *callbacks, max_steps=iterations, devices=devices, strategy=strategy, enable_checkpointing=False
    )
    trainer.fit(module, datamodule=PromptDataModule(path="test_filtering.prompts", batch_size=8), ckpt_path=ckpt_path)
    return module, {name: p.full_tensor().clone() for name, p in module.actor.named_parameters()}


@pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
@pytest.mark.parametrize("one_number", [False, True], ids=["as it is", "as earlier versions wrote it"])
def test_every_group_teaches_no_prompt_is_skipped_and_a_resumed_run_is_the_same(one_number, tmp_path, monkeypatch):
    if one_number:
        write = RolloutCallback.state_dict
        older = lambda self: write(self) | {"further_rounds": max(self._further_rounds.values())}  # noqa: E731
        monkeypatch.setattr(RolloutCallback, "state_dict", older)
    whole, weights = fit(4, Save(tmp_path / "ck.ckpt", 2))
    assert len(whole.scored) >= 7, "rounds beyond one per iteration, and beyond the epoch's five batches"
    assert whole.shares == [0.0] * 4
    assert all(len(set(rows)) == 8 for rows in whole.trained)
    loader = whole.trainer.train_dataloader
    stream = [loader.batch_at(*divmod(i, 5))["prompts"].index.tolist() for i in range(len(whole.scored))]
    assert whole.scored == stream
    rest, resumed = fit(4, ckpt_path=tmp_path / "ck.ckpt")
    assert rest.scored == whole.scored[-len(rest.scored) :]
    assert rest.trained == whole.trained[2:]
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


@pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
def test_a_callback_that_has_been_through_a_run_begins_the_next_one_anew():
    rollout = filtering()
    first, weights = fit(2, rollout=rollout)
    assert len(first.scored) > 2
    second, again = fit(2, rollout=rollout)
    assert second.scored == first.scored
    assert second.trainer.callback_metrics["reward/mean"] == first.trainer.callback_metrics["reward/mean"]
    assert all(torch.equal(weights[name], again[name]) for name in weights)


class Interrupt(pl.Callback):
    """Ends the first fit in its second iteration, after the rounds, once it is saved as `OnExceptionCheckpoint` would."""

    def __init__(self, path: Path) -> None:
        self.path, self.begun = path, 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.begun += 1
        if self.begun == 2:
            trainer.save_checkpoint(self.path)
            raise ValueError("stop here")


@pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
@pytest.mark.parametrize("resumed", [False, True], ids=["the same run", "a resumed one"])
def test_an_iteration_that_was_interrupted_begins_again_at_the_same_prompts(resumed, tmp_path):
    whole, _ = fit(3)
    pl.seed_everything(1, verbose=False)
    module, data = Watched(), PromptDataModule(path="test_filtering.prompts", batch_size=8)
    trainer = quiet_trainer(filtering(), Interrupt(tmp_path / "ck.ckpt"), max_steps=3, enable_checkpointing=False)
    with pytest.raises(ValueError, match="stop here"):
        trainer.fit(module, datamodule=data)
    assert len(module.scored) > 2, "further rounds in one of the two iterations"
    if resumed:
        module, _ = fit(3, ckpt_path=tmp_path / "ck.ckpt")
    else:
        trainer.fit(module, datamodule=data)
    own = module.trained[-2:]
    assert own[0] == whole.trained[1]
    if resumed:  # otherwise the optimizer is a new one
        assert own[1] == whole.trained[2]
        assert module.scored == whole.scored[-len(module.scored) :]


@pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
def test_what_counts_as_equal_is_what_the_module_trains_on(monkeypatch):
    asked: list[Any] = []

    class Asked(Rounds):
        def __init__(self, *arguments: Any) -> None:
            asked.append(arguments[2:])
            super().__init__(*arguments)

    def clipped() -> GRPOLightningModule:
        return GRPOLightningModule(**TINY_MODULE, reward=[first_is_even], mask_truncated=True, reward_clip=(-1.0, 2.0))

    monkeypatch.setattr("lightning_rlhf.callbacks.rollout.Rounds", Asked)
    monkeypatch.setitem(globals(), "Watched", clipped)
    fit(1)
    assert asked == [(True, (-1.0, 2.0))]


@pytest.mark.filterwarnings("ignore:more than half of the responses were cut", "ignore:all responses of the first")
def test_a_prompt_that_comes_again_in_an_iteration_is_drawn_anew(monkeypatch):
    """Of as many prompts as a batch has."""
    drawn: list[dict[int, list[tuple[int, ...]]]] = []

    class Draws(GRPOLightningModule):
        def score(self, rollout: Rollout) -> list[float]:
            drawn.append({})
            for row, completion in zip(rollout.group.tolist(), rollout.completions, strict=True):
                drawn[-1].setdefault(row, []).append(tuple(completion.token_ids))
            return [1.0] * len(rollout)

    few = prompts()[:8]
    monkeypatch.setitem(globals(), "prompts", lambda: few)
    monkeypatch.setitem(globals(), "Watched", lambda: Draws(**TINY_MODULE))
    fit(1)
    assert [sorted(own) for own in drawn] == [list(range(8))] * 4
    for row in range(8):
        assert len({tuple(own[row]) for own in drawn}) == 4


def one_if_even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """No two rewards differ, and of many responses there is none."""
    if any(ids[0] % 2 for ids in completion_ids):
        raise ValueError("odd")
    return [1.0] * len(completion_ids)


@pytest.mark.filterwarnings("ignore:more than half of the responses were cut", "ignore:.*could not be scored")
def test_failures_in_all_rounds_of_an_iteration_are_no_sign_that_nothing_can_be_scored(monkeypatch):
    made = GRPOLightningModule(**TINY_MODULE, reward=[one_if_even])
    monkeypatch.setitem(globals(), "Watched", lambda: made)
    fit(1)
    found = made.trainer.callback_metrics
    assert found["reward/failures"] >= len(made.last_experience)
    assert found["reward/mean"] == 1.0


def _rank(rank: int, sp: int) -> Any:
    module, _ = fit(3, devices=2, sp=sp)
    return module.trained, module.norms, module.scored


@pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
@pytest.mark.parametrize("sp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_generated_and_kept_does_not_depend_on_the_ranks(sp):
    one, _ = fit(3)
    (trained, norms, scored), other = spawn(_rank, 2, sp)
    assert trained == other[0] == one.trained
    assert norms == other[1] == pytest.approx(one.norms, rel=1e-4)
    assert len(scored) == len(one.scored) > 3
    if sp == 1:
        scored = [own + others for own, others in zip(scored, other[2], strict=True)]
    assert scored == one.scored


def test_what_cannot_be_filtered_is_refused():
    two = Sampling(num_generations=2)
    with pytest.raises(ValueError, match="async_level to 0"):
        RolloutCallback(sampling=two, filter_groups=FilterGroups(), async_level=1)
    with pytest.raises(ValueError, match="num_generations to 2 or more"):
        RolloutCallback(filter_groups=FilterGroups())
