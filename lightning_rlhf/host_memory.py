"""Pinned host memory for what lives as long as the run.

torch rounds a pinned tensor up to the next power of two, on average by a half. Here tensors share blocks whose size is one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

BLOCK = 1 << 31
"""Bytes of a block, at most, unless a tensor is larger."""
ALIGNMENT = 256
"""Bytes, as of memory that CUDA gives."""


class HostBlocks:
    """Blocks of host memory, and what is left of each. Nothing is given back before all of it is."""

    def __init__(self) -> None:
        self._left: dict[bool, list[Tensor]] = {True: [], False: []}  # pinned or not
        self._expected = 0

    def expect(self, nbytes: int) -> None:
        """So much will be asked for: the last block is no larger than what then is missing."""
        self._expected = max(0, nbytes)

    @torch.no_grad()
    def empty_like(self, tensor: Tensor, pinned: bool) -> Tensor:
        """A tensor on the host, a DTensor for a DTensor, whose values are undefined."""
        host = torch.empty_like(tensor, device="cpu")
        local = local_of(host)
        if nbytes := local.nbytes:
            piece = self._take(nbytes, pinned).view(local.dtype)
            local.set_(piece.untyped_storage(), piece.storage_offset(), local.shape, local.stride())
        return host

    def _take(self, nbytes: int, pinned: bool) -> Tensor:
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._expected = max(0, self._expected - size)
        rests = self._left[pinned]
        for i, left in enumerate(rests):
            if len(left) >= size:
                rests[i] = left[size:]
                return left[:nbytes]
        wanted = min(BLOCK, self._expected + size)
        block = torch.empty(max(_next_power(size), _next_power(wanted // 2 + 1)), dtype=torch.uint8, pin_memory=pinned)
        rests.append(block[size:])
        return block[:nbytes]


def _next_power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def local_of(tensor: Tensor) -> Tensor:
    """The shard of a DTensor, or the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
