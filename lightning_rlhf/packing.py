"""Ragged responses <-> packed micro-batches, balanced over data ranks.

    lengths of the whole mini-batch ──plan──▶ bins[data rank][micro-step] ──pack──▶ Packed stream ──unpack──▶ (b, T)

`plan` is a pure function of the global lengths: every rank computes the same answer without communication. All data ranks get
the same number of bins (FSDP's collectives would hang otherwise), every bin holds at most ``budget`` tokens, and bins that run
at the same time cost about the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_rlhf.images import PackedImages, pack_images
from lightning_rlhf.types import IGNORE, Movable, PromptImages, shift_labels

Cost = Callable[[int], float]


@dataclass(frozen=True)
class Packed(Movable):
    """One micro-batch as a stream of S tokens, whole sequences one after the other, padding (if any) as one more sequence.

    ``labels[t]`` is the response token that position ``t`` predicts, `IGNORE` elsewhere; ``rows`` are the positions of this
    sequence rank's piece of the stream that have one, ascending: the head computes those only. ``response_index[i, j]`` is the
    stream position that predicts token ``j`` of response ``i``, and any position where there is none: see ``response_mask``.
    These are spread over the stream, since the backward of `unpack` adds up one after the other what meets in one position.
    """

    input_ids: Int[Tensor, "S"]
    position_ids: Int[Tensor, "S"]
    labels: Int[Tensor, "S"]
    rows: Int[Tensor, "R"]
    cu_seqlens: Int[Tensor, "N_1"]
    response_index: Int[Tensor, "b T"]
    response_mask: Float[Tensor, "b T"]
    max_length: int
    real_tokens: int
    images: PackedImages | None = None

    def unpack(self, stream: Float[Tensor, "S"]) -> Float[Tensor, "b T"]:
        """Values at the positions that predict a response token, aligned with the responses; 0 on padding."""
        return torch.where(self.response_mask > 0, stream[self.response_index], 0.0)


def pack(
    sequences: Sequence[Int[Tensor, "_"]],
    prompt_lengths: Sequence[int],
    sequence_ranks: int = 1,
    sequence_rank: int = 0,
    images: Sequence[PromptImages | None] = (),
    masks: Sequence[Float[Tensor, "_"]] = (),
) -> Packed:
    """Lay sequences into one stream and shift the labels, once, inside each sequence.

    Args:
        sequences: prompt + response ids; may be empty (the stream is then padding: a rank without work in this step).
        prompt_lengths: where each response begins, at least 1.
        sequence_ranks: ranks that share the stream, each a contiguous piece: it is padded to a multiple of this.
        sequence_rank: this one.
        images: of each sequence's prompt, or empty.
        masks: 1 on the tokens of each response that are wanted, or empty: all of them.
    """
    lengths = [len(s) for s in sequences]
    total = sum(lengths)
    width = max((n - p for n, p in zip(lengths, prompt_lengths, strict=True)), default=0) or 1
    pad = -total % sequence_ranks or (sequence_ranks if total == 0 else 0)
    parts, labels, segments = list(sequences), [], list(lengths)
    index = torch.arange(len(lengths) * width).view(len(lengths), width) % (total + pad)
    mask = torch.zeros(len(lengths), width)
    start = 0
    for i, (sequence, prompt) in enumerate(zip(sequences, prompt_lengths, strict=True)):
        labels.append(shift_labels(sequence, prompt))
        n = len(sequence) - prompt
        index[i, :n] = torch.arange(start + prompt - 1, start + prompt - 1 + n)
        mask[i, :n] = masks[i] if masks else 1.0
        labels[-1][prompt - 1 : -1][mask[i, :n] == 0] = IGNORE
        start += len(sequence)
    if pad:  # real tokens never attend to it
        parts.append(torch.zeros(pad, dtype=torch.long))
        labels.append(torch.full((pad,), IGNORE))
        segments.append(pad)
    bounds = torch.tensor([0, *segments]).cumsum(0)
    all_labels = torch.cat(labels)
    piece = all_labels.chunk(sequence_ranks)[sequence_rank]
    positions = torch.arange(total + pad) - bounds[:-1].repeat_interleave(torch.tensor(segments))
    return Packed(
        input_ids=torch.cat(parts),
        position_ids=positions,
        labels=all_labels,
        rows=(piece != IGNORE).nonzero().squeeze(-1),
        cu_seqlens=bounds.int(),
        response_index=index,
        response_mask=mask,
        max_length=max(segments),
        real_tokens=total,
        images=pack_images(images, lengths, positions, sequence_ranks, sequence_rank),
    )


def pack_ends(sequences: Sequence[Int[Tensor, "_"]], sequence_ranks: int = 1, sequence_rank: int = 0) -> Packed:
    """Like `pack`, for what is read off each sequence's last token: ``rows`` and ``response_index`` are those, (b, 1).

    A last token predicts nothing: ``labels`` are `IGNORE` throughout.
    """
    packed = pack(sequences, [len(s) for s in sequences], sequence_ranks, sequence_rank)
    last = packed.cu_seqlens[1 : len(sequences) + 1].long() - 1
    piece = len(packed.input_ids) // sequence_ranks
    own = last[(last >= sequence_rank * piece) & (last < (sequence_rank + 1) * piece)]
    mask = torch.ones(len(sequences), 1)
    return replace(packed, rows=own - sequence_rank * piece, response_index=last[:, None], response_mask=mask)


def attention_cost(hidden_size: int) -> Cost:
    """Relative cost of a sequence: 12 h² n for the matrix products and 2 h n² for causal attention, per layer."""
    return lambda n: n + n * n / (6 * hidden_size)


def plan(lengths: Sequence[int], data_ranks: int, budget: int, cost: Cost = float) -> list[list[list[int]]]:
    """Bins of sequence indices, ``bins[data rank][micro-step]``.

    Longest processing time first under a token budget; the number of bins grows by ``data_ranks`` until everything fits. Bins
    of the same micro-step have similar cost, since the ranks wait for the slowest. A bin may be empty when there are fewer
    sequences than ranks.

    Raises:
        ValueError: a sequence is longer than ``budget`` tokens.
    """
    if max(lengths, default=0) > budget:
        raise ValueError(f"a sequence of {max(lengths)} tokens does not fit the budget of {budget} tokens")
    costs = [cost(n) for n in lengths]
    count = data_ranks * max(1, -(-sum(lengths) // (budget * data_ranks)))
    while (bins := _fill(costs, lengths, count, budget)) is None:
        count += data_ranks  # ends: with as many bins as sequences each has its own

    def load(members: list[int]) -> float:
        return sum(costs[i] for i in members)

    bins.sort(key=load, reverse=True)
    out: list[list[list[int]]] = [[] for _ in range(data_ranks)]
    total = [0.0] * data_ranks
    for step in range(0, count, data_ranks):  # the heaviest bin of a step goes to the rank with the least work so far
        ranks = sorted(range(data_ranks), key=lambda r: (total[r], r))
        for rank, members in zip(ranks, bins[step : step + data_ranks], strict=True):
            out[rank].append(members)
            total[rank] += load(members)
    return out


def plan_at_home(
    lengths: Sequence[int],
    homes: Sequence[int],
    groups: Sequence[int],
    data_ranks: int,
    budget: int,
    cost: Cost = float,
) -> list[list[list[int]]]:
    """Like `plan` for sequences that cannot move: ``homes`` is the data rank of each.

    Those of one group come into the same bin or the next, so that what they share is computed once or twice. Every rank gets
    as many bins as the one that needs most, ordered by load: those of a micro-step are alike.

    Raises:
        ValueError: a sequence is longer than ``budget`` tokens.
    """
    if max(lengths, default=0) > budget:
        raise ValueError(f"a sequence of {max(lengths)} tokens does not fit the budget of {budget} tokens")
    costs = [cost(n) for n in lengths]
    order = sorted(range(len(lengths)), key=lambda i: (groups[i], i))
    own = [[i for i in order if homes[i] == rank] for rank in range(data_ranks)]
    count = max(1, *(-(-sum(lengths[i] for i in rows) // budget) for rows in own))
    while None in (bins := [_cut(rows, costs, lengths, count, budget) for rows in own]):
        count += 1  # ends: cut finely enough, every sequence has a bin of its own
    return [sorted(rank or [], key=lambda members: -sum(costs[i] for i in members)) for rank in bins]


def _cut(
    rows: Sequence[int], costs: Sequence[float], sizes: Sequence[int], count: int, budget: int
) -> list[list[int]] | None:
    """``rows`` in their order, in ``count`` pieces of about equal cost; None when something does not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    total, done, j, room = sum(costs[i] for i in rows), 0.0, 0, budget
    for i in rows:
        while room < sizes[i] or (j < count - 1 and done + costs[i] / 2 > total * (j + 1) / count):
            j, room = j + 1, budget
            if j == count:
                return None
        bins[j].append(i)
        room -= sizes[i]
        done += costs[i]
    return bins


def _fill(costs: Sequence[float], sizes: Sequence[int], count: int, budget: int) -> list[list[int]] | None:
    """Heaviest first into the cheapest bin that still has room; None when something does not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [budget] * count
    heap = [(0.0, j) for j in range(count)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        full = []
        while heap and room[heap[0][1]] < sizes[i]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, j = heapq.heappop(heap)
        bins[j].append(i)
        room[j] -= sizes[i]
        heapq.heappush(heap, (load + costs[i], j))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins
