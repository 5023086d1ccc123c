"""vLLM in the trainer's process: colocated, weights handed over by reference, a replica for every rank or every few ranks.

    setup      LLM(load_format="dummy") on the empty device; the trainer's process state is put back afterwards
    wake       weights, then the KV cache: the other order restores buffers into unmapped memory
    sync       CUDA, dense, unquantised, no latent attention: ``model.load_weights(stream)``, a copy per tensor
               else: ``worker.reload_weights(stream)``, which repacks each layer once all of its tensors are there
               then ``reset_prefix_cache``: cached blocks belong to the old weights
    generate   one request per response with its own seed; token ids in, token ids out; steps without the work that
               changes nothing (`vllm_scheduler`)

Each rank's engine is started with ``external_launcher``: it takes rank and device from RANK and LOCAL_RANK, which not
every launcher of the trainer sets. With tensor parallelism consecutive ranks form one engine: each has a scheduler of its
own, and as these see the same requests they decide the same. Sleep mode exists on CUDA only; elsewhere sleeping keeps the
memory, but not the permission to generate. Everything that differs between versions of vLLM is in `vllm_process`, its requests
and answers are in `vllm_requests`.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from threading import Event
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_rlhf.hf_config import load_config
from lightning_rlhf.images import is_vision_language
from lightning_rlhf.rollout.engine import EngineMemory, EngineSetup, NamedTensors, RolloutEngine, Unmapped
from lightning_rlhf.rollout.vllm_process import (
    check_version,
    claim_process,
    destroy_groups,
    forget_stream,
    fork_rng,
    frozen_heap,
    gather_ranks,
    held_by_rank,
    high_priority_streams,
    interruptible,
    is_moe,
    keep_off_shared_memory,
    map_again,
    paused_gc,
    reset_encoder_cache,
    shorten_steps,
    shut_down,
    unchanged_process_state,
    unmapped_memory,
    version_installed,
)
from lightning_rlhf.rollout.vllm_requests import check_answers, check_extra, completion_of, requests_of, sampling_params
from lightning_rlhf.rollout.weights import checksums, whole_checksum
from lightning_rlhf.types import Completion, PromptImages, Sampling

log = logging.getLogger(__name__)

MOST_SEQUENCES = 1024
"""In flight at once unless ``engine_args`` says otherwise; the sampler's buffers grow with sequences x vocabulary."""
UTILIZATION = 0.4
"""``gpu_memory_utilization`` where neither the user nor the plan says how large the KV cache is."""
CACHE_SHARE = 0.3
"""Of the GPU, at most, for a KV cache whose size is the plan's. Few responses reach their full length, and a cache that is full
delays some, but ends no run."""
WORKING = 3 << 30
"""Bytes of a step besides weights and cache: captured graphs, activations of a prefill, float32 logits and their copies in the
sampler (each 0.6 GiB for `MOST_SEQUENCES` rows of 152 k). An assumption."""
BLOCK = 16
"""Tokens of a block of the KV cache, by vLLM's default."""
CPU_CACHE = 1 << 30
"""Bytes of the KV cache on the CPU."""


class VLLMEngine(RolloutEngine):
    """Generates with a colocated vLLM.

    Args:
        gpu_memory_utilization: share of the device's memory that vLLM may fill with weights, activations and KV cache. Default:
            the plan gives it a KV cache for all responses of a rollout at full length, but at most 30 % of the device and
            what is free; where there is no plan it is 0.4.
        tensor_parallel_size: consecutive ranks of a node that share one engine, for models too large for one GPU.
        kv_cache_memory_bytes: size of the KV cache; replaces ``gpu_memory_utilization``. Default on the CPU: 1 GiB.
        enforce_eager: no graph capture and no compilation (always so on the CPU).
        dtype: of weights and compute; "auto" is the trainer's.
        max_num_batched_tokens: tokens of one engine step, None for vLLM's default.
        load_format: how vLLM starts; default "dummy", random weights, as the trainer's are loaded before the first use, but
            "auto", from the model's folder, for vision-language models: dummy values also replace the constants by which
            vLLM normalises pixels, which are no weights and would never be put right.
        sync: how weights are replaced (module docstring); "auto" picks "plain" where it is safe.
        shorten_steps: leave out what changes nothing in the scheduler's steps (`vllm_scheduler`), where that is known to be the
            same; elsewhere, or if false, they are vLLM's own. The log says which.
        engine_args: further arguments of ``vllm.LLM``; they win over those above.
    """

    memory_settings = "rollout.engine.gpu_memory_utilization (or kv_cache_memory_bytes)"

    def __init__(
        self,
        gpu_memory_utilization: float | None = None,
        tensor_parallel_size: int = 1,
        kv_cache_memory_bytes: int | None = None,
        enforce_eager: bool = False,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        max_num_batched_tokens: int | None = None,
        load_format: str | None = None,
        sync: Literal["auto", "plain", "layerwise"] = "auto",
        shorten_steps: bool = True,
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        if tensor_parallel_size < 1:
            raise ValueError(f"rollout.engine.tensor_parallel_size must be at least 1, got {tensor_parallel_size}")
        if gpu_memory_utilization is not None and not 0.0 < gpu_memory_utilization <= 1.0:
            raise ValueError(f"rollout.engine.gpu_memory_utilization must be in (0, 1], got {gpu_memory_utilization}")
        self.gpu_memory_utilization = gpu_memory_utilization
        self.tensor_parallel_size = (engine_args or {}).get("tensor_parallel_size", tensor_parallel_size)
        self.kv_cache_memory_bytes = kv_cache_memory_bytes
        self.enforce_eager = enforce_eager
        self.dtype = dtype
        self.max_num_batched_tokens = max_num_batched_tokens
        self.load_format = load_format
        self.sync = sync
        self.shorten_steps = shorten_steps
        self.engine_args = engine_args or {}
        self.llm: Any = None
        self._asleep: set[str] = set()
        self._unmapped: Unmapped | None = None
        self._interrupted = Event()

    def setup(self, context: EngineSetup) -> None:
        """See `RolloutEngine.setup`.

        Raises:
            ImportError: vLLM is missing or its version is not supported.
            ValueError: plain sync on the CPU, or processes that do not divide into engines.
        """
        self._interrupted.clear()
        if self.llm is not None and self.keeps(context):
            return
        check_version(version_installed())
        if self.sync == "plain" and context.device.type == "cpu":
            raise ValueError(
                "rollout.engine.sync must be layerwise on the CPU, got plain: its kernels pack the weights"
            )
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks % self.tensor_parallel_size:
            raise ValueError(
                f"rollout.engine.tensor_parallel_size={self.tensor_parallel_size} must divide the {ranks} processes"
            )
        self.context = context
        self._owns_process_group = not dist.is_initialized()  # vLLM then makes one of its own
        with unchanged_process_state(context.device):
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            if dist.is_initialized():
                os.environ["RANK"] = str(dist.get_rank())
                if context.device.index is not None:
                    os.environ["LOCAL_RANK"] = str(context.device.index)
                os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
            from vllm import LLM

            claim_process(owns_default_group=self._owns_process_group)
            if context.device.type == "cpu":
                keep_off_shared_memory()

            with high_priority_streams() if context.beside else nullcontext():
                try:
                    self.llm = LLM(**self._llm_arguments(context))
                except BaseException:
                    if self.tensor_parallel_size == 1:  # else other ranks may be stuck in a collective of these groups
                        destroy_groups(owns_default_group=self._owns_process_group)
                    raise
        self._asleep = set()
        self._worker = self.llm.llm_engine.model_executor.driver_worker.worker
        self._config = self._worker.vllm_config
        self._sync_mode = self._choose_sync() if self.sync == "auto" else self.sync
        short = self.shorten_steps and shorten_steps(self.llm)
        log.info(
            "vLLM %s on %d ranks: %s weight sync, async scheduling %s, steps %s, at most %d sequences",
            version_installed(),
            self.tensor_parallel_size,
            self._sync_mode,
            "on" if getattr(self._config.scheduler_config, "async_scheduling", False) else "off",
            "shortened" if short else "by vLLM's own scheduler",
            self._config.scheduler_config.max_num_seqs,
        )

    def _llm_arguments(self, context: EngineSetup) -> dict[str, Any]:
        on_cpu = context.device.type == "cpu"
        eager = self.enforce_eager or on_cpu
        max_num_seqs = self.engine_args.get("max_num_seqs", min(context.max_num_seqs, MOST_SEQUENCES))
        arguments = {
            "model": context.model,
            "dtype": str(context.dtype).removeprefix("torch.") if self.dtype == "auto" else self.dtype,
            "max_model_len": context.max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "tensor_parallel_size": self.tensor_parallel_size,
            "gpu_memory_utilization": self.gpu_memory_utilization or UTILIZATION,
            "kv_cache_memory_bytes": self.kv_cache_memory_bytes
            or context.kv_cache_memory_bytes
            or (CPU_CACHE if on_cpu else None),
            "enforce_eager": eager,
            "load_format": self.load_format or ("auto" if _takes_images(context) else "dummy"),
            "seed": context.seed % (1 << 32),
            "trust_remote_code": context.trust_remote_code,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "enable_sleep_mode": not on_cpu,
            "disable_log_stats": True,
        }
        if context.config_overrides:
            arguments["hf_overrides"] = context.config_overrides
        if on_cpu:  # its seeded generators cannot take back the token that vLLM draws after a part of a prompt
            arguments["enable_chunked_prefill"] = False
        if not eager:
            arguments["compilation_config"] = {"cudagraph_capture_sizes": capture_sizes(max_num_seqs)}
        if dist.is_initialized():
            arguments["distributed_executor_backend"] = "external_launcher"
        return arguments | self.engine_args

    def _choose_sync(self) -> Literal["plain", "layerwise"]:
        """Plain where loading a checkpoint twice is known to be safe: nothing packs, permutes or is made of the parameters."""
        config = self._config.model_config
        changed = config.quantization is not None or is_moe(config) or config.use_mla
        packed = self.context.device.type != "cuda" or changed
        return "layerwise" if packed else "plain"

    @property
    def context_limit(self) -> int | None:
        return self.engine_args.get("max_model_len")

    def plan_memory(self, weights: int, kv_token: int, context: int, sequences: int, device: int) -> EngineMemory:
        """What the user fixed, its KV cache or its share of the GPU; else a KV cache for the work."""
        if not device:
            return EngineMemory(weights, self.kv_cache_memory_bytes or CPU_CACHE)
        fixed = {
            "kv_cache_memory_bytes": self.kv_cache_memory_bytes,
            "gpu_memory_utilization": self.gpu_memory_utilization,
        } | self.engine_args
        if fixed["kv_cache_memory_bytes"]:
            return EngineMemory(weights, fixed["kv_cache_memory_bytes"], WORKING)
        if fixed["gpu_memory_utilization"]:
            return EngineMemory(weights, max(0, int(fixed["gpu_memory_utilization"] * device) - weights))
        block = fixed.get("block_size") or BLOCK
        sequence = -(-max(context, self.context_limit or 0) // block) * block * kv_token
        in_flight = min(sequences, fixed.get("max_num_seqs", MOST_SEQUENCES))
        least = 2 * sequence  # the longest, and room for what vLLM rounds up or keeps for itself
        wanted = min((in_flight + 1) * sequence, int(CACHE_SHARE * device))
        return EngineMemory(weights, max(least, wanted), WORKING, least)

    def check_sampling(self, sampling: Sampling) -> None:
        """Of the temperature, and where vLLM is installed, which this imports then, of ``extra``."""
        if 0.0 < sampling.temperature < 0.01:
            raise ValueError(
                "rollout.sampling.temperature must be 0 (greedy) or at least 0.01, which vLLM raises lower ones to, got"
                f" {sampling.temperature}"
            )
        if not sampling.extra:
            return
        try:
            check_version(version_installed())
        except ImportError:
            return  # `setup` tells of it
        with unchanged_process_state(torch.device("cpu")):
            check_extra(sampling)

    # ── memory and weights ───────────────────────────────────────────────────────────────────────────────────────────

    def wake(self, tags: Sequence[str]) -> None:
        self._require_running()
        for tag in ("weights", "kv_cache"):
            if tag in tags and tag in self._asleep:
                if tag == "kv_cache" and "weights" in self._asleep:
                    raise RuntimeError("the KV cache must not wake before the weights: wake(['weights']) first")
                if self.context.device.type == "cuda":
                    with frozen_heap():
                        self.llm.wake_up(tags=[tag])
                self._asleep.discard(tag)
                self._unmapped = None

    def sleep(self, level: int) -> None:
        if level == 0 or self.llm is None:
            return
        if level == 2:
            self.weight_version = -1
        if self._asleep == {"weights", "kv_cache"}:
            return
        if self.context.device.type == "cuda":
            self.wake(["weights", "kv_cache"])
            with frozen_heap():
                self.llm.sleep(level=level)
        self._asleep, self._unmapped = {"weights", "kv_cache"}, None

    @property
    def unmapped(self) -> Unmapped:
        """See `RolloutEngine.unmapped`. Looked up once after each change: it takes a list of all that torch holds."""
        if not self._asleep or self.context.device.type != "cuda":
            return Unmapped()
        if self._unmapped is None:
            self._unmapped = unmapped_memory(self._asleep)
        return self._unmapped

    @torch.no_grad()
    def load_weights(self, weights: NamedTensors, version: int) -> None:
        """See `RolloutEngine.load_weights`. A failure half-way closes the engine: part of it may be without memory."""
        self._require_running()
        if "weights" in self._asleep:
            raise RuntimeError("the engine's weights are asleep: wake(['weights']) before load_weights")
        self.weight_version = -1  # until all of them are there
        try:
            if self._sync_mode == "plain":
                self._load_plain(weights)
            else:
                self._worker.reload_weights(weights_iterator=iter(weights))
            if self.llm.reset_prefix_cache() is False:
                raise RuntimeError(
                    "the prefix cache was not reset because requests are running: load between generations"
                )
            if self._config.model_config.is_multimodal_model:
                reset_encoder_cache(self.llm)
        except BaseException:
            self._fail()
            raise
        self.weight_version = version

    def _load_plain(self, weights: NamedTensors) -> None:
        from vllm.config import set_current_vllm_config

        model = self._model()
        self._sizes: dict[str, int] = {}

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                self._sizes[name] = tensor.numel()
                yield name, tensor

        with set_current_vllm_config(self._config):
            loaded = model.load_weights(noted())
        missing = set() if loaded is None else {name for name, _ in model.named_parameters()} - loaded
        if missing:
            raise ValueError(
                f"{len(missing)} weights were not sent to the engine, e.g. {min(missing)!r}: send all of them"
            )

    def checksum(self) -> int | None:
        if self.weight_version < 0 or "weights" in self._asleep or self._sync_mode != "plain":
            return None
        held = list(held_by_rank(self._model()))
        if not all(tensor.dtype in (torch.bfloat16, torch.float32) for _, tensor, _ in held):
            return None
        copies = {}
        for name, tensor, number in held:  # a fused tensor is not among those that were sent: all copies, or none
            whole = tensor.numel() == self._sizes.get(name, tensor.numel())
            copies[name] = number or (self.tensor_parallel_size if whole else 1)
        return whole_checksum(gather_ranks(checksums((name, tensor) for name, tensor, _ in held)), copies)

    def _model(self) -> Any:
        return self._worker.model_runner.get_model()

    def close(self) -> None:
        if self.llm is None:
            return
        llm, self.llm, self._worker = self.llm, None, None
        map_again(self._asleep)
        self.weight_version, self._asleep = -1, set()
        shut_down(llm, owns_default_group=self._owns_process_group)
        del llm
        gc.collect()
        torch.cuda.empty_cache()

    def _fail(self) -> None:
        """Close after an error, but leave groups with other ranks alone: these may be stuck in a collective of the engine.

        The launcher ends them once this process is gone.
        """
        if self.tensor_parallel_size > 1:
            self._failed, self.llm, self.weight_version = self.llm, None, -1  # referenced: no finalizer may run
        self.close()

    def _require_running(self) -> None:
        if self.llm is None:
            raise RuntimeError("the engine is not running: call setup (after an exception the engine is closed)")

    # ── generation ───────────────────────────────────────────────────────────────────────────────────────────────────

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[int | None],
        log_probs: bool = False,
        images: Sequence[PromptImages | None] | None = None,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`. Greedy log-probs are those of the untruncated distribution at temperature 1.

        Raises:
            RuntimeError: no usable weights, or asleep, or vLLM made other tokens of a picture.
            ValueError: a prompt that leaves no room for a response.
            Any error of vLLM itself, after which the engine is closed. With tensor parallelism the other ranks wait for this
            one until its process ends.
        """
        self._require_running()
        if self._asleep or self.weight_version < 0:
            raise RuntimeError("the engine holds no usable weights: wake it and load_weights before generate")
        if not prompts:
            return []
        self._check_lengths(prompts)
        greedy = sampling.greedy
        parameters = [self._sampling_params(greedy if s is None else sampling, s, log_probs) for s in seeds]
        shown = images or [None] * len(prompts)
        requests = requests_of(prompts, shown)
        if len(parameters) != len(requests):
            raise ValueError(f"there must be one seed per prompt, got {len(parameters)} for {len(requests)}")
        forget_stream(self._worker.model_runner)
        try:
            with fork_rng(self.context.device), paused_gc(), interruptible(self.llm, self._interrupted):
                outputs = self.llm.generate(requests, parameters, use_tqdm=False)
        except BaseException:
            self._fail()  # requests are left in the scheduler, and perhaps a broken worker
            raise
        check_answers(outputs, prompts, shown)
        return [completion_of(output.outputs[0], log_probs) for output in outputs]

    def interrupt(self) -> None:
        """See `RolloutEngine.interrupt`. Not with tensor parallelism: other ranks would wait for this one inside a step."""
        if self.tensor_parallel_size == 1:
            self._interrupted.set()

    def _check_lengths(self, prompts: Sequence[Sequence[int]]) -> None:
        limit = self._config.model_config.max_model_len
        for length in map(len, prompts):
            if not 1 <= length < limit:
                raise ValueError(
                    f"a prompt must have 1 to {limit - 1} tokens (max_model_len is {limit}), got {length}: "
                    "shorten it or raise max_model_len"
                )

    def _sampling_params(self, sampling: Sampling, seed: int | None, log_probs: bool) -> Any:
        """Of one response; a subclass may draw each in a way of its own."""
        return sampling_params(sampling, seed, log_probs, self.context.eos_token_ids)


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes whose decoding step is captured as a graph: the full batch and few others, as each takes time."""
    sizes = {1, 8, max_num_seqs}
    sizes |= {1 << k for k in range(6, max_num_seqs.bit_length())}
    return sorted(size for size in sizes if size <= max_num_seqs)


def _takes_images(context: EngineSetup) -> bool:
    return is_vision_language(load_config(context.model, None, context.trust_remote_code))
