"""Tests in one process, the program they test in another: a verdict that the program cannot forge.

The tests see the program's functions, classes and objects as stand-ins. Calling one sends the arguments to the program and
brings back the result as plain data (numbers, text, bytes, lists, tuples, sets, dicts, deques, dates, None), which is
compared HERE, by Python's own operators. So the program never holds an expected value, and an object that says it equals
everything is not data: it stays over there, and a stand-in equals nothing but what the program says of two of its own.

Lists, dicts, sets and bytearrays given as arguments are changed here as they were changed there. Modules of `GENUINE` that a
program has imported are this process's own.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
import types
import unittest
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from lightning_rlhf.sandbox.wire import Channel, Remote, Stand, outcome

GENUINE = (
    *("bisect", "cmath", "collections", "datetime", "decimal", "fractions", "heapq", "itertools", "math", "random"),
    *("re", "string"),
)
"""Modules whose contents are the same on both sides. None that evaluates text, as `typing` does."""


OWN = dict.fromkeys((*GENUINE, "copy", "functools", "json", "numpy", "operator", "statistics")) | {"np": "numpy"}
"""What a test that says `math.isclose` without an import means, whatever a program calls so."""


# -- the process of the tests ------------------------------------------------------------------------------------------
def run_test(text: str, reading: int, writing: int) -> None:
    """Run a test, and the functions and classes of pytest's or unittest's kind that it defines; returns if it passed.

    Raises:
        Exception: whatever the test raises; or the test asks nothing of the program, such as one that calls a builtin.
    """
    channel = Channel(reading, writing)
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    theirs = {name: value for name, value in map(_own, channel.ask("names")) if not str(name).startswith("__")}
    asked = channel.asked
    space = {name: value for name, value in theirs.items() if _is_tested(name, used, theirs)}
    answer = sys.modules["solution"] = types.ModuleType("solution")  # as KodCode's tests call it
    vars(answer).update(theirs, __all__=list(space))
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in OWN:
            with suppress(ImportError):
                space[node.value.id] = importlib.import_module(OWN[node.value.id] or node.value.id)
    space["__name__"] = "tests"
    exec(compile(tree, "test.py", "exec"), space)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            space[node.name]()
        elif isinstance(node, ast.ClassDef):
            _run_class(space[node.name])
    plain = {
        name for name, value in space.items() if name in theirs and not isinstance(value, Stand | types.ModuleType)
    }
    if channel.asked == asked and not plain & used:
        raise AssertionError("the test asks nothing of the program")


def _is_tested(name: str, used: set[str], theirs: Collection[str]) -> bool:
    """Whether the program's object of this name is the one that a test means by it.

    A program's `abs` must not replace the one that a test checks with. MBPP has functions called `sum`, though: a builtin's name
    is the program's where the test uses no other, and nothing else of the program's.
    """
    if not hasattr(builtins, name):
        return True
    errors = {
        one for one, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
    }
    others = {one for one in used - errors if one in theirs or hasattr(builtins, one)}
    return others == {name}


def _run_class(case: Any) -> None:
    """The tests of a class that a test defines."""
    if isinstance(case, type) and issubclass(case, unittest.TestCase):
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
        for _, trace in (*result.errors, *result.failures):
            raise AssertionError(trace)
    elif isinstance(case, type) and case.__name__.startswith("Test"):
        for name in [name for name in dir(case) if name.startswith("test")]:
            one = case()
            getattr(one, "setup_method", list)()
            getattr(one, name)()


def _own(entry: tuple[str, Any, str | None, str | None]) -> tuple[str, Any]:
    """A name of the program's and what it is: the genuine article where it says so."""
    name, value, source, attribute = entry
    if source not in GENUINE:
        return name, value
    module = importlib.import_module(source)
    public = getattr(module, "__all__", None) or [one for one in vars(module) if not one.startswith("_")]
    return name, module if attribute is None else getattr(module, attribute) if attribute in public else value


# -- the process of the program ----------------------------------------------------------------------------------------
def serve(program: dict[str, Any], reading: int, writing: int) -> None:
    """Answer the requests of the tests until they have ended."""
    channel = Channel(reading, writing)

    def back(number: int) -> Callable[..., Any]:
        """A function of the tests: calling it is all that can be done with an object of theirs."""

        def call(*args: Any) -> Any:
            channel.send("back", number, channel.encode(args))
            reply = channel.receive()
            if reply[0] == "error":
                raise getattr(builtins, reply[1], Remote)(*channel.decode(reply[2]))
            return channel.decode(reply[1])

        return call

    channel.stand = back
    operations: dict[str, Callable[..., Any]] = {"get": getattr, "set": setattr}
    operations |= {
        "iter": iter,
        "next": next,
        "len": len,
        "bool": bool,
        "kind": lambda of, value: isinstance(value, of),
    }

    def reply(operation: str, target: Any, *values: Any) -> list[Any]:
        of, given = channel.decode(target), [channel.decode(value) for value in values]
        if operation == "names":
            names = [(name, value, *_source(value)) for name, value in program.items() if not name.startswith("__")]
            return outcome(channel, lambda: names)
        if operation == "call":
            args, kwargs = given
            return outcome(channel, lambda: of(*args, **kwargs), args)
        return outcome(channel, lambda: operations[operation](of, *given))

    while True:
        try:
            request = channel.receive()
        except EOFError:
            return
        channel.send(*reply(*request))


def _source(value: Any) -> tuple[str | None, str | None]:
    """The module of `GENUINE` that a value is or comes from, and its name there."""
    if isinstance(value, type(sys)):
        return value.__name__, None
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    genuine = module in GENUINE and isinstance(name, str) and getattr(sys.modules[module], name, None) is value
    return (module, name) if genuine else (None, None)
