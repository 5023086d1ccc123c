"""`RolloutSteps`: what a rollout does with the engine.

    wake        offload optimizer → wake(weights) → sync → offload parameters → wake(kv_cache)
    generate    prompts → requests, each with its seed → engines of the `Pool` → `Rollout`
    sleep       sleep → reload both

Waking compares the engine's weight version with the module's and syncs when they differ. The first sync and every n-th is
verified: a checksum of the weights the engine holds against the ones that were sent.

All ranks take each step or none: after it they exchange whether it failed, see `faults`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_rlhf.callbacks.faults import agreed, check_lengths, makes_room, told_by_settings
from lightning_rlhf.callbacks.offload import HostMemory
from lightning_rlhf.callbacks.watchdog import watched, where
from lightning_rlhf.plan.memory import Rung
from lightning_rlhf.rollout.sharing import Pool, pool_size
from lightning_rlhf.rollout.turns import Speaker
from lightning_rlhf.rollout.weights import gather, with_checksum
from lightning_rlhf.types import Completion, Prompts, Rollout, Sampling, derive_seed

if TYPE_CHECKING:
    from lightning_rlhf.callbacks.rollout import RolloutCallback
    from lightning_rlhf.modules.base import RLHFLightningModule

_AVERAGE = 1 << 40
"""Versions of the average's weights are the policy's beyond this."""


class RolloutSteps:
    """What is done with the engine of ``rollout``, by its options, for the module that was last handed to `begin`."""

    def __init__(self, rollout: RolloutCallback) -> None:
        self.rollout, self.host = rollout, HostMemory()
        self.longest: dict[int, int] = {}  # response to the prompt of a row, when it came last; equal on every rank

    def begin(self, module: RLHFLightningModule, context: int) -> None:
        """The engine is set up for ``module``, and holds sequences of ``context`` tokens."""
        self.module, self.context, self.engine = module, context, self.rollout.engine
        self.engine.weight_version = -1  # it may hold the weights of another module
        self._syncs = 0
        self.host = HostMemory()  # its buffers are those of one module
        sp, tp = module.strategy.sequence_parallel_size, self.engine.tensor_parallel_size
        size = pool_size(sp, tp)
        gather_objects = partial(module.strategy.all_gather_objects, ranks=size)
        talk, data = self.rollout.conversation, getattr(module.trainer, "datamodule", None)
        arguments = getattr(data, "chat_template_args", None)
        self.speaker = None if talk is None else Speaker(talk, module.tokenizer, arguments)
        self.pool = Pool(sp, tp, module.strategy.global_rank % size, gather_objects)

    def wake(self, average: bool = False) -> None:
        """Weights first, synced if they are not the policy's (or its average), then the KV cache: that keeps the peak down."""
        rung, module = self.rollout.rung, self.module
        if rung.offload_optimizer:
            with self.step("offload"):
                self.host.offload_states(module.trainer.optimizers)
        if torch.cuda.is_available() and rung != Rung(0, False, False):
            torch.cuda.empty_cache()
        with self.step("wake", "weights"):
            self.engine.wake(["weights"])
        version = module.weight_version + average * _AVERAGE
        if self.engine.weight_version != version:
            self._sync(version)
        if rung.offload_parameters:
            # a reward model is asked while the engine is awake
            scores = self.rollout.filter_groups is not None or not module.trainer.training
            with self.step("offload"):
                for root in self._roots():
                    if not scores or root is not module.reward_model:
                        self.host.offload_parameters(root)
        with self.step("wake", "kv_cache"):
            self.engine.wake(["kv_cache"])

    def sleep(self) -> None:
        with self.step("sleep"):
            self.engine.sleep(self.rollout.rung.sleep_level)
        if self.host.in_use:
            with self.step("reload"):
                self.reload()

    def reload(self) -> None:
        """Whatever is on the host comes back."""
        if self.host.in_use:
            self.host.reload(self._roots(), self.module.trainer.optimizers, self.module.strategy.root_device)

    def _roots(self) -> list[torch.nn.Module]:
        """The sharded models; not frozen ones whose shards live on the host anyway."""
        frozen = [] if self.module.settings.offload_reference else ["reference", "reward_model"]
        names = ["actor", "critic", *frozen]
        return [root for name in names if (root := getattr(self.module, name, None)) is not None]

    def _sync(self, version: int) -> None:
        module, every = self.module, self.rollout.verify_sync_every
        module.strategy.reshard(module.actor)
        verify = every > 0 and self._syncs % every == 0
        self._syncs += 1
        dtype = module.strategy.precision_plugin.compute_dtype
        taken = module.hf_named_weights(average=version >= _AVERAGE)
        weights: Iterable[tuple[str, Tensor]] = chain(gather(taken, dtype), module.actor.hf_named_buffers())
        sent = with_checksum(weights) if verify else None
        with self.step("sync"):
            try:
                self.engine.load_weights(sent or weights, version)
            except Exception:
                for _ in weights:  # the other ranks need this one's shards to get as far
                    pass
                raise
        if sent is not None:
            # a step of its own: a rank that could not load must not miss the engine's exchange
            with self.step("sync", "checksum"):
                held = self.engine.checksum()
                if held is not None and held != sent.checksum:
                    raise RuntimeError(
                        "the engine does not hold the weights that were sent to it: its checksum differs"
                    )
            if held is not None:
                module.extra_metrics["rollout/checksum_ok"] = 1.0

    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling,
        iteration: int,
        log_probs: bool,
        with_greedy: bool = False,
        first: int = 0,
    ) -> Rollout:
        run, own = self.share(prompts, sampling, iteration, log_probs, with_greedy, first)
        with self.step("generate"):
            return Rollout.build(prompts, self.pool.collect(run)[own], self.rollout.whole(sampling), with_greedy)

    def share(
        self,
        prompts: Prompts,
        sampling: Sampling,
        iteration: int,
        log_probs: bool,
        with_greedy: bool,
        first: int = 0,
    ) -> tuple[Callable[[], list[Completion]], slice]:
        """See `Pool.share`; requests are in the order of `Rollout.build`. Responses to a prompt are counted from ``first``."""
        with self.step("generate"):  # of its own: a rank that fails must not miss the exchanges of the pool
            check_lengths(prompts, self.context)
            if self.speaker is not None and prompts.images:
                raise ValueError("rollout.conversation is for text, and prompts have images: leave out one of them")
        samples, rows, seed = range(first, first + sampling.num_generations), prompts.index.tolist(), self.module.seed
        n, last = len(samples) + with_greedy, [None] * with_greedy
        return self.pool.share(
            self.engine,
            [ids for ids in prompts.ids for _ in range(n)],
            sampling,
            seeds=[s for row in rows for s in (*(derive_seed(seed, iteration, row, i) for i in samples), *last)],
            log_probs=log_probs,
            images=[one for one in prompts.images for _ in range(n)] if prompts.images else None,
            expected=[self.longest.get(row, math.inf) for row in rows for _ in range(n)],
            talk=self.speaker,
            rows=None if self.speaker is None else [columns for columns in _columns(prompts) for _ in range(n)],
        )

    @contextmanager
    def step(self, phase: str, part: str = "") -> Iterator[None]:
        """A span of the rollout that hangs on no rank, fails on all of them or none, and says what to change."""
        what = f"{phase} {part}".rstrip() + f" of {where(self.module.trainer)}"
        memory = told_by_settings(what, makes_room(part or phase, self.rollout, self.module))
        alone = phase == "generate" and self.engine.tensor_parallel_size > 1
        with agreed(what, alone=alone), watched(what, self.rollout.timeout_s), memory, self.module.phases(phase):
            yield


def _columns(prompts: Prompts) -> list[dict[str, Any]]:
    """Of each prompt, and itself."""
    columns = prompts.columns.items()
    return [{name: values[i] for name, values in columns} | {"prompt": raw} for i, raw in enumerate(prompts.raw)]
