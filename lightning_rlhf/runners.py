"""Where reward functions run: with a time limit, and so that one that hangs does not take the trainer with it.

    Inline      in the caller; no limit
    Threads     a daemon thread, abandoned at the limit (it goes on in the background: Python cannot stop a thread)
    EventLoop   coroutines on one loop in a background thread, cancelled at the limit
    Workers     processes, killed at the limit and replaced

Each takes jobs, callables without arguments (for the loop, with a method ``run_async``), and returns a future for each.
A future that is not done by the limit is given up. Nothing here helps in a thread against C code that keeps the
interpreter lock, such as a regular expression that backtracks without end: only a process can be killed.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import pickle
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from types import FrameType
from typing import Any, Protocol, TypeAlias

import torch

from lightning_rlhf.rewards import RewardError

_THREADS = 32
_START_SECONDS = 300.0
_DEBUGGERS = ("bdb.py", "pdb.py", "pydevd")


class Job(Protocol):
    """Something to run; pickled for `Workers`."""

    def __call__(self) -> Any: ...

    def run_async(self) -> Coroutine[Any, Any, Any]: ...


def _settle(future: Future[Any], job: Callable[[], Any]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:  # exit() in a reward function is a failure like any other
        future.set_exception(error)


class Inline:
    """In the calling thread. ``grace``: seconds after the limit in which a runner itself settles its futures."""

    grace = 0.0

    def submit(self, jobs: Sequence[Job], timeout: float | None) -> list[Future[Any]]:
        futures: list[Future[Any]] = [Future() for _ in jobs]
        for future, job in zip(futures, jobs, strict=True):
            _settle(future, job)
        return futures

    def give_up(self) -> None: ...


class Threads(Inline):
    """In new daemon threads, at most 32 for one call."""

    def submit(self, jobs: Sequence[Job], timeout: float | None) -> list[Future[Any]]:
        futures: list[Future[Any]] = [Future() for _ in jobs]
        waiting: queue.SimpleQueue[tuple[Future[Any], Job]] = queue.SimpleQueue()
        for task in zip(futures, jobs, strict=True):
            waiting.put(task)
        end = _end(timeout)
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # a new thread begins on GPU 0

        def work() -> None:
            if device is not None:
                torch.cuda.set_device(device)
            while time.monotonic() < end:
                try:
                    future, job = waiting.get_nowait()
                except queue.Empty:
                    return
                _settle(future, job)

        for _ in range(min(len(jobs), _THREADS)):
            threading.Thread(target=work, name="reward", daemon=True).start()
        return futures


class EventLoop:
    """On one event loop that lives as long as the run, so that clients bound to it (HTTP sessions) can be kept."""

    grace = 1.0

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, jobs: Sequence[Job], timeout: float | None) -> list[Future[Any]]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run_loop, args=(self._loop,), name="reward-loop", daemon=True).start()
        return [
            asyncio.run_coroutine_threadsafe(asyncio.wait_for(job.run_async(), timeout), self._loop) for job in jobs
        ]

    def give_up(self) -> None:
        """Something blocks the loop itself: leave it behind, the next call begins another."""
        self.close()

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(_cancel_all())
    finally:
        loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Workers:
    """In ``size`` processes, started when they are first needed.

    A thread per process hands it one job after the other and kills it when a job takes too long. While others wait, too long
    is more than an equal share of the time that is left, or a second if that is more; the job then goes to the end of the queue
    and begins again when its turn comes. So jobs that hang cost the others their share only, and what is slow gets what they
    leave. Processes are forked off a server that has imported this package and done nothing else: quick to replace, safe beside
    CUDA and threads. So jobs must pickle, and a script that trains needs ``if __name__ == "__main__":``.
    """

    grace = 1.0

    def __init__(self, size: int) -> None:
        self.size = size
        self._tasks: _Tasks = queue.SimpleQueue()
        self._ready: list[threading.Event] = []

    def submit(self, jobs: Sequence[Job], timeout: float | None) -> list[Future[Any]]:
        payloads = [pickle.dumps(job) for job in jobs]
        while len(self._ready) < self.size:
            self._ready.append(threading.Event())
            arguments = (self._tasks, self._ready[-1], self.size)
            threading.Thread(target=_attend, args=arguments, name="reward-worker", daemon=True).start()
        start = _end(_START_SECONDS)
        for ready in self._ready:  # the limit does not count the time it takes a process to start
            if not ready.wait(max(0.0, start - time.monotonic())):
                raise RewardError(f"has no worker process: none started within {_START_SECONDS:g} s")
        futures: list[Future[Any]] = [Future() for _ in jobs]
        for future, payload in zip(futures, payloads, strict=True):
            self._tasks.put((future, payload, _end(timeout)))
        return futures

    def give_up(self) -> None: ...

    def close(self) -> None:
        """Let the processes go; one that is at work goes when its job ends or reaches its limit."""
        for _ in self._ready:
            self._tasks.put(None)
        self._tasks, self._ready = queue.SimpleQueue(), []


_Tasks: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], bytes, float] | None]"


def _attend(tasks: _Tasks, ready: threading.Event, size: int) -> None:
    """Keep one of ``size`` worker processes going and give it one task after the other."""
    worker = _Worker()
    ready.set()
    while (task := tasks.get()) is not None:
        future, payload, end = task
        attempt: Future[Any] = Future()
        _settle(attempt, partial(worker.run, payload, end, lambda: size / (tasks.qsize() + size)))
        if isinstance(attempt.exception(), TimeoutError) and time.monotonic() < end:
            tasks.put(task)
        else:
            _settle(future, attempt.result)
        if not worker.alive:
            ready.clear()
            worker = _Worker()
            ready.set()
    worker.kill()


class _Worker:
    """One process. ``failure`` says why it could not start; its jobs then fail with that."""

    def __init__(self) -> None:
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        context.set_forkserver_preload(["lightning_rlhf.calls"])
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other,), name="reward-worker", daemon=True)
        self.process.start()
        weakref.finalize(self, self.process.kill)  # at exit, too: it does not listen to multiprocessing's SIGTERM
        other.close()
        self.alive, self.failure = True, ""
        try:
            self.pipe.recv()
        except EOFError:
            self.failure = 'has no worker process: it died at its start; has the script `if __name__ == "__main__":`?'

    def run(self, payload: bytes, end: float, share: Callable[[], float]) -> Any:
        """The job's result.

        Args:
            share: of the time that is left when the job has been loaded (with the modules that it needs), the part it may take.

        Raises:
            TimeoutError: not done by ``end``, or in its share.
            RewardError: as the job did, or there is no process to run it.
            RuntimeError: any other error of the job's, in words.
        """
        if self.failure:
            raise RewardError(self.failure)
        if end <= time.monotonic():
            raise TimeoutError
        try:
            self.pipe.send_bytes(payload)
            reply = self._receive(end)
            if reply == "loaded":
                now = time.monotonic()
                reply = self._receive(min(end, now + max(1.0, (end - now) * share())))
        except (EOFError, OSError) as gone:
            self.kill()
            raise RuntimeError("the worker process died") from gone
        if reply is None:
            self.kill()
            raise TimeoutError
        result, error, fatal = reply
        if error is not None:
            raise RewardError(error) if fatal else RuntimeError(error)
        return result

    def _receive(self, end: float) -> Any:
        left = max(0.0, end - time.monotonic())
        return self.pipe.recv() if self.pipe.poll(None if math.isinf(left) else left) else None

    def kill(self) -> None:
        self.alive = False
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _work(pipe: Any) -> None:
    """What a worker process does until the other end of the pipe is gone."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(one, signal.SIG_IGN)  # the trainer's to handle, also if all processes get it
    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        try:
            payload = pipe.recv_bytes()
        except EOFError:
            return
        try:
            job = pickle.loads(payload)
        except Exception as error:
            pipe.send((None, f"cannot be loaded in a worker process ({error}): set its workers to 0", True))
            continue
        pipe.send("loaded")
        pipe.send(_answer(job))


def _answer(job: Callable[[], Any]) -> tuple[Any, str | None, bool]:
    """(result, error, whether every response would meet that error); errors as text, not all of them pickle."""
    try:
        return job(), None, False
    except (RewardError, ImportError) as error:
        return None, str(error), True
    except BaseException as error:
        return None, f"{type(error).__name__}: {error}", False


def at_breakpoint() -> bool:
    """Whether a thread of this process is in a debugger."""
    return any(name in files_of(frame) for frame in sys._current_frames().values() for name in _DEBUGGERS)


def files_of(frame: FrameType | None) -> str:
    """Of the code that a stack is in, one a line."""
    files = []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return "\n".join(files)


def _end(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + timeout
