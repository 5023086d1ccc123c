"""How models are built: the part of a module's arguments that its models share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lightning_rlhf.hf_config import load_config
from lightning_rlhf.kernels import check_kernel
from lightning_rlhf.paths import local_path


@dataclass(frozen=True)
class ModelSettings:
    """A transformers model and how its forward and backward passes are run.

    Args:
        model: local folder, hub id, URL of a folder (``s3://…``, any file system of fsspec), or ``random:tiny``.
        attention: kernel: auto, torch, padded, reference, or a transformers name such as flash_attention_3.
        gradient_checkpointing: recompute layers in backward: a third more time, far less memory.
        trust_remote_code: run model code that comes with the weights.
        config_overrides: changes of the transformers config, such as {rope_parameters: {rope_type: yarn, factor: 4.0}}; a
            nested config takes its own; the engine gets them too.
    """

    model: str
    attention: str = "auto"
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    config_overrides: dict[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        check_kernel(self.attention)

    @cached_property
    def path(self) -> str:
        """Local folder of `model`; downloads it if it is elsewhere."""
        return local_path(self.model, self.trust_remote_code)

    @cached_property
    def config(self) -> Any:
        """Of transformers, overrides applied."""
        return load_config(self.path, self.config_overrides, self.trust_remote_code)
