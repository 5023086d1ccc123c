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
    norms = [torch.nn.utils.clip_grad_norm_(group["params"], max_norm or float("inf")) for group in groups]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    device = groups[0]["params"][0].device
    norms = [norm.to(device) for norm in norms]  # of a group without any gradient it is on the CPU
    finite = torch.stack(norms).isfinite().tolist()  # one wait for the device for all roles
    for group, good in zip(groups, finite, strict=True):
        if not good:
            for parameter in group["params"]:
                parameter.grad = None
    return {g["role"]: norm if good else None for g, norm, good in zip(groups, norms, finite, strict=True)}
