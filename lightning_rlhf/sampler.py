"""Which data rank gets which prompts, and where a resumed run goes on.

    (seed, epoch) ─▶ order of all prompts ─▶ global batches ─▶ this data rank's piece of each

Rank r of dp takes the r-th contiguous piece of every global batch: gathered in rank order, the pieces are the batch,
which is therefore the same on any number of ranks.

Resume needs no data-loader state: the order is a pure function of (seed, epoch), and the place in it is read from the
trainer's own counters when the first batch is asked for, which is after a checkpoint has set them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import lightning.pytorch as pl
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Sampler


def check_batch_size(batch_size: int, data_ranks: int) -> None:
    """Raise ValueError unless every data rank gets the same number of prompts."""
    if batch_size % data_ranks:
        below = batch_size // data_ranks * data_ranks
        take = f"{below} or {below + data_ranks}" if below else f"{data_ranks}"
        raise ValueError(f"data.batch_size={batch_size} must be a multiple of the {data_ranks} data ranks: take {take}")


class PromptSampler(Sampler[list[int]]):
    """This data rank's piece of each global batch, as positions in the set.

    Every rank gets the same number of batches. With ``drop_last`` an incomplete last batch is left out (the next
    epoch's order is another). Without it is split as evenly as it goes: each position comes exactly once over all
    ranks, and a piece may be EMPTY, because generation and scoring contain collectives and no rank may skip a batch.

    Args:
        size: number of prompts.
        batch_size: prompts per batch over all data ranks.
        num_replicas: data ranks.
        rank: this data rank.
        shuffle: a new order each epoch instead of the set's own.
        seed: of the order.
        drop_last: leave out an incomplete last batch.
        position: (epoch, batches of it already done); asked when the first batch is wanted.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        num_replicas: int = 1,
        rank: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        position: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self.size, self.batch_size = size, batch_size
        self.num_replicas, self.rank = num_replicas, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.position = position

    def order(self, epoch: int) -> Int[Tensor, " N"]:
        """All positions, as ``epoch`` goes through them."""
        if not self.shuffle:
            return torch.arange(self.size)
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))

    def __iter__(self) -> Iterator[list[int]]:
        epoch, done = self.position()
        for number in range(done, len(self)):
            yield self.batch_at(epoch, number)

    def batch_at(self, epoch: int, number: int) -> list[int]:
        """Piece of batch ``number`` (from 0) of an epoch."""
        batch = self.order(epoch)[number * self.batch_size : (number + 1) * self.batch_size]
        return batch.tensor_split(self.num_replicas)[self.rank].tolist()

    def __len__(self) -> int:
        return self.size // self.batch_size if self.drop_last else -(-self.size // self.batch_size)


def fit_position(trainer: pl.Trainer) -> tuple[int, int]:
    """(epoch, batches of it already done), from the number of batches that the run has been through.

    Not from the trainer's epoch: resumed at an epoch's end with ``max_steps``, Lightning 2.6 takes one more batch till
    it counts the next epoch. Valid from the moment that a batch is asked for.
    """
    return divmod(trainer.fit_loop.epoch_loop.batch_progress.total.completed, int(trainer.num_training_batches))
