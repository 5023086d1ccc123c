"""However its processes are started, a run is the same: Lightning itself, torchrun, two nodes, SLURM."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import StrategyRegistry
from test_policy import strategy_of
from test_runs import QUIET, ROOT, assert_equal_runs, metrics_of
from toys import spawn

from lightning_rlhf import FSDPUlyssesStrategy
from lightning_rlhf.meeting import FailedElsewhere, name_of_attempt

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ITSELF = [sys.executable]
TWO = ["--trainer.max_steps=2", *QUIET]


Processes = list[tuple[list[str], dict[str, str]]]
"""Commands, and what they have in their environment."""


def outcomes(folder: Path, processes: Processes, seconds: float = 240, grace: float = 60) -> list[tuple[int, str]]:
    """Exit status and standard error of processes that run at the same time.

    None of them, and nothing that they started, outlives this. When one fails the others have ``grace`` seconds left: they may
    be waiting for it.
    """
    logs = [folder / f"stderr_{i}" for i in range(len(processes))]
    started: list[subprocess.Popen[bytes]] = []
    end = time.monotonic() + seconds
    try:
        for (command, own), log in zip(processes, logs, strict=True):
            environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"} | own
            with log.open("w") as stderr:
                started.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=environment,
                        stdout=subprocess.DEVNULL,
                        stderr=stderr,
                        start_new_session=True,
                    )
                )
        while len(done := [p for p in started if p.poll() is not None]) < len(started) and time.monotonic() < end:
            if any(process.returncode for process in done):
                end = min(end, time.monotonic() + grace)
            time.sleep(0.05)
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return [(process.returncode, log.read_text()) for process, log in zip(started, logs, strict=True)]


def on_a_free_port(start: Callable[[str], list[tuple[int, str]]]) -> list[tuple[int, str]]:
    """``start(port)``, again with another port while somebody else takes it between the look and the use."""
    for _ in range(5):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        found = start(port)
        if not any(status and "EADDRINUSE" in stderr for status, stderr in found):
            break
    return found


def launched(folder: Path, processes: Callable[[str], Processes], *arguments: str) -> list[dict[str, float]]:
    """Start ``LAUNCHER -m lightning_rlhf fit …`` for each (launcher, environment) at once; the metrics of the run.

    Args:
        processes: of a port that is free on this machine.
    """
    logger = ["--trainer.logger.init_args.save_dir", str(folder), "--trainer.logger.init_args.name=run"]
    fit = ["-m", "lightning_rlhf", "fit", "--config", "configs/tiny_grpo.yaml", *logger, *TWO, *arguments]
    found = on_a_free_port(
        lambda port: outcomes(
            folder, [([*launcher, *fit], {"MASTER_PORT": port} | own) for launcher, own in processes(port)]
        )
    )
    assert all(status == 0 for status, _ in found), "\n".join(f"{status}: {stderr[-2000:]}" for status, stderr in found)
    return metrics_of(folder / "run")


@pytest.fixture(scope="module")
def by_itself(tmp_path_factory: Any) -> list[dict[str, float]]:
    """Two processes on this machine, the second started by the first."""
    return launched(tmp_path_factory.mktemp("itself"), lambda _: [(ITSELF, {})], "--trainer.devices=2")


def test_torchrun(by_itself, tmp_path):
    launcher = [*TORCHRUN, "--nproc_per_node=2", "--standalone"]  # on a port that the system chooses
    assert_equal_runs(by_itself, launched(tmp_path, lambda _: [(launcher, {})], "--trainer.devices=2"))


def test_two_nodes(by_itself, tmp_path):
    """The command is started once on each node, as Lightning has it."""
    nodes: Processes = [(ITSELF, {"NODE_RANK": str(rank)}) for rank in range(2)]
    arguments = ["--trainer.devices=1", "--trainer.num_nodes=2", "--trainer.strategy=hsdp_ulysses"]
    assert_equal_runs(by_itself, launched(tmp_path, lambda _: nodes, *arguments))


@pytest.mark.slow
def test_two_nodes_by_torchrun(by_itself, tmp_path):
    def nodes(port: str) -> Processes:
        rendezvous = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=static", f"--rdzv_endpoint=127.0.0.1:{port}"]
        return [([*TORCHRUN, *rendezvous, f"--node_rank={rank}"], {}) for rank in range(2)]

    assert_equal_runs(by_itself, launched(tmp_path, nodes, "--trainer.devices=1", "--trainer.num_nodes=2"))


@pytest.mark.slow
def test_slurm(by_itself, tmp_path):
    """The environment of ``srun --nodes=1 --ntasks-per-node=2``; a sequence-parallel pair on the node."""
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    job |= {"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost"}
    tasks: Processes = [(ITSELF, job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}) for rank in range(2)]
    arguments = ["--trainer.devices=2", "--trainer.strategy=fsdp_ulysses_sp2"]
    assert_equal_runs(by_itself, launched(tmp_path, lambda _: tasks, *arguments))


def test_a_group_that_would_span_nodes_is_refused_by_the_first_process_of_each(tmp_path):
    fit = ["-m", "lightning_rlhf", "fit", "--config", "configs/tiny_grpo.yaml", *TWO, "--trainer.num_nodes=2"]
    command = [*ITSELF, *fit, "--trainer.strategy=fsdp_ulysses_sp2", "--trainer.logger=false"]
    nodes = [(command, {"NODE_RANK": rank, "MASTER_PORT": "1"}) for rank in ("0", "1")]  # they never meet
    found = outcomes(tmp_path, nodes)
    lines = [[line for line in stderr.splitlines() if "error" in line] for _, stderr in found]
    assert all(status > 0 for status, _ in found)
    message = "sequence_parallel_size=2 must divide the 1 processes of a node, a group would span nodes"
    assert [len(own) for own in lines] == [1, 1]
    assert lines[0][0].startswith(f"lightning-rlhf: error: {message}")
    assert lines[1][0].startswith(f"lightning-rlhf: error (rank 1): {message}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "status", "said"),
    [
        ("--trainer.strategy=fsdp_ulysses_sp2", 1, "sequence_parallel_size=2 must divide the 1 processes of a node"),
        ("--data.batch_size=none", 2, "data.batch_size: "),
    ],
)
def test_an_error_of_one_node_alone_is_said_there_and_ends_the_others_where_they_would_wait(
    wrong, status, said, tmp_path
):
    fit = ["-m", "lightning_rlhf", "fit", "--config", "configs/tiny_grpo.yaml", *TWO, "--trainer.logger=false"]
    fit += ["--trainer.devices=1", "--trainer.num_nodes=2", f"--trainer.default_root_dir={tmp_path}"]

    def nodes(port: str) -> Processes:
        launcher = [*TORCHRUN, "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=static", "--master_port", port]
        return [([*launcher, f"--node_rank={rank}", *fit, *[wrong] * rank], {}) for rank in range(2)]

    found = on_a_free_port(lambda port: outcomes(tmp_path, nodes(port)))
    assert [code for code, _ in found] == [1, 1]  # torchrun's own
    lines = [[line for line in stderr.splitlines() if "lightning-rlhf: " in line] for _, stderr in found]
    ((first,), (second,)) = lines
    assert second.startswith(f"lightning-rlhf: error (rank 1): {said}")
    assert first == second.replace("error (rank 1): ", "error: rank 1 failed: ")
    assert re.search(rf"exitcode +: {status}\b", found[1][1])


SLURM = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NNODES": "1"}
SLURM |= {"SLURM_NODEID": "0", "SLURM_NODELIST": "localhost"}


@pytest.mark.parametrize(
    ("launcher", "environment", "devices", "said"),
    [
        ([*TORCHRUN, "--nproc_per_node=2", "--standalone"], {}, 1, "torchrun has started 2 processes"),
        pytest.param(
            *([*TORCHRUN, "--nproc_per_node=1", "--standalone"], {}, 2, "torchrun has started 1 process"),
            marks=pytest.mark.slow,
        ),
        (ITSELF, SLURM | {"SLURM_JOB_NAME": "train"}, 2, "SLURM has started 1 process"),
    ],
)
def test_another_number_of_processes_than_was_asked_for_is_refused(launcher, environment, devices, said, tmp_path):
    """Lightning would train on one of two devices, or look for a device that is not there."""
    fit = ["-m", "lightning_rlhf", "fit", "--config", "configs/tiny_grpo.yaml", *TWO, "--trainer.logger=false"]
    options = [f"--trainer.devices={devices}", f"--trainer.default_root_dir={tmp_path}"]
    ((status, stderr),) = outcomes(tmp_path, [([*launcher, *fit, *options], environment)])
    assert status == 1
    (line,) = [line for line in stderr.splitlines() if line.startswith("lightning-rlhf: error")]
    asked = f"but trainer.devices x trainer.num_nodes is {devices} x 1: start one process per device"
    assert line.startswith(f"lightning-rlhf: error: {said}, {asked}")


def test_in_a_shell_of_slurm_s_one_process_speaks_for_all(tmp_path):
    """They inherit the variables of the shell's one task."""
    fit = ["-m", "lightning_rlhf", "fit", "--config", "configs/tiny_grpo.yaml", *TWO, "--trainer.logger=false"]
    options = ["--trainer.devices=2", "--data.batch_size=7", f"--trainer.default_root_dir={tmp_path}"]
    ((status, stderr),) = outcomes(tmp_path, [([*ITSELF, *fit, *options], SLURM | {"SLURM_JOB_NAME": "bash"})])
    assert status > 0
    assert len([line for line in stderr.splitlines() if line.startswith("lightning-rlhf: error")]) == 1, stderr


SLEEPS = """
import fcntl, subprocess, sys
held = open(sys.argv[1], "w")
fcntl.flock(held, fcntl.LOCK_EX)
subprocess.run(["sleep", "600"], pass_fds=[held.fileno()])
"""


def test_a_failure_leaves_no_process_behind(tmp_path):
    """Of two: one fails, the other sleeps beside a child of its own; both hold a lock while they live."""
    lock = tmp_path / "lock"
    sleeping, failing = [sys.executable, "-c", SLEEPS, str(lock)], [sys.executable, "-c", "raise SystemExit(3)"]
    found = outcomes(tmp_path, [(sleeping, {}), (failing, {})], grace=5)
    assert [status for status, _ in found] == [-signal.SIGKILL, 3]
    with lock.open() as file:
        assert any(released(file) for _ in range(100))


def released(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(0.1)
        return False
    return True


def test_a_port_that_is_taken_in_between_is_given_up():
    seen: list[str] = []

    def start(port: str) -> list[tuple[int, str]]:
        seen.append(port)
        return [(1, "TCPStore: EADDRINUSE"), (-9, "")] if len(seen) < 3 else [(0, ""), (0, "")]

    assert on_a_free_port(start) == [(0, ""), (0, "")]
    assert len(seen) == 3


# -- meshes and presets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sp", [1, 2, 4, 8])
@pytest.mark.parametrize(("name", "replicate"), [("fsdp_ulysses", 1), ("hsdp_ulysses", "nodes")])
def test_presets_by_name(name, replicate, sp):
    trainer = pl.Trainer(accelerator="cpu", devices=8, strategy=name if sp == 1 else f"{name}_sp{sp}", logger=False)
    strategy = trainer.strategy
    assert isinstance(strategy, FSDPUlyssesStrategy)
    assert (strategy.sequence_parallel_size, strategy.data_parallel_replicate) == (sp, replicate)
    strategy.check_world_size(16, 2)
    assert strategy.replicas(2) == (1 if replicate == 1 else 2)


def test_presets_are_listed_with_lightnings_own():
    assert {"fsdp_ulysses", "fsdp_ulysses_sp8", "hsdp_ulysses", "hsdp_ulysses_sp4"} <= set(
        StrategyRegistry.available_strategies()
    )


@pytest.mark.parametrize(
    ("sizes", "world", "nodes", "message"),
    [
        ({"sequence_parallel_size": 4}, 6, 1, "6 processes are no multiple of sequence_parallel_size x data_parallel"),
        (
            {"data_parallel_replicate": 3},
            8,
            1,
            "= 1 x 3: change trainer.devices, trainer.num_nodes or the strategy's sizes",
        ),
        ({"data_parallel_replicate": "nodes", "sequence_parallel_size": 8}, 12, 3, "= 8 x 3"),
        ({"sequence_parallel_size": 8}, 16, 4, "must divide the 4 processes of a node"),
        ({"sequence_parallel_size": 4}, 12, 2, "must divide the 6 processes of a node"),
    ],
)
def test_a_world_that_the_meshes_do_not_tile_is_refused(sizes, world, nodes, message):
    with pytest.raises(ValueError, match=message):
        FSDPUlyssesStrategy(**sizes).check_world_size(world, nodes)


# -- attempts of one job -----------------------------------------------------------------------------------------------


def test_groups_of_a_rollout_wait_as_long_as_the_others(monkeypatch):
    made = []
    monkeypatch.setattr(dist, "new_subgroups", lambda ranks, **options: made.append((ranks, options)) or ["group"])
    monkeypatch.setattr(
        dist, "all_gather_object", lambda out, value, group: out.__setitem__(slice(None), [value, group])
    )
    strategy = FSDPUlyssesStrategy(timeout_minutes=7.0)
    assert [strategy.all_gather_objects(value, 2) for value in "ab"] == [["a", "group"], ["b", "group"]]
    assert made == [(2, {"timeout": timedelta(minutes=7), "backend": "gloo"})], "once"


def limits(rank: int) -> list[timedelta]:
    """Of the collectives of every mesh; groups of all ranks are the one that was there."""
    strategy = strategy_of(2, data_parallel_replicate=2, timeout_minutes=90)
    groups = [group for mesh in (strategy.data_mesh, strategy.device_mesh) for group in mesh.get_all_groups()]
    assert [dist.get_world_size(group) for group in groups] == [2, 1, 2, 1]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


@pytest.mark.slow
def test_a_collective_of_any_mesh_has_the_limit_that_was_set():
    assert spawn(limits, 2) == [[timedelta(minutes=90)] * 4] * 2


def test_an_attempt_never_meets_under_the_name_of_an_earlier_one():
    """Whatever comes first: a rank that reads what is left of the attempt before must not take it for its own."""
    store, minute = dist.HashStore(), timedelta(minutes=1)
    names = set()
    for late in (0, 1, 2):
        with ThreadPoolExecutor(3) as pool:
            asked = {}
            for rank in sorted(range(3), key=lambda rank, late=late: rank == late):
                time.sleep(0.1 if rank == late else 0)
                asked[rank] = pool.submit(name_of_attempt, store, rank, 3, minute)
            (name,) = {one.result() for one in asked.values()}
        names.add(name)
    assert len(names) == 3
    for failing in ({2: "no file"}, {0: "no file"}, {1: "no file", 2: "no file"}, {0: "a", 2: "b"}):
        with ThreadPoolExecutor(3) as pool:
            ended = [pool.submit(name_of_attempt, store, rank, 3, minute, failing.get(rank, "")) for rank in range(3)]
        first = {error: rank for rank, error in sorted(failing.items(), reverse=True)}
        told = {f"rank {rank} failed: {error}" for error, rank in first.items()}
        for one in ended:
            assert isinstance(one.exception(), FailedElsewhere)
            assert set(str(one.exception()).split("; ")) == told
    with pytest.raises(TimeoutError, match=r"not all of 3 processes came within 0\.1 s"):
        name_of_attempt(store, 1, 3, timedelta(seconds=0.1))
