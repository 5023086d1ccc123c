"""The process that forks a jailed process for each run. It holds no program, test or secret: a child finds none in its memory.

    first message   {"readable": [...], "path": [...], "landlock": bool}        reply   {"closed": [...], "open": [...]}
    then            {"roles": [...], "seconds": …, "memory": …, "output": …} and three descriptors for each role
    reply           {"status": exit code of the first role's process, or minus the signal, "late": bool}

    script   program, standard input, standard output
    serve    program, from the tests, to the tests     see `asserts`
    tests    a test, from the program, to the program

It ends when the other end of its socket is gone, whatever it is doing.
"""

from __future__ import annotations

import builtins
import json
import os
import select
import signal
import socket
import sys
import types
from contextlib import suppress
from typing import Any

from lightning_rlhf.sandbox import asserts
from lightning_rlhf.sandbox.jail import RULES, Jail

PASSED = 86
"""Exit code of a process that has run a test to its end."""

ALIVE = RULES + 1
"""A descriptor that the first child alone has: when it is closed the child has ended."""

PRELOADED = (
    *("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "math"),
    *("operator", "random", "re", "statistics", "string", "typing"),
)


def main() -> int | None:
    """Serve the socket that is descriptor 0; what a child returns becomes its exit code, by way of Python's own end."""
    control = socket.socket(fileno=os.dup(0))
    settings = json.loads(control.recv(1 << 16))
    os.environ.pop("LD_LIBRARY_PATH", None)  # Python has started by it
    sys.path[:] = [*settings["path"]]
    for name in PRELOADED:
        __import__(name)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, before the trainer
    jail = Jail(settings["readable"], settings["landlock"])
    jail.drop_root()
    control.send(json.dumps(_tried(jail)).encode())
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 8)
        if not message:
            return 0
        job = json.loads(message)
        alive, end = os.pipe()
        children = []
        for place, role in enumerate(job["roles"]):
            own = descriptors[3 * place : 3 * place + 3]
            children.append(os.fork())
            if not children[-1]:
                control.close()
                os.dup2(end if place == 0 else own[0], ALIVE)
                return _child(role, own, jail, job)
        for descriptor in (end, *descriptors):
            os.close(descriptor)
        watched: list[Any] = [alive, control]
        ready = select.select(watched, [], [], job["seconds"])[0]  # its end is closed when the process ends
        late = alive not in ready
        statuses = [_end(child) for child in children]
        os.close(alive)
        control.send(json.dumps({"status": statuses[0], "late": late}).encode())


def _end(child: int) -> int:
    """Kill it, if it has not ended, and give its status."""
    for kill in (os.killpg, os.kill):  # a group of its own matters only where the kernel let it have children
        with suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _child(role: str, descriptors: list[int], jail: Jail, job: dict[str, Any]) -> int | None:
    """Everything that a jailed process does."""
    first, second, third = (os.dup2(one, 50 + i) for i, one in enumerate(descriptors))  # out of the way of 0 to 4
    void = os.open("/dev/null", os.O_RDWR)
    stdin, stdout = (second, third) if role == "script" else (void, void)
    for target, source in enumerate((stdin, stdout, void)):
        os.dup2(source, target)
    with open(first, encoding="utf-8", closefd=False) as file:
        text = file.read()
    channel = [] if role == "script" else [os.dup2(second, 3), os.dup2(third, 4)]
    os.closerange(max(channel, default=2) + 1, RULES)
    os.setsid()
    jail.enter(job["seconds"], job["memory"], job["output"])
    if role == "tests":
        asserts.run_test(text, *channel)
        sys.stdout.flush()
        return PASSED
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # what `site` adds
    name = "__main__" if role == "script" else "answer"
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, "answer.py", "exec"), module.__dict__)
    if role == "serve":
        asserts.serve(vars(module), *channel)
    return None


def _tried(jail: Jail) -> dict[str, list[str]]:
    """What a jailed process could do of what it should not be able to, and could not, by trying.

    Raises:
        OSError: there can be no such process.
    """
    attempts = {
        "network": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
        "processes": os.fork,
        "signals": lambda: os.kill(os.getppid(), 0),
        "reading files": lambda: open("/etc/passwd").close(),
        "writing files": lambda: open("/tmp/.lightning_rlhf_probe", "a").close(),
    }
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        done = []
        try:
            jail.enter(10, 1 << 30, 1 << 16)
            for name, attempt in attempts.items():
                try:
                    if attempt() == 0:
                        os._exit(0)  # the child of a fork
                    done.append(name)
                except OSError:
                    pass
            import uuid  # noqa: F401  # files of Python itself must be readable

            said: Any = done
        except BaseException as error:
            said = f"a process cannot enter its jail: {error}"
        os.write(writing, json.dumps(said).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        could = json.loads(file.read() or '"a process in its jail is killed at once"')
    os.waitpid(child, 0)
    if isinstance(could, str):  # every program would score 0
        raise OSError(could)
    return {"open": could, "closed": [name for name in attempts if name not in could]}
