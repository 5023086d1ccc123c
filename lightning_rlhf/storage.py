"""Where checkpoints lie: any file system of fsspec, which may be flaky, full or closed.

    FOLDER/__0_0.distcp …   shards, a rank's in `PART`s    ┐ written by torch's distributed checkpoint (DCP)
    FOLDER/.metadata        which shard is where           ┘
    FOLDER/meta.pt          loops, callbacks, schedules: written last, so a folder that has it is complete

Saving: `prepare` → DCP with `Writer` → `finish`, or `discard`. An operation that fails for a reason that may pass is tried
again (`retried`). Loading is in `restricted`.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.load import _METADATA_FILENAME as MARKER
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.futures import Future
from typing_extensions import override

RETRIES = 6
"""How often an operation is tried again."""

FIRST_WAIT_S = 1.0
"""Before the first retry; it doubles each time, 63 s in all."""

PART = 1 << 30
"""Bytes of a file, at most, unless a tensor is larger: DCP holds in host memory all that it writes to a file, until its end."""

INDEX = ".metadata"
_OURS = re.compile(rf"(__\d+_\d+\.distcp|({re.escape(INDEX)}|{re.escape(MARKER)})(\.tmp)?)")
_LASTING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LASTING_CODES = (*_FULL, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTEMPTY, errno.EINVAL)
_CLIENTS = ("aiohttp", "azure", "botocore", "gcsfs", "google", "requests", "urllib3")
"""Packages under file systems whose errors do not all derive from OSError."""

_log = logging.getLogger(__name__)
T = TypeVar("T")


class SaveFailed(OSError):
    """A checkpoint could not be written; every rank raises it. What was complete before still is."""


# -- operations that may fail ------------------------------------------------------------------------------------------


def retried(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function of the file system, again if it fails for a reason that may pass.

    Raises:
        OSError: it failed `RETRIES` + 1 times, or for a reason that stays: something is missing, not permitted or full.
    """
    for attempt in range(RETRIES + 1):
        try:
            return function(*args, **kwargs)
        except Exception as error:
            fault = _fault(error)
            if fault is None or (fault is error and (attempt == RETRIES or _lasts(fault))):
                raise
            if attempt == RETRIES or _lasts(fault):
                raise fault from error
            wait = FIRST_WAIT_S * 2**attempt
            _log.warning("%s: %s, trying again in %g s", type(fault).__name__, fault, wait)
        time.sleep(wait)
    raise AssertionError


def _fault(error: BaseException | None) -> OSError | None:
    """The file system's error behind another one, of a class of Python's, so that ranks can exchange it.

    (torch's writer ends in an error of its own when a write fails.)
    """
    while error is not None:
        if isinstance(error, OSError):
            kind = next(c for c in type(error).__mro__ if c.__module__ == "builtins")
            code = () if error.errno is None else (error.errno,)
            return error if kind is type(error) else kind(*code, str(error))
        if type(error).__module__.partition(".")[0] in _CLIENTS:
            return OSError(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return None


def _lasts(error: OSError) -> bool:
    return isinstance(error, _LASTING) or error.errno in _LASTING_CODES


def on_rank_zero(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What ``function`` returns on rank 0, or what it raises, on all ranks; ``group`` has all of them."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    result: list[Any] = [None, None]
    own: Exception | None = None
    if ranks == 1 or dist.get_rank() == 0:
        try:
            result[0] = function()
        except Exception as error:
            own = error
            known = type(error).__module__.partition(".")[0] in ("builtins", "lightning_rlhf")
            result[1] = error if known else RuntimeError(repr(error))  # not all can be pickled
    if ranks > 1:
        dist.broadcast_object_list(result, src=0, group=group)
    if result[1] is not None:
        raise own or result[1]
    return result[0]


def _open(path: str) -> tuple[AbstractFileSystem, str, bool]:
    """File system, path in it, whether it is this machine's."""
    fs, root = url_to_fs(path)
    return fs, root, isinstance(fs, LocalFileSystem)


def exists(path: str) -> bool:
    """Unlike that of fsspec, which says no when it cannot know."""
    fs, root, _ = _open(path)
    return _exists(fs, root)


def _exists(fs: AbstractFileSystem, path: str) -> bool:
    with suppress(FileNotFoundError, NotADirectoryError):
        retried(fs.info, path)
        return True
    return False


def is_complete(path: str) -> bool:
    """A folder is complete if it has its marker; a file (of another strategy) is."""
    fs, root, _ = _open(path)
    with suppress(FileNotFoundError, NotADirectoryError):
        return retried(fs.info, root)["type"] != "directory" or _exists(fs, f"{root}/{MARKER}")
    return False


def complete_in(folder: str) -> Iterator[tuple[str, Any]]:
    """Path in the file system and time of the complete checkpoints in a folder, none if it is not there."""
    fs = _open(folder)[0]
    for entry, is_folder in listed(folder):
        if entry.endswith(".ckpt"):
            with suppress(FileNotFoundError, NotADirectoryError):
                yield entry, retried(fs.modified, f"{entry}/{MARKER}" if is_folder else entry)


def newest_first(folder: str) -> list[str]:
    """The complete checkpoints in a folder, local or remote."""
    found = sorted(complete_in(folder), key=lambda entry: entry[1], reverse=True)
    full = (lambda path: path) if _is_local_file_protocol(folder) else _open(folder)[0].unstrip_protocol
    return [full(path) for path, _ in found]


def listed(folder: str) -> list[tuple[str, bool]]:
    """Paths in the file system, and whether they are folders."""
    fs, root, _ = _open(folder)
    fs.invalidate_cache()  # others write there, too
    try:
        entries = retried(fs.ls, root, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(entry["name"].rstrip("/"), entry["type"] == "directory") for entry in entries]
    return [entry for entry in found if entry[0] != root]  # a file is listed as itself


# -- writing -----------------------------------------------------------------------------------------------------------


class Writer(FsspecWriter):
    """DCP's, with files of `PART` bytes, each of which is written again from its start when that failed."""

    def __init__(self, path: str) -> None:
        super().__init__(path, per_thread_copy_ahead=0)  # else through pinned memory, which torch would keep

    @override
    def prepare_local_plan(self, plan: Any) -> Any:
        return retried(super().prepare_local_plan, plan)

    @override
    def write_data(self, plan: Any, planner: Any) -> Any:
        written: Future[list[Any]] = Future()
        results = []
        for i, items in enumerate(_parts(plan.items)):
            prefix = f"{plan.storage_data.prefix}{i or ''}"  # DCP adds the file's number in this call: 0
            part = replace(plan, items=items, storage_data=replace(plan.storage_data, prefix=prefix))
            results += retried(super().write_data, part, planner).wait()
        written.set_result(results)
        return written

    @override
    def finish(self, metadata: Any, results: Any) -> None:
        retried(super().finish, metadata, results)


def _parts(items: Sequence[Any]) -> Iterator[list[Any]]:
    """What goes into each file."""
    part: list[Any] = []
    size = 0
    for item in items:
        data = item.tensor_data  # None: not a tensor
        nbytes = data.chunk.sizes.numel() * data.properties.dtype.itemsize if data else 0
        if part and size + nbytes > PART:
            yield part
            part, size = [], 0
        part.append(item)
        size += nbytes
    yield part


def prepare(path: str) -> str:
    """Where to write what will be ``path``: beside it while that is complete, so that one of the two always is."""
    target = _beside(path) if exists(f"{path}/{MARKER}") else path
    _clear(target)
    return target


def packed(metadata: dict[str, Any]) -> bytes:
    """What the marker holds."""
    content = io.BytesIO()
    torch.save(metadata, content)
    return content.getvalue()


def finish(target: str, path: str, content: bytes) -> None:
    """Mark what was written to ``target`` as complete and put it in its place."""
    fs, root, _ = _open(target)
    retried(_write, fs, f"{root}/{MARKER}", content)
    _put(target, path)


def copy(source: str, path: str) -> None:
    """Another complete checkpoint of the same content, without room of its own where the file system has hard links."""
    target = prepare(path)
    _copy_files(source, target)
    _put(target, path)


def link(source: str, path: str) -> None:
    """A symbolic link on this machine, relative, in place of what is at ``path``."""
    remove(path)
    retried(os.symlink, os.path.relpath(source, os.path.dirname(path)), path)


def _put(target: str, path: str) -> None:
    """What is complete in its place."""
    if target == path:
        _clear(_beside(path))
        return
    _clear(path)
    fs, root, local = _open(target)
    if local and not exists(path):
        retried(fs.mv, root, _open(path)[1])
        return
    _copy_files(target, path)
    _clear(target)


def _copy_files(source: str, target: str) -> None:
    """Of a checkpoint; the marker comes last."""
    fs, root, local = _open(source)
    place = _open(target)[1]
    files = [name.rpartition("/")[2] for name, _ in listed(source)]
    retried(fs.makedirs, place, exist_ok=True)
    for name in sorted((name for name in files if _OURS.fullmatch(name)), key=lambda name: name == MARKER):
        if local:
            with suppress(OSError):  # the file system has no hard links
                os.link(f"{root}/{name}", f"{place}/{name}")
                continue
        retried(fs.cp_file, f"{root}/{name}", f"{place}/{name}")


def _write(fs: AbstractFileSystem, path: str, content: bytes) -> None:
    """Under its name once it is there as a whole."""
    with fs.open(f"{path}.tmp", "wb") as file:
        file.write(content)
        if isinstance(fs, LocalFileSystem):
            file.flush()
            os.fsync(file.fileno())
    fs.mv(f"{path}.tmp", path)


def _beside(path: str) -> str:
    """A name that is looked at for the latest checkpoint."""
    stem, extension = os.path.splitext(path)
    return f"{stem}.new{extension or '.ckpt'}"


def remove(path: str) -> None:
    """A checkpoint, if it is there; from the first moment on it is not taken for a complete one."""
    fs, root, local = _open(path)
    if local and os.path.islink(root):  # what it points to stays
        os.unlink(root)
        return
    with suppress(FileNotFoundError, NotADirectoryError):
        retried(fs.rm_file, f"{root}/{MARKER}")
    retried(_remove, fs, root)


def _clear(path: str) -> None:
    """Remove the files of a checkpoint, and the folder unless it holds something else."""
    fs, root, _ = _open(path)
    files = [name.rpartition("/")[2] for name, _ in listed(path)]
    ours = [name for name in files if _OURS.fullmatch(name)]
    if len(ours) == len(files):
        if files or exists(path):
            remove(path)
        return
    for name in sorted(ours, key=lambda name: name != MARKER):
        with suppress(FileNotFoundError):
            retried(fs.rm_file, f"{root}/{name}")


def _remove(fs: AbstractFileSystem, path: str) -> None:
    """fsspec leaves out what it cannot list, so look whether it is gone."""
    with suppress(FileNotFoundError):
        fs.rm(path, recursive=True)
    try:
        fs.info(path)
    except FileNotFoundError:
        return
    raise OSError(f"{path} is still there after its removal")


def discard(path: str) -> None:
    """Free the space of what was not completed, if that can be done."""
    fs, root, _ = _open(path)
    with suppress(Exception):
        fs.ls(root)  # once: no second wait for a store that is down
        if not exists(f"{path}/{MARKER}"):
            _clear(path)


def discard_old(path: str) -> None:
    """Remove a checkpoint that is not kept any longer; a warning if that fails."""
    try:
        remove(path)
    except OSError as error:
        rank_zero_warn(f"{path!r} is not needed any more and could not be removed: {error}; remove it by hand")


def failure(error: OSError | CheckpointException, path: str) -> SaveFailed | None:
    """What to raise for an error while saving, None if it is not the file system's."""
    faults = {0: error} if isinstance(error, OSError) else {rank: e for rank, (e, _) in error.failures.items()}
    known = {rank: fault for rank, e in faults.items() if (fault := _fault(e)) is not None}
    if len(known) < len(faults):
        return None
    rank, fault = min(known.items())
    if fault.errno in _FULL:
        change = "free space there, lower save_top_k or change the checkpoint's dirpath"
    elif isinstance(fault, PermissionError) or fault.errno == errno.EROFS:
        change = "make it writable or change the checkpoint's dirpath"
    else:
        change = "look at the file system or change the checkpoint's dirpath"
    where = "" if isinstance(error, OSError) else f" on rank {rank}"
    return SaveFailed(
        f"the checkpoint {path!r} could not be written ({type(fault).__name__}{where}: {fault}): {change}"
    )
