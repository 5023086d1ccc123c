"""AdamW over the shards of DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.host_memory import local_of


class ShardedAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW``, which is elementwise, handed each rank's shards: the same to the bit, with the same state.

    DTensor's dispatch of some hundred small parameters takes longer than the step itself. The name is its own, so that
    ``--model.optimizer AdamW`` on the command line stays torch's.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        # no argument of the default of model.optimizer: those are carried over to other classes on the command line
        if options.get("fused") is None and not options.get("foreach"):
            options["fused"] = True
        super().__init__(params, **options)

    def _init_group(self, group: dict[str, Any], *tensors: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *tensors)
        for listed in tensors:
            listed[:] = map(local_of, listed)
        return has_complex
