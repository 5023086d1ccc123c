"""TRL's side of `curves.py`: its `GRPOTrainer` on the same task, model, seed and budget.

    python -m benchmarks.trl_learning SPEC.json        (pip install trl==1.16)

One generation of ``prompts x generations`` responses per iteration and ``mini_batches`` optimizer steps on it, learning rate
constant, no KL, float32 weights with bf16 compute, vLLM colocated and awake, no recomputation, all as fast as TRL has it; the
loss is its default (dapo). The engine's cache has the size of ours: beside other runs vLLM cannot measure what is free.
The held-out additions are decoded greedily by transformers between iterations, outside their seconds.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

from examples import addition
from lightning_rlhf.rewards import first_number


class Validation(TrainerCallback):
    """Greedy accuracy on the held-out rows before training and every ``every`` iterations."""

    def __init__(self, tokenizer: Any, spec: dict[str, Any]) -> None:
        self.tokenizer, self.spec, self.rows = tokenizer, spec, addition.heldout()
        self.points: list[dict[str, float]] = []
        self.seconds: list[float] = []
        self.since = time.perf_counter()

    @torch.no_grad()
    def accuracy(self, model: Any) -> float:
        model.eval()
        answers: list[str] = []
        for start in range(0, len(self.rows), 250):
            texts = [row["prompt"] for row in self.rows[start : start + 250]]
            inputs = self.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
            with torch.autocast(model.device.type, torch.bfloat16, enabled=self.spec["device"] == "gpu"):
                out = model.generate(**inputs, max_new_tokens=self.spec["tokens"], do_sample=False)
            answers += self.tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        model.train()
        right = first_number(answers, answer=[row["answer"] for row in self.rows])
        return sum(map(bool, right)) / len(right)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.points.append({"accuracy": self.accuracy(model), "seconds": 0.0})
        self.since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        iteration, part = divmod(state.global_step, self.spec["mini_batches"])
        if part:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.since)
        if iteration % self.spec["every"] == 0:
            self.points.append({"accuracy": self.accuracy(model), "seconds": median(self.seconds)})
            self.seconds = []
        self.since = time.perf_counter()


def main(file: str) -> None:
    spec = json.loads(Path(file).read_text())
    set_seed(spec["seed"])
    gpu, responses = spec["device"] == "gpu", spec["prompts"] * spec["generations"]
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    validation = Validation(tokenizer, spec)
    if gpu:
        vllm_generation.LLM = partial(vllm_generation.LLM, kv_cache_memory_bytes=1 << 30)
    trainer = GRPOTrainer(
        spec["model"],
        reward_funcs=[first_number],
        args=GRPOConfig(
            output_dir=spec["folder"],
            model_init_kwargs={"dtype": "float32"},
            seed=spec["seed"],
            learning_rate=spec["lr"],
            lr_scheduler_type="constant",
            optim="adamw_torch_fused" if gpu else "adamw_torch",
            max_steps=spec["steps"] * spec["mini_batches"],
            per_device_train_batch_size=responses // spec["mini_batches"],
            steps_per_generation=spec["mini_batches"],
            num_generations=spec["generations"],
            max_completion_length=spec["tokens"],
            bf16=gpu,
            use_cpu=not gpu,
            use_vllm=gpu,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.1,
            vllm_max_model_length=128,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(addition.train()),
        processing_class=tokenizer,
        callbacks=[validation],
    )
    trainer.train()
    (Path(spec["folder"]) / "points.json").write_text(json.dumps(validation.points, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
