"""`RolloutCallback`: owns the engine and fills ``batch["rollout"]`` before the module sees the batch.

    on_train_batch_start    offload optimizer → wake(weights) → sync → wake(kv_cache) → generate → sleep → optimizer back
    on_validation_start     wake, sync, once per validation loop; generate per batch; sleep at its end

Every generation phase first compares the engine's weight version with the module's and syncs when they differ. The first sync
and every n-th is verified: a checksum of the weights the engine holds against the ones that were sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from jsonargparse.typing import NonNegativeInt
from torch import Tensor

from lightning_rlhf.rollout.engine import EngineSetup, RolloutEngine
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.weights import gather, with_checksum
from lightning_rlhf.types import Prompts, Rollout, Sampling, derive_seed

if TYPE_CHECKING:
    from lightning_rlhf.modules.base import RLHFLightningModule


class RolloutCallback(pl.Callback):
    """Generates the responses of each iteration with a colocated engine.

    Args:
        engine: default `TransformersEngine`, embedded in the process; `VLLMEngine` for speed.
        sampling: how training responses are drawn.
        val_sampling: how validation responses are drawn; default: one greedy response of the same length.
        sleep_level: what the engine gives back between phases: 0 nothing, 1 its cache (weights go to the host), 2 both.
        offload_optimizer: move the optimizer's state to the host while the engine is awake.
        verify_sync_every: compare checksums on the first sync and on every n-th; 0 never.
        log_probs_every: take the sampler's log-probs in every n-th iteration, to measure how far the engine is from the
            trainer; they slow vLLM down; 0 never. They do not touch the loss.
    """

    def __init__(
        self,
        engine: RolloutEngine | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        val_sampling: Sampling | None = None,
        sleep_level: Literal[0, 1, 2] = 2,
        offload_optimizer: bool = False,
        verify_sync_every: NonNegativeInt = 50,
        log_probs_every: NonNegativeInt = 10,
    ) -> None:
        if sampling.temperature <= 0.0:
            raise ValueError(
                "rollout.sampling.temperature must be positive: greedy responses are for rollout.val_sampling"
            )
        self.engine = engine or TransformersEngine()
        self.sampling = sampling
        self.val_sampling = val_sampling or replace(
            sampling, num_generations=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0
        )
        self.sleep_level = sleep_level
        self.offload_optimizer = offload_optimizer
        self.verify_sync_every = verify_sync_every
        self.log_probs_every = log_probs_every
        self._syncs = 0

    # -- engine life -------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        module: RLHFLightningModule = pl_module  # type: ignore[assignment]
        others = [c for c in trainer.callbacks if isinstance(c, RolloutCallback) and c is not self]  # type: ignore[attr-defined]
        if others:
            raise ValueError(
                "there are two RolloutCallbacks: configure the one under rollout, not in trainer.callbacks"
            )
        self.engine.setup(self._engine_setup(trainer, module))
        self.engine.weight_version = -1  # it may hold the weights of another module

    def _engine_setup(self, trainer: pl.Trainer, module: RLHFLightningModule) -> EngineSetup:
        from transformers import AutoConfig

        strategy, data = module.strategy, getattr(trainer, "datamodule", None)
        config = AutoConfig.from_pretrained(module.model_path, trust_remote_code=module.settings.trust_remote_code)
        limit = getattr(config.get_text_config(), "max_position_embeddings", None) or 2**31
        response = max(self.sampling.max_completion_length, self.val_sampling.max_completion_length)
        prompt = getattr(data, "max_prompt_length", None) or getattr(data, "longest_prompt", None)
        longest = prompt + response if prompt else limit
        if response >= limit or longest > limit:
            raise ValueError(
                f"data.max_prompt_length + rollout.sampling.max_completion_length = {longest} exceed the model's"
                f" {limit} positions: lower one of them"
            )
        budget = module.micro_batch_tokens * strategy.sequence_parallel_size
        if (prompt or 1) + self.sampling.max_completion_length > budget:
            raise ValueError(
                f"the longest sequence has {(prompt or 1) + self.sampling.max_completion_length} tokens (prompt + response), a"
                f" micro-batch holds {budget}: raise model.micro_batch_tokens, or lower data.max_prompt_length or"
                " rollout.sampling.max_completion_length"
            )
        responses = getattr(data, "batch_size", 0) * self.sampling.num_generations
        if responses and module.mini_batches > responses:
            raise ValueError(
                f"model.mini_batches is {module.mini_batches}, a rollout has only {responses} responses"
                " (data.batch_size x num_generations): lower it"
            )
        sizes = [
            -(-getattr(data, name, 256) // strategy.dp_size) * sampling.num_generations
            for name, sampling in (("batch_size", self.sampling), ("val_batch_size", self.val_sampling))
            if isinstance(getattr(data, name, 256), int)
        ]
        return EngineSetup(
            model=module.model_path,
            device=strategy.root_device,
            dtype=strategy.precision_plugin.compute_dtype,
            eos_token_ids=module.eos_token_ids,
            pad_token_id=module.pad_token_id,
            max_model_len=longest,
            max_num_seqs=max(sizes),
            seed=module.seed,
            trust_remote_code=module.settings.trust_remote_code,
        )

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.engine.close()

    # -- phases ------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: dict[str, Any], batch_idx: int
    ) -> None:
        module: RLHFLightningModule = pl_module  # type: ignore[assignment]
        iteration = trainer.fit_loop.total_batch_idx
        self._offload(trainer)
        try:
            self._wake(module)
            log_probs = self.log_probs_every > 0 and iteration % self.log_probs_every == 0
            batch["rollout"] = self._generate(module, batch["prompts"], self.sampling, iteration, log_probs)
        finally:
            with module.phases("sleep"):
                self.engine.sleep(self.sleep_level)
            self._reload(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._offload(trainer)
        self._wake(pl_module)  # type: ignore[arg-type]

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: dict[str, Any],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        # iteration -1: the same draws in every validation, so that curves show the policy and not the dice
        batch["rollout"] = self._generate(pl_module, batch["prompts"], self.val_sampling, -1, False)  # type: ignore[arg-type]

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.engine.sleep(self.sleep_level)
        self._reload(trainer)

    on_test_start = on_validation_start
    on_test_batch_start = on_validation_batch_start
    on_test_end = on_validation_end

    def _offload(self, trainer: pl.Trainer) -> None:
        if self.offload_optimizer:
            _move_state(trainer.optimizers, torch.device("cpu"))

    def _reload(self, trainer: pl.Trainer) -> None:
        if self.offload_optimizer:
            _move_state(trainer.optimizers, trainer.strategy.root_device)

    def _wake(self, module: RLHFLightningModule) -> None:
        """Weights first, synced if they are not the policy's, then the KV cache: that keeps the peak down."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        with module.phases("sync"):
            self.engine.wake(["weights"])
            if self.engine.weight_version != module.weight_version:
                self._sync(module)
        with module.phases("wake"):
            self.engine.wake(["kv_cache"])

    def _sync(self, module: RLHFLightningModule) -> None:
        module.strategy.reshard(module.actor)
        verify = self.verify_sync_every > 0 and self._syncs % self.verify_sync_every == 0
        self._syncs += 1
        weights: Iterable[tuple[str, Tensor]] = gather(
            module.actor.hf_named_parameters(), module.strategy.precision_plugin.compute_dtype
        )
        sent = with_checksum(weights) if verify else None
        self.engine.load_weights(sent or weights, module.weight_version)
        module.strategy.barrier()
        held = self.engine.checksum() if verify else None
        if sent is not None and held is not None:
            equal = module.strategy.all_gather_objects_dp(held == sent.checksum)
            if not all(equal):
                raise RuntimeError(
                    f"the engine of data rank {equal.index(False)} does not hold the weights that were sent to it: its"
                    " checksum differs"
                )
            module.extra_metrics["rollout/checksum_ok"] = 1.0

    def _generate(
        self, module: RLHFLightningModule, prompts: Prompts, sampling: Sampling, iteration: int, log_probs: bool
    ) -> Rollout:
        n = sampling.num_generations
        seeds = [derive_seed(module.seed, iteration, row, i) for row in prompts.index.tolist() for i in range(n)]
        shown = {"images": [one for one in prompts.images for _ in range(n)]} if prompts.images else {}
        with module.phases("generate"):
            completions = self.engine.generate(
                [ids for ids in prompts.ids for _ in range(n)], sampling, seeds=seeds, log_probs=log_probs, **shown
            )
        return Rollout.build(prompts, completions, sampling)


def _move_state(optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> None:
    """Moments of the optimizers to ``device``; step counters stay where they are."""
    if device.type == "cpu" and not torch.cuda.is_available():
        return
    for state in _states(optimizers):
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                state[key] = value.to(device, non_blocking=True)
    if device.type == "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _states(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    for optimizer in optimizers:
        yield from optimizer.state.values()
