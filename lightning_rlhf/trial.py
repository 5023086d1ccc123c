"""Reward functions tried on rows of the data, without a model: ``lightning-rlhf rewards``.

    rows, evenly over the data ─▶ answers to each: the reference, a given text, nothing, junk ─▶ every function, row by row

What it answers: whether the columns are there, a right answer is worth more than junk, how long a call takes, and what raises.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from lightning_rlhf.paths import local_path
from lightning_rlhf.prompts import conversation
from lightning_rlhf.scoring import Scorer
from lightning_rlhf.types import Completion, Prompts, Rollout, Sampling

REFERENCES = ("answer", "solution", "ground_truth", "response", "completion")
"""Columns that may hold a right answer."""

JUNK = "qwrt 17 zxcv. </answer> ``` {[("


@dataclass
class Trial:
    """One reward function's results: by kind of answer a list with an entry per row, NaN where there is no score."""

    name: str
    weight: float
    scores: dict[str, list[float]] = field(default_factory=dict)
    abstained: dict[str, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def try_run(module: Any, data: Any, count: int, completion: str | None, completion_column: str | None) -> list[Trial]:
    """`try_rewards` of a run that is configured but not started; of its model it reads the tokenizer."""
    from transformers import AutoTokenizer

    trust = module.settings.trust_remote_code
    folder = local_path(data.tokenizer or module.settings.model, trust, weights=False)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    return try_rewards(
        module.scorer,
        data.train_rows,
        count,
        "prompt" if data.task else data.prompt_column,
        encode=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        completion=completion,
        completion_column=completion_column,
    )


def try_rewards(
    scorer: Scorer,
    rows: Sequence[dict[str, Any]],
    count: int,
    prompt_column: str,
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    completion: str | None = None,
    completion_column: str | None = None,
) -> list[Trial]:
    """Call every function of ``scorer`` on answers to ``count`` rows.

    Args:
        encode: token ids of a text.
        decode: text of token ids.
        completion: a text to try on every row.
        completion_column: whose text is tried as the reference; by default the first of `REFERENCES` that there is.

    Raises:
        ValueError: no such column, or there are no functions.
        RewardError: a function is wrong for every response.
    """
    if not scorer.rewards:
        raise ValueError("there is no reward to try: set model.reward (a score() of a subclass cannot be tried)")
    numbers = sorted({i * len(rows) // min(count, len(rows)) for i in range(min(count, len(rows)))})
    columns = list(dict.fromkeys(name for number in numbers for name in rows[number]))
    if prompt_column not in columns:
        raise ValueError(f"data.prompt_column: the data has no column {prompt_column!r}, only {', '.join(columns)}")
    reference = completion_column or next((name for name in REFERENCES if name in columns), None)
    if reference is not None and reference not in columns:
        raise ValueError(f"rewards.completion_column: the data has no column {reference!r}, only {', '.join(columns)}")
    trials = []
    for reward, weight in zip(scorer.rewards, scorer.weights, strict=True):
        alone = Scorer([reward.function], timeout=scorer.timeout, workers=scorer.workers)
        trial = Trial(reward.name, weight)
        for number in numbers:
            row = rows[number]
            answers = {} if reference is None else {reference: _text(row.get(reference))}
            answers |= {} if completion is None else {"completion": completion}
            answers |= {"empty": "", "junk": JUNK}
            others = {name: [row.get(name)] for name in columns if name != prompt_column}
            prompts = Prompts([[]], [conversation(row[prompt_column])], others, torch.tensor([number]))
            ids = [encode(text) for text in answers.values()]
            one_turn = "turns" in reward.parameters  # which only conversations have
            given = [Completion(one, "stop", spans=(len(one),) * one_turn) for one in ids]
            rollout = Rollout.build(prompts, given, Sampling(num_generations=len(given)))
            begin = time.perf_counter()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                scores = alone(rollout, list(answers.values()), decode=decode)
            trial.seconds.append(time.perf_counter() - begin)
            trial.errors += [f"row {number}: {one.message}" for one in caught]
            for kind, value in zip(answers, scores.total.tolist(), strict=True):
                trial.scores.setdefault(kind, []).append(value)
                abstained = not scores.failures and value != value
                trial.abstained[kind] = trial.abstained.get(kind, 0) + abstained
        alone.close()
        trials.append(trial)
    return trials


def _text(value: Any) -> str:
    """Of a column: text as it is, the last message of a conversation."""
    if isinstance(value, list) and value and isinstance(value[-1], dict) and "content" in value[-1]:
        value = value[-1]["content"]
    return value if isinstance(value, str) else "" if value is None else str(value)


def table(trials: Sequence[Trial]) -> Group:
    """A line for each function and kind of answer; errors below."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("reward", "answer"):
        found.add_column(name, overflow="fold")
    for name in ("mean", "lowest", "highest", "abstained", "errors"):
        found.add_column(name, justify="right")
    for trial in trials:
        for place, (kind, scores) in enumerate(trial.scores.items()):
            valid = [score for score in scores if score == score]
            numbers = [sum(valid) / len(valid), min(valid), max(valid)] if valid else []
            cells = [f"{number:.4g}" for number in numbers] or ["-"] * 3
            lost = len(scores) - len(valid) - trial.abstained[kind]
            first = Text(trial.name if place == 0 else "")
            found.add_row(first, Text(kind), *cells, str(trial.abstained[kind]), str(lost))
    times = [
        f"{trial.name}, weight {trial.weight:g}: {len(trial.seconds)} calls, one per row,"
        f" {1e3 * sum(trial.seconds) / len(trial.seconds):.3g} ms on average, {1e3 * max(trial.seconds):.3g} at most"
        for trial in trials
    ]
    errors = [Text(f"error: {error}", style="red") for trial in trials for error in trial.errors]
    return Group(found, *(Text(line, style="dim") for line in times), *errors)
