"""The classical pipeline on the tiny model, on one core: supervised fine-tuning, a reward model, PPO against it.

python examples/pipeline/run.py          or: make pipeline
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE, RUNS = Path(__file__).parent, Path("runs/pipeline")


def column(step: str, name: str) -> list[float]:
    """A metric of a step, over its iterations."""
    with (RUNS / step / "metrics.csv").open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def main() -> None:
    """Each step is a command of its own; results are in runs/pipeline."""
    start = time.monotonic()
    shutil.rmtree(RUNS, ignore_errors=True)
    for step in ("sft", "reward", "ppo"):
        subprocess.run(
            [sys.executable, "-m", "lightning_rlhf", "fit", "--config", str(HERE / f"{step}.yaml")], check=True
        )
    loss, accuracy = column("sft", "val/heldout/loss"), column("reward", "val/heldout/accuracy")
    score, friendly = column("ppo", "reward/reward_model/mean"), column("ppo", "reward/truly_friendly/mean")
    print(
        f"SFT: held-out loss {loss[0]:.2f} -> {loss[-1]:.2f}; reward model: held-out accuracy {accuracy[-1]:.2f};"
        f" PPO: reward model's score {score[0]:.2f} -> {score[-1]:.2f}, friendly words {friendly[0]:.0%} -> {friendly[-1]:.0%};"
        f" {time.monotonic() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
