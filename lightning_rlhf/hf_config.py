"""The transformers configuration of a model: loaded, overridden, and what class it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from lightning_rlhf.images import auto_class, is_vision_language
from lightning_rlhf.options import closest

HeadKind = Literal["tokens", "score", "values"]
"""What a model gives: log-probs of tokens, one score of a sequence, or a value at each token."""


def class_of(config: Any, head: HeadKind) -> Any:
    """The transformers class that builds a model of ``config`` with such a head."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    if head == "tokens":
        return auto_class(config)
    return AutoModelForSequenceClassification if head == "score" else AutoModelForTokenClassification


def padding_of(config: Any, tokenizer: Any) -> int | None:
    """The padding token of a classifier, by which transformers finds the last token; an EOS may double as it, as in TRL."""
    ids = (config.get_text_config().pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((one for one in ids if one is not None), None)


def load_config(path: str, overrides: Mapping[str, Any] | None = None, trust_remote_code: bool = False) -> Any:
    """The config of a folder or a hub id, changed by ``overrides``.

    Raises:
        ValueError: see `override`.
        OSError: there is none.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    override(config, overrides or {})
    return config


def override(config: Any, changes: Mapping[str, Any], key: str = "model.config_overrides") -> None:
    """Change a transformers config in place: nested configs key by key, plain dictionaries such as rope_parameters merged.

    Raises:
        ValueError: a key that the config does not have (with the one that it looks like), or a value it does not take.
    """
    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for name, value in changes.items():
        if not hasattr(config, name):
            known = [n for n in config.to_dict() if isinstance(n, str)]
            raise ValueError(f"{key}: {name!r} is no option of a {type(config).__name__}{closest(name, known)}")
        old = getattr(config, name)
        if isinstance(old, PreTrainedConfig) and isinstance(value, Mapping):
            override(old, value, f"{key}.{name}")
            continue
        try:
            setattr(config, name, {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value)
        except Exception as error:  # of the library that validates configs
            raise ValueError(f"{key}.{name}: {_reason(error)}") from error
    if changes and hasattr(config, "validate"):
        try:
            config.validate()
        except Exception as error:
            raise ValueError(f"{key}: {_reason(error)}") from error
    rope = (getattr(config, "rope_parameters", None) or {}) if "rope_parameters" in changes else {}
    for kind in (rope, *rope.values()):  # of all layers, or of each type of layers
        chosen = kind.get("rope_type", "default") if isinstance(kind, dict) else "default"
        if chosen not in (known := ["default", *ROPE_INIT_FUNCTIONS]):
            raise ValueError(f"{key}.rope_parameters.rope_type must be one of {', '.join(known)}, got {chosen!r}")


def check_class(config: Any, key: str = "model.model") -> None:
    """A text model is an AutoModelForCausalLM; what takes images is of a family that can be trained.

    Args:
        key: of the configuration, for errors.

    Raises:
        NotImplementedError: the model takes images and is of another family.
        ValueError: it is no causal language model.
    """
    from transformers import AutoModelForCausalLM

    if is_vision_language(config):
        return
    own_code = getattr(config, "auto_map", None) or {}
    if type(config) not in AutoModelForCausalLM._model_mapping and "AutoModelForCausalLM" not in own_code:
        raise ValueError(
            f"{key}: a {config.model_type} is no causal language model: transformers has no AutoModelForCausalLM for"
            f" {type(config).__name__}; a class of your own is registered by a module under imports"
        )


def _reason(error: Exception) -> str:
    """The last line of a validator's report without the name of the exception."""
    last = str(error).strip().splitlines()[-1].strip()
    head, colon, rest = last.partition(": ")
    return rest if colon and head.endswith("Error") else last
