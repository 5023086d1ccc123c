from __future__ import annotations

import random

import pytest
import torch

from lightning_rlhf.packing import attention_cost, pack, plan, plan_at_home
from lightning_rlhf.types import IGNORE


def test_the_stream_holds_whole_sequences_with_labels_shifted_inside_each():
    packed = pack([torch.tensor([5, 6, 7, 8]), torch.tensor([9, 10, 11])], [2, 1])
    assert packed.input_ids.tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert packed.labels.tolist() == [IGNORE, 7, 8, IGNORE, 10, 11, IGNORE]
    assert packed.rows.tolist() == [1, 2, 4, 5]
    assert packed.cu_seqlens.tolist() == [0, 4, 7]
    assert packed.max_length == 4


def test_unpacking_puts_each_value_at_its_response_token():
    sequences, prompts = [torch.arange(7), torch.arange(100, 103), torch.arange(50, 55)], [3, 2, 5]
    packed = pack(sequences, prompts)
    labels = packed.unpack(packed.labels.float())
    assert labels.tolist() == [[3, 4, 5, 6], [102, 0, 0, 0], [0, 0, 0, 0]]
    assert packed.response_mask.sum(1).tolist() == [4, 1, 0]


def test_what_pads_responses_takes_nothing_from_the_stream_and_meets_nowhere():
    lengths = [300, *[10] * 20]
    packed = pack([torch.ones(n, dtype=torch.long) for n in lengths], [2] * len(lengths), 8)
    stream = torch.full(packed.input_ids.shape, torch.nan)
    stream[packed.labels != IGNORE] = 1.0
    stream.requires_grad_()
    values = packed.unpack(stream)
    assert torch.equal(values, packed.response_mask)
    values.backward(torch.full(values.shape, 2.0))
    assert torch.equal(stream.grad, 2.0 * (packed.labels != IGNORE))
    each, size = packed.response_index.flatten().bincount(), packed.response_index.numel()
    assert each.max() <= 2 + size // len(packed.input_ids), "so many additions wait for each other"


@pytest.mark.parametrize("multiple", [2, 4, 8])
def test_padding_is_a_sequence_of_its_own(multiple):
    packed = pack([torch.arange(5), torch.arange(4)], [1, 1], multiple)
    assert len(packed.input_ids) % multiple == 0
    assert packed.real_tokens == 9
    assert packed.cu_seqlens[2] == 9
    assert packed.max_length == packed.cu_seqlens.diff().max(), "of the padding, too"
    assert (packed.labels[9:] == IGNORE).all()


def test_a_rank_without_work_gets_a_stream_of_padding():
    packed = pack([], [], 4)
    assert len(packed.input_ids) == 4
    assert packed.unpack(torch.ones(4)).shape == (0, 1)


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_holds_every_sequence_once_within_budget_and_equally_often_on_all_ranks(seed):
    rng = random.Random(seed)
    lengths = [max(1, min(400, int(rng.lognormvariate(4, 1)))) for _ in range(rng.randint(1, 60))]
    ranks, budget = rng.choice([1, 2, 3, 4]), rng.choice([400, 512, 2000])
    bins = plan(lengths, ranks, budget, attention_cost(64))
    assert sorted(i for rank in bins for members in rank for i in members) == list(range(len(lengths)))
    assert len({len(rank) for rank in bins}) == 1
    assert all(sum(lengths[i] for i in members) <= budget for rank in bins for members in rank)


def test_very_unequal_lengths_are_balanced_over_data_ranks():
    lengths = [1000] * 3 + [10] * 300
    bins = plan(lengths, 2, 4096)
    loads = [sum(lengths[i] for members in rank for i in members) for rank in bins]
    assert max(loads) / min(loads) < 1.05


def test_a_sequence_costs_what_its_layers_compute():
    """12 h² n and 2 h n²: as much of either for 6 h tokens."""
    cost, n = attention_cost(64), 6 * 64
    assert cost(n) / cost(1) == pytest.approx(2 * n, rel=1e-2)


def test_micro_steps_are_of_equal_cost_and_the_rank_that_has_less_gets_the_heavier_half():
    lengths = [10, 8, 6, 5, 3, 1]
    one, other = plan(lengths, 2, 10)
    loads = [[sum(lengths[i] for i in members) for members in rank] for rank in (one, other)]
    assert loads == [[10, 7], [8, 8]]


def test_a_bin_without_room_for_one_sequence_is_there_for_the_next():
    """Many short ones are cheap, so their bin comes first: 3 tokens are too many for it, 1 is not."""
    (bins,) = plan([10, 4, 4, 4, 3, 1], 1, 13, lambda n: n * n)
    assert sorted(map(sorted, bins)) == [[0, 4], [1, 2, 3, 5]]


def test_fewer_sequences_than_ranks_leave_empty_bins():
    assert sorted(map(len, (members for rank in plan([5, 5], 4, 8) for members in rank))) == [0, 0, 1, 1]


def test_a_sequence_beyond_the_budget_is_an_error_with_both_numbers():
    with pytest.raises(ValueError, match="a sequence of 9 tokens does not fit the budget of 8"):
        plan([3, 9], 1, 8)


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_at_home_moves_nothing_and_keeps_groups_together(seed):
    rng = random.Random(seed)
    ranks, budget, members = rng.choice([1, 2, 3]), rng.choice([500, 1000, 4000]), 8
    lengths = [rng.randint(50, 250) for _ in range(12 * members)]
    groups = [i // members for i in range(len(lengths))]
    homes = [group % ranks for group in groups]
    rows = rng.sample(range(len(lengths)), 60)
    bins = plan_at_home(
        [lengths[i] for i in rows],
        [homes[i] for i in rows],
        [groups[i] for i in rows],
        ranks,
        budget,
        attention_cost(64),
    )
    bins = [[[rows[j] for j in members] for members in rank] for rank in bins]
    assert sorted(i for rank in bins for one in rank for i in one) == sorted(rows)
    assert all(homes[i] == rank for rank, own in enumerate(bins) for one in own for i in one)
    assert len({len(rank) for rank in bins}) == 1
    assert all(sum(lengths[i] for i in one) <= budget for rank in bins for one in rank)
    loads = [[sum(attention_cost(64)(lengths[i]) for i in one) for one in rank] for rank in bins]
    assert all(load == sorted(load, reverse=True) for load in loads)
    count = sum(map(len, bins))
    assert count <= 1.5 * sum(lengths[i] for i in rows) / budget + ranks
    assert sum(len({groups[i] for i in one}) for rank in bins for one in rank) < 12 + count


def test_a_plan_at_home_is_not_endless_when_a_rank_has_nothing_or_the_budget_is_tight():
    assert plan_at_home([8, 8, 8], [1, 1, 1], [0, 0, 1], 2, 8) == [[[], [], []], [[0], [1], [2]]]
    assert plan_at_home([], [], [], 2, 8) == [[[]], [[]]]
    bins = plan_at_home([1, 8, 1, 8, 1], [0] * 5, [0] * 5, 1, 8)
    assert sorted(i for one in bins[0] for i in one) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="a sequence of 9 tokens does not fit the budget of 8"):
        plan_at_home([9], [0], [0], 1, 8)


def test_tokens_that_are_not_wanted_have_no_label_and_no_row():
    """Of a conversation: the second turn's question, between two answers."""
    sequence = torch.arange(10, 18)
    packed = pack([sequence[:3], sequence], [1, 2], masks=[torch.ones(2), torch.tensor([1.0, 1, 0, 0, 1, 1])])
    assert packed.rows.tolist() == [0, 1, 4, 5, 8, 9]
    assert packed.labels[packed.rows].tolist() == [11, 12, 12, 13, 16, 17]
    stream = torch.arange(11.0)
    assert packed.unpack(stream)[1].tolist() == [4, 5, 0, 0, 8, 9]
