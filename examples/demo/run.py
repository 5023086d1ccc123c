"""Train the demo and show what came of it.

    held-out reward, samples  ─▶  fit  ─▶  held-out reward, samples  ─▶  table, reward_curve.png, one line of numbers

    python examples/demo/run.py --config configs/demo_ppo.yaml [any option of lightning-rlhf fit]

The exit status is 1 unless the mean reward of the last three iterations is at least twice that of the first three and
the reward on the held-out prompts has risen.
"""

from __future__ import annotations

import csv
import logging
import sys
import time
import warnings
from pathlib import Path
from statistics import mean
from typing import Any, TypeAlias

from pyarrow import parquet
from rich import get_console
from rich.table import Table
from rich.text import Text

from lightning_rlhf.callbacks.samples import visible
from lightning_rlhf.cli import RLHFCLI, run

CURVE = Path("reward_curve.png")
SHOWN = 10
ENDS = 3  # iterations averaged at either end of the curve

Samples: TypeAlias = list[dict[str, Any]]


class DemoCLI(RLHFCLI):
    """``fit`` between two validations."""

    def before_fit(self) -> None:
        self.before, self.samples_before = self.held_out()
        self.start = time.perf_counter()

    def after_fit(self) -> None:
        self.seconds = time.perf_counter() - self.start
        self.after, self.samples_after = self.held_out()

    def held_out(self) -> tuple[float, Samples]:
        """The mean reward of greedy answers to the held-out prompts, and the answers."""
        metrics = self.trainer.validate(self.model, self.datamodule, verbose=False)[0]
        file = self.folder / "samples" / f"validation_{self.trainer.global_step:06d}.parquet"
        return metrics["val/heldout/reward"], parquet.read_table(file).to_pylist()

    @property
    def folder(self) -> Path:
        """Where the run's metrics and samples are."""
        return Path(self.trainer.log_dir or ".")


def rewards_of(metrics: Path) -> list[float]:
    """The mean reward of each iteration."""
    with metrics.open(newline="") as file:
        return [float(row["reward/mean"]) for row in csv.DictReader(file) if row.get("reward/mean")]


def sample_table(before: Samples, after: Samples, answers: list[str]) -> Table:
    """Held-out prompts with what the policy answered before and after the training."""
    table = Table(title=f"{SHOWN} of {len(before)} prompts that were never trained on, greedy answers")
    for title in ("prompt", "answer", "before", "reward", "after", "reward"):
        table.add_column(title, justify="right")
    for old, new, answer in list(zip(before, after, answers, strict=True))[:SHOWN]:
        cells = [old["prompt"].rpartition("\n")[2], answer]
        for sample in (old, new):
            cells += [visible(sample["response"]), f"{sample['reward']:.0f}"]
        table.add_row(*map(Text, cells))
    return table


def draw(rewards: list[float], before: float, after: float, path: Path) -> None:
    """The reward of each iteration, its running mean, and the held-out reward at both ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    iterations = range(1, len(rewards) + 1)
    smooth = [mean(rewards[max(0, i - 5) : i]) for i in iterations]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(iterations, rewards, color="tab:blue", alpha=0.35, label="iteration (sampled)")
    axes.plot(iterations, smooth, color="tab:blue", label="mean of the last 5")
    axes.plot([0, len(rewards)], [before, after], "o--", color="tab:orange", label="held-out prompts (greedy)")
    axes.set(xlabel="iteration", ylabel="mean reward", ylim=(0, 1), title="PPO on SmolLM2-135M-Instruct: sums")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def quiet() -> None:
    """Leave the progress bar and the results on the console (TQDM_DISABLE=1 silences the small bars as well)."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning|jsonargparse")


def main() -> int:
    quiet()
    cli = run(DemoCLI, ["fit", *sys.argv[1:]])
    rewards = rewards_of(cli.folder / "metrics.csv")
    first, last = mean(rewards[:ENDS]), mean(rewards[-ENDS:])
    answers = [row["answer"] for row in cli.datamodule.val_rows["heldout"]]
    get_console().print(sample_table(cli.samples_before, cli.samples_after, answers))
    draw(rewards, cli.before, cli.after, CURVE)
    print(f"curve: {CURVE}    metrics and samples: {cli.folder}")
    print(
        f"demo: reward {first:.3f} -> {last:.3f}, held-out {cli.before:.3f} -> {cli.after:.3f}, {cli.seconds:.0f} s",
        flush=True,
    )
    return 0 if last >= 2 * first and cli.after > cli.before else 1


if __name__ == "__main__":
    sys.exit(main())
