"""Checkpoints that somebody else may have written: loading one runs nothing of it.

`read` → DCP with `Reader` and `Planner`. The marker and what is no tensor in the shards go through torch's ``weights_only``,
as tensors do in DCP; its index, which torch unpickles without limits, may only name what an index consists of.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

import torch
from fsspec.core import url_to_fs
from jsonargparse import typing as numbers
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from typing_extensions import override

from lightning_rlhf.storage import INDEX, MARKER, exists, listed, newest_first, retried

_NUMBERS = [
    *(numbers.PositiveInt, numbers.NonNegativeInt, numbers.PositiveFloat, numbers.NonNegativeFloat),
    *(numbers.ClosedUnitInterval, numbers.OpenUnitInterval),
]
"""Of the command line, in optimizers of checkpoints that were written before they were made plain: they do nothing else."""


class UntrustedCheckpoint(ValueError):
    """A checkpoint holds pickles of classes that ours do not; nothing of them was executed."""


class DamagedCheckpoint(ValueError):
    """A complete checkpoint whose files are not as they were written."""


class Reader(FsspecReader):
    """DCP's, of a folder whose index `read` has read."""

    def __init__(self, path: str, index: Any) -> None:
        super().__init__(path)
        self._name, self._index = path, index

    @override
    def read_metadata(self) -> Any:
        return self._index

    @override
    def read_data(self, plan: Any, planner: Any) -> Any:
        try:
            return retried(super().read_data, plan, planner)
        except torch.OutOfMemoryError:  # of the device that it is read to
            raise
        except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise _damaged(self._name, "shards", error) from error


class Planner(DefaultLoadPlanner):
    """DCP's, which unpickles what is no tensor (options of the optimizer) without restriction.

    Args:
        path: of the checkpoint, for messages.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    @override
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(_load(value, self._path, "shards", True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def read(path: str, trusted: bool) -> tuple[dict[str, Any], Any]:
    """The marker's content and the index of the shards, which are as long as it says.

    Args:
        trusted: unpickle whatever the files hold.

    Raises:
        FileNotFoundError: the checkpoint is not there or not complete.
        UntrustedCheckpoint: it holds what ours do not.
        DamagedCheckpoint: it cannot be read.
    """
    metadata = read_marker(path, trusted)
    fs, root = url_to_fs(path)
    sizes = {entry["name"].rpartition("/")[2]: entry["size"] for entry in retried(fs.ls, root, detail=True)}
    if INDEX not in sizes:
        raise _damaged(path, INDEX, FileNotFoundError(INDEX))
    file = io.BytesIO(retried(fs.cat_file, f"{root}/{INDEX}"))
    try:
        index = pickle.load(file) if trusted else _IndexUnpickler(file, path).load()
        ends = [(part.relative_path, part.offset + part.length) for part in index.storage_data.values()]
    except UntrustedCheckpoint:
        raise
    except Exception as error:  # whatever bytes that are no pickle lead to
        raise _damaged(path, INDEX, error) from error
    for name, end in ends:
        if name not in sizes:
            raise _damaged(path, "shards", FileNotFoundError(name))
        if (size := sizes[name]) is not None and size < end:
            raise _damaged(path, "shards", EOFError(f"{name} has {size} of at least {end} bytes"))
    return metadata, index


def read_marker(path: str, trusted: bool) -> dict[str, Any]:
    """The first half of `read`."""
    fs, root = url_to_fs(path)
    fs.invalidate_cache()
    try:
        marker = retried(fs.cat_file, f"{root}/{MARKER}")
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(path) from None
    return _load(io.BytesIO(marker), path, MARKER, not trusted)


def _missing(path: str) -> FileNotFoundError:
    """What to say of a place that is no complete checkpoint."""
    if not exists(path):
        return FileNotFoundError(f"there is no checkpoint {path!r}")
    folder = path.rstrip("/")
    if newest := next(iter(newest_first(folder) or newest_first(f"{folder}/checkpoints")), None):
        return FileNotFoundError(f"{path!r} is a folder of checkpoints: give one of them, the latest is {newest}")
    if any(name.endswith(".distcp") for name, _ in listed(path)):
        return FileNotFoundError(f"{path!r} is not a complete checkpoint: it has no {MARKER}")
    return FileNotFoundError(f"{path!r} is no checkpoint of this package: those are folders with a {MARKER}")


def _load(file: io.BytesIO, path: str, part: str, weights_only: bool) -> Any:
    try:
        with torch.serialization.safe_globals(_NUMBERS):
            return torch.load(file, weights_only=weights_only, map_location="cpu")
    except Exception as error:  # whatever bytes that are no pickle lead to
        name = re.search(r"(?:GLOBAL|got|class|function) ([\w.]+\.\w+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and name:
            raise _untrusted(path, part, name[1]) from None
        raise _damaged(path, part, error) from error


class _IndexUnpickler(pickle.Unpickler):
    """Of DCP's index: its dataclasses, shapes, dtypes and layouts. Calling any of them does nothing but build it."""

    _KNOWN = {
        "torch": {"Size", *(str(v).removeprefix("torch.") for v in vars(torch).values() if isinstance(v, torch.dtype))},
        "torch.serialization": {"_get_layout"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.distributed.checkpoint.metadata": {
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
            *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        },
        "collections": {"OrderedDict"},
        "pathlib": {"PosixPath"},
    }

    def __init__(self, file: io.BytesIO, path: str) -> None:
        super().__init__(file)
        self._path = path

    @override
    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # Python 3.13
        if name not in self._KNOWN.get(module, ()):
            raise _untrusted(self._path, INDEX, f"{module}.{name}")
        return super().find_class(module, name)


def _untrusted(path: str, part: str, name: str) -> UntrustedCheckpoint:
    return UntrustedCheckpoint(
        f"{path!r} was not loaded, its {part} would run {name}, which is in no checkpoint of a run: if you trust whoever wrote"
        " it, set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 (weights_only=False, which Trainer.fit does not hand on)"
    )


def _damaged(path: str, part: str, error: Exception) -> DamagedCheckpoint:
    first = str(error).partition(". ")[0]  # torch goes on to recommend a load that runs what it finds
    what = ": ".join([type(error).__name__, *first.splitlines()[:1]])
    return DamagedCheckpoint(
        f"{path!r} is damaged, its {part} cannot be read ({what}): take another checkpoint, or restore its files"
    )
