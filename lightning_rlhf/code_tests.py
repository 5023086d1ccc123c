"""The reward of a program: the share of its tests that it passes, run in a `sandbox`.

    answer ─▶ its last fenced Python block ─┬─ stdin and stdout   what it prints is compared in the trainer
    column ─▶ tests of the row             ─┴─ asserts            a process of their own compares what its functions return

Tests as data sets have them, text of JSON as well:

    ["assert f(2) == 4", …]                          each a test; also functions test_…, and imports of their own (MBPP, KodCode)
    {"inputs": ["21\n", …], "outputs": ["42\n", …]}    standard input and output (APPS, TACO)
    [{"input": "21\n", "output": "42\n"}, …]           the same (PrimeIntellect, DeepCoder)
    {"fn_name": "f", "inputs": [[2], …], "outputs": [4, …]}   arguments and results of a function or method of Solution (APPS)
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

from jsonargparse.typing import PositiveFloat, PositiveInt

from lightning_rlhf.rewards import Completion, RewardError, text_of
from lightning_rlhf.sandbox.client import Sandbox, SandboxError

COLUMNS = ("tests", "test_cases", "test_list", "input_output", "verification_info", "ground_truth")
"""Where tests are looked for, in this order."""

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_SLACK = 1 << 16


@dataclass(frozen=True)
class Printed:
    """Standard input, and what has to be printed."""

    stdin: str
    stdout: str


Test: TypeAlias = str | Printed
"""Text of asserts, or standard input and output."""


class CodeTests:
    """The share of a row's tests that the answer's program passes; 0 without a program, None for a row without tests.

    Each test has a process of its own without network, files to write, children or secrets (docs/rewards.md says against
    what it holds). After a test that ran out of time the rest of an answer's are not tried. Logs the shares ``no_code`` and
    ``timed_out``.

    Args:
        column: of the tests; by default the first of `COLUMNS` that there is.
        timeout: seconds of one test.
        memory_mb: 2^20 bytes of address space of one test.
        all_or_nothing: 1 for all tests, else 0.
        max_tests: try only so many of a row's.
        processes: tests at once; by default the cores of this machine shared among its ranks.
        strict: stop the run where the kernel cannot close the sandbox, instead of warning once.
    """

    own_limits = True

    def __init__(
        self,
        column: str | None = None,
        timeout: PositiveFloat = 6.0,
        memory_mb: PositiveInt = 1024,
        all_or_nothing: bool = False,
        max_tests: PositiveInt | None = None,
        processes: PositiveInt | None = None,
        strict: bool = False,
    ) -> None:
        self.column, self.all_or_nothing, self.max_tests = column, all_or_nothing, max_tests
        self.processes = processes
        self.sandbox = Sandbox(timeout, memory_mb << 20, strict)

    def __call__(
        self, completions: Sequence[Completion], log_metric: Callable[[str, float], None] | None = None, **columns: Any
    ) -> list[float | None]:
        name = self.column or next((name for name in COLUMNS if name in columns), None)
        if name not in columns:
            raise RewardError(f"needs a column of tests, {self.column or ' or '.join(COLUMNS)}; the data has none")
        programs = [program_of(text_of(completion)) for completion in completions]
        tests = [read_tests(value)[: self.max_tests] for value in columns[name]]
        pairs = [(p, t) for p, t in zip(programs, tests, strict=True) if p is not None and t]
        try:
            with ThreadPoolExecutor(self.processes or _cores(), "code-tests") as threads:
                outcomes = iter(list(threads.map(lambda pair: self.passed(*pair), pairs)))
        except SandboxError as error:
            raise RewardError(f"has no sandbox: {error}") from error
        scores: list[float | None] = []
        late = 0
        for program, of_row in zip(programs, tests, strict=True):
            passed, timed_out = next(outcomes) if program is not None and of_row else (0, False)
            late += timed_out
            share = float(passed == len(of_row)) if self.all_or_nothing else passed / max(1, len(of_row))
            scores.append(share if of_row else None)
        if log_metric is not None:
            log_metric("no_code", programs.count(None) / len(programs))
            log_metric("timed_out", late / len(programs))
        return scores

    def passed(self, program: str, tests: Sequence[Test]) -> tuple[int, bool]:
        """How many tests a program passes, and whether one ran out of time."""
        passed = 0
        for test in tests:
            if isinstance(test, Printed):
                limit = 2 * len(test.stdout.encode()) + _SLACK
                printed, late = self.sandbox.output_of(program, test.stdin, limit)
                good = printed is not None and same_output(printed, test.stdout)
            else:
                good, late = self.sandbox.passes(program, test)
            passed += good
            if late or (self.all_or_nothing and not good):
                return passed, late
        return passed, False


def _cores() -> int:
    """This rank's share of the cores that the process may use."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1
    return max(1, len(os.sched_getaffinity(0)) // int(ranks)) if hasattr(os, "sched_getaffinity") else 1


def program_of(text: str) -> str | None:
    """The last fenced block of Python, or the last one of no language if there is none; what follows ``</think>`` counts."""
    blocks = _BLOCK.findall(text.rpartition("</think>")[2])
    python = [code for language, code in blocks if language.lower() in ("python", "python3", "py")]
    plain = [code for language, code in blocks if not language]
    return (python or plain or [None])[-1]


def read_tests(value: Any) -> list[Test]:
    """The tests of a row; none if it has none.

    Raises:
        ValueError: it is in none of the known forms, or a test is not Python.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = [value] if value.strip() else None
    if isinstance(value, dict) and "test_cases" in value:
        value = value["test_cases"]
    if isinstance(value, dict) and value.keys() >= {"inputs", "outputs"}:
        pairs = list(zip(value["inputs"], value["outputs"], strict=True))
        if name := value.get("fn_name"):
            return [_call(name, given, wanted) for given, wanted in pairs]
        return [Printed(_lines(given), _lines(wanted)) for given, wanted in pairs]
    if not value:
        return []
    if not isinstance(value, list | tuple):
        raise ValueError(f"tests must be a list of asserts, or a dict with inputs and outputs, got {str(value)[:60]!r}")
    found: list[Test] = []
    for test in value:
        if isinstance(test, dict) and test.keys() >= {"input", "output"}:
            found.append(Printed(_lines(test["input"]), _lines(test["output"])))
        elif isinstance(test, str):
            try:
                nodes = list(ast.walk(ast.parse(test)))
            except (SyntaxError, ValueError) as error:
                raise ValueError(f"a test must be Python, got {test[:60]!r} ({error})") from error
            called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
            if (
                any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in nodes)
                and "check" not in called
            ):
                raise ValueError("a test defines check, which nothing calls: put check(name of the function) below it")
            found.append(test)
        else:
            raise ValueError(f"a test must be text, or a dict with input and output, got {str(test)[:60]!r}")
    return found


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _call(name: str, given: Any, wanted: Any) -> str:
    """An assert that a function, or a method of ``Solution``, gives a result. JSON has no tuples; APPS has results in a list."""
    if not name.isidentifier():
        raise ValueError(f"fn_name must be the name of a function, got {name!r}")
    return f"""
def plain(x):
    return [plain(y) for y in x] if isinstance(x, (list, tuple)) else x
try:
    from solution import {name} as function
except ImportError:
    from solution import Solution
    function = Solution().{name}
wanted, got = {wanted!r}, plain(function(*{list(given)!r}))
assert got == wanted or [got] == wanted, got
"""


def same_output(printed: str, wanted: str) -> bool:
    """Whether two outputs are equal up to white space at the end of lines and of the text, and decimals up to 1e-6."""
    a, b = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, wanted))
    if a == b:
        return True
    if [len(line.split()) for line in a] != [len(line.split()) for line in b]:
        return False
    words = zip(" ".join(a).split(), " ".join(b).split(), strict=True)
    return all(x == y or _close(x, y) for x, y in words)


def _close(printed: str, wanted: str) -> bool:
    if not re.fullmatch(r"-?\d*\.\d+(e-?\d+)?", wanted):
        return False
    try:
        return math.isclose(float(printed), float(wanted), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False
