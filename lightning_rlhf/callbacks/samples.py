"""Look at what the policy writes: a table on the console and every sample in parquet files.

    <run folder>/samples/iteration_000010.parquet     training rollouts, every n-th iteration
    <run folder>/samples/validation_000010.parquet    validation rollouts at iteration 10; of ``test`` they are test_000010

One row per response of the first data rank: prompt and response as the model saw them (special tokens included), each
reward function's value, the total, the advantage, length and how the response ended, what the reward functions logged,
and the validation set. Read them with `datasets.Dataset.from_parquet` or pandas. An observer: removing it changes no
result.
"""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from fsspec.core import url_to_fs
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich import get_console
from rich.table import Table
from rich.text import Text

from lightning_rlhf.images import collapsed
from lightning_rlhf.types import Experience, Rollout, Scores

Columns = dict[str, list[Any]]


class Samples(pl.Callback):
    """Shows and stores samples.

    Args:
        every_n_iterations: between two looks at the training rollout.
        rows: responses in the console table, 0 for no table.
        max_characters: longest prompt or response in the table; the middle of longer ones is left out.
        save: write the parquet files.
    """

    def __init__(
        self,
        every_n_iterations: int = 10,
        rows: int = 4,
        max_characters: int = 400,
        save: bool = True,
    ) -> None:
        for name, value, least in (
            ("every_n_iterations", every_n_iterations, 1),
            ("rows", rows, 0),
            ("max_characters", max_characters, 10),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self.every_n_iterations = every_n_iterations
        self.rows = rows
        self.max_characters = max_characters
        self.save = save
        self.folder = ""
        self._validation: list[Columns] = []

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self.folder = os.path.join(trainer.log_dir or trainer.default_root_dir, "samples")  # a collective: all ranks

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and trainer.global_step % self.every_n_iterations == 0:
            columns = sample_columns(
                batch["rollout"], pl_module.last_scores, pl_module.tokenizer, pl_module.last_experience
            )
            self._publish(trainer, pl_module, "iteration", columns)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._validation.clear()

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            columns = sample_columns(batch["rollout"], pl_module.last_scores, pl_module.tokenizer)
            name = pl_module.validation_set(dataloader_idx)
            self._validation.append({"set": [name] * len(columns["prompt"])} | columns)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self._validation:
            kind = "test" if trainer.testing else "validation"
            self._publish(trainer, pl_module, kind, _concatenate(self._validation))

    on_test_start = on_validation_start
    on_test_batch_end = on_validation_batch_end
    on_test_end = on_validation_end

    def _publish(self, trainer: pl.Trainer, pl_module: Any, kind: str, columns: Columns) -> None:
        step = pl_module.iteration
        title = f"{kind} {step}" if kind == "iteration" else f"{kind} at iteration {step}"
        console, sets = get_console(), list(dict.fromkeys(columns.get("set", [])))
        for name in (sets or [""]) if self.rows else []:
            own = [i for i in range(len(columns["prompt"])) if not sets or columns["set"][i] == name]
            shown = {key: [values[i] for i in own] for key, values in columns.items()}
            of_set = f"{title}: {name}" if len(sets) > 1 else title
            console.print(sample_table(shown, of_set, self.rows, self.max_characters, console.encoding))
        if self.save and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            path = f"{self.folder}/{kind}_{step:06d}.parquet"
            try:
                write_parquet({"iteration": [step] * len(columns["prompt"])} | columns, path)
            except Exception as error:  # of whichever file system; the run is worth more
                rank_zero_warn(f"{path} could not be written ({type(error).__name__}: {error})")


def sample_columns(rollout: Rollout, scores: Scores, tokenizer: Any, experience: Experience | None = None) -> Columns:
    """One entry per response in each column; advantages (mean over the response's tokens) if ``experience`` is given."""
    n = rollout.sampling.num_generations
    images = rollout.prompts.images or [None] * len(rollout.prompts)
    prompts = [tokenizer.decode(collapsed(*one)) for one in zip(rollout.prompts.ids, images, strict=True)]
    columns: Columns = {
        "prompt": [prompts[i // n] for i in range(len(rollout))],
        "response": [tokenizer.decode(c.token_ids) for c in rollout.completions],
        "reward": scores.total.tolist(),
    }
    columns |= {f"reward/{name}": part.tolist() for name, part in scores.parts.items()}
    if experience is not None and experience.advantages is not None:
        # the experience holds all data ranks' responses, ordered by group
        first = torch.searchsorted(experience.group.cpu(), rollout.group.cpu())
        rows = first + torch.arange(len(rollout)) % n
        mask = experience.mask.cpu()[rows]
        total = (experience.advantages.cpu()[rows] * mask).sum(dim=1)
        columns["advantage"] = (total / mask.sum(dim=1).clamp(min=1)).tolist()
    return columns | {
        "length": rollout.mask.sum(1).int().tolist(),
        "finish_reason": [c.finish_reason for c in rollout.completions],
        "prompt_index": rollout.prompts.index.repeat_interleave(n).tolist(),
        **{f"log/{name}": list(values) for name, values in scores.columns.items()},
    }


def sample_table(columns: Columns, title: str, rows: int, max_characters: int, encoding: str = "utf-8") -> Table:
    """The first ``rows`` samples: prompt, response, rewards and advantage."""
    shown = [n for n in columns if n in ("prompt", "response", "advantage") or n.split("/")[0] == "reward"]
    table = Table(title=Text(title), show_lines=True)
    for name in shown:
        is_text = name in ("prompt", "response")
        table.add_column(Text(visible(name, encoding)), overflow="fold", justify="left" if is_text else "right")
    for i in range(min(rows, len(columns["prompt"]))):
        cells = (columns[name][i] for name in shown)
        texts = (shorten(c, max_characters) if isinstance(c, str) else f"{c:.3g}" for c in cells)
        table.add_row(*(Text(visible(t, encoding)) for t in texts))  # Text: markup in a sample stays as it is written
    return table


def visible(text: str, encoding: str = "utf-8") -> str:
    """Control characters, invisible ones and those the console cannot show as escapes: ``\\n``, ``\\x1b``."""
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return escaped.encode(encoding, "backslashreplace").decode(encoding)


def shorten(text: str, limit: int) -> str:
    """At most ``limit`` characters: beginning and end, " ... " between."""
    if len(text) <= limit:
        return text
    head, tail = (limit - 4) // 2, (limit - 5) // 2
    return f"{text[:head]} ... {text[-tail:]}"


def write_parquet(columns: Columns, path: str) -> None:
    """Write to a local or remote path, whole or not at all; a column that Parquet has no type for is stored as text."""
    import pyarrow
    from pyarrow import parquet

    arrays = {}
    for name, values in columns.items():
        try:
            arrays[name] = pyarrow.array(values)
            as_text = "struct<>" in str(arrays[name].type)  # an empty dict: Parquet has none
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, UnicodeEncodeError, OverflowError):
            as_text = True
        if as_text:
            arrays[name] = pyarrow.array(
                [None if v is None else str(v).encode(errors="replace").decode() for v in values]
            )
    fs, target = url_to_fs(path)
    fs.makedirs(os.path.dirname(target), exist_ok=True)
    draft = f"{target}.part"
    with fs.open(draft, "wb") as file:
        parquet.write_table(pyarrow.table(arrays), file)
    fs.mv(draft, target)


def _concatenate(parts: list[Columns]) -> Columns:
    """Columns below each other; None where a part lacks a column that another has."""
    names = list(dict.fromkeys(name for part in parts for name in part))
    joined: Columns = {name: [] for name in names}
    for part in parts:
        for name in names:
            joined[name] += part.get(name, [None] * len(part["prompt"]))
    return joined
