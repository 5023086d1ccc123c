"""The cache of the embedded engine against rows kept one by one."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config
from transformers.cache_utils import DynamicCache

from lightning_rlhf.rollout.cache import ROOM, RowCache

WINDOW = 20
SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 8}
CONFIG = Qwen2Config(**SHAPE)
SLIDING = Qwen2Config(
    **SHAPE, use_sliding_window=True, sliding_window=WINDOW, layer_types=["full_attention", "sliding_attention"]
)


def states(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 2, columns, 4), torch.randn(rows, 2, columns, 4)


def read(config: Qwen2Config, rows: int, columns: int) -> DynamicCache:
    cache = DynamicCache(config=config)
    for i in range(2):
        cache.update(*states(rows, columns), i)
    return cache


@pytest.mark.parametrize("config", [CONFIG, SLIDING], ids=["full", "sliding"])
def test_rows_that_come_and_go_keep_their_keys_and_values(config: Qwen2Config) -> None:
    rng, cache = random.Random(0), RowCache(config, 6)
    rows: list[list[tuple[Tensor, Tensor]]] = []  # by row and layer: all keys and values so far
    for _ in range(400):
        if rng.random() < 0.2 and rows:
            kept = sorted(rng.sample(range(len(rows)), rng.randint(0, len(rows))))
            moving = [i for i in kept if i >= len(kept)]
            order = [i if i in kept else moving.pop() for i in range(len(kept))]
            rows = [rows[i] for i in order]
            cache.keep(order, max((row[0][0].shape[1] for row in rows), default=0))
        if rng.random() < 0.3 and len(rows) < 6:
            new = read(config, 3, rng.choice([1, 5, 30, 70]))
            before = [[(layer.keys[i], layer.values[i]) for layer in new.layers] for i in range(3)]
            select = [rng.randrange(3) for _ in range(rng.randint(1, 6 - len(rows)))]
            cache.add(new, torch.tensor(select))
            rows += [before[i] for i in select]
        if not rows:
            continue
        tokens = [states(len(rows), 1) for _ in range(2)]
        rows = [
            [
                tuple(torch.cat([held, token[i]], 1) for held, token in zip(pair, pairs, strict=True))
                for pair, pairs in zip(row, tokens, strict=True)
            ]
            for i, row in enumerate(rows)
        ]
        for number, layer in enumerate(cache.layers):
            length, offset = cache.get_mask_sizes(1, number)
            seen = layer.update(*tokens[number])
            for got, one in zip(seen, range(2), strict=True):
                assert got.shape[:3] == (len(rows), 2, length)
                for row, held in zip(got, rows, strict=True):
                    width = min(held[number][one].shape[1], length)
                    assert torch.equal(row[:, -width:], held[number][one][:, -width:])
            assert length + offset == cache.columns == layer.get_seq_length()
            assert length <= WINDOW or not layer.is_sliding


def test_a_token_is_written_in_place_until_the_room_is_used_up() -> None:
    cache = RowCache(CONFIG, 2)
    cache.add(read(CONFIG, 2, 10), torch.arange(2))
    keys = [cache.layers[0].update(*states(2, 1))[0] for _ in range(ROOM + 1)]
    assert len({k.untyped_storage().data_ptr() for k in keys[:ROOM]}) == 1
    assert keys[ROOM].untyped_storage().data_ptr() != keys[0].untyped_storage().data_ptr()
    assert torch.equal(keys[ROOM][:, :, :-1], keys[ROOM - 1])


@pytest.mark.parametrize("beside", [4, 9])
def test_numbers_that_are_none_go_with_their_row(beside: int) -> None:
    """A masked column weighs 0, and 0 times NaN is NaN."""
    cache, bad = RowCache(CONFIG, 3), read(CONFIG, 1, 9)
    for layer in bad.layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.inf)
    for one in (read(CONFIG, 1, beside), bad):
        cache.add(one, torch.tensor([0]))
    cache.keep([0], beside)
    for rows, length in ((2, 4), (3, 9)):  # in its place, and one that makes it as wide as it was
        cache.add(read(CONFIG, 1, length), torch.tensor([0]))
        for layer in cache.layers:
            assert all(seen.isfinite().all() for seen in layer.update(*states(rows, 1)))
