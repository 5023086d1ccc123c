"""Gathered shards equal the full state on any mesh; what the checksum must see and what it must not."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from toys import spawn

from lightning_rlhf.rollout.weights import checksum, checksums, gather, whole_checksum, with_checksum


class Net(nn.Module):
    """Row counts that divide by 4, that do not, and that are smaller than the world; a tied pair; a scalar-like row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.block = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 2), nn.Linear(2, 6))
        self.gain = nn.Parameter(torch.randn(1))
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight


def named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(remove_duplicate=False))


def sharded_net(mesh_shape: tuple[int, ...]) -> tuple[Net, dict[str, Tensor]]:
    torch.manual_seed(0)
    net = Net()
    full = {name: p.detach().clone() for name, p in named(net)}
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    fully_shard(net.block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, full


def assert_stream_equals(stream: dict[str, Tensor], full: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert stream.keys() == full.keys()
    for name, tensor in stream.items():
        assert type(tensor) is Tensor
        assert tensor.is_contiguous()
        assert tensor.dtype == dtype
        assert torch.equal(tensor, full[name].to(dtype)), name
    assert stream["head.weight"] is stream["embed.weight"]


def net_full_once(full: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in full.items() if name != "head.weight"]


def check_four_ranks(rank: int) -> None:
    for mesh_shape in ((4,), (2, 2)):
        net, full = sharded_net(mesh_shape)
        for dtype in (torch.float32, torch.bfloat16):
            for bucket_bytes in (1, 100, 1 << 29):
                assert_stream_equals(dict(gather(named(net), dtype, bucket_bytes)), full, dtype)
        assert checksum(gather(named(net), torch.bfloat16)) == checksum(net_full_once(full))
    check_made_on_the_fly()


def check_made_on_the_fly() -> None:
    """Merged adapters: DTensors that exist only while they are streamed, sharded in ways FSDP2 does not use."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(1)
    full = {str(i): torch.randn(5, 3) for i in range(6)}
    kinds = [(Replicate(), Shard(0)), (Shard(0), Replicate()), (Replicate(), Replicate()), (Shard(1), Replicate()),
             (Shard(0), Shard(1)), (Replicate(), Shard(1))]  # fmt: skip
    live: list[int] = []

    def made() -> object:
        for (name, tensor), placements in zip(full.items(), kinds, strict=True):
            live.append(1)
            yield name, distribute_tensor(tensor, mesh, placements)

    out = {}
    for name, tensor in gather(made(), torch.float32, bucket_bytes=5 * 3 * 4 + 1):  # type: ignore[arg-type]
        out[name] = tensor
        assert len(live) <= len(out) + 2, "reads ahead no more than a bucket"
    assert all(torch.equal(out[name], full[name]) for name in full)


@pytest.mark.slow
def test_gathered_shards_equal_the_full_state_on_four_ranks() -> None:
    spawn(check_four_ranks, 4)


def check_two_ranks(rank: int) -> None:
    net, full = sharded_net((2,))
    calls = 0
    real = DTensor.full_tensor

    def counted(self: DTensor, **kwargs: object) -> Tensor:
        nonlocal calls
        calls += 1
        return real(self, **kwargs)  # type: ignore[arg-type]

    DTensor.full_tensor = counted  # type: ignore[method-assign]
    stream = dict(gather(iter(named(net)), torch.bfloat16))
    assert calls == 0, "row shards never go through one full_tensor() per parameter"
    assert_stream_equals(stream, full, torch.bfloat16)
    assert len({t.untyped_storage().data_ptr() for t in stream.values()}) == len(net_full_once(full)), "shared memory"
    held = {name: tensor.clone() for name, tensor in stream.items()}
    dict(gather(named(net), torch.bfloat16))
    assert all(torch.equal(stream[name], held[name]) for name in held), "a buffer was reused"

    refs = []
    for _, tensor in gather(named(net), torch.float32, bucket_bytes=1):
        refs.append(weakref.ref(tensor))
        del tensor
        assert len({id(ref()) for ref in refs} - {id(None)}) <= 1, "what the consumer dropped is still held"

    mesh, deep = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    kinds = {"columns": (mesh, [Shard(1)]), "rows": (mesh, [Shard(0)]), "all": (mesh, [Replicate()])}
    kinds["twice"] = (deep, [Shard(0), Shard(0)])
    whole = dict.fromkeys(kinds, torch.arange(15.0).view(5, 3))
    made = ((name, distribute_tensor(whole[name], *kind)) for name, kind in kinds.items())
    assert all(torch.equal(tensor, whole[name]) for name, tensor in gather(made, None))


def test_gathered_shards_equal_the_full_state_on_two_ranks() -> None:
    spawn(check_two_ranks, 2)


def test_plain_tensors_pass_without_a_copy() -> None:
    net = Net()
    for name, tensor in gather(named(net), torch.float32, bucket_bytes=16):
        assert tensor.data_ptr() == dict(named(net))[name].data_ptr()
        assert not tensor.requires_grad
    assert all(t.dtype == torch.float32 for _, t in gather(named(net), None))
    cast = dict(gather(named(net), torch.bfloat16))
    assert all(t.dtype == torch.bfloat16 for t in cast.values())
    assert cast["embed.weight"] is cast["head.weight"]
    counter = torch.arange(3)
    assert dict(gather([("counter", counter)], torch.bfloat16))["counter"].dtype == torch.int64


def test_one_rank_mesh_copies_nothing(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        net, full = sharded_net((1,))
        stream = dict(gather(named(net), torch.float32))
        assert_stream_equals(stream, full, torch.float32)
        local = net.embed.weight.to_local()  # type: ignore[operator]
        assert stream["embed.weight"].data_ptr() == local.data_ptr()
    finally:
        dist.destroy_process_group()


def weights(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in {"q": (8, 4), "k": (2, 4), "v": (2, 4)}.items()}


def test_checksum_is_the_hash_weighted_histogram() -> None:
    def splitmix(z: int) -> int:
        mask = (1 << 64) - 1
        z = z * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    w = weights()
    bits = torch.cat([t.flatten() for t in w.values()]).bfloat16().view(torch.int16).tolist()
    assert checksum(w.items()) == sum(splitmix(b & 0xFFFF) for b in bits) & ((1 << 63) - 1)


def test_checksum_ignores_order_fusion_dtype_and_zero_rows() -> None:
    w = weights()
    expected = checksum(w.items())
    assert 0 < expected < 1 << 63
    assert checksum(reversed(w.items())) == expected
    assert checksum([("qkv", torch.cat(list(w.values())))]) == expected
    assert checksum([("qkv", torch.cat([*w.values(), torch.zeros(60, 4)]))]) == expected
    assert checksum((n, t.bfloat16()) for n, t in w.items()) == expected
    assert checksum((n, t.T) for n, t in w.items()) == expected, "strided views"


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w["k"].zero_(),
        lambda w: w["k"].neg_(),
        lambda w: w["k"].mul_(1.01),
        lambda w: w["k"][0, 0].mul_(1.01),
        lambda w: w["v"].copy_(w["k"]),
        lambda w: w["q"][:2].copy_(w["q"][2:4]),
        lambda w: (w["k"][0, 0].fill_(1.0), w["k"][0, 1].fill_(4.0)),
        lambda w: w.pop("v"),
    ],
)
def test_checksum_sees_changes(change: object) -> None:
    w = weights()
    w["k"][0, 0], w["k"][0, 1] = 2.0, 3.0  # the sum of the two survives one of the changes
    before = checksum(w.items())
    change(w)  # type: ignore[operator]
    assert checksum(w.items()) != before


def test_checksum_counts_a_tied_parameter_once() -> None:
    net = Net()
    once = checksum(net.named_parameters())
    assert checksum(net.named_parameters(remove_duplicate=False)) == once
    assert checksum(net.state_dict().items()) == once
    assert checksum(gather(named(net), torch.bfloat16)) == once
    assert checksum(gather(named(net), torch.bfloat16, bucket_bytes=16)) == once
    whole = torch.randn(4)
    parts = [("whole", whole), ("beginning", whole[:2])]
    assert checksum(parts) == checksum([("both", torch.cat([whole, whole[:2]]))]), "at one address, and no tie"
    untied = [(n, p.detach().clone()) for n, p in named(net)]
    assert checksum(untied) != once, "equal values in memory of their own are two tensors"


def test_reused_memory_is_not_taken_for_a_tie() -> None:
    def stream() -> object:
        for i in range(64):
            yield str(i), torch.full((1024,), 1.5)  # freed at once: the allocator hands the same address out again

    assert checksum(stream()) == checksum([("all", torch.full((64 * 1024,), 1.5))])  # type: ignore[arg-type]


def test_with_checksum_passes_the_stream_through() -> None:
    w = weights()
    sums = with_checksum(w.items())
    seen = list(sums)
    assert [(n, id(t)) for n, t in seen] == [(n, id(t)) for n, t in w.items()]
    assert sums.checksum == checksum(w.items())
    assert with_checksum([]).checksum == 0


# -- a model that ranks share ------------------------------------------------------------------------------------------


def test_pieces_of_four_ranks_add_up_to_the_model():
    torch.manual_seed(0)
    whole = {"split": torch.randn(8, 6), "norm": torch.randn(6), "heads": torch.randn(4, 6), "constant": torch.ones(8)}
    copies = {"split": 1, "norm": 4, "heads": 2, "constant": 1}

    def piece(name: str, rank: int) -> Tensor:
        pieces = 4 // copies[name]
        return whole[name].chunk(pieces)[rank // copies[name]]

    ranks = [{name: piece(name, rank) for name in whole} for rank in range(4)]
    expected = checksum(whole.items())
    assert whole_checksum([checksums(rank.items()) for rank in ranks], copies) == expected
    assert whole_checksum([checksums(rank.items()) for rank in ranks], copies | {"split": 4}) == expected, "not copies"
    for name in whole:  # stale on any single rank
        for rank in range(4):
            stale = [held | ({name: held[name] * 2} if i == rank else {}) for i, held in enumerate(ranks)]
            assert whole_checksum([checksums(held.items()) for held in stale], copies) != expected, (name, rank)
    stale = [held | {"norm": held["norm"] * 2} for held in ranks]
    assert whole_checksum([checksums(held.items()) for held in stale], copies) != expected, "the same on all"


def test_a_tensor_with_two_names_counts_once():
    tensor = torch.randn(3)
    each = checksums([("a", tensor), ("b", tensor), ("c", 2 * tensor)])
    assert each == {"a": checksum([("a", tensor)]), "b": 0, "c": checksum([("c", 2 * tensor)])}
