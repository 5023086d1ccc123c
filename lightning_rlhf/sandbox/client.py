"""The trainer's side: programs are handed to a `Sandbox`, which gives back what they printed or whether they passed."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import socket
import subprocess
import sys
import sysconfig
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_rlhf.sandbox.server import PASSED

_LIBRARIES = "/lib /lib64 /usr/lib /usr/lib64 /usr/local/lib /usr/share/zoneinfo /etc/localtime /etc/ld.so.cache"
_DEVICES = "/dev/zero /dev/urandom /dev/random"
_MAIN = "import sys; sys.path.insert(0, {root!r}); from lightning_rlhf.sandbox.server import main; sys.exit(main())"
_ENVIRONMENT = {"HOME": "/", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_START_S, _GRACE_S = 60.0, 10.0


class SandboxError(RuntimeError):
    """There is no sandbox on this machine, or not the one that was asked for."""


class Sandbox:
    """Runs programs, any number at once; each call takes a server of its own, which is kept for the next one.

    Args:
        seconds: of wall-clock time for one run.
        memory: bytes of address space of a process; two of them run when asserts are tested.
        strict: raise where something cannot be closed off, instead of warning once per process.
        landlock: use Landlock where the kernel has it (see `jail`).

    Raises:
        SandboxError: at the first call. This is not Linux, a server does not start, or, with ``strict``, a door is open.
    """

    def __init__(self, seconds: float, memory: int, strict: bool = False, landlock: bool = True) -> None:
        self.seconds, self.memory, self.strict, self.landlock = seconds, memory, strict, landlock
        self._idle: queue.LifoQueue[_Server] = queue.LifoQueue()
        self._process = os.getpid()

    def output_of(self, program: str, stdin: str, limit: int) -> tuple[str | None, bool]:
        """What a program prints of at most ``limit`` bytes, None if it fails or prints more; and whether it ran out of time."""
        with self._server() as server, open(_file("", writable=True), "rb") as output:
            files = [_file(program), _file(stdin), os.dup(output.fileno())]
            status, late = server.run(
                {**self._job, "roles": ["script"], "output": limit}, files, self.seconds + _GRACE_S
            )
            printed = os.pread(output.fileno(), limit, 0)
        return (printed.decode(errors="replace") if status == 0 else None), late

    def passes(self, program: str, test: str) -> tuple[bool, bool]:
        """Whether a program's functions pass a test (see `asserts`), and whether that ran out of time."""
        with self._server() as server:
            forth, back = os.pipe(), os.pipe()
            files = [_file(test), back[0], forth[1], _file(program), forth[0], back[1]]
            job = {**self._job, "roles": ["tests", "serve"], "output": 0}
            status, late = server.run(job, files, self.seconds + _GRACE_S)
        return status == PASSED, late

    def close(self) -> None:
        """End the servers; a later call starts others."""
        while True:
            try:
                self._idle.get_nowait().end()
            except queue.Empty:
                return

    @property
    def _job(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "memory": self.memory}

    @contextmanager
    def _server(self) -> Iterator[_Server]:
        """One that nobody uses; it does not come back from a run that went wrong."""
        if self._process != os.getpid():  # forked: the servers are the parent's, and so are their replies
            self._idle, self._process = queue.LifoQueue(), os.getpid()
        try:
            server = self._idle.get_nowait()
        except queue.Empty:
            server = _Server(self.landlock)
            _judge(server.open, self.strict)
        yield server
        self._idle.put(server)


class _Server:
    """One `server` process. ``open`` is what its jail could not close off."""

    def __init__(self, landlock: bool) -> None:
        if sys.platform != "linux":
            raise SandboxError(f"code can be run in a sandbox on Linux only, this is {sys.platform}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).parents[2])
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", "-c", _MAIN.format(root=root)],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=_ENVIRONMENT
            | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},  # Python's own
            cwd="/",
            start_new_session=True,
        )
        theirs.close()
        self.socket, self.process = ours, process
        self.end = weakref.finalize(self, _end, ours, process)
        paths = sysconfig.get_paths()
        base = [f"{prefix}/{name}" for prefix in {sys.base_prefix, sys.base_exec_prefix} for name in ("lib", "lib64")]
        packages = [paths["purelib"], paths["platlib"]]
        standard = [paths["stdlib"], f"{sys.base_exec_prefix}/lib/python{sys.version_info[0]}.{sys.version_info[1]}"]
        path = dict.fromkeys([*standard, f"{standard[-1]}/lib-dynload", *packages])
        readable = [*path, *base, *_LIBRARIES.split(), *_DEVICES.split()]
        self.open: list[str] = []
        try:
            self.open = self._ask({"readable": readable, "path": list(path), "landlock": landlock}, [], _START_S)[
                "open"
            ]
        except RuntimeError as error:
            raise SandboxError(f"no sandbox: {error}") from error

    def run(self, job: dict[str, Any], files: Sequence[int], seconds: float) -> tuple[int, bool]:
        """Status of the first role's process, minus 9 if it was late, and whether it was. ``files`` are closed.

        Raises:
            RuntimeError: there is no reply after ``seconds``, or the server could not do it. It has ended then.
        """
        reply = self._ask(job, files, seconds)
        return (-9 if reply["late"] else reply["status"]), reply["late"]

    def _ask(self, message: dict[str, Any], files: Sequence[int], seconds: float) -> Any:
        try:
            self.socket.settimeout(seconds)
            try:
                socket.send_fds(self.socket, [json.dumps(message).encode()], list(files))
            finally:
                for file in files:  # before the reply: a pipe ends when nobody else has its other end
                    os.close(file)
            if reply := self.socket.recv(1 << 16):
                return json.loads(reply)
            error = None
        except OSError as failure:
            error = failure
        except BaseException:
            self.end()
            raise
        self.process.kill()
        assert self.process.stderr is not None
        said = self.process.stderr.read().decode(errors="replace").strip().splitlines() or [str(error or "")]
        self.end()
        raise RuntimeError(f"the sandbox's server has ended: {said[-1]}") from error


def _end(channel: socket.socket, process: subprocess.Popen[bytes]) -> None:
    channel.close()
    assert process.stderr is not None
    process.stderr.close()
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_warned = False


def _judge(doors: Sequence[str], strict: bool) -> None:
    """Warn once, or raise, if a jail has open doors."""
    global _warned
    if not doors:
        return
    what = f"code that a model writes could not be kept from {', '.join(doors)} by this kernel"
    if strict:
        raise SandboxError(f"{what}: run in a container that allows seccomp and Landlock, or set strict: false")
    if not _warned:
        _warned = True
        warnings.warn(f"{what}: run it in a container without network and without files that matter", stacklevel=2)


def _file(text: str, writable: bool = False) -> int:
    """A file in memory, read from its beginning."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(text.encode(errors="replace"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    if not writable:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return descriptor
