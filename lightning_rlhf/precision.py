"""``Trainer(precision=)`` for FSDP2."""

from __future__ import annotations

import torch
from lightning.pytorch.plugins.precision import Precision
from torch.distributed.fsdp import MixedPrecisionPolicy

_DTYPES: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "32-true": (torch.float32, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "bf16-true": (torch.bfloat16, None),
}


class FSDP2Precision(Precision):
    """``Trainer(precision=)`` as FSDP2 dtypes: no autocast, no conversion of batches or of buffers.

    (Lightning's own plugins cast rotary frequencies and rewards to bfloat16.)

    ========== ================== ================ =================
    precision  parameters, Adam   compute          gradient reduction
    ========== ================== ================ =================
    32-true    float32            float32          float32
    bf16-mixed float32            bfloat16         float32
    bf16-true  bfloat16           bfloat16         float32
    ========== ================== ================ =================
    """

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in _DTYPES:
            raise ValueError(f"trainer.precision must be one of {', '.join(_DTYPES)}, got {precision!r}")
        self.precision = precision  # type: ignore[assignment]

    @property
    def param_dtype(self) -> torch.dtype:
        """Of the trained parameters and the optimizer's state."""
        return _DTYPES[self.precision][0]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of matrix products and activations."""
        return _DTYPES[self.precision][1] or self.param_dtype

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """For `fully_shard` of a trained module."""
        return MixedPrecisionPolicy(param_dtype=_DTYPES[self.precision][1], reduce_dtype=torch.float32)
