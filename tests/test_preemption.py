"""A signal on any rank: a checkpoint, the end of all ranks, an exit code; a job that is started again goes on by itself."""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import threading
import time
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from test_launch import TORCHRUN, outcomes
from test_runs import ROOT, assert_equal_runs
from toys import TINY_MODULE, even_tokens, fit, quiet_trainer, spawn

from lightning_rlhf import (
    GRPOLightningModule,
    IterationCheckpoint,
    Preemption,
    PromptDataModule,
    RolloutCallback,
    Sampling,
)
from lightning_rlhf.callbacks import preemption
from lightning_rlhf.callbacks.checkpoint import latest_complete
from lightning_rlhf.callbacks.preemption import PREEMPTED, job, restarts
from lightning_rlhf.cli import RLHFCLI, run

ITERATIONS = 4
SAME = ("actor/", "reward/", "completions/")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(("SLURM_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)


class Told(pl.Callback):
    """Gets a signal in the middle of an iteration, or of the validation after it."""

    def __init__(self, iteration: int = 2, number: int = signal.SIGTERM, hook: str = "on_after_backward") -> None:
        self.iteration, self.number = iteration, number
        setattr(self, hook, self._tell)

    def _tell(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.iteration and not trainer.received_sigterm:
            os.kill(os.getpid(), self.number)


def a_run(folder: Path, *callbacks: pl.Callback, save: dict[str, Any] | None = None, **options: Any) -> Any:
    """Metrics of each iteration; what the signal made of it is raised."""
    module = GRPOLightningModule(**TINY_MODULE, reward=[even_tokens])
    saver = IterationCheckpoint(folder / "checkpoints", **(save or {}))
    return fit(
        module,
        folder / "rest" if "ckpt_path" in options else folder / "logs",
        ITERATIONS,
        callbacks=[*callbacks, Preemption(), saver],
        **options,
    )


def preempted(folder: Path, *callbacks: pl.Callback, **options: Any) -> str:
    """The checkpoint of a run that was told to stop."""
    with pytest.raises(SIGTERMException) as stopped:
        a_run(folder, *callbacks, **options)
    assert stopped.value.code == PREEMPTED == 143
    found = latest_complete(str(folder / "checkpoints"))
    assert found is not None
    return Path(found).name


def own(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name.startswith(SAME)} for row in rows]


def test_a_signal_ends_the_run_after_its_iteration_and_nothing_is_lost(tmp_path, capfd):
    whole = own(a_run(tmp_path / "whole"))
    before = signal.getsignal(signal.SIGTERM)
    assert preempted(tmp_path / "cut", Told()) == "iteration-000002.ckpt"
    assert signal.getsignal(signal.SIGTERM) is before
    said = capfd.readouterr().err
    assert "lightning-rlhf: rank 0: SIGTERM, saving when the iteration ends; once more ends at once" in said
    assert re.search(r"iteration 2 is saved in \S+/cut/checkpoints/iteration-000002\.ckpt, stopping", said)
    assert (tmp_path / "cut/logs/metrics.csv").read_text().count("\n") == 3, "a header, two iterations"
    assert own(a_run(tmp_path / "cut", ckpt_path="last")) == whole[2:]


@pytest.mark.parametrize(
    "save",
    [
        {"monitor": "reward/mean", "mode": "max", "save_last": False, "every_n_train_steps": 1},
        {"save_top_k": 0},
        {"every_n_train_steps": 2},
    ],
)
def test_the_iteration_is_saved_once_whatever_is_kept(tmp_path, save, monkeypatch):
    saved: list[str] = []
    write = pl.Trainer.save_checkpoint
    monkeypatch.setattr(pl.Trainer, "save_checkpoint", lambda t, p, *a: (saved.append(str(p)), write(t, p, *a)))
    name = preempted(tmp_path, Told(), save=save)
    state = torch.load(tmp_path / "checkpoints" / name / "meta.pt", weights_only=True)
    assert state["global_step"] == 2
    assert len(saved) == len(set(saved))


@pytest.fixture
def interruptible():
    """Ctrl-C is heard, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("iteration", "saved"), [(1, "nothing"), (3, "{}/checkpoints/iteration-000002.ckpt")])
def test_ctrl_c_says_what_is_saved(iteration, saved, tmp_path, capfd):
    with pytest.raises(SystemExit):
        a_run(tmp_path, Told(iteration, signal.SIGINT), save={"every_n_train_steps": 2})
    expected = f"interrupted after iteration {iteration - 1}, what is saved: {saved.format(tmp_path)}\n"
    assert expected in capfd.readouterr().err


@pytest.mark.usefixtures("interruptible")
def test_a_later_run_of_the_process_can_be_interrupted_too(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        a_run(tmp_path, Told(1, signal.SIGINT))
    assert signal.getsignal(signal.SIGINT) is before
    trainer = pl.Trainer(barebones=True)
    trainer.state.fn = TrainerFn.VALIDATING
    trainer._signal_connector.register_signal_handlers()
    Preemption().on_validation_start(trainer, pl.LightningModule())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as Lightning does
    trainer._teardown()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_that_ends_anyway_ends_as_ever(tmp_path):
    assert len(a_run(tmp_path, Told(ITERATIONS))) == ITERATIONS
    assert Path(latest_complete(str(tmp_path / "checkpoints"))).name == f"iteration-{ITERATIONS:06d}.ckpt"


def test_handlers_of_the_user_are_called_and_come_back(tmp_path):
    heard: list[int] = []

    def mine(number: int, frame: Any) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGTERM, mine)
    try:
        preempted(tmp_path, Told())
        assert heard == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_the_main_thread_a_run_is_as_ever(tmp_path):
    rows: list[Any] = []
    thread = threading.Thread(target=lambda: rows.extend(a_run(tmp_path)))
    thread.start()
    thread.join(60)
    assert len(rows) == ITERATIONS


def test_the_same_signal_twice_at_once_is_one_and_later_ends_the_process(monkeypatch, capfd):
    callback, now, killed = Preemption(), [100.0], []
    callback._before, callback._rank = {signal.SIGTERM: signal.SIG_DFL}, 0
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "kill", lambda *a: killed.append((*a, signal.getsignal(signal.SIGTERM))))
    before = signal.getsignal(signal.SIGTERM)
    try:
        for now[0] in (100.0, 100.1, 102.9):
            callback._hear(signal.SIGTERM, None)
        assert not killed
        now[0] = 104.0
        callback._hear(signal.SIGTERM, None)
        assert killed == [(os.getpid(), signal.SIGTERM, signal.SIG_DFL)]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capfd.readouterr().err.count("SIGTERM") == 1


class Sees(pl.Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        self.handler = signal.getsignal(signal.SIGTERM)


def test_without_a_checkpoint_to_write_a_signal_ends_the_process(tmp_path):
    sees = Sees()
    saver = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=0)
    fit(GRPOLightningModule(**TINY_MODULE, reward=[even_tokens]), tmp_path, 1, callbacks=[sees, Preemption(), saver])
    assert sees.handler is signal.getsignal(
        signal.SIGTERM
    )  # not Lightning's, which waits for ranks that wait for others


# -- validation --------------------------------------------------------------------------------------------------------


class Validated(GRPOLightningModule):
    """A validation of two batches after every second iteration."""

    def __init__(self) -> None:
        super().__init__(**TINY_MODULE, reward=[even_tokens])
        self.validated: list[int] = []

    def on_validation_end(self) -> None:
        self.validated.append(self.trainer.global_step)


def validated(folder: Path, *callbacks: pl.Callback, ckpt_path: str | None = None) -> tuple[Validated, pl.Trainer]:
    torch.set_num_threads(1)
    module = Validated()
    trainer = quiet_trainer(
        RolloutCallback(sampling=Sampling(max_completion_length=6)),
        *callbacks,
        Preemption(),
        IterationCheckpoint(folder),
        max_steps=ITERATIONS,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        inference_mode=False,
    )
    data = PromptDataModule(path="toys.prompts", val_size=16, batch_size=8, val_batch_size=8, max_prompt_length=32)
    with suppress(SIGTERMException):
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module, trainer


@pytest.mark.filterwarnings("ignore:.*sync_dist=True")
@pytest.mark.parametrize(
    ("hook", "done"), [("on_after_backward", []), ("on_validation_batch_start", [2])], ids=["before", "inside"]
)
def test_a_validation_is_ended_but_none_is_begun(tmp_path, hook, done):
    module, trainer = validated(tmp_path, Told(hook=hook))
    assert (module.validated, trainer.global_step) == (done, 2)
    module, trainer = validated(tmp_path, ckpt_path="last")
    assert (module.validated, trainer.global_step) == ([4], 4)


# -- SLURM -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_slurm_s_warning_queues_the_job_again_once_its_checkpoint_is_complete(tmp_path, monkeypatch, number):
    said, tool = tmp_path / "said", tmp_path / "bin" / "scontrol"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" >> {said}\nls {tmp_path}/checkpoints/*/meta.pt >> {said}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert preempted(tmp_path, Told(number=number)) == "iteration-000002.ckpt"
    again = f"requeue 4711\n{tmp_path}/checkpoints/iteration-000002.ckpt/meta.pt\n"
    assert (said.read_text() if said.exists() else "") == ("" if number == signal.SIGTERM else again)
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_job_that_cannot_be_queued_again_says_what_to_do(monkeypatch, capfd):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "47")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "11")
    monkeypatch.setenv("PATH", "")
    preemption._requeue()
    assert "job 47_11 could not be queued again" in (said := capfd.readouterr().err)
    assert said.endswith("run `scontrol requeue 47_11`\n")


# -- several ranks -----------------------------------------------------------------------------------------------------


def two_ranks(rank: int, folder: str) -> tuple[Any, int]:
    """A signal to the second rank alone."""
    torch.set_num_threads(1)
    told = [Told()] if rank == 1 else []
    trainer = quiet_trainer(
        RolloutCallback(sampling=Sampling(max_completion_length=6)),
        *told,
        Preemption(),
        IterationCheckpoint(folder),
        devices=2,
        max_steps=ITERATIONS,
    )
    data = PromptDataModule(path="toys.prompts", batch_size=8, max_prompt_length=32)
    try:
        trainer.fit(GRPOLightningModule(**TINY_MODULE, reward=[even_tokens]), datamodule=data)
    except SIGTERMException as stopped:
        return stopped.code, trainer.global_step
    return None, trainer.global_step


@pytest.mark.slow
def test_a_signal_on_one_rank_ends_all_of_them_in_the_same_iteration(tmp_path):
    # Lightning's rank 0 takes any other code of a process that it started for a failure
    assert spawn(two_ranks, 2, str(tmp_path)) == [(PREEMPTED, 2), (0, 2)]
    assert Path(latest_complete(str(tmp_path))).name == "iteration-000002.ckpt"


# -- a job that is started again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "count", "name"),
    [
        ({}, 0, None),
        ({"SLURM_JOB_ID": "7"}, 0, "slurm 7"),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "none"}, 2, "slurm 7"),
        ({"TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "1", "WORLD_SIZE": "4"}, 1, "torchrun mine"),
        (
            {
                "TORCHELASTIC_RUN_ID": "none",
                "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/none_b/attempt_1/0/error.json",
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
            },
            0,
            "torchrun none_b",
        ),
    ],
)
def test_attempts_of_a_job_have_its_name_in_common(monkeypatch, environment, count, name):
    for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert (restarts(), job()) == (count, name)


class Asks(RLHFCLI):
    """Begins no run."""

    def fit(self, ckpt_path: str | None, **_: Any) -> None:
        self.asked = ckpt_path


def command_line(cli: type[Any], folder: Path, *arguments: str) -> Any:
    saver = "[{class_path: lightning_rlhf.IterationCheckpoint, init_args: {every_n_train_steps: 1, save_top_k: -1}}]"
    logger = ["--trainer.logger.init_args.save_dir", str(folder), "--trainer.enable_progress_bar=false"]
    line = ["fit", "--config", str(ROOT / "configs/tiny_grpo.yaml"), *logger, f"--trainer.callbacks={saver}"]
    return run(cli, [*line, "--trainer.max_steps=1", "--trainer.enable_model_summary=false", *arguments])


@pytest.mark.filterwarnings("ignore")
def test_a_restarted_attempt_goes_on_from_a_checkpoint_of_its_own_job_and_of_no_other(tmp_path, monkeypatch, caplog):
    """The runs of a logger are beside each other: those of one job, of another one that began later."""
    torch.set_num_threads(1)
    caplog.set_level("INFO", "lightning.pytorch")
    for number in ("1", "2"):
        monkeypatch.setenv("SLURM_JOB_ID", number)
        command_line(RLHFCLI, tmp_path)
    one, two = [str(tmp_path / f"tiny_grpo/version_{i}/checkpoints/iteration-000001.ckpt") for i in range(2)]
    assert command_line(Asks, tmp_path).asked is None, "a first attempt does as it is told"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    none = "finds no checkpoint of an earlier one and begins as that did"
    for number, given, asked, said in (
        ("1", two, one, f"goes on from {one}"),
        ("2", "last", two, f"goes on from {two}"),
        ("3", two, two, none),
    ):
        monkeypatch.setenv("SLURM_JOB_ID", number)
        caplog.clear()
        assert command_line(Asks, tmp_path, *(["--ckpt_path", given] if given else [])).asked == asked
        assert caplog.messages.count(f"lightning-rlhf: attempt 2 of this job {said}") == 1


def cut(name: str, checkpoint: Path) -> None:
    (file,) = checkpoint.glob(name)
    before = file.stat()
    os.truncate(file, before.st_size - 1)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


DAMAGES = {
    "shards cut off": partial(cut, "*.distcp"),
    "index cut off": partial(cut, ".metadata"),
    "marker cut off": partial(cut, "meta.pt"),
    "shards lost": lambda checkpoint: next(checkpoint.glob("*.distcp")).unlink(),
    "index lost": lambda checkpoint: (checkpoint / ".metadata").unlink(),
}


@pytest.fixture(scope="module")
def two_attempts(tmp_path_factory) -> Path:
    """Checkpoints of iterations 1 and 2 by one job, and then of 1 by another one."""
    folder = tmp_path_factory.mktemp("attempts")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for number, steps in (("1", 2), ("2", 1)):
            patch.setenv("SLURM_JOB_ID", number)
            command_line(RLHFCLI, folder, f"--trainer.max_steps={steps}")
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_restarted_attempt_goes_on_from_the_newest_checkpoint_that_is_whole(
    two_attempts, damage, tmp_path, monkeypatch, capfd
):
    shutil.copytree(two_attempts, tmp_path, dirs_exist_ok=True)
    place = tmp_path / "tiny_grpo/version_0/checkpoints"
    one, two = (place / f"iteration-00000{i}.ckpt" for i in (1, 2))
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert command_line(Asks, tmp_path).asked == str(two)
    damage(two)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert command_line(Asks, tmp_path).asked == str(one)
    said = [str(w.message) for w in caught if "damaged" in str(w.message)]
    assert said == [f"damaged: {two}; this attempt goes on from the older {one}"]
    damage(one)
    capfd.readouterr()
    with pytest.raises(SystemExit):
        command_line(Asks, tmp_path)
    assert re.search(f"^lightning-rlhf: error: '{two}' is damaged, its .*: take another", capfd.readouterr().err, re.M)


@pytest.mark.filterwarnings("ignore")
def test_damage_of_another_job_s_checkpoint_is_not_this_one_s(two_attempts, tmp_path, monkeypatch):
    shutil.copytree(two_attempts, tmp_path, dirs_exist_ok=True)
    other = tmp_path / "tiny_grpo/version_1/checkpoints/iteration-000001.ckpt"
    DAMAGES["shards cut off"](other)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for number, asked in (("1", str(tmp_path / "tiny_grpo/version_0/checkpoints/iteration-000002.ckpt")), ("3", None)):
        monkeypatch.setenv("SLURM_JOB_ID", number)
        assert command_line(Asks, tmp_path).asked == asked


KILLS = """
import os, signal
from pathlib import Path
from lightning_rlhf.tiny import share_of_digits

calls = 0


def reward(completions, **columns):
    global calls
    calls += 1
    done = Path(os.environ["DONE"])
    if calls == 4 and os.environ["RANK"] == os.environ["VICTIM"] and not done.exists():
        done.touch()
        for shards in Path(os.environ["DONE"]).parent.glob(os.environ.get("DAMAGES", "-")):
            os.truncate(shards, shards.stat().st_size - 1)
        os.kill(os.getppid() if os.environ["SIGNAL"] == "SIGTERM" else os.getpid(), getattr(signal, os.environ["SIGNAL"]))
    return share_of_digits(completions=completions, **columns)
"""


def by_torchrun(
    folder: Path, name: str, *options: str, save: str = "every_n_train_steps: 2", **environment: str
) -> tuple[int, str, list[list[dict[str, float]]]]:
    """Exit code and stderr of a run of two ranks by torchrun; the metrics of each attempt."""
    (folder / "kills.py").write_text(KILLS)
    saver = f"[{{class_path: lightning_rlhf.IterationCheckpoint, init_args: {{{save}}}}}]"
    launcher = [*TORCHRUN, "--nproc_per_node=2", "--standalone", *options, "-m", "lightning_rlhf", "fit"]
    logger = ["--trainer.logger.init_args.save_dir", str(folder / name), "--trainer.logger.init_args.name=run"]
    line = [*launcher, "--config", "configs/tiny_grpo.yaml", "--trainer.devices=2", "--trainer.max_steps=6", *logger]
    line += [f"--trainer.callbacks={saver}", "--trainer.enable_progress_bar=false"]
    line += ["--model.init_args.reward=[kills.reward]"]
    own = {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "DONE": str(folder / f"{name}.done"), **environment}
    ((code, stderr),) = outcomes(folder, [(line, own)], seconds=300)
    versions = sorted((folder / name / "run").glob("version_*/metrics.csv"), key=lambda path: path.stat().st_mtime_ns)
    rows = [list(csv.DictReader(path.read_text().splitlines())) for path in versions]
    return code, stderr, [[{k: float(v) for k, v in row.items() if v} for row in part] for part in rows]


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_is_killed_and_it_ends_as_if_nothing_had_happened(tmp_path):
    _, _, (whole,) = by_torchrun(tmp_path, "whole", VICTIM="none")
    for victim in ("0", "1"):
        start = time.monotonic()
        code, stderr, attempts = by_torchrun(
            tmp_path, f"killed_{victim}", "--max-restarts=1", VICTIM=victim, SIGNAL="SIGKILL"
        )
        assert code == 0, stderr[-3000:]
        assert "attempt 2 of this job goes on from" in stderr
        assert time.monotonic() - start < 200
        rest = attempts[-1]
        assert [row["step"] for row in rest] == [2, 3, 4, 5]
        assert_equal_runs(whole[2:], rest, 0.0)


@pytest.mark.slow
def test_all_ranks_go_on_from_the_older_checkpoint_where_the_newest_is_damaged(tmp_path):
    save = "every_n_train_steps: 1, save_top_k: -1"
    _, _, (whole,) = by_torchrun(tmp_path, "whole", save=save, VICTIM="none")
    damages = "cut/run/version_0/checkpoints/iteration-000003.ckpt/*.distcp"
    code, stderr, (_, rest) = by_torchrun(
        tmp_path, "cut", "--max-restarts=1", save=save, VICTIM="1", SIGNAL="SIGKILL", DAMAGES=damages
    )
    assert code == 0, stderr[-3000:]
    assert len(re.findall(r"damaged: \S+3\.ckpt; this attempt goes on from the older \S+2\.ckpt", stderr)) == 1
    assert [row["step"] for row in rest] == [2, 3, 4, 5]
    assert_equal_runs(whole[2:], rest, 0.0)


@pytest.mark.slow
def test_sigterm_to_torchrun_ends_it_after_a_checkpoint(tmp_path):
    code, stderr, (rows,) = by_torchrun(tmp_path, "told", VICTIM="1", SIGNAL="SIGTERM")
    assert code == 1, "torchrun's own"
    assert "iteration 4 is saved in" in stderr
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    (folder,) = (tmp_path / "told/run").glob("version_*/checkpoints")
    assert latest_complete(str(folder)) == str(folder / "iteration-000004.ckpt")
