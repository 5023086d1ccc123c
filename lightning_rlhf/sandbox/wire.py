"""Values between two processes over pipes, and stand-ins for objects that stay in the other one; `asserts` says what for.

request   [operation, target, …]    names, call, get, set, iter, next, len, bool, kind
reply     ["ok", value, arguments as they are now], ["error", class of the exception or its nearest builtin one, arguments], or
          ["back", number, arguments] to have a function of the tests called first
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

_LONGEST = 1 << 26


class Remote(Exception):
    """An exception of a class of the program's own."""


class Channel:
    """Values over two pipes, one line of JSON each. ``kept`` are the objects that the other side knows by number."""

    def __init__(self, reading: int, writing: int) -> None:
        self.stand: Callable[[int], Any] = partial(Stand, self)
        self.reader, self.writer = os.fdopen(reading), os.fdopen(writing, "w")
        self.kept: list[Any] = []
        self.asked = 0
        sys.set_int_max_str_digits(0)

    def send(self, *message: Any) -> None:
        self.writer.write(json.dumps(message) + "\n")
        self.writer.flush()

    def receive(self) -> Any:
        line = self.reader.readline(_LONGEST)
        if not line.endswith("\n"):
            raise EOFError("the program has ended, or its answer is too long")
        return json.loads(line)

    def encode(self, value: Any) -> Any:
        """In JSON: text, numbers, None as they are, everything else as [kind, …]."""
        if value is None or isinstance(value, bool | int | float | str):
            for plain in (bool, int, float, str):
                if isinstance(value, plain):
                    return plain(value)
            return None
        for sequence in (list, tuple, set, frozenset, deque):
            if isinstance(value, sequence):
                return [sequence.__name__, [self.encode(item) for item in value]]
        if isinstance(value, dict):
            return ["dict", [[self.encode(key), self.encode(item)] for key, item in value.items()]]
        if isinstance(value, range):
            return ["range", [value.start, value.stop, value.step]]
        if isinstance(value, bytes | bytearray):
            return [type(value).__name__, value.decode("latin-1")]
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, Decimal | Fraction):
            return [type(value).__name__, str(value)]
        for moment in (datetime, date, time):  # a datetime is a date
            if isinstance(value, moment):
                return [moment.__name__, value.isoformat()]
        if isinstance(value, timedelta):
            return ["timedelta", [value.days, value.seconds, value.microseconds]]
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
            return self.encode(value.item())
        if isinstance(value, Stand):
            return ["yours", value._number]
        self.kept.append(value)
        return ["mine", len(self.kept) - 1]

    def decode(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        kind, *rest = value
        if kind in _MAKE:
            return _MAKE[kind](map(self.decode, rest[0]) if isinstance(rest[0], list) else rest[0])
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in rest[0]}
        if kind == "complex":
            return complex(*rest)
        if kind == "yours":
            return self.kept[rest[0]]
        if kind == "mine":
            return self.stand(int(rest[0]))
        raise ValueError(f"no kind of value: {kind}")

    def ask(self, operation: str, target: Any = None, *values: Any) -> Any:
        """Send a request and wait for its reply; arguments are changed in place."""
        self.asked += 1
        self.send(operation, self.encode(target), *(self.encode(value) for value in values))
        while (reply := self.receive())[0] == "back":
            self.send(*outcome(self, lambda: self.kept[reply[1]](*self.decode(reply[2]))))
        if reply[0] == "error":
            kind = getattr(builtins, str(reply[1]), Remote)
            known = isinstance(kind, type) and issubclass(kind, Exception)
            # elsewhere StopIteration would end a loop of the tests as if all was well
            stops = known and issubclass(kind, StopIteration | StopAsyncIteration) and operation != "next"
            raise (kind if known and not stops else Remote)(*self.decode(reply[2]))
        if operation == "call":
            for given, now in zip(values[0], self.decode(reply[2]), strict=True):
                _become(given, now)
        return self.decode(reply[1])


_MAKE: dict[str, Callable[[Any], Any]] = {
    **{"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque},
    **{"datetime": datetime.fromisoformat, "date": date.fromisoformat, "time": time.fromisoformat},
    "timedelta": lambda parts: timedelta(*parts),
    "range": lambda parts: range(*parts),
    "bytes": lambda text: text.encode("latin-1"),
    "bytearray": lambda text: bytearray(text.encode("latin-1")),
    "Decimal": Decimal,
    "Fraction": Fraction,
}


def _become(given: Any, now: Any) -> None:
    if isinstance(given, list | bytearray):
        given[:] = now
    elif isinstance(given, dict | set):
        given.clear()
        given.update(now)


def outcome(channel: Channel, call: Callable[[], Any], arguments: Any = ()) -> list[Any]:
    """A reply."""
    try:
        value = call()
        return ["ok", channel.encode(value), channel.encode(list(arguments))]
    except Exception as error:
        kind = next(one for one in type(error).__mro__ if vars(builtins).get(one.__name__) is one)
        if kind is type(error):
            return ["error", kind.__name__, channel.encode(error.args)]
        return ["error", Remote.__name__ if kind is Exception else kind.__name__, channel.encode((str(error),))]


class Stand:
    """An object of the other process. Its operators are with objects of that process only."""

    def __init__(self, channel: Channel, number: int) -> None:
        self.__dict__.update(_channel=channel, _number=number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._channel.ask("call", self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what libraries look for, such as numpy an address to read from
            raise AttributeError(name)
        return self._channel.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._channel.ask("set", self, name, value)

    def __next__(self) -> Any:
        return self._channel.ask("next", self)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._channel.ask("iter", self)
        while True:
            try:
                yield next(iterator)
            except StopIteration:
                return

    def __bool__(self) -> bool:
        return self._channel.ask("bool", self)

    def __instancecheck__(self, value: Any) -> bool:
        return self._channel.ask("kind", self, value)

    def __len__(self) -> int:
        return self._channel.ask("len", self)

    def __hash__(self) -> int:
        return self._number


def _forward(name: str, *, own_only: bool) -> Callable[..., Any]:
    def method(self: Stand, *args: Any) -> Any:
        if own_only and not all(isinstance(other, Stand) for other in args):
            return NotImplemented
        return self._channel.ask("get", self, name)(*args)

    return method


for _name in ("getitem", "setitem", "delitem", "str", "repr"):
    setattr(Stand, f"__{_name}__", _forward(f"__{_name}__", own_only=False))
for _name in [
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "neg",
    "pos",
    "abs",
]:
    setattr(Stand, f"__{_name}__", _forward(f"__{_name}__", own_only=True))
