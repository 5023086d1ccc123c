"""Which data rank gets which prompts, and where a resumed run goes on.

    rows ─▶ PromptTable (prompts.py) ─▶ PromptLoader ─▶ {"prompts": Prompts}, one batch per iteration
                                           ▲
          PromptSampler: (seed, epoch) ─▶ order ─▶ global batches ─▶ this data rank's piece of each

``batch_size`` counts prompts over ALL data ranks, so nothing depends on the number of GPUs. Rank r of dp takes the r-th
contiguous piece of every global batch: gathered in rank order, the pieces are the batch. The ranks of one sequence-parallel
group are one data rank and see the same prompts.

Resume needs no data-loader state: the order is a pure function of (seed, epoch), and the place in it is read from the trainer's
own counters when the first batch is asked for, which is after a checkpoint has set them. It holds on another number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import Sampler

from lightning_rlhf.prompts import PromptEncoder, PromptTable, Rows, TaskRows, read_rows
from lightning_rlhf.types import Prompts

if TYPE_CHECKING:
    from jaxtyping import Int
    from transformers import PreTrainedTokenizerBase


class PromptSampler(Sampler[list[int]]):
    """This data rank's piece of each global batch, as positions in the set.

    Every rank gets the same number of batches. With ``drop_last`` an incomplete last batch is left out (the next epoch's order
    is another). Without it is split as evenly as it goes: each position comes exactly once over all ranks, and a piece may be
    EMPTY, because generation and scoring contain collectives and no rank may skip a batch.

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

    def order(self, epoch: int) -> Int[Tensor, "size"]:
        """All positions, as ``epoch`` goes through them."""
        if not self.shuffle:
            return torch.arange(self.size)
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))

    def __iter__(self) -> Iterator[list[int]]:
        epoch, done = self.position()
        batches = self.order(epoch).split(self.batch_size)[: len(self)]
        for batch in batches[done % max(len(self), 1) :]:
            yield batch.tensor_split(self.num_replicas)[self.rank].tolist()

    def __len__(self) -> int:
        return self.size // self.batch_size if self.drop_last else -(-self.size // self.batch_size)


def fit_position(trainer: pl.Trainer) -> tuple[int, int]:
    """(epoch, batches of it already done) by the trainer's counters, true once the epoch's first batch is asked for."""
    loop = trainer.fit_loop
    return loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current.ready


class PromptLoader:
    """Batches of prompts. No `DataLoader`: the ids are in memory, there is nothing for workers to do ahead of time.

    By having ``state_dict`` it counts as resumable in Lightning, which it is through its sampler; the state only tells whether
    a resumed run has the data of its checkpoint.
    """

    def __init__(self, table: PromptTable, sampler: PromptSampler) -> None:
        self.table, self.sampler = table, sampler

    def __iter__(self) -> Iterator[dict[str, Prompts]]:
        for positions in self.sampler:
            yield {"prompts": self.table.take(positions)}

    def __len__(self) -> int:
        return len(self.sampler)

    def state_dict(self) -> dict[str, int]:
        return {"prompts": len(self.table), "batch_size": self.sampler.batch_size, "seed": self.sampler.seed}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        if state_dict != self.state_dict():
            rank_zero_warn(
                f"data: the checkpoint was written with {state_dict}, this run has {self.state_dict()}: the epoch goes on at"
                " the same batch number, but in another order, so prompts may come twice in it or not at all"
            )


class PromptDataModule(pl.LightningDataModule):
    """Prompts for rollouts.

    Args:
        path: a .jsonl, .json or .parquet file, a folder or hub data set id (read by `datasets.load_dataset`), or the dotted
            path of your own iterable of dicts or function returning one.
        task: a reasoning-gym task instead of ``path``, such as chain_sum; score it with `rewards.reasoning_gym`.
        task_args: the task's own options.
        task_size: rows made of ``task``.
        subset: configuration of a hub data set.
        split: split of ``path`` to train on; slices such as train[:1000] work.
        val_path: validation prompts, given like ``path``.
        val_split: split of ``val_path``, or of ``path`` when there is no ``val_path``.
        val_task: a task to validate on; ``val_size`` rows are made of it.
        val_task_args: the options of ``val_task``.
        val_size: without the three above: hold out the last rows of the training set. They are never trained on; of a
            ``task`` neither are other rows with the same question.
        batch_size: prompts per iteration, over all data ranks.
        val_batch_size: prompts per validation batch, over all data ranks; ``batch_size`` if not given.
        max_prompt_length: longest prompt in tokens.
        overlong: what to do with longer ones: drop them (counted in the log) or stop with an error.
        shuffle: a new order each epoch.
        seed: of the order and of the task's rows.
        chat_template: wrap a text prompt as one user message and apply the chat template. Conversations always get it.
        chat_template_args: further variables of the template, such as enable_thinking.
        system_prompt: put before conversations that have no system message.
        prompt_column: which column is the prompt; all others flow to the reward functions.
        tokenizer: folder or hub id; the module's own tokenizer if not given.

    Raises:
        ValueError: not exactly one of ``path`` and ``task``, or settings that exclude each other.
    """

    def __init__(
        self,
        path: str | None = None,
        task: str | None = None,
        task_args: dict[str, Any] | None = None,
        task_size: PositiveInt = 5000,  # type: ignore[assignment]
        subset: str | None = None,
        split: str = "train",
        val_path: str | None = None,
        val_split: str | None = None,
        val_task: str | None = None,
        val_task_args: dict[str, Any] | None = None,
        val_size: NonNegativeInt = 0,  # type: ignore[assignment]
        batch_size: PositiveInt = 128,  # type: ignore[assignment]
        val_batch_size: PositiveInt | None = None,
        max_prompt_length: PositiveInt | None = None,
        overlong: Literal["drop", "error"] = "drop",
        shuffle: bool = True,
        seed: int = 0,
        chat_template: bool = False,
        chat_template_args: dict[str, Any] | None = None,
        system_prompt: str | None = None,
        prompt_column: str = "prompt",
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        if (path is None) == (task is None):
            raise ValueError(f"data needs exactly one of path and task, got path={path!r} and task={task!r}")
        if val_path is not None and val_task is not None:
            raise ValueError(f"data takes one of val_path and val_task, got {val_path!r} and {val_task!r}")
        if val_task is not None and not val_size:
            raise ValueError(f"data.val_task={val_task!r} needs data.val_size, the number of rows to make of it")
        if (val_path or val_split) is not None and val_size:
            raise ValueError("data.val_size holds out training rows: leave it out beside val_path and val_split")
        if val_split is not None and val_path is None and path is None:
            raise ValueError("data.val_split needs data.path or data.val_path")
        if batch_size < 1 or (val_batch_size is not None and val_batch_size < 1):
            raise ValueError(f"data.batch_size must be positive, got {batch_size} and val_batch_size={val_batch_size}")
        self.path, self.task, self.task_args, self.task_size = path, task, task_args, task_size
        self.subset, self.split = subset, split
        self.val_path, self.val_split, self.val_task, self.val_task_args = val_path, val_split, val_task, val_task_args
        self.val_size = val_size
        self.batch_size, self.val_batch_size = batch_size, val_batch_size or batch_size
        self.max_prompt_length, self.overlong = max_prompt_length, overlong
        self.shuffle, self.seed = shuffle, seed
        self.chat_template, self.chat_template_args, self.system_prompt = chat_template, chat_template_args, system_prompt
        self.prompt_column, self.tokenizer = prompt_column, tokenizer
        self.train_table: PromptTable | None = None
        self.val_table: PromptTable | None = None

    # -- set-up ------------------------------------------------------------------------------------------------------
    def prepare_data(self) -> None:
        """One process per node makes the Arrow files; the others find them in the cache."""
        self._read_train()
        self._read_val()

    def setup(self, stage: str) -> None:
        """Read, tokenise and check. Idempotent.

        Raises:
            ValueError: a prompt that is none, ``batch_size`` not a multiple of the data ranks, a set smaller than a batch.
        """
        replicas = self._ranks()["num_replicas"]
        if stage == "fit" and self.batch_size % replicas:
            below = self.batch_size // replicas * replicas
            raise ValueError(
                f"data.batch_size={self.batch_size} must be a multiple of the {replicas} data ranks:"
                f" take {below or replicas} or {below + replicas}"
            )
        if self.val_table is not None and (self.train_table is not None or stage != "fit"):
            return
        rows, encoder = self._read_train(), self._encoder()
        self.val_table = self.val_table or self._build_val(rows, encoder)
        if stage == "fit":
            self.train_table = self._build_train(rows, encoder)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, for engines that reserve memory; known after `setup`."""
        return max(table.longest for table in (self.train_table, self.val_table) if table is not None)
