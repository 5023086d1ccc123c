"""Models that follow the actor: a reference that is renewed, and the moving average of its weights.

    refreshed every n iterations     reference ← actor
    each iteration                   average ← decay · average + (1 - decay) · actor

Each rank works on its own shards; nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_rlhf.host_memory import local_of


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Parameters of a sharded model into one that is sharded alike, rounded to its dtype, wherever its shards live."""
    for parameter, copy in zip(source.parameters(), target.parameters(), strict=True):
        local_of(copy).copy_(local_of(parameter))


def average_of(root: nn.Module) -> nn.Module:
    """A module with a float32 copy of each trained parameter of ``root`` under its name, sharded alike; tied ones stay tied."""
    copies: dict[int, nn.Parameter] = {}

    def shadow(module: nn.Module) -> nn.Module:
        out = nn.Module()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.requires_grad:
                made = nn.Parameter(parameter.detach().float().clone(), requires_grad=False)
                out.register_parameter(name, copies.setdefault(id(parameter), made))
        for name, child in module.named_children():
            out.add_module(name, shadow(child))
        return out

    return shadow(root)


@torch.no_grad()
def update_average(average: nn.Module, root: nn.Module, decay: float) -> None:
    """One step of the moving average that `average_of` began."""
    trained = [p for p in root.parameters() if p.requires_grad]
    for copy, parameter in zip(average.parameters(), trained, strict=True):
        local_of(copy).lerp_(local_of(parameter).float(), 1.0 - decay)


def averages(average: nn.Module, root: nn.Module) -> Callable[[nn.Parameter], Tensor]:
    """A function: a parameter of ``root`` -> its average, or itself if it is not trained."""
    trained = [id(p) for p in root.parameters() if p.requires_grad]
    copies = dict(zip(trained, average.parameters(), strict=True))
    return lambda parameter: copies.get(id(parameter), parameter)
