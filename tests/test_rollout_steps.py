"""The steps of a rollout: what is asked of the engine, what is compared after a sync, what moves, what watches."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toys import TINY_MODULE, even_tokens, fit

from lightning_rlhf import GRPOLightningModule, RolloutCallback, Sampling
from lightning_rlhf.callbacks import watchdog
from lightning_rlhf.callbacks.rollout_steps import RolloutSteps
from lightning_rlhf.modules.correction import Correction
from lightning_rlhf.phases import Phases
from lightning_rlhf.rollout import TransformersEngine
from lightning_rlhf.rollout.sharing import Pool
from lightning_rlhf.types import Completion, Prompts

PROMPTS = Prompts([[5], [6, 7]], ["a", "b"], {"answer": [1, 2]}, torch.tensor([30, 80]), ["picture", None])  # type: ignore[list-item]
TWO = Sampling(num_generations=2)


class Asked:
    """An engine that notes its requests."""

    tensor_parallel_size = 1

    def generate(self, prompts: Any, sampling: Any, *, seeds: Any, images: Any = None, log_probs: bool = False) -> Any:
        self.requests = list(zip(prompts, seeds, images or [None] * len(prompts), strict=True))
        return [Completion([1], "stop") for _ in prompts]


def steps_of(seed: int = 1, **options: Any) -> Any:
    steps: Any = RolloutSteps(RolloutCallback(**options))
    steps.engine, steps.context, steps.speaker = Asked(), 100, None
    steps.pool = Pool(1, 1, 0, lambda value: [value])
    trainer = SimpleNamespace(training=True, fit_loop=SimpleNamespace(total_batch_idx=0))
    steps.module = SimpleNamespace(seed=seed, trainer=trainer, phases=Phases())
    return steps


def requests(seed: int = 1, iteration: int = 4, prompts: Prompts = PROMPTS, greedy: bool = False) -> list[Any]:
    steps = steps_of(seed)
    run, own = steps.share(prompts, TWO, iteration, False, greedy)
    assert len(run()[own]) == len(prompts) * (2 + greedy)
    return steps.engine.requests


def test_every_response_has_a_seed_of_its_own_of_run_iteration_row_and_number():
    others = replace(PROMPTS, index=torch.tensor([31, 81]))
    asked = [requests(), requests(seed=2), requests(iteration=5), requests(prompts=others)]
    seeds = [seed for own in asked for _, seed, _ in own]
    assert len(set(seeds)) == 4 * 4
    assert requests() == asked[0]
    swapped = replace(PROMPTS, ids=PROMPTS.ids[::-1], index=PROMPTS.index.flip(0))
    assert [seed for _, seed, _ in requests(prompts=swapped)] == seeds[2:4] + seeds[:2], "whatever shares the batch"


def test_the_greedy_response_comes_behind_the_others_and_pictures_go_with_each():
    asked = requests(greedy=True)
    assert [(ids, shown) for ids, _, shown in asked] == [([5], "picture")] * 3 + [([6, 7], None)] * 3
    assert [seed is None for _, seed, _ in asked] == [False, False, True] * 2


def test_a_conversation_has_the_columns_of_its_prompt_and_no_pictures():
    steps, heard = steps_of(), []
    steps.speaker = lambda generate, ids, rows, seeds: heard.extend(zip(ids, rows, strict=True)) or [None] * len(ids)
    with pytest.raises(ValueError, match=r"rollout\.conversation is for text, and prompts have images"):
        steps.share(PROMPTS, TWO, 0, False, False)
    run, _ = steps.share(replace(PROMPTS, images=None), TWO, 0, False, False)
    run()
    one, other = {"answer": 1, "prompt": "a"}, {"answer": 2, "prompt": "b"}
    assert heard == [([5], one)] * 2 + [([6, 7], other)] * 2


@pytest.mark.parametrize(("known", "first"), [({30: 4, 80: 5}, 80), ({30: 5, 80: 4}, 30), ({30: 5}, 80), ({80: 5}, 30)])
def test_the_longest_start_first_and_those_of_which_nothing_is_known_before_them(known, first):
    steps = steps_of()
    steps.longest = known
    run, _ = steps.share(PROMPTS, TWO, 0, False, False)
    run()
    assert steps.engine.requests[0][0] == ([5] if first == 30 else [6, 7])


def test_a_step_is_watched_as_long_as_the_user_says():
    with steps_of(timeout_s=60.0).step("sync", "checksum"):
        (step,) = watchdog._watch._steps
        assert (step.what, step.seconds) == ("sync checksum of iteration 1", 60.0)
    with steps_of().step("sync"):
        assert not watchdog._watch._steps


def test_what_lives_on_the_host_is_not_offloaded_to_it():
    steps = steps_of()
    for on_host, moved in ((False, ["actor", "reference", "reward_model"]), (True, ["actor"])):
        roots = {"actor": "actor", "critic": None, "reference": "reference", "reward_model": "reward_model"}
        steps.module = SimpleNamespace(settings=SimpleNamespace(offload_reference=on_host), **roots)
        assert steps._roots() == moved


class Notes(TransformersEngine):
    def load_weights(self, weights: Any, version: int) -> None:
        weights = list(weights)
        self.dtypes = {tensor.dtype for _, tensor in weights}
        super().load_weights(weights, version)


@pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
def test_weights_travel_in_the_dtype_that_is_computed_with(tmp_path):
    engine = Notes()
    fit(
        GRPOLightningModule(**TINY_MODULE, reward=[even_tokens]),
        tmp_path,
        1,
        {"engine": engine},
        precision="bf16-mixed",
    )
    assert engine.dtypes == {torch.bfloat16}


class Spoils(TransformersEngine):
    """Has one wrong number after the second sync."""

    def load_weights(self, weights: Any, version: int) -> None:
        super().load_weights(weights, version)
        if version == 1:
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[7] += 0.5


@pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
def test_an_engine_with_other_weights_than_were_sent_ends_the_run(tmp_path):
    module = GRPOLightningModule(**TINY_MODULE, reward=[even_tokens])
    with pytest.raises(RuntimeError, match="the engine does not hold the weights that were sent to it"):
        fit(module, tmp_path, 3, {"engine": Spoils(), "verify_sync_every": 1})
    assert module.trainer.global_step == 1


@pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
def test_a_correction_has_the_sampler_s_log_probs_in_every_iteration(tmp_path):
    module = GRPOLightningModule(**TINY_MODULE, reward=[even_tokens], correction=Correction())
    rows = fit(module, tmp_path, 3, {"log_probs_every": 0})
    assert all(row["rollout/is_ess"] > 0.5 for row in rows)


def test_the_engine_sleeps_after_a_validation():
    slept: list[str] = []
    callback = RolloutCallback()
    callback._steps = SimpleNamespace(wake=lambda average: slept.append("wake"), sleep=lambda: slept.append("sleep"))  # type: ignore[assignment]
    for stage in ("validation", "test"):
        getattr(callback, f"on_{stage}_start")(None, None)
        getattr(callback, f"on_{stage}_end")(None, None)
    assert slept == ["wake", "sleep"] * 2


def test_a_run_has_one_rollout_callback():
    one, module = RolloutCallback(), SimpleNamespace(needs_greedy=False)
    trainer: Any = SimpleNamespace(callbacks=[one, RolloutCallback()])
    with pytest.raises(ValueError, match="there are two RolloutCallbacks: configure the one under rollout"):
        one.setup(trainer, module, "fit")  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", ["validation", "test"])
def test_every_validation_draws_the_same(stage):
    drawn = []
    callback = RolloutCallback(val_sampling=TWO)
    callback._steps = SimpleNamespace(generate=lambda *arguments: drawn.append(arguments))  # type: ignore[assignment]
    for step in (0, 5):
        trainer: Any = SimpleNamespace(global_step=step, current_epoch=step)
        getattr(callback, f"on_{stage}_batch_start")(trainer, None, {"prompts": PROMPTS}, 0)
    assert drawn == [(PROMPTS, TWO, -1, False)] * 2
