"""Named spans of an iteration (generate, sync, reward, log_prob, …): wall seconds, and a place for observers to look in.

The module and the `RolloutCallback` open spans; `Throughput` and `Memory` listen. Without listeners a span only adds two
clock reads, and, on CUDA, a synchronisation of the current stream at both edges so that a span's seconds are its own.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Phases:
    """Accumulates seconds per name until `take` is called.

    ``on_start`` and ``on_end`` are lists of ``f(name)``; observers append to them.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.on_start: list[Callable[[str], None]] = []
        self.on_end: list[Callable[[str], None]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._synchronize()
        for listener in self.on_start:
            listener(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self.seconds[name] += time.perf_counter() - start
            for listener in self.on_end:
                listener(name)

    def take(self) -> dict[str, float]:
        """The seconds per phase since the last call."""
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken

    @staticmethod
    def _synchronize() -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
