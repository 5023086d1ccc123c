"""Demonstrations and pairs of a run without rollouts, as LightningDataModules.

    rows ─▶ ExampleTable (example_table.py) ─▶ PromptLoader ─▶ {"examples": Examples}, one batch per optimizer step

Every rank gets the WHOLE batch, token ids are small, and computes its own share of it: the packing plan splits any batch over
any number of ranks, so ``batch_size`` need not be a multiple of them. Order and resume are those of `sampler`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import lightning.pytorch as pl
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning.pytorch.utilities import rank_zero_info

from lightning_rlhf.conversations import Learned, Piece, answer, demonstration, preference, whole
from lightning_rlhf.data import PromptLoader, check_same_rows, set_name, tokenizer_of, training_sampler
from lightning_rlhf.example_table import ExampleTable
from lightning_rlhf.prompts import PromptEncoder
from lightning_rlhf.sampler import PromptSampler
from lightning_rlhf.sources import Row, Rows, read_rows


class SupervisedDataModule(pl.LightningDataModule, ABC):
    """Rows that are learned as they are; what a row is, a subclass says.

    Args:
        path: a .jsonl, .json, .parquet or .csv file, a folder or hub data set id (read by `datasets.load_dataset`), or the
            dotted path of your own iterable of dicts or function returning one; in Python also these themselves.
        subset: configuration of a hub data set.
        split: split of ``path`` to train on; slices such as train[:1000] work.
        val_path: validation rows, given like ``path``.
        val_split: split of ``val_path``, or of ``path`` when there is no ``val_path``.
        val_size: without these two: hold out the last rows of the training set.
        batch_size: examples per optimizer step, over all ranks.
        max_length: longest sequence in tokens, prompt and answer together.
        overlong: what to do with longer ones: drop them (counted in the log) or stop with an error. Nothing is cut.
        shuffle: a new order each epoch.
        seed: of the order.
        chat_template: wrap text prompts as one user message and apply the chat template. Conversations always get it.
        chat_template_args: further variables of the template, such as enable_thinking.
        system_prompt: put before conversations that have no system message.
        tokenizer: folder or hub id; the module's own tokenizer if not given.

    Raises:
        ValueError: settings that exclude each other.
    """

    example_size = 1
    """Sequences of an example."""

    def __init__(
        self,
        path: str,
        subset: str | None = None,
        split: str = "train",
        val_path: str | None = None,
        val_split: str | None = None,
        val_size: NonNegativeInt = 0,
        batch_size: PositiveInt = 64,
        max_length: PositiveInt | None = None,
        overlong: Literal["drop", "error"] = "drop",
        shuffle: bool = True,
        seed: int = 0,
        chat_template: bool = False,
        chat_template_args: dict[str, Any] | None = None,
        system_prompt: str | None = None,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        self.of_its_own = (val_path or val_split) is not None
        if self.of_its_own and val_size:
            raise ValueError("data.val_size holds out training rows: leave it out beside val_path and val_split")
        self.path, self.subset, self.split = path, subset, split
        self.val_path, self.val_split, self.val_size = val_path, val_split, val_size
        self.batch_size, self.max_length, self.overlong = batch_size, max_length, overlong
        self.shuffle, self.seed = shuffle, seed
        self.chat_template, self.chat_template_args = chat_template, chat_template_args
        self.system_prompt, self.tokenizer = system_prompt, tokenizer
        self.train_table: ExampleTable | None = None
        self.val_table: ExampleTable | None = None
        self._module: pl.LightningModule | None = None

    @abstractmethod
    def pieces(self, row: Row) -> Sequence[Sequence[Piece]]:
        """The sequences of a row's example, in pieces.

        Raises:
            ValueError: the row is none; the message goes on after "row 3 …".
        """

    @cached_property
    def train_rows(self) -> Rows:
        """The training data, held-out rows included."""
        rows = read_rows(self.path, self.split, self.subset)
        if self.val_size >= len(rows):
            raise ValueError(f"data.val_size={self.val_size} must be smaller than the data, which has {len(rows)} rows")
        return rows

    @cached_property
    def val_rows(self) -> Rows | None:
        """Validation data of its own."""
        if not self.of_its_own:
            return None
        return read_rows(self.val_path or self.path, self.val_split or "train", self.subset)

    def prepare_data(self) -> None:
        """One process per node makes the Arrow files; the others find them in the cache."""
        _ = self.train_rows, self.val_rows

    def setup(self, stage: str) -> None:
        """Tokenise and check; a second call for the same module does nothing.

        Raises:
            ValueError: a row that is no example, fewer rows than one batch, or other data on another rank.
        """
        if (module := None if self.trainer is None else self.trainer.lightning_module) is not self._module:
            # another tokenizer, and a reward model reads pairs in another way than DPO
            self._module, self.train_table, self.val_table = module, None, None
            self.__dict__.pop("_encoder", None)
        size = len(self.train_rows)
        validates = self.val_rows is not None or self.val_size > 0
        if not validates and stage != "fit":
            raise ValueError("data has no validation rows: set val_path, val_split or val_size")
        if not validates and self.trainer is not None:
            self.trainer.limit_val_batches = 0  # an empty loader would draw a warning, and hooks would run for nothing
        if stage == "fit" and self.train_table is None:
            self.train_table = self._table("training", self.train_rows, range(size - self.val_size))
            if len(self.train_table) < self.batch_size:
                raise ValueError(
                    f"data.batch_size={self.batch_size} is more than the {len(self.train_table)} training rows there are:"
                    " lower it, or add data"
                )
        if validates and self.val_table is None:
            rows = self.val_rows or self.train_rows
            first = 0 if self.val_rows else size - self.val_size
            self.val_table = self._table("validation", rows, range(first, len(rows)))
        if self.trainer is not None:
            check_same_rows({"training set": self.train_table, "validation set": self.val_table})

    def _table(self, which: str, rows: Rows, numbers: range) -> ExampleTable:
        source = "data" if rows is self.train_rows else "data.val_path" if self.val_path else "data.val_split"
        table = ExampleTable.build(rows, numbers, self._encoder, self.pieces, source)
        limit = self.max_length
        if limit is None or max(table.lengths, default=0) <= limit:
            return table
        if self.overlong == "error":
            number, length = next((n, size) for n, size in zip(numbers, table.lengths, strict=True) if size > limit)
            raise ValueError(
                f"{source}: row {number} has a sequence of {length} tokens, more than data.max_length={limit}: raise it, or set"
                " data.overlong: drop"
            )
        kept = table.where([length <= limit for length in table.lengths])
        if not len(kept):
            raise ValueError(f"data.max_length={limit} leaves none of the {len(table)} {which} rows: raise it")
        rank_zero_info(
            f"data: dropped {len(table) - len(kept)} of {len(table)} {which} rows, longer than {limit} tokens"
        )
        return kept

    @cached_property
    def _encoder(self) -> PromptEncoder:
        tokenizer = tokenizer_of(self.tokenizer, self._module)
        return PromptEncoder(tokenizer, self.chat_template, self.system_prompt, self.chat_template_args)

    @property
    def longest_example(self) -> int:
        """Tokens of all sequences of the largest example; 0 before `setup`."""
        tables = [table for table in (self.train_table, self.val_table) if table is not None]
        return max((sum(map(len, example)) for table in tables for example in table.examples), default=0)

    @property
    def longest_sequence(self) -> int:
        """Tokens; 0 before `setup`."""
        return max((n for table in (self.train_table, self.val_table) if table for n in table.lengths), default=0)

    @property
    def fingerprint(self) -> dict[str, Any] | None:
        """Number of training examples and a hash of their token ids; None before `setup`."""
        table = self.train_table
        return None if table is None else {"examples": len(table), "fingerprint": table.fingerprint}

    @property
    def val_names(self) -> list[str]:
        """The validation set's name in the metrics: that of its file or split, or heldout."""
        return [set_name(self.val_path or str(self.val_split).partition("[")[0])] if self.of_its_own else ["heldout"]

    def train_dataloader(self) -> PromptLoader:
        assert self.train_table is not None
        return PromptLoader(self.train_table, training_sampler(self, len(self.train_table)), "examples")

    def val_dataloader(self) -> list[PromptLoader]:
        """Every example once, in order."""
        if self.val_table is None:
            return []
        sampler = PromptSampler(len(self.val_table), self.batch_size, shuffle=False, drop_last=False)
        return [PromptLoader(self.val_table, sampler, "examples")]

    def test_dataloader(self) -> list[PromptLoader]:
        """The validation rows: `Trainer.test` has no set of its own."""
        return self.val_dataloader()


class SFTDataModule(SupervisedDataModule):
    """Demonstrations: ``messages``, ``prompt`` and ``completion``, or ``text``; see `conversations`.

    Args:
        train_on: completions: every assistant turn, or the completion; last: of messages the last of them; all: prompts, too.
        **kwargs: see `SupervisedDataModule`.
    """

    def __init__(self, path: str, train_on: Learned = "completions", **kwargs: Any) -> None:
        super().__init__(path, **kwargs)
        self.train_on = train_on

    def pieces(self, row: Row) -> Sequence[Sequence[Piece]]:
        return [demonstration(row, self._encoder, self.train_on)]


class PreferenceDataModule(SupervisedDataModule):
    """Pairs: ``chosen`` and ``rejected``, with a ``prompt`` unless they are conversations, perhaps a ``margin``.

    Args:
        **kwargs: see `SupervisedDataModule`.
    """

    example_size = 2

    def __init__(self, path: str, **kwargs: Any) -> None:
        super().__init__(path, **kwargs)

    def pieces(self, row: Row) -> Sequence[Sequence[Piece]]:
        prompt, *sides = preference(row)
        if getattr(self._module, "ends_only", False):  # in one piece, as scores will be asked for
            return [[Piece(whole(prompt, side, self._encoder), True)] for side in sides]
        return [answer(prompt, side, self._encoder) for side in sides]
