"""Where rows come from: files, the hub, your own code, procedural tasks.

    path ─▶ .jsonl, .json     parsed as they stand         task ─▶ reasoning-gym, made from (seed, row number)
            .parquet, .csv, hub     by `datasets`
            my_pkg.prompts    an iterable of dicts, or a function giving one

`Rows` are only fetched when a batch needs them, so they may live in a memory-mapped file, or not exist until then.
"""

from __future__ import annotations

import json
import mmap
from array import array
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

Row: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = Sequence[Row]
"""Anything with ``len`` and integer indexing: a `datasets.Dataset`, a list, a procedural task."""


def read_rows(path: Any, split: str = "train", subset: str | None = None) -> Rows:
    """The rows of a file, a folder, a hub data set, or of an iterable of dicts or a function giving one, or its dotted path.

    What `datasets` reads goes to memory-mapped files in its own cache; nothing is written beside the user's file.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: it cannot be read, or it is empty.
    """
    if not isinstance(path, str | Path):
        return _some(_dicts(path, type(path).__name__), type(path).__name__)
    path = str(path)
    file = Path(path).expanduser()
    is_json, is_table = file.suffix in (".jsonl", ".json"), file.suffix in (".parquet", ".csv")
    if not file.exists() and (is_json or is_table or path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise FileNotFoundError(f"data.path: there is no file {path!r}")
    if file.is_file() and not is_json and not is_table:
        raise ValueError(f"data.path: {path!r} must end in .jsonl, .json, .parquet or .csv")
    if file.is_file() and is_json:
        rows = _json(file, split)
    elif not file.exists() and "." in path and "/" not in path:
        rows = _import(path)
    else:
        rows = _load(path, file, split, subset)
    return _some(rows, path)


def _some(rows: Rows, path: str) -> Rows:
    if not len(rows):
        raise ValueError(f"data.path: {path!r} holds no rows")
    return rows


def _load(path: str, file: Path, split: str, subset: str | None) -> Rows:
    from datasets import load_dataset

    try:
        if file.is_file():
            return load_dataset(file.suffix[1:], data_files=str(file), split=split)
        return load_dataset(str(file) if file.is_dir() else path, subset, split=split)
    except Exception as error:
        raise ValueError(
            f"data.path: {path!r} cannot be read as a data set: {first_line(error.__cause__ or error)}"
        ) from error


def _json(file: Path, split: str) -> Rows:
    """Not by `datasets`: Arrow takes text that looks like a date for one, and adds keys that only other rows have."""
    if split != "train":
        raise ValueError(f"data.split={split!r} needs a data set with splits, {str(file)!r} has none")
    with file.open("rb") as start:
        is_array = file.suffix == ".json" and start.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if not is_array:
        return JsonLines(file)
    try:
        return _dicts(json.loads(file.read_bytes()), str(file))
    except ValueError as error:
        raise ValueError(f"data.path: {str(file)!r} is not valid JSON ({error})") from error


class JsonLines(Sequence[Row]):
    """The rows of a JSON Lines file, parsed when they are asked for; memory holds where each line begins."""

    def __init__(self, file: Path) -> None:
        self.file, self.starts = file, array("q")
        if not file.stat().st_size:
            return
        with file.open("rb") as source:  # stays as it is if an editor puts another file in its place
            self.data = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
        start = 0
        for line in iter(self.data.readline, b""):
            if line.strip():
                self.starts.append(start)
            start += len(line)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: Any) -> Any:
        start = self.starts[number]
        end = self.data.find(b"\n", start)
        try:
            row = json.loads(self.data[start : end if end >= 0 else len(self.data)])
            wrong = None if isinstance(row, dict) else "is not a JSON object"
        except UnicodeDecodeError as error:
            wrong = f"is not UTF-8 ({first_line(error)}): save the file in that encoding"
        except ValueError as error:
            wrong = f"is not valid JSON ({first_line(error)})"
        if wrong:
            line = self.data[:start].count(b"\n") + 1
            raise ValueError(f"data.path: line {line} of {str(self.file)!r} {wrong}")
        return row


def _import(path: str) -> Rows:
    module, _, name = path.rpartition(".")
    try:
        source = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise FileNotFoundError(
            f"data.path: {path!r} is neither a file nor a hub data set, and cannot be imported ({first_line(error)})"
        ) from error
    return _dicts(source, path)


def _dicts(source: Any, path: str) -> Rows:
    given = source() if callable(source) else source
    if isinstance(given, Mapping):
        raise ValueError(
            f"data.path: {path!r} holds several sets, {', '.join(map(str, given))}: name one, as in data['train']"
        )
    if not isinstance(given, Iterable):
        raise ValueError(f"data.path: {path!r} must give dicts, got {type(given).__name__}")
    rows = list(given)
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
            raise ImportError(
                f"data.task needs reasoning-gym ({error}): pip install 'lightning-rlhf[tasks]'"
            ) from error
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
