"""Running reward functions: calling conventions, time limits, isolation, the sum."""

from __future__ import annotations

import asyncio
import bdb
import importlib
import math
import os
import re
import signal
import threading
import time
import warnings
from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch

from lightning_rlhf.rewards import FormatReward, LengthPenalty, RewardError, exact_answer, numeric_answer
from lightning_rlhf.scoring import Scorer
from lightning_rlhf.types import Completion, Prompts, Rollout, Sampling

nan = math.nan


def rollout(prompts=("p0", "p1"), n=2, **columns):
    """Responses of 1, 2, 3, ... tokens."""
    ids = Prompts([[1]] * len(prompts), list(prompts), columns, torch.arange(len(prompts)))
    done = [Completion([7] * (i + 1), "stop") for i in range(len(prompts) * n)]
    return Rollout.build(ids, done, Sampling(num_generations=n))


def same(tensor, values):
    assert tensor.tolist() == pytest.approx(values, nan_ok=True)


# -- functions of the kinds that users bring; at module level, so that worker processes can import them ----------------
def length(completions, **kwargs):
    return [float(len(c)) for c in completions]


def fails_on_x(completions, **kwargs):
    if "x" in completions:
        raise ValueError("saw x")
    return length(completions)


def hangs_on_x(completions, **kwargs):
    if "x" in completions:
        time.sleep(60)
    return length(completions)


def backtracks_on_x(completions, **kwargs):
    if "x" in completions:
        re.match(r"(a+)+$", "a" * 40 + "b")  # keeps the interpreter lock for hours
    return length(completions)


def dies_on_x(completions, **kwargs):
    if "x" in completions:
        os._exit(3)
    return length(completions)


def process_id(completions, **kwargs):
    return [os.getpid()] * len(completions)


def group_spread(completions, **kwargs):
    """Needs all responses of a prompt: 1 where another response of the same call has the same text."""
    return [float(completions.count(c) - 1) for c in completions]


def steps_left(completions, trainer_state, **kwargs):
    return [trainer_state.max_steps - trainer_state.global_step + trainer_state.epoch] * len(completions)


def uses_signals(completions, **kwargs):
    signal.alarm(0)
    return length(completions)


def takes_apart(prompts, completions, completion_ids, tests, **kwargs):
    """As code does that builds a conversation, or drops the EOS."""
    found = []
    for prompt, completion, ids, own in zip(prompts, completions, completion_ids, tests, strict=True):
        prompt.append(completion[0])
        own["of"].pop()
        ids.clear()
        found.append(float(len(prompt)))
    if "bb" in (completion[0]["content"] for completion in completions):
        raise ValueError("saw bb")
    return found


def too_few(completions, **kwargs):
    return [1.0]


def verl(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "x":
        raise KeyError("x")
    return {"score": float(solution_str == ground_truth), "seen": data_source, "length": len(solution_str)}


def recorder(calls):
    def record(**kwargs):
        calls.append(kwargs)
        return [0.0] * len(kwargs["completions"])

    return record


# -- what functions are called with ------------------------------------------------------------------------------------
def test_a_function_with_kwargs_gets_everything_once_per_response():
    calls = []
    state = SimpleNamespace(global_step=3)
    chat = [{"role": "user", "content": "hi"}]
    batch = rollout(["p0", chat], n=2, answer=["1", "2"], level=[5, 6])
    Scorer([recorder(calls)])(batch, ["a", "b", "c", "d"], state)
    (given,) = calls
    assert given["prompts"] == ["p0", "p0", chat, chat]
    assert given["completions"] == ["a", "b", *([{"role": "assistant", "content": t}] for t in "cd")]
    assert given["completion_ids"] == [[7], [7, 7], [7, 7, 7], [7, 7, 7, 7]]
    assert given["answer"] == ["1", "1", "2", "2"]
    assert given["level"] == [5, 5, 6, 6]
    assert given["trainer_state"] is state
    assert set(given) == {
        *("prompts", "completions", "completion_ids", "answer", "level"),
        *("trainer_state", "log_metric", "log_extra"),
    }


def test_a_function_gets_only_what_it_names():
    def by_name(completion_ids, answer, unknown=7):
        assert unknown == 7
        return [len(ids) * a for ids, a in zip(completion_ids, answer, strict=True)]

    same(Scorer([by_name])(rollout(answer=[1, 10]), ["a"] * 4).total, [1, 2, 30, 40])


def test_the_warning_says_where_in_the_function_it_was():
    def fails(completions):
        return [float(text) for text in completions]

    line = fails.__code__.co_firstlineno + 1
    with pytest.warns(UserWarning, match=rf"ValueError: could not convert .* \(test_scoring\.py, line {line}\)"):
        Scorer([fails])(rollout(), ["a"] * 4)


@pytest.mark.parametrize("reward", ["my-team/reward-model", ["my-team/reward-model"]])
def test_the_name_of_a_reward_model_is_sent_to_its_option(reward):
    with pytest.raises(ValueError, match=r"got .*: a reward model is model\.reward_model$"):
        Scorer(reward)


def test_an_argument_that_is_no_column_stops_the_run():
    def wants_solution(completions, solution):
        return [1.0] * 4

    with pytest.raises(
        RewardError, match="reward wants_solution asks for 'solution', which is none of answer, prompts"
    ):
        Scorer([wants_solution])(rollout(answer=[1, 2]), ["a"] * 4)
    with pytest.raises(RewardError, match="reward exact_answer needs one of the columns answer"):
        Scorer([exact_answer])(rollout(question=[1, 2]), ["a"] * 4)


@pytest.mark.parametrize("workers", [0, 1])
def test_verl_functions_are_called_per_response_and_their_extras_are_logged(workers):
    scorer = Scorer([verl], workers=workers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scores = scorer(
            rollout(data_source=["m", "n"], reward_model=[{"ground_truth": "a"}, None], answer=["b", "c"]), list("abax")
        )
    same(scores.total, [1, 0, 0, nan])
    assert scores.failures == 1
    assert scores.columns == {"verl/seen": ["m", "m", "n", None], "verl/length": [1, 1, 1, None]}
    assert scores.metrics == {"verl/length": 1.0}
    assert "reward verl: 1 of 4" in str(caught[0].message)
    assert "KeyError" in str(caught[0].message)
    scorer.close()


def test_verl_functions_find_the_reference_in_the_usual_places():
    def truth(solution_str, ground_truth):
        return float(ground_truth)

    for columns in (
        {"ground_truth": [1, 2], "answer": [8, 9]},
        {"reward_model": [{"ground_truth": 1}, {"ground_truth": 2}]},
    ):
        same(Scorer([truth])(rollout(n=1, **columns), ["a", "b"]).total, [1, 2])
    same(Scorer([truth])(rollout(n=1, solution=[3, 4]), ["a", "b"]).total, [3, 4])


def test_what_functions_log_is_kept():
    def logs(completions, log_metric, log_extra):
        log_metric("share", 0.5)
        log_extra(column="shout", values=[c.upper() for c in completions])
        return [0] * 4

    scores = Scorer([logs])(rollout(), list("abcd"))
    assert scores.metrics == {"share": 0.5}
    assert scores.columns == {"shout": list("ABCD")}


@pytest.mark.parametrize("name", ["failures", "abstained", "mean", "length/mean", "greedy_mean", "generated_mean"])
def test_a_function_cannot_log_under_a_name_of_the_trainers_metrics(name):
    def logs(completions, log_metric):
        log_metric(name, 0.5)
        return [0] * 4

    with pytest.raises(RewardError, match=f"logs must not log '{name}': reward/{name} is a metric of"):
        Scorer([logs])(rollout(), list("abcd"))


def test_nor_can_what_a_function_of_the_verl_kind_returns_beside_its_score():
    def compute(solution_str):
        return {"score": 1.0, "mean": 7.0}

    with pytest.raises(RewardError, match="compute must not log 'compute/mean': reward/compute/mean is a metric of"):
        Scorer([compute])(rollout(), list("abcd"))


# -- the sum -----------------------------------------------------------------------------------------------------------
def test_the_total_is_the_weighted_sum_over_those_that_have_an_opinion():
    def some(completions, **kwargs):
        return [None, 2.0, float("nan"), 4.0]

    def others(completions, **kwargs):
        return torch.tensor([1.0, nan, nan, 1.0])

    scores = Scorer([some, others], weights=[1, 0.5])(rollout(), list("abcd"))
    same(scores.total, [0.5, 2.0, nan, 4.5])
    same(scores.parts["some"], [nan, 2, nan, 4])
    same(scores.parts["others"], [1, nan, nan, 1])
    assert scores.failures == 0


def test_functions_may_be_given_by_dotted_path():
    scorer = Scorer(["lightning_rlhf.rewards.exact_answer", "lightning_rlhf.rewards.FormatReward", length])
    assert [reward.name for reward in scorer.rewards] == ["exact_answer", "FormatReward", "length"]
    assert isinstance(scorer.rewards[1].function, FormatReward)


def test_names_are_unique_and_come_from_function_partial_or_class():
    functions = [length, length, partial(length), LengthPenalty(8, 4), LengthPenalty(6, 2), lambda completions: [1] * 4]
    parts = Scorer(functions)(rollout(), list("abcd")).parts
    assert list(parts) == ["length", "length_2", "length_3", "LengthPenalty", "LengthPenalty_2", "<lambda>"]


def test_a_rank_without_responses_has_the_same_parts_and_calls_nothing():
    calls = []
    scores = Scorer([recorder(calls), length])(rollout(prompts=()), [])
    assert not calls
    assert list(scores.parts) == ["record", "length"]
    assert scores.total.shape == scores.parts["length"].shape == (0,)
    assert scores.failures == 0


# -- isolation ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("timeout", [30.0, None])
def test_only_the_response_that_makes_a_function_raise_is_lost(timeout):
    with pytest.warns(UserWarning, match="reward fails_on_x: 1 of 4 .*ValueError: saw x"):
        scores = Scorer([fails_on_x, length], timeout=timeout)(rollout(), ["a", "x", "bb", "ccc"])
    same(scores.total, [2, nan, 4, 6])
    same(scores.parts["fails_on_x"], [1, nan, 2, 3])
    same(scores.parts["length"], [1, 1, 2, 3])  # the others' values stay
    assert scores.failures == 1


def test_only_the_response_that_hangs_a_function_is_lost_and_time_is_bounded():
    start = time.monotonic()
    with pytest.warns(UserWarning, match=r"reward hangs_on_x: 1 of 4 .*no result within 0\.3 s"):
        scores = Scorer([hangs_on_x], timeout=0.3)(rollout(), ["a", "x", "bb", "ccc"])
    assert time.monotonic() - start < 20
    same(scores.total, [1, nan, 2, 3])


def test_a_function_at_a_breakpoint_has_all_the_time_and_is_called_once():
    calls = []

    def stops(completions, **kwargs):
        calls.append(len(completions))
        exec(compile("import time; time.sleep(1)", "/lib/python3/bdb.py", "exec"))
        return length(completions)

    same(Scorer([stops], timeout=0.2)(rollout(), ["a", "b", "bb", "ccc"]).total, [1, 1, 2, 3])
    assert calls == [4]


@pytest.mark.parametrize("timeout", [30.0, None])
@pytest.mark.parametrize("end", [KeyboardInterrupt, bdb.BdbQuit])
def test_what_ends_a_run_ends_it_in_a_reward_too(end, timeout):
    def ends(completions, **kwargs):
        raise end

    with pytest.raises(end):
        Scorer([ends], timeout=timeout)(rollout(), list("abcd"))


def test_a_response_lost_to_several_functions_counts_once():
    with pytest.warns(UserWarning, match="1 of 4") as caught:
        scores = Scorer([fails_on_x, fails_on_x])(rollout(), ["a", "x", "bb", "ccc"])
    assert scores.failures == 1
    assert len(caught) == 2


def test_a_response_lost_to_any_function_is_lost():
    def fails_on_b(completions):
        return [1 / len(c.strip("b")) for c in completions]

    with pytest.warns(UserWarning, match="1 of 4"):
        scores = Scorer([fails_on_x, fails_on_b])(rollout(), ["a", "x", "b", "c"])
    same(scores.total, [2, nan, nan, 2])
    assert scores.failures == 2


def test_an_infinite_reward_is_a_failure():
    def infinite(completions, **kwargs):
        return [1.0 if c == "a" else float("inf") for c in completions]

    with pytest.warns(UserWarning, match="2 of 4 .*returned inf"):
        scores = Scorer([infinite])(rollout(), ["a", "b", "b", "a"])
    same(scores.total, [1, nan, nan, 1])


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], "reward wrong must return one number per response, 4, got 1"),
        (1.0, "reward wrong must return a list with one number per response, 4, got float"),
        (["1"] * 4, "reward wrong must return numbers or None, got str '1'"),
        ([{}] * 4, "reward wrong must return numbers or None, got dict"),
    ],
)
def test_a_result_of_the_wrong_length_or_type_is_an_error_that_names_the_function(result, message):
    def wrong(completions, **kwargs):
        return result

    with pytest.raises(RewardError, match=message):
        Scorer([wrong])(rollout(), list("abcd"))


def test_arguments_by_position_are_refused():
    def nameless(prompts, completions, /):
        return [1.0] * len(completions)

    with pytest.raises(ValueError, match="reward nameless takes prompts by position only: arguments are given by name"):
        Scorer([nameless])


def test_a_missing_package_stops_the_run():
    def needs(completions, **kwargs):
        import not_a_package  # noqa: F401

    with pytest.raises(RewardError, match="reward needs cannot be run: No module named 'not_a_package'"):
        Scorer([needs])(rollout(), list("abcd"))


def test_functions_that_use_signals_are_told_where_they_can_run():
    uses = Scorer([lambda completions: signal.signal(signal.SIGALRM, signal.SIG_DFL)])
    with pytest.warns(UserWarning, match=r"4 of 4 .*signal only works in main thread.*worker process"):
        uses(rollout(), list("abcd"))
    same(Scorer([uses_signals], timeout=None)(rollout(), list("abcd")).total, [1] * 4)
    main = []
    Scorer([lambda completions: main.append(threading.current_thread()) or [0] * 4], timeout=None)(
        rollout(), list("abcd")
    )
    assert main == [threading.main_thread()]


def test_rewards_build_no_graph():
    weight = torch.ones(4, requires_grad=True)
    graphs = []

    def model(completions, **kwargs):
        graphs.append((weight * 2).requires_grad)
        return weight * 2

    same(Scorer([model])(rollout(), list("abcd")).total, [2] * 4)
    assert graphs == [False]


# -- async -------------------------------------------------------------------------------------------------------------
def test_async_functions_run_at_once_and_on_the_same_loop_each_time():
    loops = []

    async def slow(completions, **kwargs):
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0.4)
        return [1.0] * len(completions)

    class Judge:
        async def __call__(self, prompts, completions):
            await asyncio.sleep(0.4)
            return [10.0] * len(completions)

    scorer = Scorer([slow, Judge(), slow])
    start = time.monotonic()
    same(scorer(rollout(), list("abcd")).total, [12] * 4)
    assert time.monotonic() - start < 1.0
    scorer(rollout(), list("abcd"))
    assert len(set(loops)) == 1
    scorer.close()


def test_async_verl_functions_run_at_once_and_only_the_culprits_are_lost():
    async def judge(data_source, solution_str, ground_truth, extra_info=None):
        await asyncio.sleep(60 if solution_str == "h" else 0.1)
        if solution_str == "x":
            raise ValueError("x")
        return 1.0

    scorer = Scorer([judge], timeout=0.5)
    start = time.monotonic()
    with pytest.warns(UserWarning, match="2 of 16"):
        total = scorer(rollout(["p"] * 8), ["a", "x", "h", *"abcdefgaaaaaa"]).total
    assert time.monotonic() - start < 4
    same(total, [1, nan, nan, *[1] * 13])
    scorer.close()


def test_async_functions_that_hang_are_cancelled_and_a_blocked_loop_is_left_behind():
    cancelled = []

    async def hangs(completions, **kwargs):
        try:
            await asyncio.sleep(60 if "x" in completions else 0)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return length(completions)

    async def blocks(completions, **kwargs):
        time.sleep(2 if "x" in completions else 0)
        return length(completions)

    scorer = Scorer([hangs], timeout=0.3)
    with pytest.warns(UserWarning, match="1 of 4"):
        same(scorer(rollout(), ["a", "x", "bb", "ccc"]).total, [1, nan, 2, 3])
    assert len(cancelled) == 2
    scorer.close()
    scorer = Scorer([blocks], timeout=0.3)
    with pytest.warns(UserWarning, match="reward blocks"):
        scorer(rollout(), ["x"] * 4)
    same(scorer(rollout(), list("abcd")).total, [1] * 4)
    scorer.close()


# -- worker processes --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def pool():
    """Worker processes that the tests share: starting them takes seconds."""
    from lightning_rlhf.runners import Workers

    workers = Workers(2)
    yield workers
    workers.close()


def scorer_on(pool, functions, timeout=60.0):
    scorer = Scorer(functions, timeout=timeout, workers=pool.size)
    scorer._pool = pool
    return scorer


def test_workers_compute_what_the_trainer_would(pool):
    batch, texts = rollout(["p"] * 5, n=3, answer=["1", "2", "3", "4", "5"]), [str(i % 6) for i in range(15)]
    functions = [exact_answer, numeric_answer, length, group_spread]
    # numeric_answer has time limits of its own where it runs in a main thread
    there, here = scorer_on(pool, functions)(batch, texts), Scorer(functions[:3])(batch, texts)
    for name, values in here.parts.items():
        assert torch.equal(there.parts[name], values)
    assert there.parts["numeric_answer"].sum() > 0


def test_workers_are_other_processes_and_never_get_part_of_a_group(pool):
    scores = scorer_on(pool, [process_id, group_spread])(rollout(["p"] * 8, n=3), ["a"] * 24)
    ids = set(scores.parts["process_id"].tolist())
    assert os.getpid() not in ids
    assert len(ids) == 2
    assert (scores.parts["group_spread"] % 3 == 2).all()


def test_objects_that_ask_for_it_stay_in_this_process(pool):
    class Here:
        in_process = True

        def __call__(self, completions):
            return [os.getpid()] * len(completions)

    assert (scorer_on(pool, [Here()])(rollout(), list("abcd")).total == os.getpid()).all()


def test_objects_with_limits_of_their_own_have_no_others(pool):
    class Bounded:
        own_limits = True

        def __call__(self, completions):
            time.sleep(0.4)
            return [os.getpid()] * len(completions)

    assert (scorer_on(pool, [Bounded()], timeout=0.1)(rollout(), list("abcd")).total == os.getpid()).all()


def test_functions_may_use_signals_in_workers(pool):
    same(scorer_on(pool, [uses_signals])(rollout(), list("abcd")).total, [1] * 4)


def test_a_trainer_is_reduced_to_what_can_be_sent(pool):
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_steps=7)
    same(scorer_on(pool, [steps_left])(rollout(), list("abcd"), trainer).total, [7] * 4)
    same(Scorer([steps_left])(rollout(), list("abcd"), trainer).total, [7] * 4)


def test_columns_that_cannot_be_sent_to_a_worker_stop_the_run(pool):
    with pytest.raises(RewardError, match="reward length needs what cannot be sent to a worker"):
        scorer_on(pool, [length])(rollout(lock=[threading.Lock()] * 2), list("abcd"))


def test_errors_in_workers_are_isolated_or_stop_the_run_as_here(pool):
    with pytest.warns(UserWarning, match="reward fails_on_x: 1 of 4 .*ValueError: saw x"):
        same(scorer_on(pool, [fails_on_x])(rollout(), ["a", "x", "bb", "ccc"]).total, [1, nan, 2, 3])
    with pytest.raises(RewardError, match="reward too_few must return one number per response, 2, got 1"):
        scorer_on(pool, [too_few])(rollout(), ["a", "x", "bb", "ccc"])


def test_hung_and_dead_workers_are_replaced_and_only_the_culprits_are_lost(pool):
    with pytest.warns(UserWarning, match="reward backtracks_on_x: 1 of 4 .*no result within 1 s"):
        same(scorer_on(pool, [backtracks_on_x], timeout=1.0)(rollout(), ["a", "x", "bb", "ccc"]).total, [1, nan, 2, 3])
    with pytest.warns(UserWarning, match="reward dies_on_x: 1 of 4 .*process died"):
        same(scorer_on(pool, [dies_on_x])(rollout(), ["a", "x", "bb", "ccc"]).total, [1, nan, 2, 3])
    same(scorer_on(pool, [length])(rollout(), list("abcd")).total, [1] * 4)


LIGHT = """
import time
def slow_or_hanging(completions, **kwargs):
    time.sleep(60 if "x" in completions else 0.5 if "s" in completions else 0)
    return [1.0] * len(completions)
"""


def test_responses_that_hang_take_no_more_than_their_share_of_the_time(tmp_path, monkeypatch):
    """More of them than workers, and before all others; what is slow has its time when the others are done."""
    (tmp_path / "light.py").write_text(LIGHT)
    monkeypatch.syspath_prepend(tmp_path)
    scorer = Scorer([importlib.import_module("light").slow_or_hanging], timeout=3.0, workers=2)
    texts = [*"xxxs", *"a" * 8]
    with pytest.warns(UserWarning, match="reward slow_or_hanging: 3 of 12"):
        scores = scorer(rollout(["p"] * 12, n=1), texts)
    same(scores.total, [nan if text == "x" else 1 for text in texts])
    scorer.close()


def test_what_cannot_be_sent_to_a_worker_is_refused_at_once():
    with pytest.raises(ValueError, match="reward <lambda> cannot be sent to a worker process"):
        Scorer([lambda completions: [1.0]], workers=1)


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="list of functions"):
        Scorer(["exact_answer"])
    with pytest.raises(ValueError, match=r"list of functions.* put it into a list"):
        Scorer(length)
    with pytest.raises(ValueError, match=r"reward FormatReward is a class: give an object of it, FormatReward\(\)"):
        Scorer([FormatReward])
    with pytest.raises(ValueError, match=r"got 'lightning_rlhf\.rewards\.exact': .* no attribute 'exact'"):
        Scorer(["lightning_rlhf.rewards.exact"])
    with pytest.raises(ValueError, match="one weight per function, 1, got 2"):
        Scorer([length], weights=[1, 2])
    with pytest.raises(ValueError, match=r"reward_weights must be finite, got \[nan\]"):
        Scorer([length], weights=[math.nan])


def test_scoring_without_a_function_says_what_to_do():
    with pytest.raises(RewardError, match=r"set model\.reward, or override score\(\)"):
        Scorer([])(rollout(), list("abcd"))


def test_signals_that_all_processes_get_are_the_trainers_to_handle() -> None:
    """A launcher may send them to a whole process group: the last iteration's rewards are still to come."""
    from lightning_rlhf.runners import Workers

    workers = Workers(1)
    job = partial(os.getpid)
    (worker,) = [future.result(60) for future in workers.submit([job], 60)]
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        os.kill(worker, number)
    assert [future.result(60) for future in workers.submit([job], 60)] == [worker]
    workers.close()


@pytest.mark.filterwarnings("ignore:reward takes_apart")
@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_function_does_to_its_arguments_changes_nothing_else(workers):
    batch = rollout([[{"role": "user", "content": "p0"}]], 3, tests=[{"of": [1, 2]}])
    scorer = Scorer([takes_apart, takes_apart, LengthPenalty(3, 1)], workers=workers)
    scores = scorer(batch, ["a", "bb", "c"])  # the second fails, so calls are repeated one by one
    scorer.close()
    same(scores.parts["takes_apart"], [2.0, nan, 2.0])
    same(scores.parts["takes_apart_2"], [2.0, nan, 2.0])
    same(scores.parts["LengthPenalty"], [0.0, 0.0, -1.0])
    assert batch.prompts.raw == [[{"role": "user", "content": "p0"}]]
    assert batch.prompts.columns == {"tests": [{"of": [1, 2]}]}
    assert [len(completion.token_ids) for completion in batch.completions] == [1, 2, 3]
