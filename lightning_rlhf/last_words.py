"""What ended a run of several ranks: each leaves its error where the others find it.

    rank 1    its reward fails ───────────▶ store ──┐
    rank 0    its connection to rank 1 is lost   ◀──┴── "rank 1 failed: KeyError: 'answer'"
              and there is nothing in the store  ◀────── "rank 1 ended without a word: …"

The store is that in which the ranks met. It ends with the process of rank 0, under torchrun with torchrun.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field

import torch.distributed as dist

ECHO_S, OWN_S = 3.0, 2.0
"""Seconds that a rank waits for what the others say: after an error that comes of their end, and after one of its own."""

_LINGER_S = 0.3
"""So long rank 0 stays when all have spoken: they read what it said."""
_POLL_S = 0.02


@dataclass
class Ended:
    """Why a run ended, as far as this rank knows."""

    text: str
    """This rank's error, in one line."""
    echo: bool
    """Whether that is only what it sees of another rank's end."""
    errors: dict[int, str] = field(default_factory=dict)
    """Of other ranks, those that are no echoes."""
    silent: list[int] = field(default_factory=list)
    """Ranks of which nothing was heard."""

    @property
    def said_by_first(self) -> bool:
        """Whether rank 0 has the very same error."""
        return self.errors.get(0) == self.text

    @property
    def cause(self) -> str | None:
        """Of an echo, what it comes of; None for a rank's own error."""
        if not self.echo:
            return None
        if self.errors:
            return "; ".join(f"rank {rank} failed: {text}" for rank, text in sorted(self.errors.items()))
        if not self.silent:
            return None
        ranks = f"rank{'s' if len(self.silent) > 1 else ''} {', '.join(map(str, self.silent))}"
        return f"{ranks} ended without a word: killed, out of host memory for example, or stuck"


def exchanged(error: BaseException) -> Ended | None:
    """Leave this rank's last words and read those of the others, for some seconds at most; None if there are no others."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    ended = Ended(" ".join(f"{type(error).__name__}: {error}".split()), is_echo(error))
    own, ranks = dist.get_rank(), dist.get_world_size()
    waits_for_all = ended.echo or own == 0
    ended.silent = [rank for rank in range(ranks) if rank != own] if waits_for_all else [0]
    end = time.monotonic() + (ECHO_S if ended.echo else OWN_S)
    with suppress(RuntimeError):  # the store is gone, and rank 0 with it
        store = dist.distributed_c10d._get_default_store()
        store.set(_key(own), json.dumps([ended.text, ended.echo]))
        while ended.silent and time.monotonic() < end:
            time.sleep(_POLL_S)
            _read(store, ended)
        if own == 0:
            time.sleep(_LINGER_S)
    return ended


def is_echo(error: BaseException) -> bool:
    """Whether an error says no more than that a connection to another rank is lost, or that it did not answer."""
    lost = r"gloo/(transport|rendezvous)|Connection (reset|closed) by peer|Broken pipe"
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(re.search(lost, str(error))))


def _read(store: dist.Store, ended: Ended) -> None:
    for rank in [rank for rank in ended.silent if store.check([_key(rank)])]:
        text, echo = json.loads(store.get(_key(rank)))
        ended.silent.remove(rank)
        if not echo:
            ended.errors[rank] = text


def _key(rank: int) -> str:
    return f"lightning_rlhf/last words of rank {rank}"
