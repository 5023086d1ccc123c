"""Functions by name: an estimator, a loss, or the user's own by dotted path, and the options they list."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser


def function_named(name: str | Callable[..., Any], module: ModuleType, key: str) -> Callable[..., Any]:
    """A function of ``module`` by its name, or any function by its dotted path.

    Raises:
        ValueError: there is none.
    """
    if callable(name):
        return name
    source, _, attribute = name.rpartition(".")
    try:
        found = getattr(import_module(source) if source else module, attribute)
    except (ImportError, AttributeError):
        takes_all = [
            n for n, f in vars(module).items() if inspect.isfunction(f) and "_" in inspect.signature(f).parameters
        ]
        public = [n for n in takes_all if vars(module)[n].__module__ == module.__name__ and n[0] != "_"]
        raise ValueError(f"{key}: there is no {name!r}; built in: {', '.join(public)}, or a dotted path") from None
    return found


def check_options(function: Callable[..., Any], given: Mapping[str, Any], own: Collection[str], key: str) -> None:
    """Raise ValueError if ``given`` has a name that ``function`` does not list, or one that the module hands over (``own``), or a
    value that its annotation excludes; or if ``function`` does not take whatever else it is handed."""
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise ValueError(
            f"{key.removesuffix('_args')}: {function.__name__} must end in **_, since it is handed more than it lists"
        )
    listed = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    options = [name for name in listed if name not in own]
    for name in given:
        if name not in options:
            raise ValueError(
                f"{key}: {function.__name__} has no option {name!r}; it has {', '.join(options) or 'none'}"
            )
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError):  # annotations that are for type checkers only
        return
    for name in given.keys() & hints.keys():
        _check_value(given[name], hints[name], f"{key}.{name}")


def _check_value(value: Any, kind: Any, key: str) -> None:
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=kind)
    except (ValueError, TypeError):  # nothing that can be said in YAML
        return
    try:
        parser.parse_object({"value": value})
    except ArgumentError as error:
        bounds = re.search("restriction (.*)", str(error))
        must = f"of type {getattr(kind, '__name__', kind)}"
        if bounds:
            must = bounds[1].replace("v<inf", "finite").replace("v", "")
        must = " or ".join(map(repr, get_args(kind))) if get_origin(kind) is Literal else must
        raise ValueError(f"{key}: got {value!r}, must be {must}") from None
