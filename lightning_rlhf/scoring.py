"""Runs reward functions on a rollout: time limits, isolation of failures, the weighted sum.

    Rollout, texts ─▶ one list per argument ─▶ each function, in a thread, on the event loop or in worker processes
                   ─▶ values (B,) per function, NaN where it abstains ─▶ Scores

A call that raises or takes longer than the limit is repeated response by response, all of them together within one more
limit, so that only the culprits are lost. A lost response has total NaN, which leaves it out of its group and of the
loss. What is wrong for every response is a `RewardError` instead: see `calls`.
"""

from __future__ import annotations

import bdb
import math
import pickle
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from pkgutil import resolve_name
from traceback import extract_tb
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from lightning_rlhf.calls import Outcome, Reward, RewardJob
from lightning_rlhf.calls import check_free as check_free  # for a score() of one's own
from lightning_rlhf.process_rewards import Steps, token_rewards
from lightning_rlhf.rewards import RewardError, normal_answer
from lightning_rlhf.runners import EventLoop, Inline, Threads, Workers, at_breakpoint
from lightning_rlhf.types import Rollout, Scores

Rows: TypeAlias = list[int]

GIVEN = ("prompts", "completions", "completion_ids", "completion_mask", "turns")
"""Arguments of a reward function besides the columns of the data; the last two of conversations only."""

NO_REWARD = "there is no reward: set model.reward, or override score() in a subclass of the module"


@dataclass(frozen=True)
class TrainerState:
    """What reward functions may know of the run; ``global_step`` counts iterations."""

    global_step: int
    max_steps: int
    epoch: int


class Scorer:
    """Runs reward functions and adds up what they say.

    Args:
        functions: reward functions, objects that can be called like one, or dotted paths of either.
        weights: of each in the sum; 1 by default.
        timeout: seconds that one call may take, and once more the repetition response by response. None: no limit, and
            functions run in the calling thread, which those need that use signals themselves. So do objects with
            ``own_limits``, which see to their time themselves.
        workers: processes for plain functions (async ones and objects with ``in_process`` stay here). Each call gets
            the responses of some prompts, never part of a prompt's. Functions must be importable: no lambda.

    Raises:
        ValueError: one is no function, or cannot be sent to a process, or the weights do not match.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any] | str],
        weights: Sequence[float] | None = None,
        timeout: float | None = 60.0,
        workers: int = 0,
    ) -> None:
        if not isinstance(functions, list | tuple):
            is_name = isinstance(functions, str) and "/" in functions
            what = "a reward model is model.reward_model" if is_name else "put it into a list"
            raise ValueError(f"reward must be a list of functions, got {functions!r}: {what}")
        called = [_function(one) for one in functions]
        if weights is not None and len(weights) != len(functions):
            raise ValueError(f"reward_weights must have one weight per function, {len(functions)}, got {len(weights)}")
        if not all(map(math.isfinite, weights or ())):
            raise ValueError(f"reward_weights must be finite, got {list(weights or ())}")
        self.rewards = [Reward(f, name) for f, name in zip(called, _names(called), strict=True)]
        self.weights = [1.0] * len(functions) if weights is None else [float(w) for w in weights]
        self.timeout, self.workers = timeout, workers
        self._inline = Inline()
        self._here = self._inline if timeout is None else Threads()
        self._loop, self._pool = EventLoop(), Workers(workers)
        for reward in self.rewards:
            reward.check()
            if self._runner(reward) is self._pool:
                _check_pickles(reward)

    def __call__(
        self,
        rollout: Rollout,
        texts: Sequence[str],
        trainer_state: Any = None,
        given: Mapping[str, tuple[torch.Tensor, float]] | None = None,
        decode: Callable[[list[int]], str] | None = None,
    ) -> Scores:
        """Score every response.

        Args:
            rollout: the responses.
            texts: each one's text.
            trainer_state: handed to functions that ask for it; of a Trainer, what `TrainerState` has.
            given: (values (B,), weight) that take part in the sum like those of a function, by name; NaN abstains.
            decode: the text of token ids; functions that give values of steps need it.

        Returns:
            `Scores` whose ``parts`` name every function, on a rank without responses too.

        Raises:
            RewardError: there is no function, or one is wrong for every response.
        """
        if not self.rewards and not given:
            raise RewardError(NO_REWARD)
        if hasattr(trainer_state, "current_epoch"):
            state = trainer_state
            trainer_state = TrainerState(state.global_step, state.max_steps, state.current_epoch)
        size, arguments = len(rollout), reward_arguments(rollout, texts, decode)
        n = rollout.sampling.num_generations
        limits = [None if self._runner(r) is self._inline else self.timeout for r in self.rewards]
        runs = [
            _Run(r, self._runner(r), limit, arguments, size, n, trainer_state)
            for r, limit in zip(self.rewards, limits, strict=True)
        ]
        for run in runs:
            if run.reward.is_async:  # in the background while the others run
                run.start()
        for run in runs:
            run.finish()
            run.leave_out_replies(rollout)
        parts = {run.reward.name: run.values for run in runs} | {n: found for n, (found, _) in (given or {}).items()}
        weights = torch.tensor([*self.weights, *(weight for _, weight in (given or {}).values())])
        values = torch.stack(list(parts.values()))
        lost = torch.stack([torch.zeros(size, dtype=torch.bool), *(run.lost for run in runs)]).any(0)
        weighted = values.nan_to_num() * weights[:, None]
        nothing = lost | values.isnan().all(0)
        return Scores(
            total=weighted.sum(0).masked_fill(nothing, math.nan),
            parts=parts,
            metrics={name: value for run in runs for name, value in run.metrics.items()},
            columns={name: column for run in runs for name, column in run.columns.items()},
            failed=lost,
            tokens=token_rewards(
                {run.reward.name: run.steps for run in runs}, self.weights, rollout.completions, decode
            ),
        )

    def close(self) -> None:
        """Stop the background loop and the worker processes; a later call starts them again."""
        self._loop.close()
        self._pool.close()

    def _runner(self, reward: Reward) -> Runner:
        if reward.is_async:
            return self._loop
        if getattr(reward.function, "own_limits", False):
            return self._inline
        if self._pool.size and not getattr(reward.function, "in_process", False):
            return self._pool
        return self._here


Runner: TypeAlias = Inline | EventLoop | Workers


class _Run:
    """One function on one rollout. ``values`` are NaN where it abstained and where ``lost``."""

    def __init__(
        self,
        reward: Reward,
        runner: Runner,
        timeout: float | None,
        arguments: dict[str, list[Any]],
        size: int,
        num_generations: int,
        trainer_state: Any,
    ) -> None:
        if size:
            reward.check_columns(arguments)
        self.reward, self.runner, self.timeout = reward, runner, timeout
        self.arguments = {name: values for name, values in arguments.items() if reward.takes(name)}
        self.trainer_state = trainer_state if reward.takes("trainer_state") else None
        self.size, self.num_generations = size, num_generations
        self.values = torch.full((size,), math.nan)
        self.lost = torch.zeros(size, dtype=torch.bool)
        self.steps: dict[int, Steps] = {}
        self.metrics: dict[str, float] = {}
        self.columns: dict[str, list[Any]] = {}
        self._weights: dict[str, int] = {}
        self._error: BaseException | None = None
        self._pending: tuple[list[Rows], list[Future[Outcome]], float] | None = None

    def start(self) -> None:
        self._pending = self._submit(self._parts())

    def finish(self) -> None:
        failed = self._collect(*(self._pending or self._submit(self._parts())))
        single = [rows for rows in failed if len(rows) == 1]
        if again := [[row] for rows in failed if len(rows) > 1 for row in rows]:
            single += self._collect(*self._submit(again))
        if single:
            self.lost[[row for rows in single for row in rows]] = True
            warnings.warn(
                f"reward {self.reward.name}: {len(single)} of {self.size} responses could not be scored{_on_this_rank()} and"
                f" are left out, the first error: {self._reason()}",
                stacklevel=3,
            )

    def leave_out_replies(self, rollout: Rollout) -> None:
        """What was given to tokens that the policy did not draw does not count."""
        for row, steps in self.steps.items():
            completion = rollout.completions[row]
            if completion.spans and all(end is None for end, _ in steps):
                counted = [*completion.mask, *[1.0] * len(steps)]  # what is too much stays
                self.steps[row] = [(None, value * on) for (_, value), on in zip(steps, counted, strict=False)]
                self.values[row] = math.fsum(value for _, value in self.steps[row])

    def _parts(self) -> list[Rows]:
        """The responses that go into one call: all of them; for processes those of some prompts."""
        if not self.size:
            return []
        if self.reward.per_response and self.reward.is_async:
            return [[row] for row in range(self.size)]
        if not isinstance(self.runner, Workers):
            return [list(range(self.size))]
        prompts = self.size // self.num_generations
        pieces = torch.arange(self.size).view(prompts, -1).tensor_split(min(prompts, 4 * self.runner.size))
        return [piece.flatten().tolist() for piece in pieces]

    def _submit(self, parts: list[Rows]) -> tuple[list[Rows], list[Future[Outcome]], float]:
        jobs = [
            RewardJob(
                self.reward,
                {name: [_copied(values[row]) for row in rows] for name, values in self.arguments.items()},
                len(rows),
                self.trainer_state,
            )
            for rows in parts
        ]
        try:
            futures = self.runner.submit(jobs, self.timeout)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise RewardError(f"reward {self.reward.name} needs what cannot be sent to a worker: {error}") from error
        return parts, futures, time.monotonic()

    def _collect(self, parts: list[Rows], futures: list[Future[Outcome]], since: float) -> list[Rows]:
        """Take in what came back in time; returns the parts that did not."""
        left = None if self.timeout is None else max(0.0, since + self.timeout + self.runner.grace - time.monotonic())
        late = wait(futures, left).not_done
        while late and at_breakpoint():
            late = wait(futures, self.timeout).not_done
        if late:
            self.runner.give_up()
        failed = []
        for rows, future in zip(parts, futures, strict=True):
            error = TimeoutError() if future in late else future.exception()
            if isinstance(error, KeyboardInterrupt | bdb.BdbQuit):
                raise error
            if isinstance(error, RewardError):
                raise RewardError(f"reward {self.reward.name} {error}") from error
            if isinstance(error, ImportError):
                raise RewardError(f"reward {self.reward.name} cannot be run: {error}") from error
            if error is None:
                self._take(rows, future.result())
            else:
                self._error = self._error or error
                failed.append(rows)
        return failed

    def _take(self, rows: Rows, outcome: Outcome) -> None:
        self.values[rows] = torch.tensor(outcome.values)
        self.steps |= {rows[place]: steps for place, steps in outcome.steps.items()}
        for name, value in outcome.metrics.items():  # the mean over the responses of all calls that logged it
            seen = self._weights.get(name, 0)
            self.metrics[name] = (self.metrics.get(name, 0.0) * seen + value * len(rows)) / (seen + len(rows))
            self._weights[name] = seen + len(rows)
        for name, values in outcome.columns.items():
            column = self.columns.setdefault(name, [None] * self.size)
            for row, value in zip(rows, values, strict=True):
                column[row] = value

    def _reason(self) -> str:
        if isinstance(self._error, TimeoutError):
            return f"no result within {self.timeout:g} s"
        text = str(self._error)
        if not isinstance(self._error, RuntimeError):
            text = f"{type(self._error).__name__}: {text}"
        text += _place(self._error)
        if "signal only works in main thread" in text or "signal.alarm" in text:
            return f"{text} (functions that use signals need a worker process, or no time limit)"
        return text


def _place(error: BaseException | None) -> str:
    """The line of the reward function from which an error came; nothing for one of this package or of another process."""
    frames = extract_tb(error.__traceback__) if error else []
    ours = [i for i, frame in enumerate(frames) if Path(frame.filename).is_relative_to(Path(__file__).parent)]
    theirs = frames[ours[-1] + 1 :] if ours else []
    return f" ({Path(theirs[0].filename).name}, line {theirs[0].lineno})" if theirs else ""


def _on_this_rank() -> str:
    alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
    return "" if alone else f" on rank {dist.get_rank()}"


def _function(one: Callable[..., Any] | str) -> Callable[..., Any]:
    """A reward function, if need be by its dotted path; a class there is made without arguments, as on the command line."""
    given = one
    if isinstance(one, str):
        try:
            one = resolve_name(one)
        except (ImportError, AttributeError, ValueError) as error:
            why = "a reward model is model.reward_model" if "/" in str(given) else error
            raise ValueError(
                f"reward must be a list of functions or their dotted paths, got {given!r}: {why}"
            ) from None
        one = one() if isinstance(one, type) else one
    if isinstance(one, type):
        raise ValueError(f"reward {one.__name__} is a class: give an object of it, {one.__name__}()")
    if not callable(one):
        raise ValueError(f"reward must be a list of functions, got {given!r}")
    return one


def _check_pickles(reward: Reward) -> None:
    try:
        pickle.dumps(reward)
    except Exception as error:
        raise ValueError(
            f"reward {reward.name} cannot be sent to a worker process ({error}): define it in a module, or no workers"
        ) from error


def _names(functions: Sequence[Callable[..., Any]]) -> list[str]:
    """``__name__`` or the class's name; with a number where several have the same."""
    names: list[str] = []
    for function in functions:
        plain = function.func if isinstance(function, partial) else function
        name = getattr(plain, "__name__", type(plain).__name__)
        same = sum(other == name or other.rpartition("_")[0] == name for other in names)
        names.append(f"{name}_{same + 1}" if name in names else name)
    return names


def reward_arguments(
    rollout: Rollout, texts: Sequence[str], decode: Callable[[list[int]], str] | None = None
) -> dict[str, list[Any]]:
    """What reward functions are called with: lists with one entry per response, prompt-major."""
    prompts, n = rollout.prompts, rollout.sampling.num_generations

    def repeat(values: Sequence[Any]) -> list[Any]:
        return [value for value in values for _ in range(n)]

    raw = repeat(prompts.raw)
    return {
        **{name: repeat(values) for name, values in prompts.columns.items()},
        "prompts": raw,
        "completions": [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(raw, texts, strict=True)
        ],
        "completion_ids": [completion.token_ids for completion in rollout.completions],
        **({"completion_mask": [list(map(int, c.mask)) for c in rollout.completions]} if rollout.several_turns else {}),
        **({"turns": turns} if (turns := _turns(rollout, decode)) else {}),
    }


def _turns(rollout: Rollout, decode: Callable[[list[int]], str] | None) -> list[list[str]]:
    """Of conversations the texts of the policy's turns and the replies, in turn; none of other responses."""
    if decode is None or not rollout.several_turns:
        return []
    return [
        [text for pair in zip_longest(map(decode, c.turns), c.replies) for text in pair if text is not None]
        for c in rollout.completions
    ]


def _copied(value: Any) -> Any:
    """Lists and dicts anew, with the same values in them, such as pictures: what a function does to its arguments changes neither
    the run, nor those of another response or function.
    """
    if isinstance(value, list):
        flat = set(map(type, value)).isdisjoint((list, dict))  # thousands of token ids
        return value.copy() if flat else [_copied(one) for one in value]
    return {name: _copied(one) for name, one in value.items()} if isinstance(value, dict) else value


def answers_of(scores: Scores, texts: Sequence[str]) -> list[str]:
    """What each response votes for: the column ``pred`` that a reward function logged, or else its `normal_answer`."""
    logged = [column for name, column in scores.columns.items() if name.rpartition("/")[2] == "pred"]
    return [str(answer) for answer in logged[0]] if logged else [normal_answer(text) for text in texts]
