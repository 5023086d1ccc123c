"""From one GPU to all of a host: whole steps by data, sequence and tensor parallelism, long sequences, and a rank that dies.

python benchmarks/scaling.py --gpus 8
python benchmarks/scaling.py --gpus 4 --rows "step 1.5b"          # those whose names begin so; --list names all
python benchmarks/scaling.py --gpus 2 --device cpu --shapes tiny --prompts 2 --prompt_tokens 8 --tokens 4 --longest 64

    step SHAPE dp N            the same 256 responses on N GPUs: strong scaling
    step SHAPE dp N, weak      256 responses per GPU
    step SHAPE hsdp 2xM        two replicas, each sharded over M GPUs
    step SHAPE sp N            sequence parallel over N GPUs
    step SHAPE tp N            data parallel, with engines over N GPUs each
    long SHAPE sp N            one sequence of --longest tokens x N, LoRA, recomputed but for attention, activations on the host
    kill N                     SIGKILL of the last rank in a run: how long the others took to end, then it goes on
    reshard N to M             the same run, its checkpoint goes on on M GPUs

Steps are those of step.py, long sequences those of update.py, kills those of resume.py; each row is a process of its own, its
output is in ``--out``. Rows that are there with the same arguments are not run again. Speed-up is that of tokens per second over
the row of one GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
FITS = {"7b": ("--gpu_memory=0.25", "--micro_batch_tokens=12800", "--model.init_args.gradient_checkpointing=selective")}
"""With which a step of the shape fits one H200; the same on all numbers of GPUs."""
LONG = "{lora: {r: 16}, gradient_checkpointing: selective, tiled_mlp: 16384, offload_activations: true%s}"


@dataclass(frozen=True)
class Row:
    """One measurement. ``script`` is a file of this folder, with arguments and, where torchrun starts it, GPUs."""

    name: str
    gpus: int
    script: str
    arguments: tuple[str, ...]
    torchrun: bool = False


def parse(line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True, help="the most; rows are for 1, 2, 4, … of them")
    parser.add_argument("--rows", default="", help="only those whose names begin so")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--shapes", nargs="+", default=["1.5b", "7b"])
    parser.add_argument(
        "--prompts", type=int, default=32, help="of a step, with 8 responses each; per GPU in weak rows"
    )
    parser.add_argument("--prompt_tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024, help="of a response")
    parser.add_argument("--longest", type=int, default=262144, help="tokens per GPU of long rows")
    parser.add_argument("--switches", default=", attention: flash_attention_4", help="more of them, for long rows")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--options", nargs="*", default=[], help="for lightning-rlhf fit, in step rows: a.b=c")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--out", type=Path, default=Path("runs/scaling"))
    return parser.parse_args(line)


def rows(a: argparse.Namespace) -> list[Row]:
    counts = [1 << k for k in range(a.gpus.bit_length()) if 1 << k <= a.gpus]
    strategy, engine = "--trainer.strategy.init_args.", "--rollout.engine.init_args."
    found = []

    def step(name: str, shape: str, gpus: int, *options: str, prompts: int = a.prompts) -> Row:
        work = [f"--shape={shape}", f"--devices={gpus}", f"--prompts={prompts}", f"--prompt_tokens={a.prompt_tokens}"]
        work += [
            f"--lengths=fixed:{a.tokens}",
            f"--steps={a.steps}",
            "--warmup=1",
            "--only=ours",
            f"--device={a.device}",
        ]
        given = [*(FITS.get(shape, ()) if a.device == "gpu" else ()), *(f"--{option}" for option in a.options)]
        if any(option.startswith(strategy) for option in options):
            options = ("--trainer.strategy=lightning_rlhf.FSDPUlyssesStrategy", *options)
        return Row(f"step {shape} {name}", gpus, "step.py", (*work, *options, *given))

    for shape in a.shapes:
        for n in counts:
            found.append(step(f"dp {n}", shape, n))
            if n > 1:
                found.append(step(f"dp {n}, weak", shape, n, prompts=a.prompts * n))
                found.append(step(f"sp {n}", shape, n, f"{strategy}sequence_parallel_size={n}"))
                if a.device == "gpu":
                    found.append(step(f"tp {n}", shape, n, f"{engine}tensor_parallel_size={n}"))
            if n > 2:
                found.append(step(f"hsdp 2x{n // 2}", shape, n, f"{strategy}data_parallel_replicate=2"))
        for n in counts:
            work = [
                f"--shape={shape}",
                f"--lengths={a.longest * n}",
                "--tokens=1",
                "--steps=1",
                f"--sp={n}",
                f"--device={a.device}",
            ]
            work += [f"--switches={LONG % (a.switches if a.device == 'gpu' else '')}"]
            work += ["--precision=32-true"] if a.device == "cpu" else []
            found.append(Row(f"long {shape} sp {n}", n, "update.py", tuple(work), torchrun=n > 1))
    config = "configs/tiny_ppo.yaml" if a.device == "cpu" else "configs/grpo_smollm2_gpu.yaml"
    for n in counts[1:]:
        work = [f"--config={ROOT / config}", "--steps=6", "--kill_at=5", f"--rank={n - 1}", f"--trainer.devices={n}"]
        found.append(Row(f"kill {n}", n, "resume.py", tuple(work)))
        found.append(Row(f"reshard {n} to {n // 2}", n, "resume.py", (*work, f"--resume_devices={n // 2}")))
    return found


def run(row: Row, a: argparse.Namespace) -> dict[str, Any]:
    """Its result; of a row that failed the last line that it wrote."""
    folder = (a.out / row.name.replace(" ", "_").replace(",", "")).resolve()
    done = folder / "result.json"
    if done.exists() and (known := json.loads(done.read_text()))["arguments"] == list(row.arguments):
        return known  # type: ignore[no-any-return]
    folder.mkdir(parents=True, exist_ok=True)
    start = ["-m", "torch.distributed.run", f"--nproc_per_node={row.gpus}"] if row.torchrun else []
    own = [f"--out={folder}"] if row.script == "step.py" else []
    command = [sys.executable, *start, str(ROOT / "benchmarks" / row.script), *row.arguments, *own]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (folder / "log").write_text(ended.stdout)
    result: dict[str, Any] = {"gpus": row.gpus, "arguments": list(row.arguments)}
    lines = [line for line in ended.stdout.splitlines() if line.strip()]
    if ended.returncode:
        return result | {"failed": next((line for line in reversed(lines) if "rror" in line), lines[-1])[:200]}
    if row.script == "step.py":
        measured = json.loads((folder / "ours.json").read_text())
        steps = measured["rows"][1:]
        for name in ("step", "generate", "update"):
            result[f"{name}, s"] = round(median(step[name] for step in steps), 3)
        result["tokens/s"] = round(median(step["tokens"] / step["step"] for step in steps))
        result["MFU"] = f"{median(step.get('perf/mfu', 0.0) for step in steps):.1%}"
        result["peak GiB"] = measured["peak"] and round(measured["peak"], 1)
    elif row.script == "update.py":
        cells = next(line for line in reversed(lines) if line.rstrip().endswith("}")).partition("{")[0].split()
        result["what"] = "{} tokens, {} s, {} tokens/s on a GPU, MFU {}, {} GiB".format(
            *cells[:1], *cells[2:5], cells[6]
        )
    else:
        result["what"] = "; ".join(lines[-2:])
    done.write_text(json.dumps(result))
    return result


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: a table of steps with their speed-up, and a list of the rest."""
    names = ["step, s", "generate, s", "update, s", "tokens/s", "MFU", "peak GiB"]
    lines = [["row", *names, "speed-up"], ["---"] * (len(names) + 2)]
    rest = []
    for name, result in results.items():
        if "tokens/s" in result:
            one = results.get(" ".join([*name.split()[:2], "dp 1"]), {}).get("tokens/s")
            speed = f"{result['tokens/s'] / one:.2f} on {result['gpus']}" if one else ""
            lines.append([name, *(str(result[key]) for key in names), speed])
        else:
            rest.append(f"{name}: {result.get('what') or result['failed']}")
    shown = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([*(shown if len(shown) > 2 else []), *rest])


def main(line: Sequence[str] | None = None) -> int:
    a = parse(line)
    chosen = [row for row in rows(a) if row.name.startswith(a.rows)]
    if a.list:
        print("\n".join(row.name for row in chosen))
        return 0
    results = {}
    for row in chosen:
        results[row.name] = run(row, a)
        print(f"{row.name}: {results[row.name]}", file=sys.stderr, flush=True)
    text = table(results)
    (a.out / "table.md").write_text(text + "\n")
    print(text)
    return int(any("failed" in result for result in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
