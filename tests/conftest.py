"""A test leaves nothing in the process: no process group, no environment variables of a launcher."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@contextmanager
def restored() -> Iterator[None]:
    environment, threads = dict(os.environ), torch.get_num_threads()
    # Without it Lightning's launcher sets torch's threads in the first run of a test, and only there: that run would differ
    # from the next ones in the last bit (one head's attention scores lie elsewhere in the second thread's buffer).
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    torch.set_num_threads(threads)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


@pytest.fixture(autouse=True, scope="module")
def clean_module() -> Iterator[None]:
    """Of what a module's own fixtures leave; it begins before them."""
    with restored():
        yield


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    with restored():
        yield
