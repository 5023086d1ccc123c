"""Tokens per second of `VLLMEngine` beside vLLM on its own in several set-ups: random weights, responses of given lengths.

python benchmarks/generation.py --shape 1.5b --lengths fixed:1024 --setups ours "{}" "{processes: 2}" "{n: true, seeds: false}"
python benchmarks/generation.py --setups ours --profile

``ours`` is `VLLMEngine` as a run has it, ``ours+log_probs`` with the sampler's log-probs, ``ours+vllm_steps`` without
``shorten_steps`` (both may be given). Any other set-up is ``vllm.LLM`` alone, its arguments as YAML, and besides:

    processes   1 (default): the engine in this process, as training needs it; 2: vLLM's default, an engine core of its own
    n           true: one request per prompt with n responses, where they have one length; else one per response
    seeds       false: none; else one per response, as ours

Each set-up runs in a new process: a round that compiles and captures, then ``--rounds`` that count. Prompts are new in every
round, so the prefix cache serves the responses of one prompt only. ``--profile`` prints where the Python of one more round is,
by samples of the main thread's stack.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from multiprocessing import active_children
from pathlib import Path
from statistics import median
from threading import Event, Thread, main_thread
from typing import Any

import torch
import yaml
from lengths import Lengths
from random_model import SHAPES, write

ROOT = Path(__file__).parent.parent
Generate = Callable[[list[list[int]], list[int]], list[int]]
"""(token ids of prompts, length of each response), prompt-major, to the numbers of tokens that came."""


def ours(a: argparse.Namespace, model: str, given: set[str]) -> Generate:
    """`VLLMEngine` with the model's own weights."""
    from benchmarks.engines import ForcedVLLM
    from lightning_rlhf.rollout.engine import EngineSetup
    from lightning_rlhf.types import Sampling

    if not given <= {"log_probs", "vllm_steps"}:
        raise ValueError(f"ours may have log_probs and vllm_steps, got {sorted(given)}")
    longest = Lengths.parse(a.lengths).longest
    options = {"gpu_memory_utilization": a.gpu_memory, "shorten_steps": "vllm_steps" not in given}
    engine = ForcedVLLM(a.lengths, load_format="auto", **options)
    count = a.prompts * a.generations
    engine.setup(EngineSetup(model, device(), torch.bfloat16, (), 0, a.prompt_tokens + longest, count))
    engine.weight_version = 0
    sampling = Sampling(max_completion_length=longest, ignore_eos=True)

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[int]:
        seeds = [random.getrandbits(63) for _ in prompts]
        done = engine.generate(prompts, sampling, seeds=seeds, log_probs="log_probs" in given)
        return [len(one.token_ids) for one in done]

    return generate


def alone(a: argparse.Namespace, model: str, given: dict[str, Any]) -> Generate:
    """``vllm.LLM``."""
    given = dict(given)
    together, seeds = given.pop("n", False), given.pop("seeds", True)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(given.pop("processes", 1) - 1)
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    longest = a.prompt_tokens + Lengths.parse(a.lengths).longest
    options = {"gpu_memory_utilization": a.gpu_memory, "max_model_len": longest} | given
    llm = LLM(model, dtype="bfloat16", disable_log_stats=True, **options)

    def parameters(length: int, n: int) -> Any:
        seed = random.getrandbits(63) if seeds else None
        final = RequestOutputKind.FINAL_ONLY
        return SamplingParams(n=n, seed=seed, max_tokens=length, ignore_eos=True, detokenize=False, output_kind=final)

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[int]:
        step, n = (a.generations, a.generations) if together else (1, 1)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts[::step]]
        outputs = llm.generate(requests, [parameters(length, n) for length in lengths[::step]], use_tqdm=False)
        return [len(one.token_ids) for output in outputs for one in output.outputs]

    return generate


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def sampled_stacks(rows: int) -> Any:
    """Print the share of samples in which a function was at work itself, and in which it was anywhere on the stack."""
    own, anywhere, done, main = Counter(), Counter(), Event(), main_thread().ident

    def watch() -> None:
        while not done.wait(1e-3):
            frame, names = sys._current_frames().get(main), []
            while frame is not None:
                code = frame.f_code
                names.append(f"{Path(code.co_filename).name}:{code.co_qualname}")
                frame = frame.f_back
            own[names[0]] += 1
            anywhere.update(set(names))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread = Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    total = sum(own.values())
    for title, counts in (("itself", own), ("with what it calls", anywhere)):
        print(f"share of {total} samples, {title}")
        for name, count in counts.most_common(rows):
            print(f"  {count / total:6.1%}  {name}")


def one(a: argparse.Namespace, setup: str, model: str) -> None:
    """Measure one set-up in this process; the last line printed is the result."""
    given = yaml.safe_load(setup)
    start = time.perf_counter()
    is_ours = isinstance(given, str)
    generate = ours(a, model, set(given.split("+")[1:])) if is_ours else alone(a, model, given)
    started = time.perf_counter() - start
    lengths = Lengths.parse(a.lengths)
    rng = random.Random(0)

    def once(round_: int) -> float:
        prompts = [[rng.randrange(3, 256) for _ in range(a.prompt_tokens)] for _ in range(a.prompts)]
        prompts = [prompt for prompt in prompts for _ in range(a.generations)]
        limits = [lengths(round_, i) for i in range(len(prompts))]
        began = time.perf_counter()
        got = generate(prompts, limits)
        took = time.perf_counter() - began
        if got != limits:
            raise RuntimeError(f"the responses of {setup} must have other lengths")
        return sum(limits) / took

    once(0)
    speeds = [once(1 + i) for i in range(a.rounds)]
    if a.profile:
        with sampled_stacks(45):
            once(1 + a.rounds)
    print(json.dumps({"started": started, "speeds": speeds}), flush=True)
    for process in active_children():  # an engine core of its own would hold on to the output
        process.kill()
    os._exit(0)  # engines need not be taken down in order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--lengths", default="fixed:1024")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--generations", type=int, default=8, help="responses per prompt")
    parser.add_argument("--prompt_tokens", type=int, default=256)
    parser.add_argument("--gpu_memory", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--setups", nargs="+", default=["ours", "{}"])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--model", help="a folder that random_model.py wrote")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.one is not None:
        return one(a, a.one, a.model)
    with tempfile.TemporaryDirectory() as folder:
        if a.model is None:
            a.model = folder
            write(a.shape, folder)
        line = [f"--model={a.model}", *sys.argv[1:]]
        for setup in a.setups:
            command = [sys.executable, __file__, *line, f"--one={setup}"]
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                print(f"{setup}: failed\n{done.stdout[-2000:]}", flush=True)
                continue
            lines = done.stdout.splitlines()
            found = json.loads(next(line for line in reversed(lines) if line.startswith('{"started"')))
            if a.profile:
                print("\n".join(line for line in lines if "%" in line or "share" in line))
            speeds = found["speeds"]
            print(
                f"{median(speeds):8,.0f} tokens/s ({min(speeds):,.0f} to {max(speeds):,.0f}),"
                f" start-up {found['started']:.0f} s   {setup}",
                flush=True,
            )


if __name__ == "__main__":
    main()
