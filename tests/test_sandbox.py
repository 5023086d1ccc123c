"""The sandbox against programs that mean harm: each attack is run, and what it would have done is looked for."""

from __future__ import annotations

import os
import platform
import resource
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from lightning_rlhf.sandbox import client
from lightning_rlhf.sandbox.client import Sandbox, SandboxError, _judge, _Server

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"), reason="the sandbox is Linux's"
)


@pytest.fixture(scope="module", params=[True, False], ids=["landlock", "no-landlock"])
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    sandbox = Sandbox(3.0, 512 << 20, landlock=request.param)
    client._warned = True
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def shut() -> Iterator[Sandbox]:
    """Everything that this kernel has; its time limit is not what ends anything."""
    sandbox = Sandbox(8.0, 512 << 20)
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def brief() -> Iterator[Sandbox]:
    sandbox = Sandbox(0.6, 512 << 20)
    yield sandbox
    sandbox.close()


def printed(sandbox: Sandbox, program: str, stdin: str = "", limit: int = 10_000) -> str | None:
    return sandbox.output_of(program, stdin, limit)[0]


def errors_of(sandbox: Sandbox, attempts: dict[str, str]) -> dict[str, str]:
    """What each of many attempts in one program ends in: an error's class, or that it worked."""
    program = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    program += "def call(x86, arm, *a):\n    number = x86 if os.uname().machine == 'x86_64' else arm\n"
    program += "    if number is None or libc.syscall(number, *a) < 0: raise OSError\n"
    for name, code in attempts.items():
        program += attempt(f"print({name!r}, end=': ')\n{code}")
    return dict(line.split(": ") for line in (printed(sandbox, program) or "").splitlines())


def at_once(runs: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(runs)) as threads:
        return list(threads.map(lambda run: run(), runs))


def attempt(code: str) -> str:
    """A program that prints the error that ``code`` ends in, or that it worked."""
    lines = "\n".join(f"    {line}" for line in code.splitlines())
    return f"import os, sys\ntry:\n{lines}\n    print('worked')\nexcept Exception as error:\n    print(type(error).__name__)\n"


# -- what programs can do ----------------------------------------------------------------------------------------------
def test_a_program_reads_its_input_and_prints(box: Sandbox) -> None:
    assert printed(box, "import sys\nprint(sum(map(int, sys.stdin.read().split())))", "1 2\n3") == "6\n"
    assert printed(box, "import os\nprint(len(os.read(0, os.fstat(0).st_size)))", "x" * 100_000) == "100000\n"
    assert printed(box, "print(input(), 'é')", "ü") == "ü é\n"
    assert printed(box, "if __name__ == '__main__':\n    print(1)\n    exit()") == "1\n"
    threads = "import threading\nthreading.stack_size(1 << 26)\nthreading.Thread(target=lambda: print(2)).start()"
    assert printed(box, threads) == "2\n"
    assert printed(box, "import asyncio\nasync def f(): print(3)\nasyncio.run(f())") == "3\n"
    assert printed(box, "import numpy, uuid, ssl\nprint(numpy.arange(4).sum())") == "6\n"


def test_each_run_begins_anew(shut: Sandbox) -> None:
    assert printed(shut, "import builtins, os\nbuiltins.left = 1\nos.environ['LEFT'] = '1'\nprint(1)") == "1\n"
    assert (
        printed(shut, "import builtins, os\nprint(hasattr(builtins, 'left'), 'LEFT' in os.environ)") == "False False\n"
    )


@pytest.mark.parametrize("program", ["1 / 0", "import sys\nsys.exit(1)", "def f(:", "print(1)\nraise ValueError", "\0"])
def test_a_program_that_fails_has_no_output(shut: Sandbox, program: str) -> None:
    assert shut.output_of(program, "", 100) == (None, False)


# -- time, memory, output ----------------------------------------------------------------------------------------------
def test_a_program_without_end_is_ended(brief: Sandbox) -> None:
    endless = ["while True: pass", "import time\ntime.sleep(1000)", "print(1, flush=True)\nwhile 1: pass"]
    start = time.monotonic()
    assert at_once([partial(brief.output_of, one, "", 100) for one in endless]) == [(None, True)] * 3
    assert time.monotonic() - start < 4


def test_memory_has_a_limit(shut: Sandbox) -> None:
    assert printed(shut, attempt("x = bytearray(1 << 30)")) == "MemoryError\n"
    assert printed(shut, attempt("x = []\nwhile True: x.append(bytes(1 << 20))")) == "MemoryError\n"
    import_less = "import mmap\nx = mmap.mmap(-1, 1 << 30)"
    assert printed(shut, attempt(import_less)) in ("OSError\n", "MemoryError\n")


def test_output_has_a_limit_and_what_is_over_it_is_kept_nowhere(shut: Sandbox) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert printed(shut, "while True: print('x' * 1000)") is None
    assert printed(shut, "import os\nos.write(1, b'x' * (1 << 28))") in (None, "x" * 10_000)
    assert printed(shut, "import os\nos.ftruncate(1, 1 << 40)\nos.pwrite(1, b'x', 1 << 30)") is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_recursion_without_end_costs_one_run(shut: Sandbox) -> None:
    assert printed(shut, attempt("f = lambda: f()\nf()")) == "RecursionError\n"
    deep = "import sys\nsys.setrecursionlimit(10 ** 9)\nf = lambda x: sorted([1, 2], key=f)\nf(1)"
    assert printed(shut, deep) is None
    assert printed(shut, "(" * 10_000) is None
    assert printed(shut, "print(1)") == "1\n"


# -- processes ---------------------------------------------------------------------------------------------------------
CHILDREN = {
    "fork": "os.fork()",
    "daemon": "if os.fork() == 0:\n    os.setsid()\n    os.fork()",
    "subprocess": "import subprocess\nsubprocess.run(['true'])",
    "multiprocessing": "import multiprocessing\nmultiprocessing.Process(target=print).start()",
    "exec": "os.execv('/bin/true', ['true'])",
    "session": "os.setsid()",
    "kill parent": "os.kill(os.getppid(), 9)",
    "kill all": "os.kill(-1, 9)",
    "kill group": "os.kill(0, 9)",
    "kill group of the parent": "os.killpg(os.getpgid(os.getppid()), 9)",
    "limits of the parent": "import resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))",
    "priority": "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "signal by the kernel": "import fcntl\nfcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
    "signal by an ioctl": "import fcntl\nfcntl.ioctl(0, 0x8901, os.getppid().to_bytes(4, 'little'))",
    "own limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "debug the parent": "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "if libc.ptrace(16, os.getppid(), 0, 0): raise OSError",
    "outlive the parent": "import ctypes\nif ctypes.CDLL(None).prctl(1, 0, 0, 0, 0): raise OSError",
    "memory of others": "import ctypes\nif ctypes.CDLL(None).shmat(0, None, 0) == -1: raise OSError",
    "shared memory": "import ctypes\nif ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) < 0: raise OSError",
    "file in memory": "os.memfd_create('x')",
    "clone": "import ctypes\nif ctypes.CDLL(None).syscall(56 if os.uname().machine == 'x86_64' else 220, 17, 0, 0, 0, 0) < 0:"
    " raise OSError",
    "clone3": "import ctypes\nif ctypes.CDLL(None).syscall(435, bytes(88), 88) < 0: raise OSError",
    "namespace": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError",
    "write out the disks": "call(162, 81)",
    "watches of the user": "call(253, None)",
    "watches of the user 1": "call(294, 26, 0)",
    "requests of the machine": "call(206, 0, 1000, ctypes.byref(ctypes.c_ulong()))",
    "personality": "call(135, 92, 0x0400000)",
    "segments": "call(154, None, 0, bytes(16), 16)",
}


def test_a_program_has_no_children_and_no_power_over_other_processes(box: Sandbox) -> None:
    found = errors_of(box, CHILDREN)
    assert found.keys() == CHILDREN.keys(), "the program lives"
    assert {how: one for how, one in found.items() if one not in ("PermissionError", "OSError", "ValueError")} == {}
    assert printed(box, "print(1)") == "1\n", "the server lives"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86-64")
def test_system_calls_of_other_kinds_end_the_program(shut: Sandbox) -> None:
    x32 = "import ctypes\nctypes.CDLL(None).syscall(0x40000000 + 39)\nprint(1)"
    code = (
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(bytes.fromhex('b814000000cd80c3'))\n"  # int 0x80
    )
    code += "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()\nprint(1)"
    assert printed(shut, x32) is None
    assert printed(shut, code) is None


def tasks() -> int:
    """Processes and threads of the machine."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])


def test_a_fork_bomb_leaves_no_process_and_a_thread_bomb_ends_with_its_process(brief: Sandbox) -> None:
    before = tasks()
    bomb = "import os\nfor i in range(1000):\n    try: os.fork()\n    except OSError: pass\nprint(1)"
    assert printed(brief, bomb) == "1\n"
    threads = "import threading, time\nthreading.stack_size(1 << 15)\n"
    threads += "while True: threading.Thread(target=time.sleep, args=(1000,)).start()"
    assert printed(brief, threads) is None
    time.sleep(0.2)
    assert tasks() < before + 200


def test_a_program_may_end_itself_by_a_signal(box: Sandbox) -> None:
    assert box.output_of("import os\nprint(1, flush=True)\nos.abort()", "", 100) == (None, False)
    assert box.output_of("import os\nprint(1, flush=True)\nos.kill(os.getpid(), 9)", "", 100) == (None, False)


# -- network, files, secrets -------------------------------------------------------------------------------------------
def test_a_program_reaches_no_socket(box: Sandbox, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "socket"))
        local.listen()
        address = server.getsockname()
        for socket_ in (server, local):
            socket_.settimeout(0.02)
        attempts = [
            f"socket.create_connection({address!r})",
            f"socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', {address!r})",
            f"socket.socket(socket.AF_UNIX).connect({str(tmp_path / 'socket')!r})",
            "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', '/dev/log')",
            f"socket.socketpair()[0].connect({str(tmp_path / 'socket')!r})",
            f"socket.socketpair()[0].sendto(b'x', {str(tmp_path / 'socket')!r})",
            "socket.getaddrinfo('localhost.localdomain', 80)",
            "socket.fromfd(0, socket.AF_INET, socket.SOCK_STREAM).connect(('127.0.0.1', 80))",
            "import ctypes\nif ctypes.CDLL(None).syscall(425, 1, bytes(120)) < 0: raise OSError",
        ]
        found = errors_of(box, {str(i): f"import socket\n{one}" for i, one in enumerate(attempts)})
        assert len(found) == len(attempts)
        assert set(found.values()) <= {"PermissionError", "OSError", "gaierror"}, found
        for socket_ in (server, local):
            with pytest.raises(TimeoutError):
                socket_.accept()


WRITES = {
    "temporary": "open('/tmp/lightning_rlhf_test', 'w')",
    "working folder": "open('lightning_rlhf_test', 'a')",
    "append": "open({path!r}, 'a')",
    "change": "open({path!r}, 'r+')",
    "truncate": "os.truncate({path!r}, 0)",
    "remove": "os.remove({path!r})",
    "rename": "os.rename({path!r}, {path!r} + '2')",
    "mode": "os.chmod({path!r}, 0)",
    "times": "os.utime({path!r}, (0, 0))",
    "attributes": "os.setxattr({path!r}, 'user.a', b'x')",
    "folder": "os.mkdir({path!r} + '2')",
    "link": "os.link({path!r}, {path!r} + '2')",
    "symbolic link": "os.symlink('/', {path!r} + '2')",
    "shared memory": "open('/dev/shm/lightning_rlhf_test', 'w')",
    "lock": "import fcntl\nfcntl.flock(os.open({path!r}, os.O_RDONLY), fcntl.LOCK_EX)",
    "lease": "import fcntl\nfcntl.fcntl(os.open({path!r}, os.O_RDONLY), 1024, fcntl.F_RDLCK)",
    "tempfile": "import tempfile\ntempfile.TemporaryFile()",
}


def test_a_program_writes_nothing(box: Sandbox, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    tmp_path.chmod(0o777)
    file.chmod(0o666)
    if os.getuid() == 0:  # the program is nobody then
        os.chown(file, 65534, 65534)
    before = file.stat()
    found = errors_of(box, {how: code.format(path=str(file)) for how, code in WRITES.items()})
    assert found.keys() == WRITES.keys()
    assert set(found.values()) <= {"PermissionError", "OSError", "FileNotFoundError"}, found
    after = file.stat()
    assert (file.read_text(), after.st_mode, after.st_mtime) == ("mine", before.st_mode, before.st_mtime)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_program_reads_python_and_nothing_else(shut: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("token")
    tmp_path.chmod(0o755)
    secret.chmod(0o644)
    if _Server(True).open:
        pytest.skip("this kernel has no Landlock")
    for path in (
        str(secret),
        os.path.expanduser("~"),
        "/etc/passwd",
        "/proc/self/environ",
        __file__,
        "/proc/1/cmdline",
    ):
        code = f"os.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r}).read()"
        assert printed(shut, attempt(code)) == "PermissionError\n", path
    assert printed(shut, attempt(f"open('/proc/{os.getpid()}/environ').read()")) == "PermissionError\n"
    assert printed(shut, attempt("open('/proc/%d/mem' % os.getppid(), 'rb').read()")) == "PermissionError\n"


def test_the_environment_and_open_files_of_the_trainer_are_not_the_programs(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    fresh = Sandbox(5.0, 512 << 20, landlock=box.landlock)
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        assert printed(fresh, "import os\nprint(sorted(os.environ))") == f"{sorted(VARIABLES)}\n"
        seen = "import os\nfor i in range(3, 4096):\n    try: os.fstat(i)\n    except OSError: continue\n    print(i)"
        assert printed(fresh, seen) == "101\n", "the sign of life alone"
    fresh.close()


VARIABLES = ["HOME", "LC_ALL", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"]


# -- asserts -----------------------------------------------------------------------------------------------------------
PROGRAM = """
import math, collections
from math import isclose
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __eq__(self, other): return self.items == other.items
    def __str__(self): return 'a stack'
def adder(x): return lambda y: x + y
def array():
    import numpy
    return numpy.array([1.0, 2.0])
class Full(Exception): pass
def double(x): return x * 2
def same(x): return x
def grow(x): x.append(1)
def apply(f, x): return [f(y) for y in x]
def raises(): raise ValueError("no")
def full(): raise Full("no")
def sum(a, b): return a + b + 1
class Refused(ValueError): pass
def refuse(): raise Refused("refused")
def missing_key(): return {}["a"]
def total(x):
    assert isinstance(x, range)
    return sum(0, -1 + __builtins__["sum"](x) if isinstance(__builtins__, dict) else -1 + __builtins__.sum(x))
SIZE = 3
from math import gcd
def squares():
    i = 0
    while True: yield i * i; i += 1
"""
GOOD = [
    "assert double(2) == 4 and double('a') == 'aa' and double([1]) == [1, 1] and double((1,)) == (1, 1)",
    "x = [0]; grow(x); assert x == [0, 1]",
    "assert apply(lambda y: y + 1, [1, 2]) == [2, 3]",
    "for v in (None, True, 1.5, float('inf'), 10**5000, {1: (2, {3})}, b'\\xff', frozenset([1]), 1j, '\\ud800'):\n"
    "    assert same(v) == v and type(same(v)) is type(v)",
    "from decimal import Decimal\nfrom fractions import Fraction\nassert same([Decimal('0.1'), Fraction(1, 3)])[1] * 3 == 1",
    "try:\n    raises()\nexcept ValueError as e:\n    assert str(e) == 'no'\nelse:\n    raise SystemExit",
    "s = Stack().push(1).push(2)\nassert len(s) == 2 and list(s) == [1, 2] and s.items == [1, 2] and s and 2 in s",
    "assert Stack().push(1) == Stack().push(1) and Stack() != Stack().push(1)",
    "import itertools\nassert list(itertools.islice(squares(), 3)) == [0, 1, 4]",
    "assert isclose(double(0.5), 1.0) and math.isclose(double(1), 2) and collections.Counter('aa')['a'] == double(1)",
    "def check(candidate):\n    assert candidate(3) == 6\ncheck(double)",
    "def test_a():\n    assert double(1) == 2\ndef test_b():\n    assert double(2) == 4",
    "assert sum(1, 2) == 4",
    "assert double(1) + sum([1, 2]) == 5",
    "import math\nassert math.floor(double(1.2)) == 2",
    "from collections import deque, Counter\nassert same(deque([1])) == deque([1]) and same(Counter('aa')) == {'a': 2}",
    "from datetime import *\nfor v in (date(2020, 1, 2), datetime(2020, 1, 2, 3), timedelta(1, 2)):\n    assert same(v) == v",
    "import numpy as np\nassert np.allclose(array(), [1.0, 2.0]) and array().sum() == 3 and array().tolist() == [1, 2]",
    "assert isinstance(Stack(), Stack) and not isinstance(3, Stack) and isinstance(double(1), int)",
    "from solution import double, sum\ndef test_a():\n    assert double(2) == sum(1, 2)",
    "import solution\nassert solution.double(2) == 4",
    "import unittest\nclass A(unittest.TestCase):\n    def test_a(self): self.assertEqual(double(2), 4)",
    "class TestA:\n    def setup_method(self): self.x = 4\n    def test_a(self): assert double(2) == self.x",
    "assert total(range(4)) == 6 and same(range(2)) == range(2)",
    "try:\n    refuse()\nexcept ValueError as e:\n    assert str(e) == 'refused'\nelse:\n    raise SystemExit",
    "try:\n    same({})['a']\nexcept KeyError as e:\n    assert str(e) == repr('a')",
    "try:\n    missing_key()\nexcept KeyError as e:\n    assert str(e) == repr('a')\nelse:\n    raise SystemExit",
    "assert SIZE == 3",
    "assert gcd(4, 6) == 2",
    "assert adder(2)(3) == 5 and str(Stack()) == 'a stack' and f'{Stack()}' == 'a stack'",
]
BAD = [
    "assert double(2) == 5",
    "def check(candidate):\n    assert candidate(3) == 7\ncheck(double)",
    "def test_a():\n    assert double(1) == 2\ndef test_b():\n    assert double(2) == 5",
    "missing(1)",
    "full()",
    "raise SystemExit(0)",
    "import unittest\nclass A(unittest.TestCase):\n    def test_a(self): self.assertEqual(double(2), 5)",
    "import unittest\nclass A(unittest.TestCase):\n    def test_a(self): missing(1)",
    "class TestA:\n    def test_a(self): assert double(2) == 5",
    "async def test_a(): assert double(2) == 5",
    "def check(candidate):\n    assert candidate(2) == 5",
    "assert max(1, 2) == 2",
    "x = 1",
]


def test_tests_see_functions_and_objects_of_the_program(shut: Sandbox) -> None:
    assert [test for test in GOOD if not shut.passes(PROGRAM, test)[0]] == []
    assert [test for test in BAD if shut.passes(PROGRAM, test)[0]] == []


EQUAL = """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __getattr__(self, name): return lambda *a, **k: self
    def __bool__(self): return True
    def __abs__(self): return 0
    __sub__ = __rsub__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda self, other: 0
    def __hash__(self): return 48271
    def __float__(self): return float(48271)
    __index__ = __int__ = lambda self: 48271
    def __iter__(self): return iter(())
def f(*a): return Any()
"""
FORGERIES = {
    "prints passed": "print('passed', 'PASSED', 86, flush=True)\ndef f(x): print('passed')",
    "exits": "import sys\nsys.exit(0)",
    "exits with the code": "import os\nos._exit(86)",
    "exits when called": "import os\ndef f(x): os._exit(86)",
    "exits later": "import sys\ndef f(x): sys.exit(86)",
    "equals everything": EQUAL,
    "a number that equals everything": "class N(int):\n    __eq__ = lambda a, b: True\n"
    "    __hash__ = int.__hash__\ndef f(x): return N(5)",
    "a list that equals everything": "class L(list):\n    __eq__ = lambda a, b: True\ndef f(x): return L()",
    "other builtins": "import builtins\nbuiltins.AssertionError = None\nbuiltins.abs = builtins.len = lambda x: 0\n"
    "def abs(x): return 0\ndef isinstance(*a): return True\ndef set(x): return 0\ndef f(x): return 0",
    "names of the tests": "def check(c): pass\ndef test_f(): pass\n__builtins__ = {}\ndef f(x): return 0",
    "the caller's frame": "import sys, re\ndef f(x):\n    frame = sys._getframe().f_back\n    while frame:\n"
    "        for c in frame.f_code.co_consts:\n            if c == 48271: return 48271\n        frame = frame.f_back",
    "everything in memory": "import gc, re\ndef f(x):\n    for o in gc.get_objects():\n"
    "        for s in (o.values() if isinstance(o, dict) else o if isinstance(o, (list, tuple)) else ()):\n"
    "            m = isinstance(s, str) and re.search(r'assert f\\(2\\) == (\\d+)', s)\n            if m: return int(m[1])",
    "ends the loop of the tests": "def f(x): raise StopIteration",
    "its own channel": "import os\nfor i in range(100):\n    for n in (3, 4, 86):\n"
    "        try: os.write(n, b'[\"ok\", 48271, []]\\n' * 9)\n        except OSError: pass\n"
    "def f(x): return 48271 if x == 3 else 0",
    "closes its channel": "import os\nos.closerange(0, 4096)\ndef f(x): return 48271",
    "modules of the tests": "class math:\n    isclose = lambda *a, **k: True\nclass np:\n    isclose = math.isclose\n"
    "math = math()\ndef f(x): return 0",
    "a module of the program's": "class math:\n    def isclose(*a, **k): return True\nclass np:\n    isclose = math.isclose\n"
    "def f(x): return 0",
    "names of what checks": "def abs(x): return 0\ndef sum(x): return 0\ndef NameError(): pass",
    "what checks alone": "def abs(x): return 0",
    "a function of the trainer's": "f = __import__('functools').partial(__import__('os')._exit, 86)",
    "annotations to evaluate": "class A: pass\nA.__annotations__ = {'x': \"__import__('os')._exit(86)\"}\ndef f(x): return A\n"
    "from typing import get_type_hints as g",
}
FORGED_TESTS = [
    "assert f(2) == 48271",
    "assert not f(2) != 48271",
    "assert abs(f(2) - 48271) < 1e-6",
    "assert 48271 in f(2) and [f(2)] == [48271]",
    "assert all(map(lambda c: f(c[0]) == c[1], [(2, 48271)]))",
    "def check(c):\n    assert f(2) == 48271\ncheck(f)",
    "def test_f():\n    assert f(2) == 48271",
    "import math\nassert math.isclose(f(2), 48271)",
    "assert math.isclose(f(2), 48271)",
    "assert np.isclose(f(2), 48271)",
    "assert abs(sum([f(2)]) - 48271) < 1e-6",
    "import unittest\nclass A(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(2), 48271)",
    "assert f(2) in {48271}",
    "assert sorted([f(2)]) == [48271]",
]


ALONE = [test for test in FORGED_TESTS if test.startswith(("def", "import unittest", "assert f(2) ==", "assert abs(f"))]
ANY = "won = 0\n" + "".join(
    f"try:\n{indent(test, '    ')}\n    won += 1\nexcept Exception:\n    pass\n"
    for test in FORGED_TESTS
    if not test.startswith(("def test_f", "import unittest", "assert np"))
)


@pytest.mark.parametrize("how", FORGERIES)
def test_a_verdict_cannot_be_forged(shut: Sandbox, how: str) -> None:
    tests = [*ALONE, ANY + "assert won > 0"]
    tests += [
        test for test in FORGED_TESTS if test.startswith("assert np") and ("np" in FORGERIES[how] or "equals" in how)
    ]
    if any(passed for passed, _ in at_once([partial(shut.passes, FORGERIES[how], test) for test in tests])):
        pytest.fail(str([test for test in FORGED_TESTS if shut.passes(FORGERIES[how], test)[0]]))


def test_a_builtin_that_checks_is_not_the_programs(shut: Sandbox) -> None:
    test = "assert abs(sum([1, 2]) - 3) < 1e-6"
    for program in (
        "def abs(x): return 0",
        "def abs(x): return 0\ndef sum(x): return 0",
        "def sum(x): return 0",
        "x = 1",
    ):
        assert not shut.passes(program, test)[0], program


def test_the_right_answer_passes_what_forgeries_fail(shut: Sandbox) -> None:
    right = [test for test in FORGED_TESTS if "in f(2)" not in test]
    program = "def f(x): return x + 48271 - 2"
    assert [test for test in right if not shut.passes(program, test)[0]] == []
    assert shut.passes(program, ANY + f"assert won == {len(right) - 3}")[0]


def test_a_test_without_end_is_ended(brief: Sandbox) -> None:
    pairs = [("def f(x):\n    while True: pass", "assert f(1) == 2"), ("while True: pass", "assert f(1) == 2")]
    pairs += [("def f(): return 1", "while True: f()")]
    assert at_once([partial(brief.passes, *pair) for pair in pairs]) == [(False, True)] * 3


# -- servers -----------------------------------------------------------------------------------------------------------
def test_servers_end_with_the_trainer(tmp_path: Path) -> None:
    code = """
import glob, os, threading, time
from lightning_rlhf.sandbox.client import Sandbox
box = Sandbox(100.0, 1 << 29)
threading.Thread(target=box.output_of, args=("import time\\ntime.sleep(99)", "", 9), daemon=True).start()
box.output_of("print(1)", "", 9)
children = ""
while len(children.split()) < 2:
    time.sleep(0.01)
    children = "".join(open(path).read() for path in glob.glob("/proc/self/task/*/children"))
print(children, flush=True)
time.sleep(99)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    ) as trainer:
        assert trainer.stdout is not None
        servers = [int(pid) for pid in trainer.stdout.readline().split()]
        trainer.kill()
    assert servers
    end = time.monotonic() + 5
    while (left := [pid for pid in servers if os.path.exists(f"/proc/{pid}")]) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


def test_a_server_that_dies_costs_one_run() -> None:
    box = Sandbox(5.0, 512 << 20)
    assert printed(box, "print(1)") == "1\n"
    box._idle.queue[0].process.kill()
    with pytest.raises(RuntimeError, match="the sandbox's server has ended"):
        box.output_of("print(1)", "", 9)
    assert printed(box, "print(1)") == "1\n"
    box.close()


def test_a_forked_process_has_servers_of_its_own() -> None:
    """With its parent's it would read the parent's verdicts."""
    box = Sandbox(5.0, 512 << 20)
    assert printed(box, "print(1)") == "1\n"
    server = box._idle.queue[0].process.pid
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of others do not matter to what the child does
        child = os.fork()
    if not child:
        said = printed(box, "print(2)")
        os.write(writing, f"{said}{box._idle.queue[0].process.pid == server}".encode())
        os._exit(0)
    assert os.read(reading, 20) == b"2\nFalse"
    os.waitpid(child, 0)
    assert printed(box, "print(1)") == "1\n"
    box.close()


def test_a_jail_that_cannot_be_entered_is_an_error_and_not_a_score_of_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_MAIN", "import platform; platform.machine = lambda: 'riscv64'; " + client._MAIN)
    with pytest.raises(SandboxError, match=r"no sandbox: .*no table of system calls for riscv64"):
        printed(Sandbox(5.0, 512 << 20), "print(1)")


def test_python_finds_its_libraries_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/libraries")  # of a Python that modules of a cluster provide
    box = Sandbox(5.0, 512 << 20)
    assert printed(box, "import os\nprint(sorted(os.environ))") == f"{sorted(VARIABLES)}\n"
    server = box._idle.queue[0].process.pid
    assert b"LD_LIBRARY_PATH=/libraries" in Path(f"/proc/{server}/environ").read_bytes()
    box.close()


def test_open_doors_warn_once_or_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_warned", False)
    with pytest.raises(
        SandboxError, match="could not be kept from network, signals by this kernel: run in a container"
    ):
        _judge(["network", "signals"], strict=True)
    with pytest.warns(
        UserWarning, match="could not be kept from network by this kernel: run it in a container without"
    ):
        _judge(["network"], strict=False)
    _judge(["network"], strict=False)
    _judge([], strict=True)
