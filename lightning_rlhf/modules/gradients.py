"""Gradients before the optimizer step: clipped, and dropped when they are not finite, each role on its own."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor


def clip_roles(groups: list[dict[str, Any]], max_norm: float | None) -> dict[str, Float[Tensor, ""] | None]:
    """Clip the gradients of each parameter group by its norm; the norm before clipping, by the group's ``role``.

    A group whose norm is NaN or infinite loses its gradients, so that the step leaves its parameters and their optimizer
    state alone; its norm is None. A collective for sharded parameters.
    """
    norms: dict[str, Tensor | None] = {}
    for group in groups:
        norm = torch.nn.utils.clip_grad_norm_(group["params"], max_norm or float("inf"))
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        norms[group["role"]] = norm if bool(norm.isfinite()) else None
        if norms[group["role"]] is None:
            for parameter in group["params"]:
                parameter.grad = None
    return norms
