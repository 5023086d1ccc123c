"""Tensors that share blocks of host memory: none touches another, and little more than what they need is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_policy import strategy_of

from lightning_rlhf.background import Background
from lightning_rlhf.host_memory import ALIGNMENT, HostBlocks
from lightning_rlhf.modules.policy import build_policy
from lightning_rlhf.modules.settings import ModelSettings


def blocks_of(*tensors: torch.Tensor) -> dict[int, int]:
    """Bytes of each block, by address."""
    return {(s := t.untyped_storage()).data_ptr(): s.nbytes() for t in tensors}


LAYER = [(16, 64), (64, 16), (64, 16), (16,), (12, 16)]
CASES: dict[str, tuple[list[tuple[int, ...]], float]] = {
    "one": ([(64,)], 1.0),
    "equal": ([(1 << 16,)] * 9, 1.0),
    "a table larger than a block, then layers": ([(30_000, 16), *LAYER * 40], 1.1),
    "the largest last": ([(7, 11), (0, 4), (5,), (100, 1000)], 2.0),
}
"""Shapes, and how many times the bytes that they need are taken at most."""


@pytest.mark.parametrize("case", CASES)
def test_blocks_hold_each_tensor_and_little_more(case, monkeypatch):
    monkeypatch.setattr("lightning_rlhf.host_memory.BLOCK", 1 << 18)
    shapes, most = CASES[case]
    originals = [torch.randn(shape).to((torch.float32, torch.bfloat16)[i % 2]) for i, shape in enumerate(shapes)]
    blocks, needed = HostBlocks(), sum(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in originals)
    blocks.expect(needed)
    copies = [blocks.empty_like(t, pinned=False) for t in originals]
    for copy, original in zip(copies, originals, strict=True):
        assert (copy.shape, copy.stride(), copy.dtype) == (original.shape, original.stride(), original.dtype)
        copy.copy_(original)
    assert all(torch.equal(copy, original) for copy, original in zip(copies, originals, strict=True))
    sizes = blocks_of(*(copy for copy in copies if copy.numel()))
    assert all(size & (size - 1) == 0 for size in sizes.values()), "torch rounds every other size up"
    assert needed <= sum(sizes.values()) <= most * needed


def test_without_a_number_to_expect_a_tensor_has_a_block_whose_rest_the_next_one_takes():
    blocks = HostBlocks()
    one, other = (blocks.empty_like(torch.ones(n), pinned=False) for n in (300, 50))
    assert blocks_of(one) == blocks_of(other)
    assert list(blocks_of(one).values()) == [2048]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_tensors_that_share_blocks_holds_each_once(tmp_path):
    state = {f"weight {i}": torch.full((1 << 16,), float(i)) for i in range(16)}
    copied = Background(torch.device("cpu"), None).copied(state)
    assert len(blocks_of(*copied.values())) == 1
    dcp.save(copied, checkpoint_id=tmp_path)
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) < 1.05 * 16 * (1 << 18)
    loaded = {name: torch.zeros(1 << 16) for name in state}
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert all(torch.equal(loaded[name], state[name]) for name in state)


@pytest.mark.parametrize("shards", [0, 10**9], ids=["layers", "whole"])
def test_a_model_on_the_host_lies_in_shared_blocks_and_computes_the_same(shards):
    strategy = strategy_of(1, min_num_params=shards)
    here, on_host = (
        build_policy(ModelSettings("random:tiny", offload_reference=away), strategy, frozen=True)
        for away in (False, True)
    )
    local: list[Any] = [p.to_local() for p in on_host.parameters()]
    assert len(blocks_of(*local)) < len(local) / 4
    assert all(torch.equal(p.to_local(), q) for p, q in zip(here.parameters(), local, strict=True))
