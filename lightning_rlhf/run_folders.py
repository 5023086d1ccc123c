"""Folders of loggers that number their runs: ``version_0``, ``version_1``, ...

Lightning takes the number after the highest that is there, and makes the folder later: of two runs that start at the same time
both may take the same, and each then removes the other's checkpoints. Here the folder is made as the number is taken.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.cloud_io import _is_local_file_protocol


def take_folders(loggers: Iterable[Any]) -> None:
    """On rank 0: make the folder of each logger that has no number yet, on a local disk; one that somebody else makes is his."""
    for logger in _unnumbered(loggers):
        while _is_local_file_protocol(logger.log_dir):
            try:
                os.makedirs(logger.log_dir)
            except FileExistsError:
                logger._version += 1
                continue
            except OSError:  # the logger's own to say
                pass
            break


@contextmanager
def only_looking(loggers: Iterable[Any]) -> Iterator[None]:
    """Whoever asks for a logger's folder in here takes no number."""
    unnumbered = _unnumbered(loggers)
    try:
        yield
    finally:
        for logger in unnumbered:
            logger._version = None


def _unnumbered(loggers: Iterable[Any]) -> list[Any]:
    return [one for one in loggers if hasattr(one, "_get_next_version") and getattr(one, "_version", 0) is None]
