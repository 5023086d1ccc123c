"""How an iteration's responses are cut into optimizer steps, and these or a step's examples into packed micro-batches; every rank
computes the same cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from lightning_rlhf.packing import Packed, pack, pack_ends, plan, plan_at_home
from lightning_rlhf.types import Examples, Experience, Movable, derive_seed


def mini_batches(responses: int, count: int, *seed: int) -> list[list[int]]:
    """A permutation of the global response indices that depends on ``seed`` only, split near-equally.

    Raises:
        ValueError: there are fewer responses than mini-batches.
    """
    if count > responses:
        raise ValueError(f"model.mini_batches is {count}, the rollout has only {responses} responses: lower it")
    generator = torch.Generator().manual_seed(derive_seed("mini_batches", *seed))
    return [part.tolist() for part in torch.randperm(responses, generator=generator).tensor_split(count)]


@dataclass(frozen=True)
class Split:
    """How the work on a batch is split over ranks and micro-batches.

    Args:
        data_ranks: ranks with different data.
        data_rank: this one.
        sequence_ranks: ranks that share a sequence.
        sequence_rank: this one.
        tokens: token budget of one micro-batch on one GPU.
        cost: relative cost of a sequence by its length.
        device: where the micro-batches are put.
    """

    data_ranks: int
    data_rank: int
    sequence_ranks: int
    sequence_rank: int
    tokens: int
    cost: Callable[[int], float]
    device: torch.device


@dataclass(frozen=True)
class MicroBatch(Movable):
    """Some responses of an experience as one packed stream; ``rows`` are their indices."""

    packed: Packed
    rows: Int[Tensor, "b"]

    @property
    def width(self) -> int:
        """T of the response-aligned tensors."""
        return self.packed.response_mask.shape[1]


def micro_batches(experience: Experience, rows: Sequence[int], split: Split) -> tuple[list[MicroBatch], int]:
    """This data rank's micro-batches of ``rows``, as many as every other rank has, on the device before any of them is run.

    Also returns the tokens that all ranks together spend time on, waiting for the largest of each micro-step included.
    """
    lengths = [len(experience.sequences[i]) for i in rows]
    budget = split.tokens * split.sequence_ranks
    if experience.home is None:
        bins = plan(lengths, split.data_ranks, budget, split.cost)
    else:  # pictures stay where they were read
        homes, groups = [experience.home[i] for i in rows], experience.group[list(rows)].tolist()
        bins = plan_at_home(lengths, homes, groups, split.data_ranks, budget, split.cost)
    own = []
    for members in bins[split.data_rank]:
        chosen = [rows[i] for i in members]
        sequences = [experience.sequences[i] for i in chosen]
        prompts = [experience.prompt_lengths[i] for i in chosen]
        images = [experience.images.get(i) for i in chosen]
        packed = pack(sequences, prompts, split.sequence_ranks, split.sequence_rank, images)
        own.append(_on_device(packed, chosen, split))
    return own, _spent(bins, lengths)


def example_batches(examples: Examples, split: Split, *, ends_only: bool = False) -> tuple[list[MicroBatch], int]:
    """The same of labelled examples, whose sequences come into one stream, side by side.

    Args:
        ends_only: streams by `pack_ends`.
    """
    size = examples.size
    members = [range(i * size, (i + 1) * size) for i in range(len(examples))]
    lengths = [sum(len(examples.sequences[i]) for i in own) for own in members]
    bins = plan(lengths, split.data_ranks, split.tokens * split.sequence_ranks, lambda n: size * split.cost(n // size))
    place = split.sequence_ranks, split.sequence_rank
    batches = []
    for chosen in bins[split.data_rank]:
        rows = [row for i in chosen for row in members[i]]
        sequences = [examples.sequences[row] for row in rows]
        if ends_only:
            packed = pack_ends(sequences, *place)
        else:
            prompts, masks = [examples.prompt_lengths[row] for row in rows], [examples.masks[row] for row in rows]
            packed = pack(sequences, prompts, *place, masks=masks)
        batches.append(_on_device(packed, rows, split))
    return batches, _spent(bins, lengths)


def _on_device(packed: Packed, rows: Sequence[int], split: Split) -> MicroBatch:
    return MicroBatch(packed, torch.tensor(rows, dtype=torch.long)).to(split.device, non_blocking=True)


def _spent(bins: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int]) -> int:
    """Tokens that all ranks together spend time on: in each micro-step they wait for the largest."""
    spent = [[sum(lengths[i] for i in members) for members in rank] for rank in bins]
    return sum(map(max, zip(*spent, strict=True))) * len(bins)
