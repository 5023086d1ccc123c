"""From rows to token ids.

    path (.jsonl, .parquet, hub, your code) or task ─▶ rows ─▶ PromptEncoder ─▶ PromptTable ─▶ Prompts

Rows stay where they are (memory-mapped Arrow, the user's list, a procedural task) and are fetched for one batch at a
time; only the token ids are held, as C arrays. A prompt is tokenised once: the ids that the engine gets are the ids
that the policy is trained on.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lightning_rlhf.types import Prompt, Prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = Sequence[Row]
"""Anything with ``len`` and integer indexing: a `datasets.Dataset`, a list, a procedural task."""

_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_CHUNK = 1024


def read_rows(path: str, split: str = "train", subset: str | None = None) -> Rows:
    """The rows of a file, a folder, a hub data set, or a dotted path to an iterable of dicts or a function giving one.

    Arrow files are made in the Hugging Face cache and memory-mapped; nothing is written beside the user's file.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: it cannot be read, or it is empty.
    """
    file = Path(path).expanduser()
    if file.exists():
        rows = _load(path, file, split, subset)
    elif file.suffix in _READERS or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise FileNotFoundError(f"data.path: there is no file {path!r}")
    elif "." in path and "/" not in path:
        rows = _import(path)
    else:
        rows = _load(path, file, split, subset)
    if not len(rows):
        raise ValueError(f"data.path: {path!r} holds no rows")
    return rows


def _load(path: str, file: Path, split: str, subset: str | None) -> Rows:
    from datasets import load_dataset

    try:
        if not file.is_file():
            return load_dataset(str(file) if file.is_dir() else path, subset, split=split)
        if file.suffix not in _READERS:
            raise ValueError(f"its ending must be one of {', '.join(_READERS)}")
        source = {"path": _READERS[file.suffix], "data_files": str(file), "split": split}
        rows = load_dataset(**source)
        features = {name: _dates_as_text(feature) for name, feature in rows.features.items()}
        if source["path"] == "json" and features != dict(rows.features):
            rows = load_dataset(**source, features=type(rows.features)(features))
        return rows
    except StopIteration:  # what an empty JSON file ends in
        return []
    except Exception as error:
        reason = _bad_line(file) if file.suffix == ".jsonl" and file.is_file() else None
        raise ValueError(f"data.path: {path!r} cannot be read as a data set: {reason or first_line(error)}") from error


def _dates_as_text(feature: Any) -> Any:
    """JSON has no dates: a string that looks like one is text, whatever Arrow guesses."""
    from datasets import List, Value

    if isinstance(feature, Value):
        return Value("string") if feature.dtype.startswith(("timestamp", "date", "time")) else feature
    if isinstance(feature, dict):
        return {name: _dates_as_text(part) for name, part in feature.items()}
    return List(_dates_as_text(feature.feature)) if isinstance(feature, List) else feature


def _bad_line(file: Path) -> str | None:
    """What is wrong with the first line that is no JSON object."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    return f"line {number} is not a JSON object"
            except ValueError as error:
                return f"line {number} is not valid JSON ({first_line(error)})"
    return None


def _import(path: str) -> Rows:
    module, _, name = path.rpartition(".")
    try:
        source = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise FileNotFoundError(
            f"data.path: {path!r} is neither a file nor a hub data set, and cannot be imported ({first_line(error)})"
        ) from error
    rows = list(source() if callable(source) else source)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"data.path: {path!r} must give dicts, row {number} is a {type(row).__name__}")
    return rows


def first_line(error: BaseException) -> str:
    """What an error says, short enough for a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class TaskRows(Sequence[Row]):
    """Rows of a reasoning-gym task, made on demand from (seed, row number).

    Columns: ``prompt`` (the question), ``answer``, and for the reward `rewards.reasoning_gym` the ``task``, its
    ``task_args`` and the whole ``entry`` that the task's own verifier asks for.
    """

    def __init__(self, task: str, size: int, seed: int, args: Mapping[str, Any] | None = None) -> None:
        try:
            from reasoning_gym import create_dataset
        except ImportError as error:
            raise ImportError("data.task needs reasoning-gym: pip install 'lightning-rlhf[tasks]'") from error
        self.task, self.args = task, dict(args or {})
        try:
            self.entries = create_dataset(task, size=size, seed=seed, **self.args)
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"data.task: {task!r} with {self.args} cannot be made: {first_line(error)}") from error

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)  # the task itself would make any row
        entry = self.entries[number]
        shared = {"task": self.task, "task_args": self.args}
        return {"prompt": entry["question"], "answer": entry["answer"], **shared, "entry": entry}


def special_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens (one BOS, or none, as a rule) that the tokenizer puts before a text."""
    bare, full = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    return next((full[:i] for i in range(len(full)) if full[i : i + len(bare)] == bare), [])


def conversation(prompt: Any) -> Prompt:
    """A prompt without the None entries by which Arrow fills up keys that only other rows' messages have.

    Raises:
        ValueError: neither text nor a list of messages, or empty.
    """
    if isinstance(prompt, str):
        filled: Any = prompt.strip()
    elif isinstance(prompt, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in prompt):
        prompt = [{k: v for k, v in message.items() if v is not None or k == "content"} for message in prompt]
        filled = any(message.get("content") for message in prompt)
    else:
        got = "nothing" if prompt is None else f"{type(prompt).__name__} {str(prompt)[:40]!r}"
        raise ValueError(f"must be text or a list of messages with role and content, got {got}")
    if not filled:
        raise ValueError("is empty")
    return prompt


@dataclass(frozen=True)
class PromptEncoder:
    """Prompt to token ids.

    A conversation goes through the chat template once, with the generation prompt (one that ends in an assistant
    message is continued instead); text is taken as it is unless ``chat_template`` wraps it as one user message. Where
    the tokenizer begins a text with special tokens (a BOS), the ids begin with exactly those, whether or not template
    or text held them.
    """

    tokenizer: PreTrainedTokenizerBase
    chat_template: bool = False
    system_prompt: str | None = None
    template_args: Mapping[str, Any] | None = None

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of rendered prompts."""
        encoded = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        prefix = special_prefix(self.tokenizer)
        return [ids if ids[: len(prefix)] == prefix else prefix + ids for ids in encoded["input_ids"]]

    def render(self, prompt: Any) -> str:
        """The text that is tokenised.

        Raises:
            ValueError: the prompt is empty or no prompt at all, or there is no template, or it refuses the prompt.
        """
        messages = conversation(prompt)
        if isinstance(messages, str):
            if not self.chat_template:
                if self.system_prompt is not None:
                    raise ValueError(
                        "is text, to which data.system_prompt cannot be added: set data.chat_template: true"
                    )
                return messages
            messages = [{"role": "user", "content": messages}]
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        if not self.tokenizer.chat_template:
            raise ValueError("needs a chat template, but the tokenizer has none: give text, or take an instruct model")
        ends = "continue_final_message" if messages[-1]["role"] == "assistant" else "add_generation_prompt"
        arguments = {**(self.template_args or {}), ends: True}
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
        except Exception as error:
            raise ValueError(f"is refused by the chat template: {first_line(error)}") from error


@dataclass(frozen=True)
class PromptTable:
    """Rows, and the token ids of those that are used.

    Args:
        rows: the data.
        prompt_column: which column is the prompt.
        columns: the other columns; they flow to the rewards.
        numbers: the rows used, by number.
        ids: token ids of each of them.
        first_index: the `Prompts.index` of row 0.
    """

    rows: Rows
    prompt_column: str
    columns: tuple[str, ...]
    numbers: Sequence[int]
    ids: list[array[int]]
    first_index: int = 0

    @classmethod
    def build(
        cls, rows: Rows, numbers: range, encoder: PromptEncoder, prompt_column: str = "prompt", first_index: int = 0
    ) -> PromptTable:
        """Tokenise the rows ``numbers``.

        Raises:
            ValueError: no such column, or a prompt that is none; the first such row is named.
        """
        columns: dict[str, None] = {}
        ids: list[array[int]] = []
        for start in range(0, len(numbers), _CHUNK):
            texts = []
            for number in numbers[start : start + _CHUNK]:
                row = rows[number]
                columns.update(dict.fromkeys(row))
                if prompt_column not in row:
                    raise ValueError(
                        f"data: row {number} has no column {prompt_column!r}, only {', '.join(row) or 'none'}"
                    )
                try:
                    texts.append(encoder.render(row[prompt_column]))
                except ValueError as error:
                    raise ValueError(f"data: the prompt of row {number} {error}") from error
            ids += [array("i", one) for one in encoder(texts)]
        columns.pop(prompt_column, None)
        return cls(rows, prompt_column, tuple(columns), numbers, ids, first_index)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.ids), default=0)

    def where(self, keep: Callable[[array[int]], bool]) -> PromptTable:
        """A table of the prompts whose token ids pass ``keep``."""
        kept = [(number, ids) for number, ids in zip(self.numbers, self.ids, strict=True) if keep(ids)]
        return replace(self, numbers=[number for number, _ in kept], ids=[ids for _, ids in kept])

    def take(self, positions: Sequence[int]) -> Prompts:
        """The prompts at ``positions``, which may be none."""
        numbers = [self.numbers[p] for p in positions]
        rows = [self.rows[number] for number in numbers]
        return Prompts(
            ids=[self.ids[p].tolist() for p in positions],
            raw=[conversation(row[self.prompt_column]) for row in rows],
            columns={name: [row.get(name) for row in rows] for name in self.columns},
            index=torch.tensor(numbers, dtype=torch.int64) + self.first_index,
        )
