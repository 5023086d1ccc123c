"""The scalar head on a backbone: a critic's values, a reward model's scores; where it comes from, and its name outside.

    here              transformers
    model.…           <prefix>.…           the backbone
    value_head.weight score.weight         (1, h)
    value_head.bias   score.bias           of a token-classification model only

A reward model is an ``AutoModelForSequenceClassification`` with one label, whose head has no bias; a critic, which has one, is an
``AutoModelForTokenClassification``: a value at every token.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

from lightning_rlhf.modules.loading import stored_names
from lightning_rlhf.modules.settings import ModelSettings

if TYPE_CHECKING:
    from torch import nn

_KINDS = ("ForSequenceClassification", "ForTokenClassification")


def is_scored(config: Any) -> bool:
    """Whether a config is a classification model's."""
    return any(name.endswith(_KINDS) for name in config.architectures or ())


def head_names(settings: ModelSettings, bias: bool) -> dict[str, str]:
    """Names of the head's parameters here and in the folder; empty for a language model, which has no such head.

    Args:
        bias: whether there is one here.

    Raises:
        ValueError: the head has more than one output, a bias that has no place here, or is not found.
    """
    if not is_scored(settings.config):
        return {}
    from safetensors import safe_open

    stored = stored_names(settings.path)
    if "score.weight" not in stored:
        raise ValueError(
            f"{settings.key}: {settings.model!r} is a {settings.config.architectures[0]} without a tensor score.weight in"
            " safetensors: convert it, or take another model"
        )
    with safe_open(stored["score.weight"], framework="pt") as file:
        labels = file.get_slice("score.weight").get_shape()[0]
    if labels != 1:
        raise ValueError(
            f"{settings.key}: {settings.model!r} has {labels} labels, it must have one: take another model"
        )
    if "score.bias" in stored and not bias:
        raise ValueError(
            f"{settings.key}: {settings.model!r} is a critic, its head has a bias: take a sequence-classification model"
        )
    return {f"value_head.{n}": f"score.{n}" for n in ("weight", "bias") if f"score.{n}" in stored}


def scored_part(sequence: Int[Tensor, "_"], padding: int | None) -> Int[Tensor, "_"]:
    """Up to the last token that is not ``padding``: where transformers reads the score, also if an EOS doubles as padding."""
    kept = (sequence != padding).nonzero() if padding is not None else None
    return sequence if kept is None else sequence[: int(kept[-1]) + 1 if len(kept) else 1]


@torch.no_grad()
def start_head(head: nn.Linear, std: float, seed: int, names: Collection[str]) -> None:
    """Fill ``names`` of a sharded head, equally for any number of ranks: the weight with N(0, std²), the bias with 0."""
    for name, parameter in head.named_parameters(prefix="value_head"):
        if name not in names:
            continue
        parameter.zero_()
        if parameter.dim() > 1 and std:
            full = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * std
            sharded: Any = parameter
            full = full.to(parameter.device)
            parameter.copy_(distribute_tensor(full, sharded.device_mesh, sharded.placements, src_data_rank=None))


def check_same_vocabulary(critic: ModelSettings, policy: ModelSettings) -> None:
    """A critic reads the policy's token ids.

    Raises:
        ValueError: its tokenizer gives them another meaning.
    """
    own, theirs = (_vocabulary(one) for one in (critic, policy))
    if own is None or theirs is None:  # a folder without a tokenizer: all that is known is how many ids there are
        sizes = [one.config.get_text_config().vocab_size for one in (critic, policy)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{critic.key}: {critic.model!r} has {sizes[0]} token ids, the policy's {policy.model!r} has {sizes[1]}. A critic"
                " reads the policy's token ids: take a model of the same family"
            )
        return
    if own == theirs:
        return
    token = min(t for t in own.keys() | theirs.keys() if own.get(t) != theirs.get(t))
    raise ValueError(
        f"{critic.key}: {critic.model!r} has another vocabulary than the policy's {policy.model!r}: token {token!r} has id"
        f" {own.get(token)} there and {theirs.get(token)} here. A critic reads the policy's token ids: take a model of the same"
        " family"
    )


def _vocabulary(settings: ModelSettings) -> dict[str, int] | None:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(settings.path, trust_remote_code=settings.trust_remote_code).get_vocab()
    except (OSError, ValueError):
        return None
