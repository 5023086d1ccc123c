"""The trainer's memory while the engine has the device: optimizer state and parameters wait in host memory.

    state, shards ── copy ──▶ host buffers (pinned on CUDA, allocated once, reused) ── copy ──▶ new device memory

Parameters keep their identity, so optimizers, ties and FSDP2's groups stay as they are: FSDP2's own ``_apply`` swaps the
contents of each `nn.Parameter`. That needs parameters without live weak references. Everything that is offloaded is readable
where it is: a checkpoint written meanwhile is complete. On the CPU the same path runs from host memory to host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_rlhf.host_memory import HostBlocks, local_of

_Key = tuple[int, str]
"""id of a parameter, and which of its tensors: itself or a name in the optimizer's state."""


class HostMemory:
    """Host buffers of the tensors of one module and its optimizers, and which of them are in use."""

    def __init__(self) -> None:
        self._buffers: dict[_Key, Tensor] = {}
        self._blocks = HostBlocks()
        self._away: set[_Key] = set()

    def offload_states(self, optimizers: Iterable[torch.optim.Optimizer]) -> int:
        """Moments of the optimizers to the host; step counters stay. Returns the bytes of this rank that moved.

        Raises:
            NotImplementedError: a state is a tensor of another package's class.
        """
        moved, moments = 0, list(_states(optimizers))
        self._expect((state[name], key) for state, name, key in moments)
        for state, name, key in moments:
            if key not in self._away:
                state[name] = self._to_host(key, state[name])
                moved += local_of(state[name]).nbytes
        self._wait()
        _free_device_memory()
        return moved

    def offload_parameters(self, root: nn.Module) -> int:
        """Parameters of an FSDP2 root to the host, gradients dropped. Returns the bytes of this rank that moved."""
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        parameters = [p for p in root.parameters() if (id(p), "parameter") not in self._away]
        self._expect((parameter, (id(parameter), "parameter")) for parameter in parameters)
        for parameter in root.parameters():
            parameter.grad = None
        hosts = {id(p): self._to_host((id(p), "parameter"), p.detach()) for p in parameters}
        moved = sum(local_of(host).nbytes for host in hosts.values())
        self._wait()  # FSDP2 copies a shard that is shorter than others once more, on the host
        root._apply(lambda tensor: hosts.pop(id(tensor), tensor))  # a buffer, a tied one's second name: as it is
        _free_device_memory()
        return moved

    def reload(
        self, roots: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer], device: torch.device
    ) -> None:
        """Everything that is away comes back to ``device``."""

        def to_device(tensor: Tensor) -> Tensor:
            key = (id(tensor), "parameter")
            return self._to_device(key, tensor.detach(), device) if key in self._away else tensor

        for root in roots:
            root._apply(to_device)
        for state, name, key in _states(optimizers):
            if key in self._away:
                state[name] = self._to_device(key, state[name], device)

    @property
    def in_use(self) -> bool:
        """Whether anything is away."""
        return bool(self._away)

    def _expect(self, tensors: Iterable[tuple[Tensor, _Key]]) -> None:
        self._blocks.expect(sum(local_of(tensor).nbytes for tensor, key in tensors if key not in self._buffers))

    def _to_host(self, key: _Key, tensor: Tensor) -> Tensor:
        if type(local_of(tensor)) is not Tensor:
            raise NotImplementedError(
                f"the optimizer keeps {type(local_of(tensor)).__name__} tensors, whose parts cannot be moved one by one: set"
                " rollout.offload_optimizer to false"
            )
        host = self._buffers.get(key)
        if host is None:
            host = self._buffers[key] = self._blocks.empty_like(tensor, local_of(tensor).is_cuda)
        local_of(host).copy_(local_of(tensor), non_blocking=True)
        self._away.add(key)
        return host

    def _wait(self) -> None:
        """For the copies: what is on the host may be read."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def _to_device(self, key: _Key, host: Tensor, device: torch.device) -> Tensor:
        tensor = torch.empty_like(host, device=device)
        local_of(tensor).copy_(local_of(host), non_blocking=True)
        self._away.discard(key)
        return tensor


def _states(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[dict[str, Tensor], str, _Key]]:
    """(state of a parameter, name in it, key) of every moment; the state may be written to meanwhile."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for name, value in list(state.items()):
                if isinstance(value, Tensor) and value.dim() > 0:
                    yield state, name, (id(parameter), name)


def _free_device_memory() -> None:
    """Give torch's cache back to the device: the engine allocates on its own."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
