"""Kill a run at random moments, resume it until it ends, and compare it with one that was left alone.

python tests/chaos.py --kills 100
python tests/chaos.py --kills 20 --ranks 1 --seed 3

A run of the tiny PPO model on the CPU: two epochs and a half of prompts, a checkpoint after every second iteration, half of the
attempts' kills at a random time, the others inside a save, in the middle of some tensor or when some file was written. SIGKILL
goes to one rank, whose end the others must notice, or to all; at a random time half of the signals are SIGTERM, after which
nothing at all may be lost. Each attempt resumes by ``ckpt_path="last"``; half of them save while the run goes on.

Every metric that any attempt logged, every prompt and every response of any iteration, and the weights and the optimizer's state
at the end must be those of the run that was left alone, to the last bit. Prints what was done and found, exits with 1 if anything
differs or hangs.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.distributed.tensor import DTensor
from toys import TINY_MODULE, even_tokens

from lightning_rlhf import (
    KL,
    FSDPUlyssesStrategy,
    IterationCheckpoint,
    PPOLightningModule,
    Preemption,
    PromptDataModule,
    RolloutCallback,
    Sampling,
)
from lightning_rlhf.callbacks.preemption import PREEMPTED
from lightning_rlhf.modules.losses import Correction

ITERATIONS = 10
SAVE_EVERY = 2
SAME_AT_ANY_SPEED = ("actor/", "critic/", "reward/", "completions/", "rollout/logprob", "rollout/is")
PATIENCE = 60.0
"""Seconds in which ranks must end when another is gone."""
WHOLE_RUN = 600.0
"""Seconds that no attempt takes."""


@dataclass(frozen=True)
class Kill:
    """A signal, to one rank or to all.

    Args:
        rank: whom it meets; None is every rank at once.
        number: SIGKILL, or SIGTERM if it comes after some seconds.
        after: seconds from the start of the attempt; or
        write: the number of the write, counted within this attempt's saves, that it comes in.
    """

    rank: int | None
    number: int = signal.SIGKILL
    after: float | None = None
    write: int | None = None


class Diary(pl.Callback):
    """One line per iteration: which prompts, which responses."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            experience = pl_module.last_experience
            tokens = json.dumps([sequence.tolist() for sequence in experience.sequences])
            line = {"rows": experience.group.tolist(), "tokens": hashlib.sha256(tokens.encode()).hexdigest()}
            with self.file.open("a") as file:
                file.write(json.dumps({"iteration": trainer.global_step, **line}) + "\n")


@dataclass(frozen=True)
class Options:
    """Of an attempt.

    Args:
        ranks: processes.
        async_level: of the rollouts.
        async_save: of the checkpoints.
    """

    ranks: int
    async_level: int
    async_save: bool


def attempt(rank: int, port: int, folder: Path, name: str, options: Options, kill: Kill | None) -> None:
    """One rank of a run that goes on from the last checkpoint in ``folder``, if there is one."""
    ranks, async_level = options.ranks, options.async_level
    with open(folder / f"{name}.{rank}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "chaos",
    }
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    count = count_writes(kill.write if kill is not None and kill.rank in (None, rank) else None)
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=FSDPUlyssesStrategy(),
        max_steps=ITERATIONS,
        precision="32-true",
        logger=CSVLogger(str(folder), name="", version=name, flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            RolloutCallback(sampling=Sampling(max_completion_length=6, num_generations=2), async_level=async_level),
            IterationCheckpoint(folder / "checkpoints", every_n_train_steps=SAVE_EVERY, async_save=options.async_save),
            Preemption(),
            Diary(folder / f"{name}.diary"),
        ],
    )
    data = PromptDataModule(path="toys.prompts", batch_size=8, max_prompt_length=32)
    correction = Correction() if async_level else None
    module = PPOLightningModule(
        **TINY_MODULE, reward=[even_tokens], kl=KL(0.01), mini_batches=2, lr_schedule="linear", correction=correction
    )
    trainer.fit(module, datamodule=data, ckpt_path="last")
    digest = hashlib.sha256()
    for tensor in state_of(module, trainer):  # collectives: on every rank
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    if rank == 0:
        (folder / "end").write_text(digest.hexdigest())
        (folder / "writes").write_text(str(count[0]))
    os._exit(0)


def state_of(module: pl.LightningModule, trainer: pl.Trainer) -> Iterator[torch.Tensor]:
    states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    for tensor in [*module.parameters(), *states]:
        yield (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def count_writes(last: int | None) -> list[int]:
    """The number so far of tensors, markers and files that this process wrote into checkpoints; the ``last`` one stays half
    written, and the process with it."""
    count, fsync, save = [0], os.fsync, torch.save

    def counted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        count[0] += 1
        if count[0] == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted_save(value: Any, file: Any, **options: Any) -> None:
        count[0] += 1
        if count[0] == last:
            whole = io.BytesIO()
            save(value, whole, **options)
            file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        save(value, file, **options)

    os.fsync, torch.save = counted_fsync, counted_save
    return count


def run(folder: Path, name: str, options: Options, kill: Kill | None) -> tuple[int, list[str]]:
    """(exit code of all ranks, 1 if they differ; what was wrong with how they ended)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    arguments = (port, folder, name, options, kill)
    processes = [context.Process(target=attempt, args=(rank, *arguments), daemon=True) for rank in range(options.ranks)]
    for process in processes:
        process.start()
    if kill is not None and kill.after is not None:
        processes[0].join(kill.after)
        for rank, process in enumerate(processes):
            if kill.rank in (None, rank) and process.is_alive():
                os.kill(process.pid or 0, kill.number)
    limit, wrong = time.monotonic() + WHOLE_RUN, []
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            limit = min(limit, time.monotonic() + PATIENCE)
        if time.monotonic() > limit:
            wrong += [f"{name}: rank {rank} hangs" for rank, process in enumerate(processes) if process.is_alive()]
            for process in processes:
                process.kill()
        time.sleep(0.02)
    codes = {process.exitcode or 0 for process in processes}
    return codes.pop() if len(codes) == 1 else 1, wrong


def lines_of(folder: Path, name: str) -> dict[tuple[str, int], Any]:
    """What a run said of each iteration, by kind and iteration; half a line at its end is left out."""
    found: dict[tuple[str, int], Any] = {}
    diary, metrics = folder / f"{name}.diary", folder / name / "metrics.csv"
    for line in diary.read_text().splitlines() if diary.exists() else ():
        entry = json.loads(line)
        found["responses", entry.pop("iteration")] = entry
    if metrics.exists():
        text = metrics.read_text()
        for row in csv.DictReader(text[: text.rfind("\n") + 1].splitlines()):
            values = {key: value for key, value in row.items() if value and key.startswith(SAME_AT_ANY_SPEED)}
            if values:
                found["metrics", int(row["step"])] = values
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inside_saves", action="store_true", help="no kill at a random time")
    parser.add_argument("--async_level", type=int, choices=(0, 1), default=0)
    a = parser.parse_args(arguments)
    draw, runs, wrong = random.Random(a.seed), 0, []
    killed = in_saves = beside = told = resumed = 0
    with tempfile.TemporaryDirectory() as name:
        left_alone = Path(name) / "left_alone"
        left_alone.mkdir()
        began = time.monotonic()
        code, problems = run(left_alone, "run", Options(a.ranks, a.async_level, async_save=False), None)
        took = time.monotonic() - began
        if code:
            print((left_alone / "run.0.log").read_text()[-3000:])
            return 1
        want, end = lines_of(left_alone, "run"), (left_alone / "end").read_text()
        writes = int((left_alone / "writes").read_text())
        while killed < a.kills:
            folder = Path(name) / f"run{runs}"
            folder.mkdir()
            codes: list[int] = []
            while codes[-1:] != [0] and len(codes) < 100:
                kill = None
                if killed < a.kills and draw.random() < 0.9:
                    whom = draw.choice([None, *range(a.ranks)])
                    write = draw.randint(1, writes) if a.inside_saves or draw.random() < 0.5 else None
                    number = signal.SIGKILL if write else draw.choice([signal.SIGKILL, signal.SIGTERM])
                    after = None if write else took * draw.random() ** 0.5  # the first half starts up
                    kill = Kill(whom, number, after, write)
                options = Options(a.ranks, a.async_level, async_save=draw.random() < 0.5)
                code, problems = run(folder, f"try{len(codes)}", options, kill)
                codes.append(code)
                wrong += problems
                killed += code != 0
                inside = code != 0 and kill is not None and kill.write is not None
                in_saves += inside
                beside += inside and options.async_save
                told += code == PREEMPTED
                if code and kill is None:
                    wrong.append(f"run {runs}: {(folder / f'try{len(codes) - 1}.0.log').read_text()[-1500:]}")
                    break
            last = 0  # iteration that must not be done again
            for i, code in enumerate(codes):
                said = lines_of(folder, f"try{i}")
                done = sorted({iteration for kind, iteration in said if kind == "responses"})
                resumed += done[:1] > [1]
                if done and done[0] <= last:
                    wrong.append(f"run {runs}, attempt {i}: iteration {last} was done and lost")
                last = max([last, *done]) if code == PREEMPTED else 0 if done else last
                for key, value in said.items():
                    if value != want.get(key):
                        wrong.append(f"run {runs}, attempt {i}: {key[0]} of iteration {key[1]} differ")
            if codes[-1] == 0 and (folder / "end").read_text() != end:
                wrong.append(f"run {runs}: the state at the end differs")
            runs += 1
            print(
                f"{runs} runs, {killed} kills ({in_saves} inside a save, {beside} of them beside the run; {told} by SIGTERM),"
                f" {resumed} resumes from a checkpoint, {len(wrong)} differences",
                flush=True,
            )
    print("".join(f"{line}\n" for line in wrong), end="")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
