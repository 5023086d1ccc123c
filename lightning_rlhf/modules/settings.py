"""How models are built: the part of a module's arguments that its models share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Literal, get_args

from jsonargparse.typing import PositiveInt

from lightning_rlhf.kernels import check_kernel
from lightning_rlhf.tiny import local_path

Recomputed = Literal["off", "full", "selective", "every_second"]
"""Which of a layer's activations are computed again in backward."""


@dataclass(frozen=True)
class ModelSettings:
    """A transformers model and how its forward and backward passes are run.

    Args:
        model: local folder or hub id, or ``random:tiny``.
        attention: kernel: auto, torch, padded, reference, or flash_attention_2, 3 or 4 (docs/models.md).
        gradient_checkpointing: recompute layers in backward. full (or true): every layer, a third more time, far less memory;
            selective: what attention returned is kept; every_second: every other layer; off (or false).
        trust_remote_code: run model code that comes with the weights.
        tiled_mlp: tokens of a tile: MLPs run over tiles of the stream and are recomputed in backward; for very long sequences.
        offload_activations: what layers save for backward waits in pinned host memory.
        offload_reference: the reference's shards live in host memory and are copied layer by layer when it runs.
        compile: `torch.compile` each decoder layer.
        liger: Liger's fused RMSNorm, gated MLP and rotary embedding (CUDA; the extra ``liger``).
    """

    model: str
    attention: str = "auto"
    gradient_checkpointing: Recomputed | bool = "off"
    trust_remote_code: bool = False
    tiled_mlp: PositiveInt | None = None
    offload_activations: bool = False
    offload_reference: bool = False
    compile: bool = False
    liger: bool = False

    def __post_init__(self) -> None:
        check_kernel(self.attention)
        if self.recomputed not in get_args(Recomputed):
            raise ValueError(
                f"model.gradient_checkpointing must be one of {', '.join(get_args(Recomputed))}, true or false,"
                f" got {self.gradient_checkpointing!r}"
            )
        if self.tiled_mlp is not None and self.tiled_mlp < 1:
            raise ValueError(
                f"model.tiled_mlp must be at least 1 token, or null to switch it off, got {self.tiled_mlp}"
            )
        if self.tiled_mlp is not None and self.compile:
            raise ValueError(
                "model.tiled_mlp and model.compile exclude each other (a compiled layer would be specialised on each number"
                " of tiles): set one of them to null or false"
            )
        if self.liger and find_spec("liger_kernel") is None:
            raise ValueError("model.liger needs the package: pip install 'lightning-rlhf[liger]', or set it to false")

    @property
    def recomputed(self) -> str:
        """`gradient_checkpointing` with true and false by their names."""
        named = {True: "full", False: "off"}
        return named.get(self.gradient_checkpointing, self.gradient_checkpointing)  # type: ignore[arg-type]

    @cached_property
    def path(self) -> str:
        """Local folder of `model`; downloads it if it is a hub id."""
        return local_path(self.model, self.trust_remote_code)
