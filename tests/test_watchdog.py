"""No hang anywhere: what does not end in time ends its process and says where, and so does a process whose launcher is gone."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.trainer.states import RunningStage
from test_launch import released
from test_runs import QUIET, ROOT
from toys import TINY_MODULE, even_tokens, fit, quiet_trainer

from lightning_rlhf import (
    KL,
    GRPOLightningModule,
    IterationCheckpoint,
    PPOLightningModule,
    PromptDataModule,
    RolloutCallback,
    Sampling,
    Watchdog,
)
from lightning_rlhf.callbacks import watchdog
from lightning_rlhf.callbacks.watchdog import HUNG, ORPHANED, watched
from lightning_rlhf.cli import CLEAN_UP_S, RLHFCLI
from lightning_rlhf.phases import Phases
from lightning_rlhf.rollout import TransformersEngine

LIMIT = 1.0


class Ended:
    """In place of the process's end: what was said, and a wait for it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.code = 0
        self.event = threading.Event()

    def __call__(self, code: int, text: str) -> None:
        self.said += [] if text in self.said else [text]
        self.code = code
        self.event.set()

    def hang(self, *_: Any) -> None:
        """Until the watchdog has noticed."""
        self.event.clear()
        assert self.event.wait(20)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ended]:
    ended = Ended()
    monkeypatch.setattr(watchdog, "_end", ended)
    monkeypatch.setattr(watchdog, "_TICK", 0.1)
    yield ended
    assert not watchdog._watch._steps


class HangsEverywhere(PPOLightningModule):
    """In each phase of the second iteration, once."""

    def __init__(self, ended: Ended) -> None:
        super().__init__(**TINY_MODULE, reward=[even_tokens], mini_batches=2, kl=KL(0.01))
        self.ended, self.hung = ended, set[str]()

    def reach(self, place: str) -> None:
        if self.trainer.fit_loop.total_batch_idx == 1 and place not in self.hung:
            self.hung.add(place)
            self.ended.hang()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.global_step == 1:
            self.ended.hang()
        return batch

    def score(self, rollout: Any) -> Any:
        self.reach("val" if self.trainer.validating else "score")
        return super().score(rollout)

    def forward_all(self, root: Any, *args: Any, **options: Any) -> Any:
        self.reach("critic" if root is self.critic else "reference" if root is self.reference else "actor")
        return super().forward_all(root, *args, **options)

    def compute_advantages(self, experience: Any) -> Any:
        self.reach("advantages")
        return super().compute_advantages(experience)

    def policy_loss(self, *args: Any) -> Any:
        self.reach("loss")
        return super().policy_loss(*args)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.reach("save")


class Generates(TransformersEngine):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.module.reach("generate")
        return super().generate(*args, **kwargs)


@pytest.mark.filterwarnings("ignore:.*sync_dist=True", "ignore:You have overridden")
def test_a_hang_anywhere_in_an_iteration_is_named(tmp_path, ended, monkeypatch):
    monkeypatch.setattr(watchdog, "_ROLLOUT_TIMES", 1)
    torch.set_num_threads(1)
    module, engine = HangsEverywhere(ended), Generates()
    engine.module = module
    trainer = quiet_trainer(
        Watchdog(0.4),
        RolloutCallback(engine, Sampling(max_completion_length=4)),
        IterationCheckpoint(tmp_path),
        max_steps=2,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
    )
    trainer.fit(
        module, datamodule=PromptDataModule(path="toys.prompts", val_size=4, batch_size=4, max_prompt_length=32)
    )
    places = [
        "a callback or the next batch after iteration 1",
        "generate of iteration 2",
        "reward of iteration 2",
        "log_prob of iteration 2",
        "reference of iteration 2",
        "values of iteration 2",
        "what follows values of iteration 2",
        "update of iteration 2",
        "checkpoint of iteration 2",
        "what follows generate of validate at iteration 2",
    ]
    setting = "has not ended in 0.4 s (Watchdog.timeout_s), all threads:"
    named = [text for text in ended.said if any(text.startswith(place) for place in places)]
    assert named == [f"{place} {setting}" for place in places]
    assert ended.code == HUNG


def test_signs_of_life_put_the_end_off(tmp_path, ended):
    class Slow(GRPOLightningModule):
        def policy_loss(self, *args: Any) -> Any:
            time.sleep(0.4 * LIMIT)
            return super().policy_loss(*args)

    module = Slow(**TINY_MODULE | {"micro_batch_tokens": 40}, reward=[even_tokens])
    fit(module, tmp_path, 1, callbacks=[Watchdog(2 * LIMIT)])
    assert ended.said == []


def test_one_that_waits_for_others_or_is_at_a_breakpoint_is_left_alone(ended, tmp_path):
    def hang(place: str) -> None:
        code = compile("import time\ntime.sleep(2 * seconds)", place, "exec")
        with watched("a step", LIMIT / 4):
            exec(code, {"seconds": LIMIT / 2})

    hang("/torch/distributed/distributed_c10d.py")
    hang("/lib/python3/bdb.py")
    assert ended.said == []
    hang("/home/me/reward.py")
    assert ended.said == ["a step has not ended in 0.25 s (rollout.timeout_s), all threads:"]


def test_the_limit_is_two_thirds_of_that_of_collectives_and_more_for_rollouts(tmp_path):
    seen: dict[str, tuple[float, str]] = {}

    class Looks(pl.Callback):
        def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
            step = lambda name: seen.update({name: watchdog._watch._steps[-1].seconds})  # noqa: E731
            pl_module.phases.on_start.append(step)

    fit(GRPOLightningModule(**TINY_MODULE, reward=[even_tokens]), tmp_path, 1, callbacks=[Watchdog(), Looks()])
    assert (seen["reward"], seen["update"], seen["generate"]) == (1200.0, 1200.0, 7200.0)
    assert not watchdog._watch._steps


def test_the_watch_in_c_is_set_to_the_step_that_must_end_first_and_off_without_any(monkeypatch):
    """A process that holds the interpreter's lock ends by it; one that has nothing to do must not."""
    armed: list[Any] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, **options: armed.append(round(seconds)))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: armed.append("off"))
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    watch, steps = (
        watchdog._Watch(),
        [watchdog._Step(what, seconds, "") for what, seconds in (("a", 300.0), ("b", 9.0))],
    )
    for change in (watch.add, watch.remove):
        for step in steps:
            change(step)
    grace = watchdog._GRACE
    assert armed == [300 + grace, 9 + grace, 9 + grace, "off"]


def test_a_step_that_ends_while_the_thread_sets_the_watch_in_c_leaves_it_off(ended, monkeypatch):
    armed, setting = [], threading.Event()

    def slow(seconds: float, **options: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            setting.set()
            time.sleep(0.2)
        armed.append(True)

    monkeypatch.setattr(faulthandler, "dump_traceback_later", slow)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: armed.append(False))
    with watched("a step", 60.0):
        setting.clear()
        assert setting.wait(20)
    time.sleep(0.4)
    assert armed[-1] is False


def test_a_step_that_fails_has_ended(ended):
    with pytest.raises(ZeroDivisionError), watched("a step", 60.0):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("environment", "local_rank", "watches"),
    [(LightningEnvironment(), 0, False), (LightningEnvironment(), 1, True), (TorchElasticEnvironment(), 0, True)],
)
def test_several_runs_have_one_watchdog_each_and_a_launcher_if_they_were_launched(
    environment, local_rank, watches, monkeypatch
):
    monkeypatch.setattr(watchdog, "_watch", watch := watchdog._Watch())
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    module = SimpleNamespace(phases=Phases())
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(cluster_environment=environment),
        local_rank=local_rank,
        training=True,
        state=SimpleNamespace(stage=RunningStage.TRAINING),
        fit_loop=SimpleNamespace(total_batch_idx=0),
    )
    dog = Watchdog(60.0)
    for end in (
        lambda: dog.teardown(trainer, module, "validate"),
        lambda: dog.on_exception(trainer, module, OSError()),
    ):
        dog.setup(trainer, module, "validate")
        with module.phases("reward"):
            assert [step.what for step in watch._steps] == ["reward of iteration 1"]
        assert [step.what for step in watch._steps] == ["what follows reward of iteration 1"]
        end()
        assert not watch._steps
        with module.phases("checkpoint"):  # one that was under way
            assert [step.what for step in watch._steps] == ["checkpoint of iteration 1"]
        assert not watch._steps, "a process that goes on would be ended"
    assert len(module.phases.on_start) == len(module.phases.on_end) == 1
    assert watch.parent == (os.getppid() if watches else None)
    trainer.training, trainer.state.stage = False, None
    with module.phases("log_prob"):
        assert not watch._steps, "outside of a run"


# -- processes ---------------------------------------------------------------------------------------------------------

HANGS = """
import os, time

def reward(completions, **columns):
    while os.environ.get("LOCAL_RANK", "0") == os.environ["VICTIM"]:
        time.sleep(1)
    return [0.5] * len(completions)
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_reward_that_hangs_on_one_rank_ends_both(tmp_path, victim):
    (tmp_path / "hangs.py").write_text(HANGS)
    options = ["--trainer.devices=2", "--trainer.logger=false", "--model.init_args.reward=[hangs.reward]"]
    options += [
        "--model.init_args.reward_timeout=null",
        "--trainer.callbacks+={class_path: lightning_rlhf.Watchdog, init_args: {timeout_s: 5}}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "lightning_rlhf", "fit", "--config", "configs/tiny_grpo.yaml", *QUIET, *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "VICTIM": victim},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode in ([HUNG] if victim == "0" else [-9, 1])
    assert f"lightning-rlhf: rank {victim}: reward of iteration 1 has not ended in 5 s" in done.stderr
    assert f"rank {1 - int(victim)}: reward" not in done.stderr, "the one that waits is not to blame"
    assert "hangs.py" in done.stderr


CHILD = """
import fcntl, os, sys, time
from lightning_rlhf.callbacks import watchdog

held = open(sys.argv[1], "w")
fcntl.flock(held, fcntl.LOCK_EX)
watchdog._watch.parent = os.getppid()
watchdog.must_end("the sleep", 600)
print("ready", flush=True)
time.sleep(600)
"""


def test_while_a_step_runs_the_launcher_must_live(ended, monkeypatch):
    monkeypatch.setattr(watchdog, "_BOTH_END", 0.0)
    monkeypatch.setattr(watchdog._watch, "parent", os.getppid())
    with watched("a step", 60.0):
        assert not ended.event.wait(0.5)
        monkeypatch.setattr(watchdog._watch, "parent", 12345678)
        assert ended.event.wait(20)
    assert (ended.code, ended.said) == (ORPHANED, ["process 12345678, which started it, is gone"])


@pytest.mark.slow
def test_a_process_ends_when_the_one_that_started_it_is_gone(tmp_path):
    launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    lock = tmp_path / "lock"
    line = [sys.executable, "-c", launcher, CHILD, str(lock)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as started:
        assert started.stdout.readline() == "ready\n"
        started.kill()
        with lock.open() as file:
            assert any(released(file) for _ in range(100))
        assert f"lightning-rlhf: rank 0: process {started.pid}, which started it, is gone" in started.stderr.read()


@pytest.mark.parametrize(
    ("ranks", "error", "steps"),
    [(2, ValueError("no"), ["the clean-up after ValueError"]), (1, ValueError("no"), []), (2, SystemExit(143), [])],
)
def test_one_of_several_ranks_must_end_soon_after_an_error(monkeypatch, ranks, error, steps):
    monkeypatch.setattr(watchdog, "_watch", watch := watchdog._Watch())
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    RLHFCLI.progress.on_exception(SimpleNamespace(world_size=ranks), None, error)
    faulthandler.cancel_dump_traceback_later()
    assert [(step.what, step.seconds) for step in watch._steps] == [(what, CLEAN_UP_S) for what in steps]
