"""The prompts of a run, as a LightningDataModule.

    rows ─▶ PromptTable (prompts.py) ─▶ PromptLoader ─▶ {"prompts": Prompts}, one batch per iteration
                                           ▲
          PromptSampler: (seed, epoch) ─▶ order ─▶ global batches ─▶ this data rank's piece of each

``batch_size`` counts prompts over ALL data ranks, so nothing depends on the number of GPUs. The ranks of one
sequence-parallel group are one data rank and see the same prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_rlhf.meeting import check_alike
from lightning_rlhf.prompts import PromptEncoder, PromptTable
from lightning_rlhf.sampler import PromptSampler, check_batch_size, fit_position
from lightning_rlhf.sources import Rows, TaskRows, first_line, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptLoader:
    """Batches of prompts. No `DataLoader`: the ids are in memory, there is nothing for workers to do ahead of time.

    By having ``state_dict`` it counts as resumable in Lightning, which it is through its sampler; the state only tells
    whether a resumed run has the data of its checkpoint.

    Args:
        table: anything with ``take(positions)``, ``fingerprint`` and a length.
        sampler: of positions in it.
        key: of what is taken, in the batch.
    """

    def __init__(self, table: Any, sampler: PromptSampler, key: str = "prompts") -> None:
        self.table, self.batches, self.key = table, sampler, key

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for positions in self.batches:
            yield {self.key: self.table.take(positions)}

    def __len__(self) -> int:
        return len(self.batches)

    def batch_at(self, epoch: int, number: int) -> dict[str, Any]:
        """The batch that is number ``number`` (from 0) of an epoch, whichever is due."""
        return {self.key: self.table.take(self.batches.batch_at(epoch, number))}

    def state_dict(self) -> dict[str, Any]:
        sizes = {self.key: len(self.table), "batch_size": self.batches.batch_size, "seed": self.batches.seed}
        return {**sizes, "fingerprint": self.table.fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = self.state_dict()
        # a checkpoint of before there were fingerprints says nothing of them
        other = [
            f"{name} {state_dict[name]} (here {own[name]})"
            for name in own
            if state_dict.get(name, own[name]) != own[name]
        ]
        if other:
            rank_zero_warn(
                f"data: the checkpoint was written with {', '.join(other)}: the epoch goes on at the same batch number, but"
                " with other data or in another order, so prompts may come twice in it or not at all"
            )


@dataclass(frozen=True)
class ValidationSet:
    """Where the prompts of one validation set come from.

    Args:
        path: given like the ``path`` of the training data.
        task: a reasoning-gym task instead.
        task_args: the task's own options.
        size: rows made of ``task``.
        subset: configuration of a hub data set.
        split: of ``path``; slices such as test[:200] work.
    """

    path: str | None = None
    task: str | None = None
    task_args: dict[str, Any] | None = None
    size: PositiveInt = 200
    subset: str | None = None
    split: str = "train"

    def __post_init__(self) -> None:
        if (self.path is None) == (self.task is None):
            raise ValueError(f"a set of data.val needs one of path and task, got {self.path!r} and {self.task!r}")

    def rows(self, seed: int) -> Rows:
        if self.task is not None:
            return TaskRows(self.task, self.size, seed, self.task_args)
        return read_rows(self.path, self.split, self.subset)


class PromptDataModule(pl.LightningDataModule):
    """Prompts for rollouts.

    Args:
        path: a .jsonl, .json, .parquet or .csv file, a folder or hub data set id (read by `datasets.load_dataset`), or the
            dotted path of your own iterable of dicts or function returning one; in Python also these themselves.
        task: a reasoning-gym task instead of ``path``, such as chain_sum; score it with `rewards.reasoning_gym`.
        task_args: the task's own options.
        task_size: rows made of ``task``.
        subset: configuration of a hub data set.
        split: split of ``path`` to train on; slices such as train[:1000] work.
        val: several validation sets by the names that they have in the metrics, each given like ``path`` or as a
            `ValidationSet`.
        val_path: validation prompts, given like ``path``, when there is one set.
        val_split: split of ``val_path``, or of ``path`` when there is no ``val_path``.
        val_task: a task to validate on; ``val_size`` rows are made of it.
        val_task_args: the options of ``val_task``.
        val_size: without the four above: hold out the last rows of the training set. They are never trained on; of a
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
        max_image_pixels: of vision-language models: scale larger pictures down to this many pixels.

    Raises:
        ValueError: not exactly one of ``path`` and ``task``, or settings that exclude each other.
    """

    def __init__(
        self,
        path: str | None = None,
        task: str | None = None,
        task_args: dict[str, Any] | None = None,
        task_size: PositiveInt = 5000,
        subset: str | None = None,
        split: str = "train",
        val: dict[str, str | ValidationSet] | None = None,
        val_path: str | None = None,
        val_split: str | None = None,
        val_task: str | None = None,
        val_task_args: dict[str, Any] | None = None,
        val_size: NonNegativeInt = 0,
        batch_size: PositiveInt = 128,
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
        max_image_pixels: PositiveInt | None = None,
    ) -> None:
        super().__init__()
        if (path is None) == (task is None):
            raise ValueError(f"data needs exactly one of path and task, got path={path!r} and task={task!r}")
        if val and (val_path or val_split or val_task or val_size):
            raise ValueError("data.val names all validation sets: leave out val_path, val_split, val_task and val_size")
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
        self.val_size = val_size
        self.val_sets = {name: _validation_set(one) for name, one in (val or {}).items()}
        if val_task is not None:
            self.val_sets[set_name(val_task)] = ValidationSet(task=val_task, task_args=val_task_args, size=val_size)
        elif val_path is not None or val_split is not None:
            name = set_name(val_path or str(val_split).partition("[")[0])
            self.val_sets[name] = ValidationSet(val_path or path, subset=subset, split=val_split or "train")
        self.batch_size, self.val_batch_size = batch_size, val_batch_size or batch_size
        self.max_prompt_length, self.overlong = max_prompt_length, overlong
        self.shuffle, self.seed = shuffle, seed
        self.chat_template, self.chat_template_args, self.system_prompt = (
            chat_template,
            chat_template_args,
            system_prompt,
        )
        self.prompt_column, self.tokenizer = prompt_column, tokenizer
        self.max_image_pixels = max_image_pixels
        self.train_table: PromptTable | None = None
        self.val_tables: dict[str, PromptTable] = {}
        self._module: pl.LightningModule | None = None

    @cached_property
    def train_rows(self) -> Rows:
        """The training data, held-out rows included."""
        if self.path is not None:
            rows = read_rows(self.path, self.split, self.subset)
        else:
            rows = TaskRows(str(self.task), self.task_size, self.seed, self.task_args)
        if self.val_size >= len(rows) and not self.val_sets:
            raise ValueError(f"data.val_size={self.val_size} must be smaller than the data, which has {len(rows)} rows")
        return rows

    @cached_property
    def val_rows(self) -> dict[str, Rows]:
        """Validation data of their own; empty if rows are held out, or there is no validation."""
        return {name: one.rows(self.seed + 1) for name, one in self.val_sets.items()}

    def prepare_data(self) -> None:
        """One process per node makes the Arrow files; the others find them in the cache."""
        _ = self.train_rows, self.val_rows

    def setup(self, stage: str) -> None:
        """Tokenise and check; a second call for the same module does nothing.

        Raises:
            ValueError: a prompt that is none, ``batch_size`` not a multiple of the data ranks, a set below one batch, other data
            on another rank.
        """
        if (module := None if self.trainer is None else self.trainer.lightning_module) is not self._module:
            self._module, self.train_table, self.val_tables = module, None, {}  # another tokenizer
            self.__dict__.pop("_encoder", None)
        replicas = self._ranks["num_replicas"]
        if stage == "fit":
            check_batch_size(self.batch_size, replicas)
        validates = bool(self.val_sets or self.val_size)
        if not validates and stage != "fit":
            raise ValueError("data has no validation prompts: set val, val_path, val_split, val_task or val_size")
        if not validates and self.trainer is not None:
            self.trainer.limit_val_batches = 0  # an empty loader would draw a warning, and hooks would run for nothing
        if validates and not self.val_tables:
            self.val_tables = self._val_tables()
        if stage == "fit" and self.train_table is None:
            self.train_table = self._train_table()
            if len(self.train_table) < self.batch_size:
                raise ValueError(
                    f"data.batch_size={self.batch_size} is more than the {len(self.train_table)} training prompts there"
                    " are: lower it, or add data"
                )
        if self.trainer is not None:
            validation = {f"validation set {name}": table for name, table in self.val_tables.items()}
            check_same_rows({"training set": self.train_table, **validation})

    def _val_tables(self) -> dict[str, PromptTable]:
        size = len(self.train_rows)
        if not self.val_sets:
            return {"heldout": self._tokenise("validation", self.train_rows, range(size - self.val_size, size))}
        tables = {}
        for name, rows in self.val_rows.items():
            tables[name] = self._tokenise("validation", rows, range(len(rows)), first_index=size)
            size += len(rows)
        return tables

    def _train_table(self) -> PromptTable:
        held_out = 0 if self.val_sets else self.val_size
        table = self._tokenise("training", self.train_rows, range(len(self.train_rows) - held_out))
        if self.task is None:
            return table
        # a task may draw a question more than once
        questions = {ids.tobytes() for validation in self.val_tables.values() for ids in validation.ids}
        kept = table.where(lambda ids: ids.tobytes() not in questions)
        if len(kept) < len(table):
            rank_zero_info(f"data: dropped {len(table) - len(kept)} training prompts that validation has as well")
        return kept

    def _tokenise(self, which: str, rows: Rows, numbers: range, first_index: int = 0) -> PromptTable:
        column = "prompt" if isinstance(rows, TaskRows) else self.prompt_column
        table = PromptTable.build(rows, numbers, self._encoder, column, first_index)
        limit = self.max_prompt_length
        if limit is None or table.longest <= limit:
            return table
        if self.overlong == "error":
            number, ids = next((n, ids) for n, ids in zip(table.numbers, table.ids, strict=True) if len(ids) > limit)
            raise ValueError(
                f"data: the prompt of row {number} has {len(ids)} tokens, more than data.max_prompt_length={limit}:"
                " raise it, or set data.overlong: drop"
            )
        kept = table.where(lambda ids: len(ids) <= limit)
        if not len(kept):
            raise ValueError(
                f"data.max_prompt_length={limit} leaves none of the {len(table)} {which} prompts (the longest has"
                f" {table.longest} tokens): raise it"
            )
        rank_zero_info(
            f"data: dropped {len(table) - len(kept)} of {len(table)} {which} prompts, longer than {limit} tokens"
        )
        return kept

    @cached_property
    def _encoder(self) -> PromptEncoder:
        tokenizer = tokenizer_of(self.tokenizer, self._module)
        vision = getattr(self._module, "vision", None)
        if self.max_image_pixels is not None:
            if vision is None:
                raise ValueError("data.max_image_pixels needs a vision-language model: leave it out")
            vision = replace(vision, max_pixels=self.max_image_pixels)
        return PromptEncoder(tokenizer, self.chat_template, self.system_prompt, self.chat_template_args, vision)

    @property
    def _ranks(self) -> dict[str, Any]:
        """num_replicas and rank of the data ranks; a strategy with sequence parallelism counts its groups."""
        return (self.trainer and self.trainer.distributed_sampler_kwargs) or {"num_replicas": 1, "rank": 0}

    # -- loaders -----------------------------------------------------------------------------------------------------
    @property
    def longest_prompt(self) -> int | None:
        """Tokens of the longest prompt, for engines that reserve memory; None before `setup`."""
        tables = [*self.val_tables.values(), *([self.train_table] if self.train_table is not None else [])]
        return max((table.longest for table in tables), default=None)

    @property
    def fingerprint(self) -> dict[str, Any] | None:
        """Number of training prompts and a hash of their token ids; None before `setup`."""
        table = self.train_table
        return None if table is None else {"prompts": len(table), "fingerprint": table.fingerprint}

    @property
    def val_names(self) -> list[str]:
        """The validation sets' names in the metrics: those of ``val``, or that of the task, file or split, or heldout."""
        return list(self.val_sets) or ["heldout"]

    def train_dataloader(self) -> PromptLoader:
        assert self.train_table is not None
        return PromptLoader(self.train_table, training_sampler(self, len(self.train_table), **self._ranks))

    def val_dataloader(self) -> list[PromptLoader]:
        """Of each set every prompt once over all data ranks, in order."""
        options = {"shuffle": False, "drop_last": False, **self._ranks}
        return [
            PromptLoader(table, PromptSampler(len(table), self.val_batch_size, **options))
            for table in self.val_tables.values()
        ]

    def test_dataloader(self) -> list[PromptLoader]:
        """The validation prompts: `Trainer.test` has no set of its own."""
        return self.val_dataloader()


def _validation_set(given: Any) -> ValidationSet:
    """As YAML or Python says it: whole, its fields, or its path."""
    if isinstance(given, ValidationSet):
        return given
    if isinstance(given, dict) and (unknown := given.keys() - {field.name for field in fields(ValidationSet)}):
        raise ValueError(f"a set of data.val has no {', '.join(sorted(unknown))}: see ValidationSet")
    return ValidationSet(**given) if isinstance(given, dict) else ValidationSet(given)


def set_name(source: Any) -> str:
    """What a validation set is called by default: the file without its ending, the last part of an id or dotted path; heldout if
    it has neither."""
    if not isinstance(source, str | Path):
        return "heldout"
    path = Path(source)
    return path.stem if path.suffix in (".jsonl", ".json", ".parquet", ".csv") else path.name.rpartition(".")[2]


def check_same_rows(tables: Mapping[str, Any]) -> None:
    """Raise ValueError on all ranks if the tables of one differ: its epoch would end earlier, and all wait for it. Collective."""
    found = {
        f"data: the {name}": None if table is None else f"of {len(table)} rows (fingerprint {table.fingerprint})"
        for name, table in tables.items()
    }
    check_alike(found, "give all nodes the same files")


def training_sampler(data: Any, rows: int, **ranks: Any) -> PromptSampler:
    """Of a data module's ``rows``, from where its Trainer's fit stands."""
    trainer = data.trainer
    return PromptSampler(
        rows,
        data.batch_size,
        shuffle=data.shuffle and not getattr(trainer, "overfit_batches", 0),
        seed=data.seed,
        position=(lambda: fit_position(trainer)) if trainer else (lambda: (0, 0)),
        **ranks,
    )


def tokenizer_of(name: str | None, module: Any) -> PreTrainedTokenizerBase:
    """By its folder or hub id, or else the module's.

    Raises:
        ValueError: it cannot be loaded, or there is none.
    """
    if not name:
        if (own := getattr(module, "tokenizer", None)) is None:
            raise ValueError("data.tokenizer must be given when the module has no attribute tokenizer")
        return own
    from transformers import AutoTokenizer

    from lightning_rlhf.tiny import TINY, tiny_model

    try:
        return AutoTokenizer.from_pretrained(tiny_model() if name == TINY else name)
    except (OSError, ValueError) as error:
        raise ValueError(f"data.tokenizer: {name!r} cannot be loaded: {first_line(error)}") from error
