"""TRL's side of `step.py` and `replay.py`: one `GRPOTrainer`, timed by the clock that times ours.

    python -m benchmarks.trl_side SPEC.json        (pip install trl==1.16; on N GPUs under torchrun)

What is set, and why:

    use_vllm, vllm_mode="colocate"      as ours: one engine per GPU in the trainer's process
    vllm_enable_sleep_mode              on, as ours; off: --trl "{vllm_enable_sleep_mode: false}"
    vllm_gpu_memory_utilization         the same share as ours
    vllm_importance_sampling_correction TRL's default, on: it costs a forward pass, which ours does not have in its default;
                                        off: --trl "{vllm_importance_sampling_correction: false}"
    generation_kwargs                   ignore_eos; detokenize off, as TRL decodes the token ids itself
    bf16, model in float32              TRL's default and ours: float32 weights and AdamW state, bfloat16 compute
    optim="adamw_torch_fused"           the fastest of torch's
    gradient_checkpointing              TRL's default, on; where memory allows --trl "{gradient_checkpointing: false}"
    per_device_train_batch_size         most responses of full length that fit the same token budget as ours
    gradient_accumulation_steps         one optimizer step per rollout, as ours; so is the learning rate, constant
    loss_type="dapo", beta              TRL's default, as ours; the KL coefficient
    log_completions off, logging_steps 1, no checkpoints, as ours; disable_tqdm

Everything else is TRL's default, attention too ("sdpa"). Any field of `GRPOConfig` can be set by ``--trl``: kernels of the hub
("{model_init_kwargs: {dtype: float32, use_kernels: true}}"), another attention_implementation, torch_compile. Quote the fastest.

Patched: vLLM gets one `SamplingParams` per request, which differ in max_tokens (without vLLM, on a CPU, responses are generated
at the longest length and cut); wake_up, sleep and sync_weights are timed. Several GPUs are plain data parallel.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trl
from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.lengths import Lengths
from benchmarks.prompts import reward
from benchmarks.recorded import Recorded
from lightning_rlhf.phases import Phases


class Clock(TrainerCallback):
    """Rows of seconds per optimizer step, as `Throughput` logs them: a step lasts from the end of one to the end of the next."""

    def __init__(self, file: Path) -> None:
        self.phases, self.file = Phases(), file
        self.rows: list[dict[str, float]] = []
        self.since = self.updating = self.started = 0.0
        self.tokens = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.time()
        self.since = self.updating = self.now()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.phases.seconds["update"] = self.now() - self.updating

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        now = self.now()
        tokens = int(state.num_input_tokens_seen)
        self.rows.append({"step": now - self.since, "tokens": tokens - self.tokens, **self.phases.take()})
        self.since, self.tokens = now, tokens

    def save(self) -> None:
        """Write what was timed so far: a run that is cut keeps its steps."""
        self.file.write_text(
            json.dumps({"version": trl.__version__, "started": self.started, "rows": self.rows}, indent=1)
        )

    @staticmethod
    def now() -> float:
        Phases._synchronize()
        return time.perf_counter()


class TimedGRPOTrainer(GRPOTrainer):
    """Spans around the phases, the loss of each optimizer step, and responses of given lengths."""

    def __init__(self, clock: Clock, lengths: Lengths | None, **kwargs: Any) -> None:
        super().__init__(callbacks=[clock], **kwargs)
        self.clock, self.lengths = clock, lengths
        self.rollouts, self.in_update, self.loss = 0, False, 0.0
        if self.use_vllm:
            engine, llm = self.vllm_generation, self.vllm_generation.llm
            engine.sync_weights = self.timed("sync", engine.sync_weights)
            llm.sleep = self.timed("sleep", llm.sleep)
            wake, wake_cache = llm.wake_up, self.timed("wake", llm.wake_up)
            # the weights wake inside the sync, whose span holds it
            llm.wake_up = lambda tags: (wake_cache if tags == ["kv_cache"] else wake)(tags=tags)
            llm.generate = self.forced(self.timed("generate", llm.generate))

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            with self.clock.phases(phase):
                return function(*args, **kwargs)

        return inner

    def next_lengths(self, responses: int) -> list[int]:
        """Of this rank's next responses."""
        first = self.accelerator.process_index * responses
        self.rollouts += 1
        return [self.lengths(self.rollouts - 1, first + i) for i in range(responses)]

    def forced(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """vLLM's ``generate`` with a length of its own for each request."""

        def inner(prompts: list[Any], sampling_params: Any, **kwargs: Any) -> Any:
            each = []
            for length in self.next_lengths(len(prompts)):
                each.append(copy.copy(sampling_params))
                each[-1].max_tokens = length
            return generate(prompts, sampling_params=each, **kwargs)

        return inner

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        if self.use_vllm:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        lengths = self.next_lengths(len(prompt_ids))
        self.generation_config.max_new_tokens = self.generation_config.min_new_tokens = max(lengths)
        with self.clock.phases("generate"):
            responses, log_probs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        return [ids[:length] for ids, length in zip(responses, lengths, strict=True)], log_probs

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        output = super()._generate_and_score_completions(*args, **kwargs)
        self.clock.updating = self.clock.now()
        return output

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.phases("reward"):
            return super()._calculate_rewards(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self.in_update:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        with self.clock.phases("reference" if model is self.ref_model else "log_prob"):
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.in_update = True
        loss = super()._compute_loss(*args, **kwargs)
        self.in_update = False
        self.loss += loss.detach()
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "grad_norm" in logs:  # after each optimizer step
            self.clock.rows[-1] |= {"loss": float(self.loss), "grad_norm": float(logs["grad_norm"])}
            self.loss = 0.0
            if self.accelerator.is_main_process:
                self.clock.save()
        super().log(logs, *args, **kwargs)


def config(spec: dict[str, Any]) -> GRPOConfig:
    """The settings of the docstring, changed by what ``spec["settings"]`` says."""
    on_cpu, longest = spec["device"] == "cpu", spec["longest"]
    responses = spec["prompts"] * spec["generations"] // spec["devices"]
    most = max(1, spec["micro_batch_tokens"] // (spec["prompt_tokens"] + longest))
    settings = {
        "output_dir": spec["folder"],
        "model_init_kwargs": {"dtype": "float32"},
        "per_device_train_batch_size": max(n for n in range(1, min(most, responses) + 1) if responses % n == 0),
        "num_generations": spec["generations"],
        "max_completion_length": longest,
        "max_steps": spec["steps"],
        "learning_rate": spec["lr"],
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch" if on_cpu else "adamw_torch_fused",
        "beta": spec["kl"],
        "bf16": not on_cpu,
        "use_cpu": on_cpu,
        "use_vllm": not on_cpu,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_gpu_memory_utilization": spec["gpu_memory"],
        "vllm_max_model_length": spec["prompt_tokens"] + longest,
        "generation_kwargs": {} if on_cpu else {"ignore_eos": True, "detokenize": False},
        "shuffle_dataset": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    } | spec["settings"]
    steps = responses // settings["per_device_train_batch_size"]
    return GRPOConfig(**{"gradient_accumulation_steps": steps, "steps_per_generation": steps} | settings)


def replayed(file: str, tokenizer: Any) -> Callable[..., Any]:
    """TRL's ``rollout_func`` that returns recorded responses."""
    responses = Recorded(file)

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": ids, "completion_ids": responses(ids), "logprobs": None}

    return rollout


def main(file: str) -> None:
    spec = json.loads(Path(file).read_text())
    tokenizer, clock = AutoTokenizer.from_pretrained(spec["model"]), Clock(Path(spec["folder"]) / "rows.json")
    trainer = TimedGRPOTrainer(
        clock,
        Lengths.parse(spec["lengths"]) if spec["lengths"] else None,
        model=spec["model"],
        reward_funcs=[reward],
        args=config(spec),
        train_dataset=load_dataset("json", data_files=spec["data"], split="train"),
        processing_class=tokenizer,
        rollout_func=replayed(spec["recorded"], tokenizer) if spec["recorded"] else None,
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
