"""Learning curves of the recipes in configs/ on one task with one budget, and TRL's GRPO beside them: mean and range over seeds.

python benchmarks/curves.py --model models/smollm2-135m --recipes grpo ppo gspo --seeds 0 1 2 --parallel 4 --plot curves.png
python benchmarks/curves.py --model models/smollm2-135m --recipes grpo trl --seeds 0 --parallel 1      # times to be compared
python benchmarks/curves.py --model random:tiny --recipes grpo --seeds 0 --steps 2 --every 1 --device cpu

The task is examples/addition.py: 64 prompts x 8 responses of 5 tokens an iteration, reward 1 if the first number is right; every
``--every`` iterations, the share of 500 held-out additions that greedy decoding gets right. What a recipe says of its algorithm
stays; model, reward, data, learning rate, batch and the number of optimizer steps per iteration (``--mini_batches``) are
the same for all (dapo generates more: up to four batches an iteration). `OWN` lists what else is changed, and why. TRL (pip
install trl==1.16) takes the same rows in an order of its own; see trl_learning.py.

Each run is a process; ``--parallel`` of them share the GPU, and then their seconds say nothing. Curves are added to
``--results``; those that are there are not run again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).parent.parent
PROMPTS, RESPONSES, TOKENS = 64, 8, 5
OWN: dict[str, dict[str, Any]] = {
    # every response of this task ends at its limit of tokens; one reward function, which none shapes
    "dapo": {
        "model.init_args.mask_truncated": False,
        "model.init_args.val_metric": None,
        "rollout.filter_groups.metric": None,
    },
    # λ = 1 - 1 / (1.0 · 5): the recipe's 0.05 is for responses of hundreds of tokens; a warm-up that leaves steps to learn in
    "vapo": {
        "model.init_args.advantage_args": {"length_alpha": 1.0, "lam_critic": 1.0},
        "model.init_args.critic_warmup": 5,
    },
}
Point = dict[str, float]


def parse(line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--recipes", nargs="+", default=["grpo"], help="files of configs/ without .yaml, or trl")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100, help="iterations")
    parser.add_argument("--every", type=int, default=10, help="iterations between validations")
    parser.add_argument("--mini_batches", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--results", type=Path, default=Path("runs/curves.json"))
    parser.add_argument("--out", type=Path, default=Path("runs/curves"), help="logs")
    parser.add_argument("--plot", type=Path, help="a picture of the curves")
    return parser.parse_args(line)


def our_command(recipe: str, seed: int, a: argparse.Namespace, folder: Path) -> list[str]:
    engine: dict[str, Any] = {"class_path": "lightning_rlhf.rollout.VLLMEngine"}
    engine["init_args"] = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.1}
    logger = {"save_dir": str(folder.parent), "name": "", "version": folder.name}
    options = {
        "seed_everything": seed,
        "trainer.accelerator": a.device,
        "trainer.devices": 1,
        "trainer.precision": "bf16-mixed" if a.device == "gpu" else "32-true",
        "trainer.max_steps": a.steps,
        "trainer.val_check_interval": a.every,
        "trainer.check_val_every_n_epoch": None,
        "trainer.log_every_n_steps": 1,
        "trainer.enable_progress_bar": False,
        "trainer.enable_checkpointing": False,
        "trainer.logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": logger},
        "model.init_args.model": a.model,
        "model.init_args.reward": ["lightning_rlhf.rewards.first_number"],
        "model.init_args.lr": a.lr,
        "model.init_args.warmup_steps": 0,
        "model.init_args.mini_batches": a.mini_batches,
        "model.init_args.micro_batch_tokens": 32768,
        "model.init_args.val_before_train": True,
        "rollout.engine": engine if a.device == "gpu" else "lightning_rlhf.rollout.TransformersEngine",
        "rollout.sampling.num_generations": RESPONSES,
        "rollout.sampling.temperature": 1.0,
        "rollout.sampling.max_completion_length": TOKENS,
        "data.path": "examples.addition.train",
        "data.val_path": "examples.addition.heldout",
        "data.val_size": 0,
        "data.batch_size": PROMPTS,
        "data.val_batch_size": 500,
        "data.max_prompt_length": 64,
    } | OWN.get(recipe, {})
    line = [
        f"--{name}={json.dumps(value) if isinstance(value, dict | list | None) else value}"
        for name, value in options.items()
    ]
    return [sys.executable, "-m", "lightning_rlhf", "fit", "--config", str(ROOT / f"configs/{recipe}.yaml"), *line]


def read_ours(folder: Path) -> list[Point]:
    """The curve out of what a run logged: held-out accuracy, and the median seconds of an iteration since the last one."""
    points: list[Point] = []
    seconds: list[float] = []
    with open(folder / "metrics.csv") as file:
        for row in csv.DictReader(file):
            if took := row.get("timing_s/step"):
                seconds.append(float(took))
            if accuracy := row.get("val/heldout/reward"):
                points.append({"accuracy": float(accuracy), "seconds": median(seconds or [0.0])})
                seconds = []
    return points


def run(recipe: str, seed: int, a: argparse.Namespace) -> list[Point]:
    """One run in a process of its own.

    Raises:
        RuntimeError: it failed.
    """
    folder = (a.out / f"{recipe}-{seed}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    command = our_command(recipe, seed, a, folder)
    if recipe == "trl":
        spec = {"model": a.model, "seed": seed, "steps": a.steps, "every": a.every, "lr": a.lr, "folder": str(folder)}
        spec |= {"prompts": PROMPTS, "generations": RESPONSES, "tokens": TOKENS, "mini_batches": a.mini_batches}
        (folder / "spec.json").write_text(json.dumps(spec | {"device": a.device}))
        command = [sys.executable, "-m", "benchmarks.trl_learning", str(folder / "spec.json")]
    with socket.socket() as taken:  # TRL's launcher would give every run the same port
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TOKENIZERS_PARALLELISM": "false", "MASTER_PORT": str(port)}
    with open(folder / "log", "w") as log:
        code = subprocess.run(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=os.environ | settings
        ).returncode
    if code:
        raise RuntimeError(f"{recipe}, seed {seed} ended with {code}:\n{(folder / 'log').read_text()[-2000:]}")
    points = json.loads((folder / "points.json").read_text()) if recipe == "trl" else read_ours(folder)
    for place, point in enumerate(points):
        point["iteration"] = min(place * a.every, a.steps)
    return points  # type: ignore[no-any-return]


def measure(a: argparse.Namespace) -> tuple[dict[str, list[list[Point]]], list[str]]:
    """The curves of each recipe, seed by seed, and what failed; results are written as they come.

    Raises:
        ValueError: the results that are there are of other work.
    """
    work = {name: getattr(a, name) for name in ("steps", "every", "mini_batches", "lr", "parallel", "device")}
    work["model"] = Path(a.model).name
    known = json.loads(a.results.read_text()) if a.results.exists() else {"work": work, "runs": {}}
    if known["work"] != work:
        raise ValueError(f"{a.results} is of {known['work']}, not of {work}: give another --results")
    a.results.parent.mkdir(parents=True, exist_ok=True)
    runs, failed = known["runs"], []
    missing = [(r, s) for s in a.seeds for r in a.recipes if str(s) not in runs.get(r, {})]
    with ThreadPoolExecutor(a.parallel) as pool:
        futures = {pool.submit(run, recipe, seed, a): (recipe, seed) for recipe, seed in missing}
        for future in as_completed(futures):
            recipe, seed = futures[future]
            if error := future.exception():
                failed.append(str(error))
                continue
            runs.setdefault(recipe, {})[str(seed)] = future.result()
            a.results.write_text(json.dumps(known))
    chosen = {r: [runs[r][str(s)] for s in a.seeds if str(s) in runs[r]] for r in a.recipes if r in runs}
    return chosen, failed


def table(curves: dict[str, list[list[Point]]], parallel: int) -> str:
    """Markdown: a row per recipe, accuracy after each validation as mean (lowest - highest) over the seeds."""
    places = [int(point["iteration"]) for point in next(iter(curves.values()))[0]]
    lines = [["held-out accuracy after", *(f"{n}" for n in places), *(["s an iteration"] if parallel == 1 else [])]]
    lines.append(["---"] * len(lines[0]))
    for recipe, runs in curves.items():
        columns = [[points[place]["accuracy"] for points in runs] for place in range(len(places))]
        ranges = [f" ({min(c):.3f} - {max(c):.3f})" if min(c) < max(c) else "" for c in columns]
        cells = [f"{mean(c):.3f}{range_}" for c, range_ in zip(columns, ranges, strict=True)]
        seconds = [point["seconds"] for points in runs for point in points[1:]]
        lines.append([recipe, *cells, *([f"{median(seconds):.2f}"] if parallel == 1 else [])])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plot(curves: dict[str, list[list[Point]]], path: Path) -> None:
    """A line for the mean of the seeds and a band for their range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    colours = pyplot.colormaps["tab20"]
    for number, (recipe, runs) in enumerate(curves.items()):
        x = [point["iteration"] for point in runs[0]]
        columns = [[points[place]["accuracy"] for points in runs] for place in range(len(x))]
        axes.plot(x, [mean(c) for c in columns], color=colours(number), label=recipe)
        axes.fill_between(x, [min(c) for c in columns], [max(c) for c in columns], color=colours(number), alpha=0.15)
    axes.set(xlabel="iteration", ylabel="held-out accuracy, greedy")
    axes.legend(ncols=2, fontsize="small")
    figure.savefig(path, dpi=110)


def main(line: Sequence[str] | None = None) -> int:
    a = parse(line)
    curves, failed = measure(a)
    if curves:
        print(table(curves, a.parallel))
        if a.plot:
            plot(curves, a.plot)
    print("\n".join(failed), file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
