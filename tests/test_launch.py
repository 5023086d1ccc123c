"""However its processes are started, a run is the same: Lightning itself, torchrun, two nodes, SLURM."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import StrategyRegistry
from test_runs import QUIET, ROOT, assert_equal_runs, metrics_of, run

from lightning_rlhf import FSDPUlyssesStrategy

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ITSELF = [sys.executable]
TWO = ["--trainer.max_steps=2", *QUIET]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def launched(
    folder: Path, processes: list[tuple[list[str], dict[str, str]]], *arguments: str
) -> list[dict[str, float]]:
    """Start ``LAUNCHER -m lightning_rlhf fit …`` for each (launcher, environment) at once; the metrics of the run."""
    logger = ["--trainer.logger.init_args.save_dir", str(folder), "--trainer.logger.init_args.name=run"]
    fit = ["-m", "lightning_rlhf", "fit", "--config", "configs/tiny_grpo.yaml", *logger, *TWO, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [*launcher, *fit],
            cwd=ROOT,
            env=environment | own,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for launcher, own in processes
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(e[-2000:] for e in errors)
    return metrics_of(folder / "run")


@pytest.fixture(scope="module")
def by_itself(tmp_path_factory: Any) -> list[dict[str, float]]:
    """Two processes on this machine, the second started by the first."""
    return run(tmp_path_factory.mktemp("itself"), "tiny_grpo.yaml", *TWO, "--trainer.devices=2")


def test_torchrun(by_itself, tmp_path):
    launcher = [*TORCHRUN, "--nproc_per_node=2", f"--master_port={free_port()}"]
    assert_equal_runs(by_itself, launched(tmp_path, [(launcher, {})], "--trainer.devices=2"))


def test_two_nodes(by_itself, tmp_path):
    """The command is started once on each node, as Lightning has it."""
    nodes = [(ITSELF, {"NODE_RANK": str(rank)}) for rank in range(2)]
    arguments = ["--trainer.devices=1", "--trainer.num_nodes=2", "--trainer.strategy=hsdp_ulysses"]
    assert_equal_runs(by_itself, launched(tmp_path, nodes, *arguments))


@pytest.mark.slow
def test_two_nodes_by_torchrun(by_itself, tmp_path):
    port = free_port()
    rendezvous = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=static", f"--rdzv_endpoint=127.0.0.1:{port}"]
    nodes = [([*TORCHRUN, *rendezvous, f"--node_rank={rank}"], {}) for rank in range(2)]
    assert_equal_runs(by_itself, launched(tmp_path, nodes, "--trainer.devices=1", "--trainer.num_nodes=2"))


@pytest.mark.slow
def test_slurm(by_itself, tmp_path):
    """The environment of ``srun --nodes=1 --ntasks-per-node=2``; a sequence-parallel pair on the node."""
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    job |= {"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost"}
    tasks = [(ITSELF, job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}) for rank in range(2)]
    arguments = ["--trainer.devices=2", "--trainer.strategy=fsdp_ulysses_sp2"]
    assert_equal_runs(by_itself, launched(tmp_path, tasks, *arguments))


def test_a_group_that_would_span_nodes_is_refused_by_the_first_process_alone(tmp_path):
    fit = ["-m", "lightning_rlhf", "fit", "--config", "configs/tiny_grpo.yaml", *TWO, "--trainer.num_nodes=2"]
    command = [*ITSELF, *fit, "--trainer.strategy=fsdp_ulysses_sp2", "--trainer.logger=false"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    nodes = [
        subprocess.Popen(command, cwd=ROOT, env=environment | {"NODE_RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    errors = [node.communicate(timeout=240)[1].splitlines() for node in nodes]
    lines = [[line for line in error if "error" in line] for error in errors]
    assert all(node.returncode != 0 for node in nodes)
    message = "sequence_parallel_size=2 must divide the 1 processes of a node, a group would span nodes"
    assert len(lines[0]) == 1
    assert message in lines[0][0]
    assert lines[1] == []


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
