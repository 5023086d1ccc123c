"""The observers on a small real module and trainer: what they log, show, write and never write."""

from __future__ import annotations

import csv
import io
import itertools
import os
import re
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from safetensors import safe_open
from torch import nn
from toys import spawn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lightning_rlhf.callbacks.checkpoint import IterationCheckpoint, latest_complete
from lightning_rlhf.callbacks.hf_export import ExportFailed, HFExport, export, write_folder
from lightning_rlhf.callbacks.memory import Memory, resident_bytes
from lightning_rlhf.callbacks.progress import IterationProgress
from lightning_rlhf.callbacks.rollout import RolloutCallback
from lightning_rlhf.callbacks.samples import Samples, sample_columns, sample_table, shorten, visible, write_parquet
from lightning_rlhf.callbacks.throughput import Throughput
from lightning_rlhf.flops import Passes, dims_of, training_flops
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.phases import Phases
from lightning_rlhf.rollout import TransformersEngine
from lightning_rlhf.rollout.engine import Unmapped
from lightning_rlhf.tiny import tiny_model
from lightning_rlhf.types import Completion, Experience, Prompts, Rollout, Sampling, Scores

RESPONSES = ("[bold]4[/bold]\x1b[2J\n", "fünf", "6", "")
LENGTHS = [len(r.encode()) for r in RESPONSES]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="session")
def tokenizer(model_path: str) -> Any:
    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def a_rollout(tokenizer: Any) -> Rollout:
    """Two prompts of five tokens, two responses each."""
    prompts = Prompts(tokenizer(["2+2=?", "1+4=?"])["input_ids"], ["2+2=?", "1+4=?"], {}, torch.tensor([7, 3]))
    ids = [tokenizer(r)["input_ids"] if r else [] for r in RESPONSES]
    completions = [Completion(i, "stop") for i in ids]
    return Rollout.build(prompts, completions, Sampling(num_generations=2))


def an_experience(rollout: Rollout) -> Experience:
    """The rollout's responses and one of another data rank, ordered by data set row: 3, 3, 5 (another's), 7, 7."""
    order = [2, 3, 4, 0, 1]
    sequences = [torch.tensor(rollout.prompts.ids[i // 2] + c.token_ids) for i, c in enumerate(rollout.completions)]
    mask = torch.cat([rollout.mask, torch.ones(1, rollout.mask.shape[1])])
    advantages = torch.tensor([1.0, -1.0, 0.5, 9.0, 7.0])[:, None] * mask
    return Experience(
        [[*sequences, torch.arange(100)][i] for i in order],
        [5] * 5,
        torch.tensor([7, 7, 3, 3, 5])[order],
        mask[order],
        mask * 0,
        temperature=1.0,
        max_length=8,
        advantages=advantages[order],
    )


class Actor(nn.Module):
    head_kind = "tokens"

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def hf_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters(remove_duplicate=False)

    def hf_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ()


class Toy(pl.LightningModule):
    """What the callbacks read of an RL module, with an optimizer step per batch."""

    def __init__(
        self, tokenizer: Any, model_path: str = "", finish_reason: str = "stop", work_seconds: float = 0.0
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = nn.Parameter(torch.zeros(2))
        self.phases = Phases()
        self.tokenizer, self.settings = tokenizer, ModelSettings(model_path)
        self.packing = {"real_tokens": 30, "padded_tokens": 40}
        self.lengths: list[int] = []
        self.work_seconds = work_seconds
        self.iteration = 0
        self.flops: list[Passes] = []
        self.seen: list[tuple[int, int, int]] = []
        self.val_rewards = iter(range(100))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: dict, batch_idx: int) -> None:
        with self.phases("update"):
            time.sleep(self.work_seconds)
            self.weight.grad = batch["x"].mean(0)
            self.optimizers().step()
        self.iteration = self.global_step
        self.last_experience = an_experience(batch["rollout"])
        self.lengths = [len(sequence) for sequence in self.last_experience.sequences]
        self.last_scores = self.score()
        self.seen.append((self.current_epoch, batch_idx, self.global_step))

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        time.sleep(self.work_seconds)
        self.last_scores = self.score()
        self.log("val/reward", float(next(self.val_rewards)), batch_size=1)

    def validation_set(self, dataloader_idx: int) -> str:
        return f"set {dataloader_idx}"

    @staticmethod
    def score() -> Scores:
        parts = {"exact": torch.tensor([1.0, 0.0, 0.5, 0.0]), "[red]x": torch.tensor([0.0, 0.0, 0.0, float("nan")])}
        return Scores(torch.tensor([1.0, 0.0, 0.5, float("nan")]), parts, columns={"parsed": ["4", None, 6, [1]]})


class ToyRollout(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: dict, batch_idx: int) -> None:
        with pl_module.phases("generate"):
            time.sleep(pl_module.work_seconds)
            batch["rollout"] = a_rollout(pl_module.tokenizer)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: dict, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        with pl_module.phases("generate"):
            time.sleep(pl_module.work_seconds)
            batch["rollout"] = a_rollout(pl_module.tokenizer)


class Resumable(torch.utils.data.DataLoader):
    """Says that it can resume, so that Lightning does not warn."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


def loader(batches: int) -> Resumable:
    return Resumable([{"x": torch.ones(2)} for _ in range(batches)], num_workers=0)


def fit(
    toy: Toy, root: Path, callbacks: list[pl.Callback], batches: int = 3, val: bool = False, **kw: Any
) -> pl.Trainer:
    """Train the toy on the CPU, the rollout callback last so that no observer relies on its place."""
    options = {"max_epochs": 1, "logger": CSVLogger(root, name="run"), "limit_val_batches": 2 if val else 0} | kw
    ckpt_path = options.pop("ckpt_path", None)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=root,
        callbacks=[*callbacks, ToyRollout()],
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_checkpointing=any(isinstance(c, IterationCheckpoint) for c in callbacks),
        enable_model_summary=False,
        **({"enable_progress_bar": False} | options),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        warnings.filterwarnings("ignore", message=".*(`isinstance|LeafSpec|tree_)")
        warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint")
        trainer.fit(toy, loader(batches), loader(2), ckpt_path=ckpt_path)
    return trainer


def logged(trainer: pl.Trainer) -> list[dict[str, float]]:
    with open(Path(trainer.logger.log_dir) / "metrics.csv") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


# ------------------------------------------------------------------------------------------------------------ progress


@pytest.mark.parametrize(
    ("limits", "total"),
    [({"max_steps": 5, "max_epochs": -1}, 5), ({"max_epochs": 2}, 6), ({"max_steps": 4, "max_epochs": 2}, 4)],
)
def test_progress_counts_the_iterations_of_the_run(
    limits: dict[str, int], total: int, tmp_path: Path, tokenizer: Any, capsys: Any
) -> None:
    bar = IterationProgress()
    toy = Toy(tokenizer)
    toy.training_step = lambda batch, batch_idx: (Toy.training_step(toy, batch, batch_idx), toy.log("r", 0.25, True))[0]  # type: ignore[method-assign]
    fit(toy, tmp_path, [bar], enable_progress_bar=True, **limits)
    assert (bar.train_progress_bar.completed, bar.train_progress_bar.total) == (total, total)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("iteration ")]
    assert lines == [f"iteration {i}/{total}  r 0.25" for i in range(1, total + 1)]  # no terminal: a log file


# ---------------------------------------------------------------------------------------------------------- throughput


def test_throughput_logs_times_tokens_and_padding(tmp_path: Path, tokenizer: Any) -> None:
    rows = logged(fit(Toy(tokenizer, work_seconds=0.02), tmp_path, [Throughput()]))
    assert len(rows) == 3
    tokens = 4 * 5 + sum(LENGTHS) + 100
    for row in rows:
        assert row["timing_s/generate"] >= 0.02
        assert row["timing_s/update"] >= 0.02
        assert row["timing_s/step"] >= row["timing_s/generate"] + row["timing_s/update"]
        assert row["perf/throughput"] == pytest.approx(tokens / row["timing_s/step"], rel=1e-3)
        assert row["perf/padding_efficiency"] == 0.75
        assert "perf/mfu" not in row


def test_steps_add_up_to_the_run_without_validation(tmp_path: Path, tokenizer: Any) -> None:
    start = time.perf_counter()
    rows = logged(fit(Toy(tokenizer, work_seconds=0.05), tmp_path, [Throughput()], val=True, val_check_interval=1))
    steps = [r for r in rows if "timing_s/step" in r]
    assert len(steps) == 3
    total = sum(r["timing_s/step"] for r in steps)
    assert 6 * 0.05 <= total <= time.perf_counter() - start - 12 * 0.05
    assert all(r["timing_s/generate"] + r["timing_s/update"] <= r["timing_s/step"] for r in steps)


def test_mfu_is_the_update_against_the_peak(tmp_path: Path, tokenizer: Any, model_path: str) -> None:
    toy = Toy(tokenizer, work_seconds=0.01)
    dims = dims_of(AutoConfig.from_pretrained(model_path))
    toy.flops = [Passes(dims, 2, 2)]
    row = logged(fit(toy, tmp_path, [Throughput(peak_tflops=0.5)], batches=1))[0]
    lengths = toy.lengths
    for name, lookup in (("perf/mfu", False), ("perf/mfu_conventional", True)):
        want = 2 * training_flops(dims, lengths, lookup=lookup) / (row["timing_s/update"] * 0.5e12)
        assert row[name] == pytest.approx(want, rel=1e-3)
    assert row["perf/mfu"] < row["perf/mfu_conventional"]


def test_a_peak_must_be_positive() -> None:
    with pytest.raises(ValueError, match="peak_tflops must be positive"):
        Throughput(peak_tflops=0)


# -------------------------------------------------------------------------------------------------------------- memory


def test_memory_on_the_cpu_is_the_resident_size(tmp_path: Path, tokenizer: Any) -> None:
    toy = Toy(tokenizer)
    row = logged(fit(toy, tmp_path, [Memory()], batches=1))[0]
    assert row["perf/cpu_memory_gb"] * 2**30 == pytest.approx(resident_bytes(), rel=0.2)
    assert not [name for name in row if name.startswith(("memory_gb/", "perf/memory_"))]
    assert not toy.phases.on_start
    assert not toy.phases.on_end


def test_resident_size_follows_what_is_allocated() -> None:
    before = resident_bytes()
    block = torch.ones(64 * 2**20 // 4)
    assert resident_bytes() - before > 48 * 2**20
    del block


class Sleeper(TransformersEngine):
    """In torch's counts its pool has 30 GiB, 28 of them tensors."""

    unmapped = Unmapped()


def test_what_a_sleeping_engine_gave_back_is_no_memory_of_a_phase(tokenizer: Any, monkeypatch: Any) -> None:
    """The trainer holds 50 GiB and 20 more in the update."""
    gib, toy, engine, memory = 2**30, Toy(tokenizer), Sleeper(), Memory()
    counted = {"held": 78 * gib, "peak": 78 * gib}

    def use(more: int) -> None:
        counted["peak"] = max(counted["peak"], counted["held"] + more * gib)

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: counted["peak"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: counted["peak"] + 2 * gib)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: counted.update(peak=counted["held"]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    monkeypatch.setattr(Toy, "device", torch.device("cuda"))
    memory.on_train_start(SimpleNamespace(callbacks=[memory, RolloutCallback(engine)]), toy)  # type: ignore[arg-type]
    with toy.phases("sleep"):
        engine.unmapped = Unmapped(28 * gib, 30 * gib)
    with toy.phases("update"):
        use(20)
    assert memory._phases == {"sleep": 78 * gib, "update": 70 * gib}
    assert (memory._allocated, memory._reserved) == (78 * gib, 80 * gib)
    memory._clear()
    with toy.phases("update"):
        use(20)
    assert (memory._allocated, memory._reserved) == (70 * gib, 70 * gib)
    with toy.phases("wake"):  # whether its peak was before or after the pool got memory is not known: the larger figure
        use(1)
        engine.unmapped = Unmapped(18 * gib, 20 * gib)
    assert memory._phases["wake"] == 61 * gib


def test_a_run_that_fails_leaves_nobody_who_listens_to_its_phases(
    tmp_path: Path, tokenizer: Any, monkeypatch: Any
) -> None:
    """A second one would take the peaks of the next run's."""

    class Fails(Toy):
        device = torch.device("cuda")

        def training_step(self, batch: dict, batch_idx: int) -> None:
            listening.append(len(self.phases.on_start))
            raise ArithmeticError("of the module")

    for name in ("max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    listening: list[int] = []
    toy = Fails(tokenizer)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="of the module"):
            fit(toy, tmp_path, [Memory()])
    assert listening == [1, 1]
    assert toy.phases.on_start == toy.phases.on_end == []


@pytest.mark.gpu
def test_each_phase_has_its_own_peak_and_the_outer_one_the_inner_ones() -> None:
    memory, phases, mebibyte = Memory(), Phases(), 2**20
    phases.on_start.append(memory._enter)
    phases.on_end.append(memory._leave)
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with phases("outer"):
        with phases("inner"):
            torch.empty(64 * mebibyte, dtype=torch.uint8, device="cuda")
        torch.empty(16 * mebibyte, dtype=torch.uint8, device="cuda")
    with phases("small"):
        torch.empty(4 * mebibyte, dtype=torch.uint8, device="cuda")
    peaks = {name: (peak - base) // mebibyte for name, peak in memory._phases.items()}
    assert peaks == {"outer": 64, "inner": 64, "small": 4}


# ------------------------------------------------------------------------------------------------------------- samples


def test_samples_are_shown_and_written_every_n_iterations(tmp_path: Path, tokenizer: Any, capsys: Any) -> None:
    from datasets import Dataset

    trainer = fit(Toy(tokenizer), tmp_path, [Samples(every_n_iterations=2)], batches=5)
    out = capsys.readouterr().out
    assert "iteration 2" in out
    assert "iteration 4" in out
    assert "iteration 3" not in out
    assert "\x1b[2J" not in out
    folder = Path(trainer.log_dir) / "samples"
    assert sorted(os.listdir(folder)) == ["iteration_000002.parquet", "iteration_000004.parquet"]
    table = Dataset.from_parquet(str(folder / "iteration_000002.parquet"), cache_dir=str(tmp_path / "cache"))
    assert table["iteration"][:] == [2] * 4
    assert table["response"][:] == list(RESPONSES)
    assert table["prompt"][:] == ["2+2=?", "2+2=?", "1+4=?", "1+4=?"]
    assert table["advantage"][:] == [1.0, -1.0, 0.5, 0.0]
    assert table["reward/exact"][:] == [1.0, 0.0, 0.5, 0.0]
    assert table["length"][:] == LENGTHS
    assert table["prompt_index"][:] == [7, 7, 3, 3]
    assert table["log/parsed"][:] == ["4", None, "6", "[1]"]


def test_validation_samples_are_written_once_per_loop(tmp_path: Path, tokenizer: Any, capsys: Any) -> None:
    from pyarrow import parquet

    trainer = fit(Toy(tokenizer), tmp_path, [Samples(every_n_iterations=100)], val=True, val_check_interval=1)
    folder = Path(trainer.log_dir) / "samples"
    assert sorted(os.listdir(folder)) == [f"validation_00000{i}.parquet" for i in (1, 2, 3)]
    table = parquet.read_table(folder / "validation_000002.parquet").to_pydict()
    assert table["response"] == list(RESPONSES) * 2
    assert set(table["set"]) == {"set 0"}
    assert "advantage" not in table
    assert "validation at iteration 3" in capsys.readouterr().out


def test_fast_dev_run_writes_no_samples(tmp_path: Path, tokenizer: Any, capsys: Any) -> None:
    fit(Toy(tokenizer), tmp_path, [Samples(every_n_iterations=1)], fast_dev_run=2, logger=None)
    assert "iteration 2" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_console_that_knows_ascii_only_is_no_problem(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", console)
    fit(Toy(tokenizer), tmp_path, [Samples(every_n_iterations=1)], batches=1)
    console.flush()
    assert rb"f\xfcnf" in console.buffer.getvalue()


def render(columns: dict[str, list[Any]], **kw: Any) -> str:
    from rich.console import Console

    console = Console(width=200, color_system="truecolor", force_terminal=True)
    with console.capture() as capture:
        console.print(sample_table(columns, "title", **({"rows": 4, "max_characters": 40} | kw)))
    return capture.get()


def test_markup_and_control_characters_in_samples_are_shown_not_obeyed(tokenizer: Any) -> None:
    out = render(sample_columns(a_rollout(tokenizer), Toy.score(), tokenizer))
    assert "[bold]4[/bold]" in out
    assert "[red]x" in out
    assert r"\x1b[2J\n" in out
    assert "\x1b[2J" not in out
    assert "nan" in out
    assert visible("a\u202eb\x00\u200b\tc é 😀") == r"a\u202eb\x00\u200b\tc é 😀"
    assert visible("é", "ascii") == r"\xe9"


def test_long_texts_are_shortened_in_the_table_only(tokenizer: Any) -> None:
    columns = sample_columns(a_rollout(tokenizer), Toy.score(), tokenizer)
    columns["response"] = ["a" * 500 + "END", "b", "c", "d"]
    out = render(columns)
    assert re.search(r"a{18} \.\.\. a{14}END", out)
    assert columns["response"][0] == "a" * 500 + "END"
    for limit in (10, 11, 40):
        assert len(shorten("x" * 99, limit)) == limit
    assert shorten("short", 10) == "short"


def test_a_file_appears_whole_and_takes_any_value(tmp_path: Path) -> None:
    from pyarrow import parquet

    path = tmp_path / "deep" / "samples.parquet"
    write_parquet({"mixed": [1, "a", {"b": 2}], "odd": ["\ud800", "b", None]}, str(path))
    assert os.listdir(path.parent) == ["samples.parquet"]
    table = parquet.read_table(path).to_pydict()
    assert table == {"mixed": ["1", "a", "{'b': 2}"], "odd": ["?", "b", None]}


@pytest.mark.parametrize("value", [2**63, {"a": -(2**70)}, {}, {"a": [{}]}])
def test_numbers_and_dicts_that_parquet_does_not_have_are_stored_as_text(value: Any, tmp_path: Path) -> None:
    from pyarrow import parquet

    path = tmp_path / "samples.parquet"
    write_parquet({"log/parsed": [value, None]}, str(path))
    assert parquet.read_table(path).to_pydict() == {"log/parsed": [str(value), None]}


def test_samples_that_cannot_be_written_end_no_run(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "samples").touch()  # where the folder would be
    with pytest.warns(UserWarning, match=r"iteration_000002\.parquet could not be written \(.*Error: "):
        trainer = fit(Toy(tokenizer), tmp_path, [Samples(every_n_iterations=2)], logger=False)
    assert trainer.global_step == 3


# ---------------------------------------------------------------------------------------------------------- checkpoint


def saved_at(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_checkpoints_count_iterations_and_the_last_one_is_saved(tmp_path: Path, tokenizer: Any) -> None:
    checkpoint = IterationCheckpoint(every_n_train_steps=2, save_top_k=-1)
    trainer = fit(Toy(tokenizer), tmp_path, [Throughput(), checkpoint], batches=5)
    folder = Path(trainer.log_dir) / "checkpoints"
    assert saved_at(folder) == ["iteration-000002.ckpt", "iteration-000004.ckpt", "iteration-000005.ckpt"]
    assert [i for i, row in enumerate(logged(trainer)) if row.get("timing_s/checkpoint")] == [2, 4]


def test_only_the_latest_checkpoint_is_kept_by_default(tmp_path: Path, tokenizer: Any) -> None:
    trainer = fit(Toy(tokenizer), tmp_path, [IterationCheckpoint(every_n_train_steps=1)], batches=4)
    assert saved_at(Path(trainer.log_dir) / "checkpoints") == ["iteration-000004.ckpt"]


def test_a_time_interval_works_in_manual_optimisation(tmp_path: Path, tokenizer: Any) -> None:
    checkpoint = IterationCheckpoint(tmp_path / "c", train_time_interval=timedelta(seconds=0.25), save_top_k=-1)
    fit(Toy(tokenizer, work_seconds=0.05), tmp_path, [checkpoint], batches=8)
    times = {int(re.findall(r"\d+", p.name)[0]): p.stat().st_mtime for p in (tmp_path / "c").iterdir()}
    order = sorted(times)
    assert order[-1] == 8
    assert len(order) >= 3
    regular = order[:-1]  # the last iteration is saved however little time has passed
    assert all(times[later] - times[earlier] > 0.24 for earlier, later in itertools.pairwise(regular))


def test_an_early_stop_is_saved_so_that_the_run_can_go_on(tmp_path: Path, tokenizer: Any) -> None:
    whole, first, second = Toy(tokenizer), Toy(tokenizer), Toy(tokenizer)
    options: dict[str, Any] = {"batches": 5, "max_epochs": 2}
    fit(whole, tmp_path / "whole", [], **options)
    stop = EarlyStopping("val/reward", mode="min", patience=1)
    checkpoint = IterationCheckpoint(tmp_path / "c", save_top_k=-1)
    fit(first, tmp_path, [stop, checkpoint], val=True, val_check_interval=2, **options)
    assert saved_at(tmp_path / "c") == ["iteration-000004.ckpt"]
    fit(second, tmp_path, [IterationCheckpoint(tmp_path / "c")], ckpt_path="last", **options)
    assert first.seen + second.seen == whole.seen


def test_a_monitored_checkpoint_waits_for_the_fresh_metric(tmp_path: Path, tokenizer: Any) -> None:
    checkpoint = IterationCheckpoint(
        tmp_path / "c",
        "{step}-{val/reward:.0f}",
        every_n_train_steps=2,
        monitor="val/reward",
        mode="max",
        save_top_k=-1,
    )
    fit(Toy(tokenizer), tmp_path, [checkpoint], batches=6, val=True, val_check_interval=2)
    # rewards of the two batches of a loop are (0, 1), (2, 3), (4, 5): means 0.5, 2.5, 4.5
    assert saved_at(tmp_path / "c") == ["2-0.ckpt", "4-2.ckpt", "6-4.ckpt", "last.ckpt"]
    assert checkpoint.best_model_path.endswith("6-4.ckpt")


def test_a_monitored_metric_that_is_never_logged_is_named_and_the_last_iteration_kept(
    tmp_path: Path, tokenizer: Any
) -> None:
    checkpoint = IterationCheckpoint(
        tmp_path / "c", every_n_train_steps=1, monitor="reward/meen", mode="max", save_last=False
    )

    class Logging(Toy):
        def training_step(self, batch: dict, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.log("reward/mean", 1.0, batch_size=1)

    said = r"monitor='reward/meen'\): no such metric was logged, .*: set monitor to one of reward/mean$"
    with pytest.warns(UserWarning, match=said) as warned:
        fit(Logging(tokenizer), tmp_path, [checkpoint], batches=3)
    assert len(warned) == 4  # at each iteration that was due, and at the end
    assert saved_at(tmp_path / "c") == ["last.ckpt"]
    assert torch.load(next((tmp_path / "c").iterdir()), weights_only=True)["global_step"] == 3


def test_a_metric_of_a_validation_to_come_is_waited_for(tmp_path: Path, tokenizer: Any) -> None:
    checkpoint = IterationCheckpoint(
        tmp_path / "c",
        "{step}",
        every_n_train_steps=1,
        monitor="val/reward",
        mode="max",
        save_last=False,
        save_top_k=-1,
    )
    fit(Toy(tokenizer), tmp_path, [checkpoint], batches=4, val=True, val_check_interval=2)  # warnings are errors
    assert saved_at(tmp_path / "c") == ["2.ckpt", "3.ckpt", "4.ckpt"]


def test_fast_dev_run_saves_no_checkpoint(tmp_path: Path, tokenizer: Any) -> None:
    fit(Toy(tokenizer), tmp_path, [IterationCheckpoint(tmp_path / "c")], fast_dev_run=2, logger=None)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(("stop", "batches"), [(4, 6), (6, 6), (7, 6), (12, 6)])
def test_a_run_that_ended_continues_where_it_stopped(tmp_path: Path, tokenizer: Any, stop: int, batches: int) -> None:
    whole = Toy(tokenizer)
    fit(whole, tmp_path / "whole", [], batches=batches, max_steps=14, max_epochs=-1)
    first, second = Toy(tokenizer), Toy(tokenizer)
    limit: dict[str, Any] = {"batches": batches, "max_epochs": -1}
    fit(first, tmp_path, [IterationCheckpoint(tmp_path / "c")], max_steps=stop, **limit)
    fit(second, tmp_path, [IterationCheckpoint(tmp_path / "c")], max_steps=14, ckpt_path="last", **limit)
    assert first.seen + second.seen == whole.seen
    torch.testing.assert_close(second.weight, whole.weight, atol=0, rtol=0)


def test_a_stop_that_nobody_announced_is_saved_too(tmp_path: Path, tokenizer: Any) -> None:
    class Stopping(Toy):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:  # after all callbacks
            self.trainer.should_stop = batch_idx == 2

    fit(Stopping(tokenizer), tmp_path, [IterationCheckpoint(tmp_path / "c")], batches=6)
    assert saved_at(tmp_path / "c") == ["iteration-000003.ckpt"]


def test_last_is_the_latest_complete_checkpoint(tmp_path: Path) -> None:
    assert latest_complete(str(tmp_path / "nowhere")) is None
    assert latest_complete(str(tmp_path)) is None
    for i, (name, files) in enumerate(
        {"b.ckpt": ["meta.pt"], "a.ckpt": ["meta.pt"], "z.ckpt": ["__0_0.distcp"], "notes": ["meta.pt"]}.items()
    ):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
            os.utime(tmp_path / name / file, (i, i))
    assert latest_complete(str(tmp_path)) == str(tmp_path / "a.ckpt")
    (tmp_path / "one_file.ckpt").touch()
    assert latest_complete(str(tmp_path)) == str(tmp_path / "one_file.ckpt")


def test_last_is_found_in_the_earlier_runs_of_the_same_logger(tmp_path: Path, tokenizer: Any) -> None:
    """Each run has a version folder of its own; the one that is resumed is the newest with a complete checkpoint."""
    fit(Toy(tokenizer), tmp_path, [IterationCheckpoint(every_n_train_steps=2)], 4, max_steps=2)
    (tmp_path / "run/version_1/checkpoints/iteration-000009.ckpt").mkdir(parents=True)  # interrupted
    toy = Toy(tokenizer)
    trainer = fit(toy, tmp_path, [IterationCheckpoint(every_n_train_steps=2)], 4, max_steps=4, ckpt_path="last")
    assert Path(trainer.logger.log_dir).name == "version_2"
    assert [step for _, _, step in toy.seen] == [3, 4]


def test_last_is_found_on_another_file_system() -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    try:
        fs.pipe("/runs/a.ckpt/meta.pt", b"")
        fs.pipe("/runs/b.ckpt/__0_0.distcp", b"")
        assert latest_complete("memory://runs") == "memory:///runs/a.ckpt"
        assert fs.exists("memory:///runs/a.ckpt/meta.pt")
    finally:
        fs.rm("/runs", recursive=True)


# ----------------------------------------------------------------------------------------------------------- hf export


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_loads_back_equal(tmp_path: Path, tokenizer: Any, model_path: str, tied: bool) -> None:
    config = AutoConfig.from_pretrained(model_path, tie_word_embeddings=tied)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    source = tmp_path / "source"
    config.save_pretrained(source)
    toy = Toy(tokenizer, str(source))
    toy.root = Actor(model)
    trainer = fit(toy, tmp_path, [HFExport()], batches=3)
    folder = Path(trainer.log_dir) / "hf"
    assert os.listdir(folder) == ["iteration_000003"]
    exported = folder / "iteration_000003"
    loaded, report = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.dtype == torch.bfloat16
    with safe_open(exported / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) != tied  # noqa: SIM118
    want = dict(model.named_parameters(remove_duplicate=False))
    assert {n for n, _ in loaded.named_parameters(remove_duplicate=False)} == set(want)
    for name, parameter in loaded.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(parameter, want[name].to(torch.bfloat16), atol=0, rtol=0)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    text = "2+2=? 4\n"
    assert AutoTokenizer.from_pretrained(exported)(text)["input_ids"] == tokenizer(text)["input_ids"]
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
        torch.testing.assert_close(loaded.float()(ids).logits, model(ids).logits)


def export_sharded(rank: int, root: str, model_path: str) -> str:
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import DDPStrategy
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    devices = [torch.device("cpu")] * 2
    strategy = DDPStrategy(CPUAccelerator(), devices, cluster_environment=TorchElasticEnvironment())
    strategy.set_world_ranks()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
    if rank == 0:
        torch.save(model.state_dict(), f"{root}/want.pt")
    actor = Actor(fully_shard(model, mesh=init_device_mesh("cpu", (2,))))
    export(actor, Path(root) / "out", model_path, AutoTokenizer.from_pretrained(model_path), strategy)
    try:
        export(actor, Path(root) / "failed", model_path, Failing(), strategy)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_shards_are_exported_whole_and_a_failure_is_raised_on_every_rank(tmp_path: Path, model_path: str) -> None:
    errors = spawn(export_sharded, 2, str(tmp_path), model_path)
    assert all(e.endswith("failed failed: OSError: disk full") for e in errors)
    assert sorted(os.listdir(tmp_path)) == ["out", "want.pt"]
    want, loaded = torch.load(tmp_path / "want.pt"), AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, want[name].to(torch.bfloat16), atol=0, rtol=0)


class Recording:
    def __init__(self) -> None:
        self.folders: list[str] = []

    def __call__(self, text: Any) -> Any:
        return {"input_ids": [[1, 2, 3, 4, 5]] * 2 if isinstance(text, list) else [1]}

    def save_pretrained(self, folder: Path) -> None:
        self.folders.append(re.findall("iteration_[0-9]+", str(folder))[0])


@pytest.mark.parametrize(
    ("batches", "every", "at_end", "want"),
    [(4, 2, True, [2, 4]), (5, 2, True, [2, 4, 5]), (5, 2, False, [2, 4]), (3, None, True, [3])],
)
def test_exports_come_every_n_iterations_and_once_at_the_end(
    tmp_path: Path, model_path: str, batches: int, every: int | None, at_end: bool, want: list[int]
) -> None:
    toy = Toy(Recording(), model_path)
    toy.root = Actor(AutoModelForCausalLM.from_pretrained(model_path).train())
    fit(toy, tmp_path, [HFExport(every, at_end, tmp_path / "hf")], batches=batches)
    assert toy.tokenizer.folders == [f"iteration_{i:06d}" for i in want]
    assert sorted(os.listdir(tmp_path / "hf")) == toy.tokenizer.folders


def test_an_export_finds_the_home_folder(tmp_path: Path, model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    toy = Toy(Recording(), model_path)
    toy.root = Actor(AutoModelForCausalLM.from_pretrained(model_path).train())
    fit(toy, tmp_path, [HFExport(dirpath="~/hf")], batches=1)
    assert os.listdir(tmp_path / "home" / "hf") == ["iteration_000001"]


def test_the_generation_config_is_carried_over(tmp_path: Path, tokenizer: Any, model_path: str) -> None:
    from transformers import GenerationConfig

    weights = dict(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).state_dict())
    write_folder(tmp_path / "out", weights, model_path, tokenizer)
    want, got = (GenerationConfig.from_pretrained(p) for p in (model_path, tmp_path / "out"))
    assert (got.eos_token_id, got.pad_token_id) == (want.eos_token_id, want.pad_token_id)
    assert got.eos_token_id is not None


class Failing:
    def save_pretrained(self, folder: Path) -> None:
        raise OSError("disk full")


def test_a_failed_export_leaves_nothing_and_says_why(tmp_path: Path, tokenizer: Any, model_path: str) -> None:
    toy = Toy(Failing(), model_path)
    toy.root = Actor(AutoModelForCausalLM.from_pretrained(model_path).train())

    (tmp_path / "hf" / "iteration_000001").mkdir(parents=True)
    (tmp_path / "hf" / "iteration_000001" / "old").touch()
    with pytest.raises(OSError, match="disk full"):
        write_folder(tmp_path / "hf" / "iteration_000001", dict(toy.root.hf_named_parameters()), model_path, Failing())
    assert os.listdir(tmp_path / "hf") == ["iteration_000001"]
    assert os.listdir(tmp_path / "hf" / "iteration_000001") == ["old"]
    write_folder(tmp_path / "hf" / "iteration_000001", dict(toy.root.hf_named_parameters()), model_path, tokenizer)
    assert "old" not in os.listdir(tmp_path / "hf" / "iteration_000001")
    assert "model.safetensors" in os.listdir(tmp_path / "hf" / "iteration_000001")


class FailsIn(Recording):
    def __init__(self, *iterations: int) -> None:
        super().__init__()
        self.iterations = [f"iteration_{i:06d}" for i in iterations]

    def save_pretrained(self, folder: Path) -> None:
        super().save_pretrained(folder)
        if self.folders[-1] in self.iterations:
            raise OSError("disk full")


def test_an_export_that_fails_during_the_run_ends_it_at_its_end_only(tmp_path: Path, model_path: str) -> None:
    toy = Toy(FailsIn(2), model_path)
    toy.root = Actor(AutoModelForCausalLM.from_pretrained(model_path).train())
    saver = IterationCheckpoint(tmp_path / "checkpoints")
    with pytest.warns(UserWarning, match="iteration_000002 failed: OSError: disk full. The run goes on"):
        fit(toy, tmp_path, [HFExport(2, dirpath=tmp_path / "hf"), saver], batches=4)
    assert os.listdir(tmp_path / "hf") == ["iteration_000004"]

    toy.tokenizer = FailsIn(4)
    with (
        pytest.warns(UserWarning, match="iteration_000004 failed"),
        pytest.raises(ExportFailed, match="the same weights"),
    ):
        fit(toy, tmp_path, [HFExport(2, dirpath=tmp_path / "again"), saver], batches=4)
    assert toy.tokenizer.folders == [f"iteration_{i:06d}" for i in (2, 4, 4)]
    assert os.listdir(tmp_path / "again") == ["iteration_000002"]
    assert latest_complete(str(tmp_path / "checkpoints")) == f"{tmp_path}/checkpoints/iteration-000004.ckpt"


def test_impossible_exports_are_refused(tmp_path: Path, tokenizer: Any, model_path: str) -> None:
    with pytest.raises(ValueError, match="would never export"):
        HFExport(at_end=False)
    with pytest.raises(ValueError, match="every_n_iterations must be at least 1"):
        HFExport(every_n_iterations=0)
    with pytest.raises(ValueError, match="local folders only, got 's3://bucket/x'"):
        fit(Toy(tokenizer, model_path), tmp_path, [HFExport(dirpath="s3://bucket/x")])
