"""Where the processes of one attempt of a job meet, and whether they are of one mind.

torchrun keeps one store for all attempts (``--max-restarts``), and torch 2.13 looks in it under the same names each time: a
process that comes early reads the address of one that is dead, and all wait for each other until the time-out. (The number of
the restart does not tell attempts apart: each node counts for itself.) So here rank 0 names the attempt, and each other
rank takes that name only from a rank 0 that has seen this very process.

A process that ends before comes too, with its error: the others would wait for it until the time-out.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

_PREFIX = "lightning_rlhf/meeting"
_TELL = timedelta(minutes=1)
"""So long a process that ends waits for the others to hear of it: some may still be loading their data."""


class FailedElsewhere(RuntimeError):
    """A rank ended before the ranks met; it has said so itself."""


def tell(error: str) -> None:
    """Of a process that ends before the ranks meet: all others get ``error`` where they meet. Only under torchrun."""
    with suppress(TimeoutError, RuntimeError):  # the others may be gone, or fail, too
        store_of_attempt(_TELL, error)


def store_of_attempt(timeout: timedelta, error: str = "") -> dist.Store | None:
    """A part of torchrun's store that no earlier attempt has written to, once all ranks are there; None without torchrun.

    Args:
        error: what this process ends by, if it only comes to say so.

    Raises:
        TimeoutError: not all came in time.
        FailedElsewhere: one came to say that it ends.
    """
    environment = os.environ
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    rank, ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(name_of_attempt(dist.PrefixStore(_PREFIX, store), rank, ranks, timeout, error), store)


def name_of_attempt(store: dist.Store, rank: int, ranks: int, timeout: timedelta, error: str = "") -> str:
    """The same on all ranks and new each time, whatever earlier ranks left in the store; see `store_of_attempt`."""
    own = uuid.uuid4().hex
    store.set(f"rank {rank}", own)
    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        if rank == 0:
            present = [store.get(f"rank {i}").decode() for i in range(ranks)]
            store.set("present", json.dumps(present))
            came = [f"{own} {present[i]}" for i in range(1, ranks)]
            if store.check(came):
                errors = [error, *(store.get(key).decode() for key in came)]
                store.set(f"errors {own}", json.dumps(errors))
                return _unless_failed(own, errors)
        elif store.check(["present"]):
            present = json.loads(store.get("present"))
            if present[rank : rank + 1] == [own]:
                store.set(f"{present[0]} {own}", error)
                if store.check([f"errors {present[0]}"]):
                    return _unless_failed(present[0], json.loads(store.get(f"errors {present[0]}")))
        time.sleep(0.02)
    raise TimeoutError(f"not all of {ranks} processes came within {timeout.total_seconds():g} s")


def _unless_failed(name: str, errors: list[str]) -> str:
    first: dict[str, int] = {}
    for rank, error in enumerate(errors):
        if error:
            first.setdefault(error, rank)
    if first:
        raise FailedElsewhere("; ".join(f"rank {rank} failed: {error}" for error, rank in first.items()))
    return name


def check_alike(own: Mapping[str, Any], remedy: str) -> None:
    """Compare what all ranks should have in common. Collective.

    Args:
        own: this rank's, plain values by name, equal if they look equal (NaN is itself). Absolute paths and URLs may differ:
            nodes keep files in different places.
        remedy: what to do about a difference.

    Raises:
        ValueError: a rank has something else than rank 0; the same on all ranks.
    """
    everybody = of_all_ranks(dict(own))
    first = everybody[0]
    for rank, other in enumerate(everybody):
        for name in (*first, *(other.keys() - first.keys())):
            here, there = first.get(name), other.get(name)
            if repr(here) != repr(there) and not (_is_place(here) or _is_place(there)):
                raise ValueError(f"{name} is {there} on rank {rank} and {here} on rank 0: {remedy}")


def of_all_ranks(own: T) -> list[T]:
    """``own`` of each rank, a small object that pickles. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    return everybody


def _is_place(value: Any) -> bool:
    return isinstance(value, str) and (os.path.isabs(value) or "://" in value)
