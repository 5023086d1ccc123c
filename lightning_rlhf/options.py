"""Options that come from Python, where no parser has looked at them: dicts as in YAML, and misspelled names in one line; options
by the names they have on a command line."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

ELSEWHERE = {
    "learning_rate": "model.lr",
    "lr_scheduler_type": "model.lr_schedule",
    "model_name_or_path": "model.model",
    "sft_model_path": "model.model",
    "reward_funcs": "model.reward",
    "reward_model_path": "model.reward_model.model",
    "beta": "model.kl.coef",
    "kl_coef": "model.kl.coef",
    "epsilon": "model.clip_low",
    "epsilon_high": "model.clip_high",
    "cliprange": "model.clip_low",
    "cliprange_value": "model.value_clip",
    "loss_type": "model.loss",
    "num_iterations": "model.ppo_epochs",
    "num_ppo_epochs": "model.ppo_epochs",
    "num_mini_batches": "model.mini_batches",
    "gradient_accumulation_steps": "model.micro_batch_tokens",
    "peft_config": "model.lora",
    "dataset_name": "data.path",
    "train_dataset": "data.path",
    "eval_dataset": "data.val_path",
    "per_device_train_batch_size": "data.batch_size",
    "train_batch_size": "data.batch_size",
    "use_vllm": "rollout.engine",
    "generation_kwargs": "rollout.sampling.extra",
    "response_length": "rollout.sampling.max_completion_length",
    "max_new_tokens": "rollout.sampling.max_completion_length",
    "num_train_epochs": "trainer.max_epochs",
    "logging_steps": "trainer.log_every_n_steps",
    "output_dir": "trainer.default_root_dir",
    "bf16": "trainer.precision",
    "seed": "seed_everything",
}
"""TRL's and verl's names of options, and what comes nearest here."""


def options_as(kind: type[T], given: Any, key: str) -> T:
    """``given`` itself if it is a ``kind``, or one made of a dict, as YAML says it.

    Raises:
        ValueError: it is neither, or the dict has other names than the parameters of ``kind``, or too few of them.
    """
    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f"{key} must be a lightning_rlhf.{kind.__name__} or a dict of its options, got {given!r}")
    known = inspect.signature(kind).parameters
    for name in given:
        if name not in known:
            raise ValueError(f"{key} has no option {name!r}{suggestion(str(name), known)}; it has {', '.join(known)}")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in given:
            raise ValueError(f"{key} needs {name!r}")
    return kind(**given)


def optional_options(kind: type[T], given: Any, key: str) -> T | None:
    """`options_as`, where None, which leaves something out, is allowed."""
    return None if given is None else options_as(kind, given, key)


def suggestion(name: str, known: Collection[str]) -> str:
    """What is meant by an unknown name, as the end of a sentence; nothing if no other looks like it."""
    return f", did you mean {ELSEWHERE[name]!r}?" if name in ELSEWHERE else closest(name, known)


def closest(name: str, known: Collection[str]) -> str:
    """`suggestion` from ``known`` alone: the shortest that begins with the name, or else the one that looks most like it."""
    begun = sorted((other for other in sorted(known) if name and other.startswith(name)), key=len)
    close = begun or difflib.get_close_matches(name, known, 1, 0.6)
    return f", did you mean {close[0]!r}?" if close else ""


def parameters_of(kind: type) -> set[str]:
    """What a class and those that it hands its keywords on to can be given."""
    return {name for base in kind.__mro__[:-1] for name in inspect.signature(base).parameters} - {"args", "kwargs"}


def flat(options: Any, name: str = "") -> dict[str, Any]:
    """Of nested dicts and lists their leaves, by the names that they have on a command line; an item of a list by its number."""
    if isinstance(options, Mapping) and options:
        inner = [(name if key == "init_args" else f"{name}.{key}".lstrip("."), value) for key, value in options.items()]
    elif isinstance(options, list) and options:
        inner = [(f"{name}[{number}]", value) for number, value in enumerate(options)]
    else:
        return {name: options}
    return {leaf: value for key, below in inner for leaf, value in flat(below, key).items()}
