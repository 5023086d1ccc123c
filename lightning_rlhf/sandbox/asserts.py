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
from collections.abc import Callable
from typing import Any

from lightning_rlhf.sandbox.wire import Channel, Remote, outcome

GENUINE = (
    *("bisect", "cmath", "collections", "datetime", "decimal", "fractions", "heapq", "itertools", "math", "random"),
    *("re", "string"),
)
"""Modules whose contents are the same on both sides. None that evaluates text, as `typing` does."""


# -- the process of the tests ------------------------------------------------------------------------------------------
def run_test(text: str, reading: int, writing: int) -> None:
    """Run a test, and the functions called ``test_…`` that it defines; returns if it passed, else raises whatever it raises."""
    channel = Channel(reading, writing)
    tree = ast.parse(text)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    theirs = {name: value for name, value in map(_own, channel.ask("names")) if not str(name).startswith("__")}
    # a program's `abs` must not replace the one that a test checks with; MBPP has functions called `sum`, though
    shadows = not any(name in used and not hasattr(builtins, name) for name in theirs)
    space = {name: value for name, value in theirs.items() if shadows or not hasattr(builtins, name)}
    space["__name__"] = "tests"
    exec(compile(tree, "test.py", "exec"), space)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            space[node.name]()


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
                raise getattr(builtins, reply[1], Remote)(reply[2])
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
