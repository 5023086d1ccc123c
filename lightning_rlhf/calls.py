"""How reward functions are called.

Two kinds are taken as they are, told apart by their parameters; each may be ``async``:

    TRL     f(prompts, completions, completion_ids, <columns>, trainer_state, log_metric, log_extra) -> [float | None]
    verl    f(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, ...}, per response

In place of a float there may be a list of values of steps or tokens, see `process_rewards`.
A function gets those of the arguments that it names, or all of them if it has ``**kwargs``. What is wrong for every
response (a result of the wrong length or type, an argument that there is not) is a `RewardError`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_rlhf.process_rewards import Steps, read_steps
from lightning_rlhf.rewards import RewardError, text_of

_STATE = ("trainer_state", "log_metric", "log_extra")
_RESERVED = ("mean", "std", "square", "failures", "abstained", "frac_zero_std", "greedy_mean", "generated_mean")
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERL_COLUMNS = ("data_source", "ground_truth", "reward_model", "answer", "solution", "extra_info")


@dataclass(frozen=True)
class Outcome:
    """What a function said of some responses: NaN where it abstained, and what it logged; ``steps`` by place, if it gave any."""

    values: list[float]
    steps: dict[int, Steps] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Reward:
    """A reward function, its name in the metrics, and how it wants to be called."""

    function: Callable[..., Any]
    name: str

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    @property
    def per_response(self) -> bool:
        """Whether it is of the verl kind."""
        return "solution_str" in self.parameters

    @property
    def is_async(self) -> bool:
        return any(inspect.iscoroutinefunction(f) for f in (self.function, type(self.function).__call__))

    def check(self) -> None:
        """Raise ValueError if it cannot be called with arguments by name."""
        if nameless := [p.name for p in self.parameters.values() if p.kind is p.POSITIONAL_ONLY]:
            raise ValueError(f"reward {self.name} takes {nameless[0]} by position only: arguments are given by name")

    def takes(self, name: str) -> bool:
        if self.per_response:
            return name == "completions" or name in _VERL_COLUMNS
        return name in self.parameters or any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())

    def missing(self, columns: Collection[str]) -> list[str]:
        """Arguments that it must have and that there are not."""
        available = _VERL if self.per_response else {*columns, *_STATE}
        named = [p for p in self.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return [p.name for p in named if p.default is p.empty and p.name not in available]

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise RewardError if it must have an argument that there is not."""
        if missing := self.missing(columns):
            raise RewardError(f"reward {self.name} asks for {missing[0]!r}, which is none of {', '.join(columns)}")


@dataclass(frozen=True)
class RewardJob:
    """A reward function and the responses to call it on; ``arguments`` have one entry per response."""

    reward: Reward
    arguments: dict[str, list[Any]]
    size: int
    trainer_state: Any = None

    def __call__(self) -> Outcome:
        with torch.no_grad():
            if self.reward.per_response:
                return self._of_each([self.reward.function(**kwargs) for kwargs in self._each()])
            kwargs, logged = self._all()
            return self._of_all(self.reward.function(**kwargs), logged)

    async def run_async(self) -> Outcome:
        with torch.no_grad():
            if self.reward.per_response:
                return self._of_each(await asyncio.gather(*(self.reward.function(**kwargs) for kwargs in self._each())))
            kwargs, logged = self._all()
            return self._of_all(await self.reward.function(**kwargs), logged)

    def _all(self) -> tuple[dict[str, Any], Outcome]:
        """The arguments of one call for all responses, and what its log functions write to."""
        logged = Outcome([])

        def log_metric(name: str, value: float) -> None:
            check_free(name)
            logged.metrics[name] = float(value)

        def log_extra(column: str, values: Sequence[Any]) -> None:
            if len(values) != self.size:
                raise RewardError(f"must give log_extra({column!r}) {self.size} values, got {len(values)}")
            logged.columns[column] = list(values)

        available = {**self.arguments, **dict(zip(_STATE, (self.trainer_state, log_metric, log_extra), strict=True))}
        return {name: value for name, value in available.items() if self.reward.takes(name)}, logged

    def _of_all(self, raw: Any, logged: Outcome) -> Outcome:
        values, steps = _numbers(raw, self.size)
        return replace(logged, values=values, steps=steps)

    def _each(self) -> list[dict[str, Any]]:
        """The arguments of one call per response."""
        rows = [{name: values[i] for name, values in self.arguments.items()} for i in range(self.size)]
        calls = [
            {
                "data_source": row.get("data_source"),
                "solution_str": text_of(row["completions"]),
                "ground_truth": _ground_truth(row),
                "extra_info": row.get("extra_info") or {},
            }
            for row in rows
        ]
        return [{name: value for name, value in call.items() if name in self.reward.parameters} for call in calls]

    def _of_each(self, raw: Sequence[Any]) -> Outcome:
        results = [one if isinstance(one, dict) else {"score": one} for one in raw]
        if without := [one for one in results if "score" not in one]:
            raise RewardError(f"must return a number or a dict with a score, got one with {', '.join(without[0])}")
        extras = dict.fromkeys(key for one in results for key in one if key != "score")
        for key in extras:
            check_free(f"{self.reward.name}/{key}")
        columns = {f"{self.reward.name}/{key}": [one.get(key) for one in results] for key in extras}
        numbers = {key: [float(v) for v in values if isinstance(v, int | float)] for key, values in columns.items()}
        metrics = {key: sum(values) / len(values) for key, values in numbers.items() if values}
        return Outcome(*_numbers([one["score"] for one in results], self.size), metrics, columns)


def check_free(name: str) -> None:
    """Raise RewardError if what is logged under ``name`` would be mixed with a metric of the trainer's."""
    if name in _RESERVED or name.endswith("/mean"):
        raise RewardError(f"must not log {name!r}: reward/{name} is a metric of the trainer's")


def _ground_truth(row: Mapping[str, Any]) -> Any:
    if "ground_truth" in row:
        return row["ground_truth"]
    if isinstance(row.get("reward_model"), dict):
        return row["reward_model"].get("ground_truth")
    return row.get("answer", row.get("solution"))


def _numbers(raw: Any, size: int) -> tuple[list[float], dict[int, Steps]]:
    """Checked values, and steps by place; None becomes NaN, steps their sum."""
    values = raw.tolist() if hasattr(raw, "tolist") else raw
    if not isinstance(values, list | tuple):
        raise RewardError(f"must return a list with one number per response, {size}, got {type(raw).__name__}")
    if len(values) != size:
        raise RewardError(f"must return one number per response, {size}, got {len(values)}")
    plain = [value.tolist() if hasattr(value, "tolist") else value for value in values]
    steps = {place: read_steps(value) for place, value in enumerate(plain) if isinstance(value, list | tuple)}
    for place, one in steps.items():
        plain[place] = math.fsum(value for _, value in one)
    return [math.nan if value is None else _number(value) for value in plain], steps


def _number(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number) and not isinstance(value, float):
        raise RewardError(f"must return numbers or None, got {type(value).__name__} {str(value)[:40]!r}")
    if math.isinf(number):
        raise ValueError(f"returned {value}")
    return number
