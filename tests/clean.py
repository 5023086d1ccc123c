"""What `conftest` does around each test; it imports nothing of the package, whose shapes are checked from its first import on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


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
