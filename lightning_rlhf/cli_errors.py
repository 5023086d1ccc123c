"""What is wrong with a command line, in one line: the parser's nested reports, made short."""

from __future__ import annotations

import inspect
import os
import re
import sys
from typing import NoReturn

import lightning.pytorch as pl

from lightning_rlhf.callbacks.filtering import FilterGroups
from lightning_rlhf.callbacks.rollout import RolloutCallback
from lightning_rlhf.data import PromptDataModule
from lightning_rlhf.meeting import tell
from lightning_rlhf.modules.correction import Correction
from lightning_rlhf.modules.dpo import DPOLightningModule
from lightning_rlhf.modules.frozen_reward import FrozenRewardModel
from lightning_rlhf.modules.kl import KL
from lightning_rlhf.modules.ppo import PPOLightningModule
from lightning_rlhf.modules.reward_model import RewardModelLightningModule
from lightning_rlhf.modules.settings import LoRA, ModelSettings
from lightning_rlhf.options import ELSEWHERE, suggestion
from lightning_rlhf.rollout.turns import Conversation
from lightning_rlhf.supervised import SFTDataModule, SupervisedDataModule
from lightning_rlhf.types import Sampling

_GROUPS = ("model", "data", "rollout", "trainer", "seed_everything", "imports", "config", "ckpt_path")

_HOMES = (
    ("rollout.sampling", (Sampling,)),
    ("model", (ModelSettings, *PPOLightningModule.__mro__[:-1], DPOLightningModule, RewardModelLightningModule)),
    ("data", (PromptDataModule, SFTDataModule, SupervisedDataModule)),
    ("rollout", (RolloutCallback,)),
    ("trainer", (pl.Trainer,)),
    ("model.kl", (KL,)),
    ("model.lora", (LoRA,)),
    ("model.reward_model", (FrozenRewardModel,)),
    ("model.correction", (Correction,)),
    ("rollout.filter_groups", (FilterGroups,)),
    ("rollout.conversation", (Conversation,)),
    ("rollout.val_sampling", (Sampling,)),
)
"""Whose parameters are options, and below which key."""

_GROUPS_OF_OPTIONS = [(key, kinds[0]) for key, kinds in _HOMES if key not in _GROUPS]
"""Keys whose values have no class_path."""


def readable(message: str) -> str:
    """One line out of the parser's nested report: the key, and the reasons that matter."""
    keys: list[str] = []
    reasons: list[str] = []
    types: list[str] = []
    given = ""
    for raw in message.splitlines():
        line = raw.strip().removeprefix("- ")
        while found := re.match(r"""Parser key "([^"]+)":\s*|Problem with given class_path '[^']*':\s*""", line):
            keys += [found[1]] if found[1] and found[1] not in keys else []
            line = line[found.end() :]
        types += re.findall(r"Expected a <class '(?!NoneType)(\w+)'>", line)
        types += ["class path"] if re.match(r"Not a valid subclass|Expected a dot import path", line) else []
        if found := re.match(r"Expected a <class '\w+'>\. Got value: (.*)", line):
            given = given or found[1]
        if line.startswith("Given value:") and not given and len(line) < 120 and "Namespace(" not in line:
            given = re.sub(r"NestedArg\(key=.*, val='?(.*?)'?\)$", r"\1", line.removeprefix("Given value:").strip())
        elif line and not re.match(
            r"Does not validate|Subtypes:|Errors:|Given value|Expected a (<class|path but|dot)|Not a valid subclass"
            r"|Subclass types|a class path|a dict with",
            line,
        ):
            reasons.append(line)
    articles = {"list": f"a list such as [{given}]", "int": "an int", "class path": "a class path"}
    if (kind := dict(_GROUPS_OF_OPTIONS).get(".".join(keys))) is not None:
        articles["class path"] = f"options such as {{{next(iter(inspect.signature(kind).parameters))}: …}}"
    kinds = [articles.get(kind, f"a {kind}") for kind in dict.fromkeys(types)]
    expected = f"must be {' or '.join(kinds)}" if kinds else "is not accepted"
    text = " or ".join(dict.fromkeys(reasons)) or f"{expected}, got {given or ' '.join(message.split())}"
    text = re.sub(r"Expected a typing\.Literal(\[[^]]*\])\. Got value: (.*)", r"must be one of \1, got \2", text)
    if text.startswith("Expected a typing.Literal["):
        text = f"must be one of {' or '.join([text, *kinds])}" + (f", got {given}" if given else "")
    text = text.replace("Expected a typing.Literal", "")
    text = re.sub(r"""^Unable to load config ['"](.*?)['"].*""", rf"must be {articles['class path']}, got \1", text)
    # of an optional one the value is not in the reason
    value = re.compile(r"Not of type \w+: (\S*) ?does not conform to restriction v")
    text = value.sub(lambda found: f"got {found[1] or given}, must be ", text)
    text = text.replace(">-inf and v<inf", "finite").replace("v<inf", "finite").replace(" and v<", " and <")
    return ": ".join([".".join(keys), text] if keys else [text]) + _suggestion(text, ".".join(keys))


def _suggestion(text: str, place: str) -> str:
    """What may have been meant by an unknown option: one of its name elsewhere, one of another library, one that looks like it.

    Args:
        place: key below which it was given, if it is not part of its name.
    """
    unknown = re.search(
        r"(?:Option|Group '.*' does not accept option) '([^']+)'|unrecognized arguments: --(\S+)|not accept option '([^']+)'",
        text,
    )
    if unknown is None:
        return ""
    whole = (unknown[1] or unknown[2] or unknown[3]).split("=")[0]
    group, name = whole.partition(".")[0], whole.rpartition(".")[2]
    if not unknown[1] and group not in _GROUPS and (close := suggestion(group, _GROUPS)):
        return close
    if name in ELSEWHERE:
        return suggestion(name, ())
    options = [
        (key, kind, option) for key, kinds in _HOMES for kind in kinds for option in inspect.signature(kind).parameters
    ]
    for key, kind, option in options:
        if option == name and (key, unknown[1]) == (place, name):
            return f", it is one of {kind.__name__}"
        if option == name:
            return f", did you mean {f'{key}.{name}'!r}?"
    near = {option for key, _, option in options if key == place or not text.startswith("Option")}
    return suggestion(name, near) if unknown[1] or group in _GROUPS else ""


def fail(message: str, code: int = 1, *, own: bool = False, met: bool = True) -> NoReturn:
    """Print one line and exit; rank 0 speaks for all, unless the error is this process's ``own``.

    Args:
        met: false if the other ranks do not know of the error and may wait for this one.
    """
    rank, line = _rank(), " ".join(readable(message).split())
    if rank == 0 or own:
        where = f" (rank {rank})" if rank else ""
        # one write: several processes may speak at once
        sys.stderr.write(f"lightning-rlhf: error{where}: {line}\n")
        sys.stderr.flush()
    if not met:
        tell(line)
    sys.exit(code)


def is_first_of_node() -> bool:
    """Whether this process speaks for those of its machine about what is or is not there."""
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "SLURM_LOCALID"))


def _rank() -> int:
    """Of this process as far as its launcher says: torchrun, srun, or Lightning itself on each node.

    In a shell of SLURM's all processes are of one task: Lightning goes by the same names.
    """
    environment = os.environ
    in_a_shell = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    for name in ("RANK",) if in_a_shell else ("RANK", "SLURM_PROCID"):
        if name in environment:
            return int(environment[name])
    return int(environment.get("NODE_RANK", 0)) or int(environment.get("LOCAL_RANK", 0))
