"""How responses are cut into optimizer steps and these into micro-batches: a partition, by budget, the same on every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_rlhf.modules.batching import Split, example_batches, micro_batches, mini_batches
from lightning_rlhf.types import Examples, Experience

LENGTHS = [10, 8, 6, 5, 3, 2]


def split(tokens: int, data_ranks: int = 1, data_rank: int = 0, sequence_ranks: int = 1) -> Split:
    return Split(data_ranks, data_rank, sequence_ranks, 0, tokens, float, torch.device("cpu"))


def experience() -> Experience:
    """Each sequence holds its own row's number."""
    sequences = [torch.full((n,), row) for row, n in enumerate(LENGTHS)]
    none = torch.zeros(len(LENGTHS), 1)
    return Experience(sequences, [1] * len(LENGTHS), torch.arange(len(LENGTHS)) // 2, none, none, 1.0, 9)


@pytest.mark.parametrize(("responses", "count"), [(7, 3), (8, 4), (5, 5), (6, 1)])
def test_mini_batches_are_a_near_equal_partition_that_every_part_of_the_seed_changes(responses, count):
    parts = mini_batches(responses, count, 1, 2, 3)
    assert sorted(i for part in parts for i in part) == list(range(responses))
    assert len(parts) == count
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert mini_batches(responses, count, 1, 2, 3) == parts
    others = [mini_batches(40, 2, *seed) for seed in ((1, 2, 3), (0, 2, 3), (1, 0, 3), (1, 2, 0))]
    assert all(a != b for i, a in enumerate(others) for b in others[:i])
    with pytest.raises(
        ValueError, match=f"mini_batches is {responses + 1}, the rollout has only {responses} responses"
    ):
        mini_batches(responses, responses + 1, 0)


def test_the_ranks_share_the_rows_and_wait_for_the_largest_of_each_step():
    rows = [5, 0, 2, 4, 1]  # of 2, 10, 6, 3 and 8 tokens
    seen, spent = [], set()
    for rank in range(2):
        batches, tokens = micro_batches(experience(), rows, split(10, 2, rank))
        spent.add(tokens)
        assert len(batches) == 2
        for batch in batches:
            assert [int(batch.packed.input_ids[i]) for i in batch.packed.cu_seqlens[:-1]] == batch.rows.tolist()
            assert batch.packed.real_tokens == sum(LENGTHS[row] for row in batch.rows) <= 10
            seen += batch.rows.tolist()
    assert sorted(seen) == sorted(rows)
    assert spent == {2 * (10 + 6)}, "8 waits for 10, and 3 + 2 for 6"


def test_ranks_that_share_a_sequence_have_a_budget_together():
    assert len(micro_batches(experience(), range(6), split(17))[0]) == 2
    assert len(micro_batches(experience(), range(6), split(17, sequence_ranks=2))[0]) == 1


def test_pictures_are_found_by_the_row_of_their_response(monkeypatch):
    given = []
    monkeypatch.setattr("lightning_rlhf.packing.pack_images", lambda images, *_: given.append(images))
    shown = replace(experience(), home=[0] * 6, images={row: f"picture of {row // 2}" for row in range(6)})
    (batch,), _ = micro_batches(shown, [1, 3, 4], split(99))
    assert given == [[shown.images[row] for row in batch.rows.tolist()]]


def test_the_two_of_a_pair_stay_together_and_only_what_is_wanted_is_learned():
    masks = [torch.tensor([0.0] * (n - 2) + [1.0]) for n in LENGTHS]
    pairs = Examples(experience().sequences, [1] * 6, masks, size=2)
    for options in ({}, {"ends_only": True}):
        batches, spent = example_batches(pairs, split(18), **options)
        assert sorted(batch.rows.tolist() for batch in batches) == [[0, 1], [2, 3, 4, 5]]
        assert spent == sum(LENGTHS)
    assert [len(batch.packed.rows) for batch in example_batches(pairs, split(18))[0]] in ([2, 4], [4, 2])
    with pytest.raises(ValueError, match="a sequence of 18 tokens does not fit the budget of 17"):
        example_batches(pairs, split(17))
