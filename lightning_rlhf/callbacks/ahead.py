"""The next iteration's responses, generated beside this one's update (``rollout.async_level: 1``).

    iteration k     take(k) → sync the weights of k → start(k + 1) ┬ a thread: generate with the weights of k
                                                                   └ training_step: update to the weights of k + 1

So responses are one update behind the policy that they train, which `losses.Correction` weighs. They depend on nothing that the
thread does beside them: a run is the same however fast either is, and the same as without a thread.

A checkpoint waits for them and holds them, those of all ranks by what they answer (`keys`): the weights that drew them are gone
when it is read again. A run that goes on with other prompts or draws in another way leaves them alone.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.types import Completion, Prompts, Sampling

Rows = dict[int, list[Completion]]
"""The responses to each prompt, by its key."""


def keys(prompts: Prompts, sampling: Sampling, *conversation: Any) -> list[int]:
    """Of each prompt's row in the data set, its tokens and how responses are drawn, and answered (`Conversation.key`)."""
    named = zip(prompts.index.tolist(), map(list, prompts.ids), strict=True)
    digests = (hashlib.blake2b(repr((row, ids, sampling, *conversation)).encode(), digest_size=8) for row, ids in named)
    return [int.from_bytes(digest.digest()) for digest in digests]


class Ahead:
    """Responses of one iteration: being generated, or there."""

    def __init__(self) -> None:
        self._running: _Running | None = None
        self._rows: Rows = {}
        self.iteration = -1
        """That the responses are for, -1 without any; equal on every rank."""
        self.seconds = 0.0
        """That the last generation took, beside or not."""
        self.failure: Exception | None = None
        """Of the generation, on this rank or another."""

    def start(
        self, iteration: int, rows: Sequence[int], generate: Callable[[], list[Completion]], device: torch.device
    ) -> None:
        """Begin to generate the responses to the prompts with the keys ``rows``."""
        self.iteration, self._rows = iteration, {}
        self._running = _Running(rows, generate, device)

    @property
    def running(self) -> bool:
        """Whether a thread has the engine, or has left a result or an error."""
        return self._running is not None

    @property
    def generates(self) -> bool:
        """Whether a thread has the engine."""
        return self._running is not None and self._running.thread.is_alive()

    def wait(self) -> None:
        """Until the engine is free. Raises nothing."""
        if self._running is not None:
            self._running.thread.join()

    def settle(self, collect: Callable[[Callable[[], list[Completion]]], list[Completion]]) -> None:
        """Wait for what runs and keep it, or raise what it raised.

        Args:
            collect: from the responses of this rank's engine to those of its prompts; it may talk to other ranks, the thread
                must not.
        """
        running = self._running
        assert running is not None
        try:
            self._rows = _by_row(running.rows, collect(running.result))
        finally:
            if not self.generates:  # Ctrl-C ends the waiting, not the thread
                self._running = None
        self.seconds = running.seconds

    def has(self, rows: Sequence[int], each: int) -> bool:
        """Whether all prompts with the keys ``rows`` have so many responses, settled before."""
        return all(len(self._rows.get(row, ())) == each for row in rows)

    def take(self, rows: Sequence[int]) -> list[Completion]:
        """The responses to the prompts with the keys ``rows``; none are kept."""
        taken = [completion for row in rows for completion in self._rows[row]]
        self.clear()
        return taken

    def clear(self) -> None:
        self._rows, self.iteration = {}, -1

    def state(self, all_gather: Callable[[Rows], list[Rows]]) -> dict[str, Any]:
        """The responses that are kept on any data rank, as tensors and plain containers; empty if there are none."""
        if self.iteration < 0:
            return {}
        rows = {row: own for rows in all_gather(self._rows) for row, own in rows.items()}
        return {"iteration": self.iteration} | _packed(rows)

    def load(self, state: dict[str, Any]) -> None:
        """Keep the responses of a checkpoint."""
        self.iteration, self._rows = (state["iteration"], _unpacked(state)) if state else (-1, {})


class _Running:
    """A thread that generates, on a stream of its own: kernels of the update and of the engine share the GPU."""

    def __init__(self, rows: Sequence[int], generate: Callable[[], list[Completion]], device: torch.device) -> None:
        self.rows, self.seconds = list(rows), 0.0
        self._generate, self._device, self._cores = generate, device, torch.get_num_threads()
        self._done: list[Completion] = []
        self._error: BaseException | None = None
        self.thread = Thread(target=self._run, name="generate ahead", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        start = time.perf_counter()
        torch.set_num_threads(self._cores)  # a thread begins with the default of its own, and results depend on it
        try:
            with _own_stream(self._device):
                self._done = self._generate()
        except BaseException as error:
            self._error = error
        self.seconds = time.perf_counter() - start

    def result(self) -> list[Completion]:
        self.thread.join()
        if self._error is not None:
            raise self._error
        return self._done


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Work on the stream of all generations; at the end nothing of it is under way, not even a step ahead of the engine's."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)  # a thread begins on the first
    stream = _stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Of high priority: its kernels are short and one waits for the other, those of an update are long and queue.

    One for the process: memory that torch's allocator and cuBLAS keep is kept for each stream, and torch has 32 of them,
    which it hands out in turn, those of FSDP2 among them.
    """
    return torch.cuda.Stream(device, priority=-1)


def _packed(rows: Rows) -> dict[str, Any]:
    completions = [completion for own in rows.values() for completion in own]
    log_probs = [c.log_probs for c in completions if c.log_probs is not None]
    return {
        "rows": list(rows),
        "lengths": torch.tensor([len(c.token_ids) for c in completions]),
        "finish_reasons": [c.finish_reason for c in completions],
        "token_ids": torch.tensor([t for c in completions for t in c.token_ids], dtype=torch.int32),
        # float64: whatever an engine returns comes back as it was
        "log_probs": torch.tensor([x for own in log_probs for x in own], dtype=torch.float64)
        if len(log_probs) == len(completions)
        else None,
        "spans": [c.spans for c in completions],
        "replies": [c.replies for c in completions],
    }


def _unpacked(state: dict[str, Any]) -> Rows:
    lengths: list[int] = state["lengths"].tolist()

    def ragged(flat: Tensor | None) -> list[Any]:
        return [None] * len(lengths) if flat is None else [piece.tolist() for piece in flat.split(lengths)]

    none = [()] * len(lengths)  # of a checkpoint without conversations
    fields = (ragged(state["token_ids"]), state["finish_reasons"], ragged(state["log_probs"]))
    told = (map(tuple, state.get(name, none)) for name in ("spans", "replies"))
    return _by_row(state["rows"], [Completion(*values) for values in zip(*fields, *told, strict=True)])


def _by_row(rows: list[int], completions: list[Completion]) -> Rows:
    """Equally many to each prompt, in the order of ``rows``."""
    each = len(completions) // max(1, len(rows))
    return {row: completions[i * each : (i + 1) * each] for i, row in enumerate(rows)}
