"""Kill a run with a real engine, let it go on from its last checkpoint, and compare it with one that was left alone.

python benchmarks/resume.py --config configs/grpo_smollm2_gpu.yaml --steps 8 --kill_at 5
python benchmarks/resume.py --config configs/grpo_smollm2_gpu.yaml --steps 8 --kill_at 5 --rank 1 --trainer.devices 2
python benchmarks/resume.py --config configs/grpo_smollm2_gpu.yaml --kill_at 5 --rank 3 --trainer.devices 4 --resume_devices 2
python benchmarks/resume.py --config configs/tiny_ppo.yaml --steps 4 --kill_at 3      # a CPU: equal to the last bit

A checkpoint is due after every second iteration. SIGKILL comes in iteration ``--kill_at``, ``--after`` seconds after the end of
the one before; to all processes, or with ``--rank`` to that one, whose end the others must notice. Arguments that are not listed
below go to ``lightning-rlhf fit``.

Prints, for each iteration, how many responses of the run left alone came again in the first and in the resumed attempt, and how
far their mean rewards and gradient norms differ. Exits with 1 if an iteration is missing, if a response up to the first iteration
after the checkpoint is another one, or if processes outlive the dead rank by ``--patience`` seconds. (On a GPU gradients are
summed in an order that changes, so later responses may differ.)
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parent.parent
SAVE_EVERY = 2
Diary = dict[int, dict[str, Any]]


def command(a: argparse.Namespace, folder: Path, name: str) -> list[str]:
    checkpoint = {"dirpath": str(folder / "checkpoints"), "every_n_train_steps": SAVE_EVERY}
    callbacks = [
        {"class_path": "lightning_rlhf.IterationCheckpoint", "init_args": checkpoint},
        {"class_path": "benchmarks.engines.Diary", "init_args": {"path": str(folder / name)}},
    ]
    options = {
        "trainer.max_steps": a.steps,
        "trainer.val_check_interval": None,
        "trainer.logger": False,
        "trainer.enable_progress_bar": False,
        "trainer.callbacks": callbacks,
        "ckpt_path": "last",
    }
    line = [f"--{name}={json.dumps(value) if name != 'ckpt_path' else value}" for name, value in options.items()]
    return [sys.executable, "-m", "lightning_rlhf", "fit", "--config", str(a.config), *line, *a.others]


def read(file: Path) -> Diary:
    """What a run wrote of each iteration, but for half a line at its end."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return {(entry := json.loads(line))["iteration"]: entry for line in lines if line.endswith("\n")}


def start(a: argparse.Namespace, folder: Path, name: str) -> subprocess.Popen[bytes]:
    line = command(a, folder, name)
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(line, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def whole(a: argparse.Namespace, folder: Path, name: str) -> Diary:
    """Run to the end.

    Raises:
        RuntimeError: it failed.
    """
    if start(a, folder, name).wait():
        raise RuntimeError((folder / f"{name}.log").read_text()[-3000:])
    return read(folder / name)


def killed(a: argparse.Namespace, folder: Path, name: str) -> tuple[Diary, float]:
    """Run until the kill; also the seconds that the last process took to end after it.

    Raises:
        RuntimeError: it ended before.
    """
    process = start(a, folder, name)
    while a.kill_at - 1 not in read(folder / name):
        if process.poll() is not None:
            raise RuntimeError((folder / f"{name}.log").read_text()[-3000:])
        time.sleep(0.01)
    time.sleep(a.after)
    if a.rank is None:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        os.kill(read(folder / name)[a.kill_at - 1]["processes"][a.rank], signal.SIGKILL)
    began = time.monotonic()
    try:
        process.wait(a.patience)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    return read(folder / name), time.monotonic() - began


def shown(want: dict[str, Any], got: dict[str, Any] | None) -> list[str]:
    """Responses that are equal, differences of reward and gradient norm."""
    if got is None:
        return ["", "", ""]
    equal = sum(a == b for a, b in zip(want["responses"], got["responses"], strict=True))
    differences = [f"{abs(want[key] - got[key]):.1e}" for key in ("reward", "norm")]
    return [f"{equal} of {len(want['responses'])}", *differences]


def main(line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--kill_at", type=int, default=5, help="iteration, at least 4: a checkpoint lies before it")
    parser.add_argument("--after", type=float, default=0.0, help="seconds")
    parser.add_argument("--rank", type=int, help="default: all processes")
    parser.add_argument(
        "--at_once", action="store_true", help="the run left alone beside the other: where both have room"
    )
    parser.add_argument("--resume_devices", type=int, help="go on on so many; default: as many")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds")
    a, a.others = parser.parse_known_args(line)
    a.config = a.config.resolve()
    with TemporaryDirectory() as name:
        folders = [Path(name) / attempt for attempt in ("alone", "killed")]
        for folder in folders:
            folder.mkdir()
        with ThreadPoolExecutor() as threads:
            alone = threads.submit(whole, a, folders[0], "run")
            if not a.at_once:
                alone.result()
            first, seconds = killed(a, folders[1], "first")
            want = alone.result()
        if a.resume_devices is not None:
            a.others.append(f"--trainer.devices={a.resume_devices}")
        second = whole(a, folders[1], "second")
    print(
        "| iteration | equal responses, killed | reward | gradient norm | resumed | reward | gradient norm |\n"
        + "|---" * 7
        + "|"
    )
    for i, entry in want.items():
        print(f"| {' | '.join([str(i), *shown(entry, first.get(i)), *shown(entry, second.get(i))])} |")
    resumed = min(second)
    wrong = [f"iteration {i} is missing" for i in range(1, a.steps + 1) if i not in first and i not in second]
    wrong += [f"the first attempt ended {seconds:.0f} s after the kill"] if seconds >= a.patience else []
    equal = all(d[i]["responses"] == want[i]["responses"] for d in (first, second) for i in d if i <= resumed)
    wrong += [] if equal else [f"responses differ up to iteration {resumed}"]
    print(f"\nended {seconds:.1f} s after the kill, went on with iteration {resumed}")
    print("; ".join(wrong) or "as if nothing had happened")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
