"""How models are built: the part of a module's arguments that its models share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lightning_rlhf.kernels import check_kernel
from lightning_rlhf.tiny import local_path


@dataclass(frozen=True)
class ModelSettings:
    """A transformers model and how its forward and backward passes are run.

    Args:
        model: local folder or hub id, or ``random:tiny``.
        attention: kernel: auto, torch, padded, reference, or a transformers name such as flash_attention_3.
        gradient_checkpointing: recompute layers in backward: a third more time, far less memory.
        trust_remote_code: run model code that comes with the weights.
        freeze_vision: leave a vision-language model's vision tower as it is; it is then held in the compute dtype.
    """

    model: str
    attention: str = "auto"
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    freeze_vision: bool = True

    def __post_init__(self) -> None:
        check_kernel(self.attention)

    @cached_property
    def path(self) -> str:
        """Local folder of `model`; downloads it if it is a hub id."""
        return local_path(self.model, self.trust_remote_code)
