"""Gradients before the optimizer step: clipped, and dropped when they are not finite, each role on its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_rlhf.host_memory import local_of


@torch.no_grad()
def clip_roles(groups: list[dict[str, Any]], max_norm: float | None) -> dict[str, Float[Tensor, ""] | None]:
    """Clip the gradients of each parameter group by its norm; the norm before clipping, by the group's ``role``.

    A group whose norm is NaN or infinite loses its gradients, so that the step leaves its parameters and their optimizer
    state alone; its norm is None. A collective for sharded parameters. The arithmetic is that of
    ``torch.nn.utils.clip_grad_norm_``, on each rank's shards: DTensor would dispatch each.
    """
    device = groups[0]["params"][0].device
    norms = [total_norm(group["params"], device) for group in groups]
    finite = torch.stack(norms).isfinite().tolist()  # one wait for the device for all roles
    for group, norm, good in zip(groups, norms, finite, strict=True):
        gradients = [local_of(p.grad) for p in group["params"] if p.grad is not None]
        if not good:
            for parameter in group["params"]:
                parameter.grad = None
        elif max_norm is not None and gradients:
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return {g["role"]: norm if good else None for g, norm, good in zip(groups, norms, finite, strict=True)}


def total_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> Float[Tensor, ""]:
    """The 2-norm of all gradients, of all shards; 0 without any. A collective for sharded parameters."""
    layouts: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            layout = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
            layouts.setdefault(layout, []).append(local_of(gradient))
    squares = torch.zeros((), device=device)
    for layout, gradients in layouts.items():
        square = nn.utils.get_total_norm(gradients).float().square()
        if layout is not None:
            mesh, placements = layout
            for dim, placement in enumerate(placements):
                if placement.is_shard():
                    dist.all_reduce(square, group=mesh.get_group(dim))
        squares += square
    return squares.sqrt()
