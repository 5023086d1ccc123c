"""Rewards of steps and tokens: what a reward function may return for a response instead of one number.

    [0.0, 0.5, …]                one number per token of the response; None and NaN are 0
    [(end, value), …]            steps: ``value`` goes to the token that has the character before ``end`` of the response's text

The response's reward is their sum, so they can stand beside other functions' and serve any estimator. Those that look at tokens
(`gae`, `reinforce_plus_plus`, `remax`, `optimal_token_baseline`) get each value at its place, the others the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.rewards import RewardError
from lightning_rlhf.types import Completion, right_pad

Steps: TypeAlias = list[tuple[int | None, float]]
"""Values by end character, or, with None, one for each token."""


def read_steps(given: Sequence[Any]) -> Steps:
    """What a function returned for one response.

    Raises:
        RewardError: it is neither numbers nor (end, value).
        ValueError: a value is infinite.
    """
    try:
        if all(isinstance(one, list | tuple) for one in given):
            steps: Steps = [(int(end), _number(value)) for end, value in given]
        else:
            steps = [(None, _number(value)) for value in given]
    except TypeError as error:
        raise RewardError(f"must return numbers per token, or (end, value) per step, got {str(given)[:60]}") from error
    if infinite := [value for _, value in steps if math.isinf(value)]:
        raise ValueError(f"returned {infinite[0]}")
    return steps


def _number(value: Any) -> float:
    number = math.nan if value is None else float(value)
    return 0.0 if math.isnan(number) else number


def on_tokens(steps: Steps, ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[float]:
    """The value at each of a response's tokens.

    Args:
        decode: the text of token ids, by which a step's end is found.

    Raises:
        RewardError: there is not one value per token, or a step ends outside of the text.
    """
    if steps and steps[0][0] is None:
        surplus = steps[len(ids) :]
        if len(steps) < len(ids) or any(value for _, value in surplus):  # a padded tensor has zeros beyond the response
            raise RewardError(f"must return one number per token, {len(ids)}, got {len(steps)}")
        return [value for _, value in steps[: len(ids)]]
    values = [0.0] * len(ids)
    length = len(decode(list(ids)))
    for end, value in steps:
        assert end is not None
        if not 0 < end <= length:
            raise RewardError(f"gives a step that ends at character {end} of a response of {length}")
        low, high = 1, len(ids)  # tokens that have it
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(decode(list(ids[:middle]))) >= end else (middle + 1, high)
        values[low - 1] += value
    return values


def token_rewards(
    given: Mapping[str, Mapping[int, Steps]],
    weights: Sequence[float],
    completions: Sequence[Completion],
    decode: Callable[[list[int]], str] | None,
) -> Float[Tensor, "B T"] | None:
    """The weighted sum of what functions gave to tokens; None if none did.

    Args:
        given: of each function by its name, what it gave by response.

    Raises:
        RewardError: as `on_tokens`; or there are steps, and no ``decode``.
    """
    if not any(given.values()):
        return None
    rows = [[0.0] * len(completion.token_ids) for completion in completions]
    for (name, by_response), weight in zip(given.items(), weights, strict=True):
        for row, steps in by_response.items():
            try:
                text = _several_turns if completions[row].spans else decode or _no_text
                values = on_tokens(steps, completions[row].token_ids, text)
            except RewardError as error:
                raise RewardError(f"reward {name} {error}") from error
            rows[row] = [have + weight * more for have, more in zip(rows[row], values, strict=True)]
    return right_pad(rows)


def _several_turns(ids: list[int]) -> str:
    raise RewardError("gives values of steps, which a conversation does not have: give one value per token")


def _no_text(ids: list[int]) -> str:
    raise RewardError("gives values of steps: hand `decode` to the Scorer, or give one value per token")
