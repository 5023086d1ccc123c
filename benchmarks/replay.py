"""One recorded rollout through both trainers: loss and gradient norm of ours and of TRL (pip install trl==1.16) must agree.

python benchmarks/replay.py --device cpu                         # float32: to 1e-4
python benchmarks/replay.py --device cpu --precision bf16-mixed
python benchmarks/replay.py --shape 0.5b --kl 0.1 --optim sgd --lr 0.01 --precision 32-true      # a GPU: to 1e-4
python benchmarks/replay.py --shape 0.5b --kl 0.1 --optim sgd --lr 0.01      # a GPU, bf16-mixed: to 1 %

Responses of ragged lengths are sampled once from the initial weights by transformers. In every iteration each side gets
their token ids, scores them by the same function, takes ``--epochs`` optimizer steps on all of them and goes on with the weights
that it has then. From the second step on the probability ratio is not 1 and, with ``--kl``, the distance to the reference not 0.
Settings under which both compute the same:

    ours                                  TRL
    aggregation: token-mean               loss_type="dapo"              both: over the whole optimizer step; both defaults
    advantage: grpo                       scale_rewards="group"         both defaults; std + 1e-6 against std + 1e-4, so:
    reward_weights: [1000]                reward_weights=[1000]         rewards so large that neither counts
    clip_dual: null                       delta=None (default)          TRL has no lower bound of a negative advantage's loss
    kl: {estimator: k3}                   use_bias_correction_kl=False  TRL's default multiplies the KL by the ratio
    clip 0.2, gradients to norm 1, AdamW without decay, no importance-sampling correction     the same on both

``loss`` is that of an optimizer step with its KL term, ``norm`` that of its gradient before clipping; means over the ``--epochs``
steps of an iteration, which is what ours logs. Differences are relative. Exits with 1 if one is above ``--limit``. Adam's first
steps move every weight by the learning rate in the direction of its gradient's sign, also where that is rounding alone: with a
large model, whose sums are rounded otherwise on the two sides, they lead apart two runs that compute the same. SGD's do not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from lengths import Lengths
from random_model import SHAPES, write
from recorded import write_recorded
from step import ROOT, read_ours, run, write_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from lightning_rlhf.rollout import EngineSetup, TransformersEngine
from lightning_rlhf.types import Sampling

SGD = {"class_path": "torch.optim.SGD", "init_args": {"fused": False}}  # torch shards no fused one
LIMITS = {"32-true": 1e-4, "bf16-mixed": 1e-2}


def record(a: argparse.Namespace, model: Path, data: Path, file: Path) -> None:
    """Sample the responses and write their token ids."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    device = torch.device("cpu" if a.device == "cpu" else "cuda")
    engine, lengths = TransformersEngine(), Lengths.parse(a.lengths)
    engine.setup(EngineSetup(str(model), device, torch.float32, (), 0, a.prompt_tokens + lengths.longest, 64))
    engine.load_weights(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict().items(), 0)
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in data.read_text().splitlines()]
    each = [ids for ids in prompts for _ in range(a.generations)]
    sampling = Sampling(max_completion_length=lengths.longest, ignore_eos=True)
    drawn = engine.generate(each, sampling, seeds=range(len(each)))
    engine.close()
    write_recorded(file, each, [one.token_ids[: lengths(0, i)] for i, one in enumerate(drawn)])


def our_rows(a: argparse.Namespace, model: Path, data: Path, recorded: Path, folder: Path) -> list[dict[str, float]]:
    options = {
        "trainer.accelerator": a.device,
        "trainer.precision": a.precision,
        "trainer.max_steps": a.iterations,
        "trainer.logger.init_args.save_dir": folder,
        "trainer.logger.init_args.name": "",
        "trainer.logger.init_args.version": "ours",
        "model.init_args.model": model,
        "model.init_args.lr": a.lr,
        "model.init_args.ppo_epochs": a.epochs,
        "model.init_args.reward_weights": "[1000]",
        **({"model.init_args.optimizer": SGD} if a.optim == "sgd" else {}),
        "model.init_args.clip_dual": "null",
        "model.init_args.kl.coef": a.kl,
        "rollout.engine": "benchmarks.engines.Replay",
        "rollout.engine.init_args.path": recorded,
        "rollout.sampling.num_generations": a.generations,
        "rollout.sampling.max_completion_length": Lengths.parse(a.lengths).longest,
        "data.path": data,
        "data.batch_size": a.prompts,
    }
    command = [sys.executable, "-m", "lightning_rlhf", "fit", "--config", str(ROOT / "benchmarks/grpo_step.yaml")]
    run([*command, *(f"--{name}={value}" for name, value in options.items())], folder / "ours.log")
    rows = read_ours(folder / "ours")["rows"]
    return [
        {"loss": r["actor/pg_loss"] + a.kl * r.get("actor/kl_loss", 0.0), "norm": r["actor/grad_norm"]} for r in rows
    ]


def trl_rows(a: argparse.Namespace, model: Path, data: Path, recorded: Path, folder: Path) -> list[dict[str, float]]:
    settings = {"num_iterations": a.epochs, "reward_weights": [1000.0], "use_bias_correction_kl": False}
    settings |= {"use_vllm": False, "generation_kwargs": {}, "bf16": a.precision != "32-true"}
    settings |= {"optim": "sgd"} if a.optim == "sgd" else {}
    names = ("device", "prompts", "generations", "prompt_tokens", "lr", "kl")
    spec: dict[str, Any] = {name: getattr(a, name) for name in names}
    spec |= {"devices": 1, "steps": a.iterations * a.epochs, "longest": Lengths.parse(a.lengths).longest}
    spec |= {"model": str(model), "data": str(data), "folder": str(folder), "recorded": str(recorded)}
    spec |= {"lengths": None, "micro_batch_tokens": 20480, "gpu_memory": 0.0, "settings": settings}
    (folder / "spec.json").write_text(json.dumps(spec))
    run([sys.executable, "-m", "benchmarks.trl_side", str(folder / "spec.json")], folder / "trl.log")
    rows = json.loads((folder / "rows.json").read_text())["rows"]
    steps = [rows[i : i + a.epochs] for i in range(0, len(rows), a.epochs)]
    return [{"loss": mean(r["loss"] for r in s), "norm": mean(r["grad_norm"] for r in s)} for s in steps]


def compare(ours: list[dict[str, float]], trl: list[dict[str, float]]) -> list[float]:
    """Print both sides; returns the relative differences."""
    print("| iteration | loss, ours | TRL | difference | gradient norm, ours | TRL | difference |\n|" + " --- |" * 7)
    differences = []
    for i, (mine, theirs) in enumerate(zip(ours, trl, strict=True)):
        cells = []
        for name in ("loss", "norm"):
            differences.append(abs(mine[name] / theirs[name] - 1))
            cells += [f"{mine[name]:.7f}", f"{theirs[name]:.7f}", f"{differences[-1]:.1e}"]
        print(f"| {i} | {' | '.join(cells)} |")
    return differences


def main(line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument(
        "--lengths", default="lognormal:24,0.6,64", help="fixed:LENGTH or lognormal:MEDIAN,SIGMA,LONGEST"
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt_tokens", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2, help="optimizer steps per iteration, each on all responses")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--optim", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--kl", type=float, default=0.0)
    parser.add_argument("--precision", choices=tuple(LIMITS), help="default: float32 on cpu only")
    parser.add_argument("--limit", type=float, help="default: 1e-4 in float32, 1e-2 in bf16-mixed")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    a = parser.parse_args(line)
    disable_progress_bar()
    a.precision = a.precision or ("32-true" if a.device == "cpu" else "bf16-mixed")
    limit = LIMITS[a.precision] if a.limit is None else a.limit
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, data, recorded = folder / "model", folder / "prompts.jsonl", folder / "recorded.json"
        write(a.shape, str(model))
        write_prompts(data, a.prompts, a.prompt_tokens)
        record(a, model, data, recorded)
        differences = compare(*(rows(a, model, data, recorded, folder) for rows in (our_rows, trl_rows)))
    agree = all(difference <= limit for difference in differences)  # NaN does not
    print(f"\n{a.precision}: {'agree to' if agree else 'further apart than'} {limit:.0e}")
    return int(not agree)


if __name__ == "__main__":
    raise SystemExit(main())
