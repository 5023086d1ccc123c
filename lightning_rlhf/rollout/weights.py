"""From the trainer's shards to an engine: a stream of full tensors, and a checksum that survives the engine's layout.

    shards ── gather ──▶ (name, full tensor) ── with_checksum ──▶ engine.load_weights        engine.checksum()
                                                     └────────────── equal? ──────────────────────┘

**Gather.** FSDP2 splits dim 0 over W ranks like `torch.chunk`: c = ceil(rows / W) rows each, trailing ranks short or
empty. Padding every shard to c rows therefore puts all padding at the END of the gathered tensor, so the parameter is a
prefix of its own receive buffer: no copy after the all-gather, and every output owns its memory. That matters, for
consumers keep tensors until a layer is complete. The all-gathers of a bucket are in flight together.

**Checksum.** With c_b the number of elements whose bfloat16 bits are b, and h a 63-bit hash with h(0) = 0,

    checksum = Σ_b c_b · h(b)  mod 2^63

It depends on the multiset of values alone: fusing q, k and v into one matrix, reordering parameters or padding the
vocabulary with zero rows leaves it as it is; a stale, scaled or missing tensor does not. Where ranks share a model, it is the
sum over the pieces, each piece counted once (`whole_checksum`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lightning_rlhf.rollout.engine import NamedTensors

_MASK = (1 << 63) - 1
_CHUNK = 1 << 24
"""Elements hashed at a time: bounds the integer copy to 64 MiB."""


def gather(named: NamedTensors, dtype: torch.dtype | None, bucket_bytes: int = 1 << 29) -> Iterator[tuple[str, Tensor]]:
    """Full tensors of sharded parameters, with at most one bucket of extra memory at a time.

    A collective over the parameters' mesh: every rank iterates to the end, in the same order. Tensors are detached,
    cast to ``dtype`` before they travel and never written to again; a plain tensor that needs no cast is passed on
    without a copy. Names that share a parameter come one after the other with the same tensor, which is gathered once.

    Args:
        named: (name, parameter) pairs, DTensors or plain tensors. Existing `nn.Parameter`s are read ahead to find tied
            names; of tensors made on the fly at most one bucket is read ahead.
        dtype: of the floating-point outputs, None keeps each parameter's own.
        bucket_bytes: most bytes gathered at once (a larger parameter goes alone).
    """
    for window in _windows(named, bucket_bytes):
        for bucket in _buckets(window, dtype, bucket_bytes):
            pending = [_start_gather(parameter, dtype) for _, parameter in bucket]
            pending.reverse()
            for names, _ in bucket:
                full = pending.pop()()  # held by the consumer alone once the next one is due
                for name in names:
                    yield name, full


def checksum(named: NamedTensors) -> int:
    """63-bit checksum of the bfloat16 patterns of all tensors; names that share memory count once."""
    sums = with_checksum(named)
    for _ in sums:
        pass
    return sums.checksum


def checksums(named: NamedTensors) -> dict[str, int]:
    """`checksum` of each tensor by itself; of one that came under an earlier name 0."""
    sums = with_checksum(named)
    out, before = {}, 0
    for name, _ in sums:
        out[name] = (sums.checksum - before) & _MASK
        before = sums.checksum
    return out


def whole_checksum(ranks: Sequence[dict[str, int]], copies: Mapping[str, int]) -> int:
    """`checksum` of a model that ranks share: parts of it are split, others are on several ranks and count once.

    Args:
        ranks: `checksums` of each rank's tensors, under the same names.
        copies: ranks in a row that should hold the same, by name: 1 where a tensor is split, all where each rank has the whole.
            Of ranks that do not hold the same every one counts: the result is that of no model, or the tensor is split after all.
    """
    total = 0
    for name, number in copies.items():
        for i in range(0, len(ranks), number):
            sums = [rank[name] for rank in ranks[i : i + number]]
            total += sums[0] if len(set(sums)) == 1 else sum(sums)
    return total & _MASK


class with_checksum:
    """Iterate over ``named`` unchanged; ``.checksum`` is that of the tensors seen so far.

    A tensor counts once however many names it has, provided it is alive when it comes again, as it is for parameters of
    a module and in the stream of `gather`.
    """

    def __init__(self, named: NamedTensors) -> None:
        self._named = iter(named)
        self._counts: dict[torch.device, Tensor] = {}
        self._seen: dict[int, weakref.ref[Tensor]] = {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        name, tensor = next(self._named)
        self._add(tensor.detach() if tensor.requires_grad else tensor, owner=tensor)
        return name, tensor

    @property
    def checksum(self) -> int:
        total = sum(int((counts * _hash_table(device)).sum()) for device, counts in self._counts.items())
        return total & _MASK

    def _add(self, tensor: Tensor, owner: Tensor) -> None:
        if tensor.numel() == 0 or self._is_alias(owner):
            return
        counts = self._counts.setdefault(tensor.device, torch.zeros(1 << 16, dtype=torch.int64, device=tensor.device))
        for chunk in tensor.reshape(-1).split(_CHUNK):
            bits = chunk.to(torch.bfloat16).view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
            counts += torch.bincount(bits, minlength=1 << 16)

    def _is_alias(self, tensor: Tensor) -> bool:
        earlier = self._seen.get(tensor.data_ptr())
        alive = earlier() if earlier is not None else None  # freed memory is reused: an address alone proves nothing
        self._seen[tensor.data_ptr()] = weakref.ref(tensor)
        return alive is not None and alive.shape == tensor.shape


_Tied = tuple[list[str], Tensor]
"""A parameter with all its names."""


def _windows(named: NamedTensors, bucket_bytes: int) -> Iterator[list[_Tied]]:
    """Read ahead as far as that costs no memory, and join the names of each parameter."""
    window: dict[int, _Tied] = {}  # by identity: equal on all ranks, unlike the addresses of empty shards
    held = 0
    for name, tensor in named:
        if id(tensor) in window:
            window[id(tensor)][0].append(name)
            continue
        if not isinstance(tensor, nn.Parameter):
            held += tensor.numel() * tensor.element_size()
        window[id(tensor)] = ([name], tensor)
        if held >= bucket_bytes:
            yield list(window.values())
            window, held = {}, 0
    yield list(window.values())


def _buckets(window: list[_Tied], dtype: torch.dtype | None, bucket_bytes: int) -> Iterator[list[_Tied]]:
    bucket: list[_Tied] = []
    size = 0
    for names, tensor in window:
        nbytes = tensor.numel() * (dtype or tensor.dtype).itemsize
        if bucket and size + nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((names, tensor))
        size += nbytes
    if bucket:
        yield bucket


def _start_gather(parameter: Tensor, dtype: torch.dtype | None) -> Callable[[], Tensor]:
    """Begin to assemble one parameter; the result waits for it and returns the full tensor."""
    tensor = parameter.detach()
    if not isinstance(tensor, DTensor):
        full = _cast(tensor, dtype)
        return lambda: full
    group = _row_shard_group(tensor)
    local = _cast(_to_mesh_device(tensor), dtype)
    if group is None:
        spec = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        return spec.full_tensor
    if dist.get_world_size(group) == 1:
        return lambda: local
    return _all_gather_rows(local, tensor.shape, group)


def _all_gather_rows(local: Tensor, shape: torch.Size, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """All-gather shards cut like `torch.chunk` along dim 0, into a buffer whose beginning is the full tensor."""
    ranks = dist.get_world_size(group)
    rows = -(-shape[0] // ranks)
    if local.shape[0] < rows:
        padded = local.new_zeros(rows, *shape[1:])
        padded[: local.shape[0]] = local
        local = padded
    out = local.new_empty(rows * ranks, *shape[1:])
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    work = all_gather(_bytes(out), _bytes(local.contiguous()), group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return out[: shape[0]]

    return finish


def _row_shard_group(tensor: DTensor) -> dist.ProcessGroup | None:
    """The group over which dim 0 is split when that is the only split (FSDP2, HSDP, Ulysses), else None."""
    sharded = [(i, placement) for i, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(sharded) != 1 or type(sharded[0][1]) is not Shard or sharded[0][1].dim != 0:
        return None
    return tensor.device_mesh.get_group(sharded[0][0])


def _to_mesh_device(tensor: DTensor) -> Tensor:
    """The local shard where its collectives run: an offloaded shard is on the host while its mesh is not."""
    local = tensor.to_local()
    kind = tensor.device_mesh.device_type
    if local.device.type == kind:
        return local
    return local.to(torch.device(kind, torch.accelerator.current_device_index()))


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _bytes(tensor: Tensor) -> Tensor:
    """Flat bytes: every backend moves them, whatever the dtype."""
    return tensor.view(-1).view(torch.uint8)


@cache
def _hash_table(device: torch.device) -> Tensor:
    """splitmix64 of 0..65535 (Steele et al. 2014), shifted so that h(0) = 0; int64 wraps around as it must."""
    x = torch.arange(1 << 16, dtype=torch.int64) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _logical_shift(x, shift)) * _signed(factor)
    return (x ^ _logical_shift(x, 31)).to(device)


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned
