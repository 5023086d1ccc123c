"""`RolloutCallback`: owns the engine and fills ``batch["rollout"]`` before the module sees the batch.

    on_train_batch_start    offload optimizer → wake(weights) → sync → offload parameters → wake(kv_cache) → generate → sleep
                            → reload both
      filter_groups         generate and score, until enough groups can be learned from, see `filtering`
      async_level 1         take the responses of this iteration, or generate → sync → start those of the next, see `ahead`
    on_validation_start     wake, sync, once per validation loop; generate per batch; sleep at its end

Every generation phase first compares the engine's weight version with the module's and syncs when they differ. The first sync
and every n-th is verified: a checksum of the weights the engine holds against the ones that were sent.

All ranks take each step or none: after it they exchange whether it failed, see `faults`. After a failure the engine is closed
and everything is reloaded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from jsonargparse.typing import NonNegativeInt, PositiveFloat
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_rlhf.callbacks.ahead import Ahead
from lightning_rlhf.callbacks.faults import agreed, check_lengths, makes_room, told_by_settings
from lightning_rlhf.callbacks.filtering import FilterGroups, Rounds
from lightning_rlhf.callbacks.offload import HostMemory
from lightning_rlhf.callbacks.watchdog import watched, where
from lightning_rlhf.plan import Plan, Run, make_plan, problems, read_run
from lightning_rlhf.plan.checks import too_long
from lightning_rlhf.plan.ladder import Ladder, Switch
from lightning_rlhf.plan.memory import Rung
from lightning_rlhf.rollout.engine import EngineSetup, RolloutEngine
from lightning_rlhf.rollout.sharing import Pool, engine_share, pool_size
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.weights import gather, with_checksum
from lightning_rlhf.types import Completion, Experience, Prompts, Rollout, Sampling, derive_seed

if TYPE_CHECKING:
    from lightning_rlhf.modules.base import RLHFLightningModule

log = logging.getLogger(__name__)

_AVERAGE = 1 << 40
"""Versions of the average's weights are the policy's beyond this."""


class RolloutCallback(pl.Callback):
    """Generates the responses of each iteration with a colocated engine.

    Args:
        engine: default `TransformersEngine`, embedded in the process; `VLLMEngine` for speed.
        sampling: how training responses are drawn.
        val_sampling: how validation responses are drawn; default: one greedy response of the same length.
        sleep_level: what the engine gives back between phases: 0 nothing, 1 its cache (weights go to the host), 2 both. auto,
            as for the two switches: the least that fits by the plan, see `plan.ladder`; on the CPU 2, and nothing moves.
        offload_optimizer: the optimizer's state waits in host memory while the engine is awake.
        offload_parameters: the shards of actor, critic and reference too, once the weights are synced.
        verify_sync_every: compare checksums on the first sync and on every n-th; 0 never.
        log_probs_every: take the sampler's log-probs in every n-th iteration, to measure how far the engine is from the
            trainer; they slow vLLM down; 0 never. They do not touch the loss.
        async_level: 1 generates the next iteration's responses beside the update of this one, by a policy that is one update
            older, see `ahead`. It needs ``model.correction`` and memory for both, and slows both down: it pays where a few long
            responses keep the GPU idle.
        val_average: validation responses are drawn from the moving average of the policy's weights, see ``model.ema_decay``; the
            engine is synced with it before a validation, and with the policy after.
        filter_groups: generate for further prompts in place of groups whose responses all score the same (DAPO's dynamic
            sampling); ``{}`` takes its defaults, null trains on all.
        timeout_s: seconds that one step of a rollout (sync, wake, generate, sleep) may take; then the process ends and shows
            where it hung. Null leaves it to the `Watchdog`: only you know how long the longest generation is.
    """

    def __init__(
        self,
        engine: RolloutEngine | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        val_sampling: Sampling | None = None,
        sleep_level: Literal["auto", 0, 1, 2] = "auto",
        offload_optimizer: Switch = "auto",
        verify_sync_every: NonNegativeInt = 50,
        log_probs_every: NonNegativeInt = 10,
        offload_parameters: Switch = "auto",
        timeout_s: PositiveFloat | None = None,
        async_level: Literal[0, 1] = 0,
        filter_groups: FilterGroups | None = None,
        val_average: bool = False,
    ) -> None:
        if sampling.temperature <= 0.0:
            raise ValueError(
                "rollout.sampling.temperature must be positive: greedy responses are for rollout.val_sampling"
            )
        self.engine = engine or TransformersEngine()
        self.sampling = sampling
        self.val_sampling = val_sampling or sampling.greedy
        if async_level and (sleep_level not in ("auto", 0) or True in (offload_optimizer, offload_parameters)):
            raise ValueError(
                "rollout.async_level: 1 keeps the engine awake beside the trainer: leave out sleep_level, offload_optimizer and"
                " offload_parameters"
            )
        if filter_groups is not None and async_level:
            raise ValueError(
                "rollout.filter_groups needs rewards before it knows the next prompts: set rollout.async_level to 0"
            )
        if filter_groups is not None and sampling.num_generations < 2:
            raise ValueError(
                "rollout.filter_groups compares the responses to a prompt: set rollout.sampling.num_generations to 2 or more"
            )
        self.async_level, self.filter_groups, self.val_average = async_level, filter_groups, val_average
        self._further_rounds = 0  # of all iterations, each a batch of prompts
        awake = Ladder(0, False, False)
        self.ladder = awake if async_level else Ladder(sleep_level, offload_optimizer, offload_parameters)
        self.rung = self.ladder.usual
        self.plan: Plan | None = None
        self._host = HostMemory()
        self.verify_sync_every = verify_sync_every
        self.log_probs_every = log_probs_every
        self.timeout_s = timeout_s
        self._syncs = 0
        self._longest: dict[int, int] = {}  # response to the prompt of a row, when it came last; equal on every rank
        self._ahead = Ahead()
        self._own = slice(0)
        self._settle: Callable[[], None] = lambda: None

    # -- engine life -------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        module: RLHFLightningModule = pl_module  # type: ignore[assignment]
        others = [c for c in trainer.callbacks if isinstance(c, RolloutCallback) and c is not self]  # type: ignore[attr-defined]
        if others:
            raise ValueError(
                "there are two RolloutCallbacks: configure the one under rollout, not in trainer.callbacks"
            )
        if self.filter_groups is not None:
            self.filter_groups.check(module.score_names)
        if self.val_average and module.ema_decay is None:
            raise ValueError("rollout.val_average: true needs a moving average: set model.ema_decay")
        context = self._engine_setup(trainer, module, stage)
        with agreed("setting up the engine"):
            self.engine.setup(context)
        self._context = min(context.max_model_len, self.engine.context_limit or context.max_model_len)
        sp, tp = module.strategy.sequence_parallel_size, self.engine.tensor_parallel_size
        size = pool_size(sp, tp)
        gather_objects = partial(module.strategy.all_gather_objects, ranks=size)
        self._pool = Pool(sp, tp, module.strategy.global_rank % size, gather_objects)
        self.engine.weight_version = -1  # it may hold the weights of another module
        self._host = HostMemory()  # its buffers are those of one module
        self._ahead, self._all_gather = Ahead(), module.strategy.all_gather_objects_dp
        self._settle = partial(self._settle_ahead, module)

    def _engine_setup(self, trainer: pl.Trainer, module: RLHFLightningModule, stage: str) -> EngineSetup:
        run, strategy, data = run_of(trainer, module, self), module.strategy, getattr(trainer, "datamodule", None)
        for problem in problems(run):
            if problem.kind == "error":
                raise ValueError(problem.message)
            rank_zero_warn(problem.message)
        limit = module.check_models()
        if run.prompt_length and run.context > limit:
            raise ValueError(too_long(run, limit))
        sizes = [
            engine_share(
                -(-getattr(data, name, 256) // strategy.dp_size) * responses,
                strategy.sequence_parallel_size,
                self.engine.tensor_parallel_size,
            )
            for name, responses in (
                ("batch_size", self.sampling.num_generations + module.needs_greedy),
                ("val_batch_size", self.val_sampling.num_generations),
            )
            if isinstance(getattr(data, name, 256), int)
        ]
        return EngineSetup(
            model=module.model_path,
            device=strategy.root_device,
            dtype=strategy.precision_plugin.compute_dtype,
            eos_token_ids=module.eos_token_ids,
            pad_token_id=module.pad_token_id,
            max_model_len=run.context,
            max_num_seqs=max(sizes),
            seed=module.seed,
            trust_remote_code=module.settings.trust_remote_code,
            config_overrides=module.settings.config_overrides,
            kv_cache_memory_bytes=self._choose_rung(trainer, module, stage),
            beside=self.async_level > 0,
        )

    def _choose_rung(self, trainer: pl.Trainer, module: RLHFLightningModule, stage: str) -> int | None:
        """Decide what gives way to the engine. Returns the size of its KV cache if that is the plan's to choose.

        Raises:
            ValueError: nothing fits.
        """
        self.rung, self.plan = self.ladder.usual, None
        memory = module.strategy.broadcast(device_memory(module.strategy.root_device))  # one answer on all ranks
        if not memory:
            return None
        try:
            plan = plan_of(trainer, module, self, memory)
        except Exception as error:  # a model that trains, but that the meta device cannot run
            rank_zero_warn(f"the plan cannot choose rollout.sleep_level, the engine {self.rung}: {error}")
            return None
        errors = [problem.message for problem in plan.problems if problem.kind == "error"]
        if errors and stage == "fit":
            raise ValueError(errors[0])
        self.rung, self.plan = plan.choice.rung, plan
        rank_zero_info(f"engine {plan.choice.reason}")
        return None if plan.engine.least is None else plan.engine.kv_cache

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._ahead.wait()
        try:
            self.engine.close()
        except Exception:
            log.exception("the engine could not be closed after a %s", type(exception).__name__)
        self._reload(trainer, pl_module)  # type: ignore[arg-type]

    # -- phases ------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: dict[str, Any], batch_idx: int
    ) -> None:
        module: RLHFLightningModule = pl_module  # type: ignore[assignment]
        iteration, prompts = trainer.fit_loop.total_batch_idx, batch["prompts"]
        measured = self.log_probs_every > 0 and iteration % self.log_probs_every == 0
        log_probs = measured or module.correction is not None
        if self.async_level and self._is_there(iteration, prompts):
            taken = self._ahead.take(prompts.index.tolist())
            batch["rollout"] = Rollout.build(prompts, taken, self.sampling, module.needs_greedy)
            module.extra_metrics |= {"rollout/staleness": 1.0, "rollout/ahead_s": self._ahead.seconds}
        else:
            self._wake(trainer, module)
            generate = partial(
                self._generate,
                module,
                sampling=self.sampling,
                iteration=iteration,
                log_probs=log_probs,
                with_greedy=module.needs_greedy,
            )
            batch |= {"rollout": generate(prompts)} if self.filter_groups is None else self._filtered(module, generate)
        if self.async_level:
            self._start_next(trainer, module, iteration + 1)
        else:
            self._sleep(trainer, module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        experience: Experience | None = getattr(pl_module, "last_experience", None)
        if experience is None:  # of a training_step of the user's own
            return
        found: dict[int, int] = {}
        fields = zip(experience.group.tolist(), experience.sequences, experience.prompt_lengths, strict=True)
        for row, sequence, prompt_length in fields:
            found[row] = max(found.get(row, 0), len(sequence) - prompt_length)
        self._longest |= found

    def _filtered(self, module: RLHFLightningModule, generate: Callable[[Prompts], Rollout]) -> dict[str, Any]:
        """Rollout and scores of as many groups as a batch has prompts, see `filtering`."""
        assert self.filter_groups is not None
        trainer = module.trainer
        rounds = Rounds(self.filter_groups, self._all_gather, module.mask_truncated, module.reward_clip)
        begin = trainer.fit_loop.total_batch_idx + self._further_rounds
        while not (rounds and rounds.done):
            epoch, number = divmod(begin + len(rounds), int(trainer.num_training_batches))
            prompts = trainer.train_dataloader.batch_at(epoch, number)["prompts"]  # type: ignore[union-attr]
            rollout = generate(prompts)
            with module.phases("reward"):
                rounds.add(rollout, module.scores_of(rollout))
        self._further_rounds += len(rounds) - 1
        module.extra_metrics |= rounds.metrics
        rollout, scores = rounds.result()
        return {"prompts": rollout.prompts, "rollout": rollout, "scores": scores}

    def _is_there(self, iteration: int, prompts: Prompts) -> bool:
        """Whether the responses of this iteration were generated beside the last one's update."""
        self._settle()
        if self._ahead.iteration != iteration:
            return False
        everywhere = all(self._all_gather(self._ahead.has(prompts.index.tolist())))
        if not everywhere:  # resumed with other data
            self._ahead.clear()
        return everywhere

    def _start_next(self, trainer: pl.Trainer, module: RLHFLightningModule, iteration: int) -> None:
        """Begin to generate for the next iteration, if there is one, with the weights of now."""
        epoch, number = divmod(iteration, int(trainer.num_training_batches))
        if 0 <= trainer.max_steps <= trainer.global_step + 1 or epoch == trainer.max_epochs:
            return
        prompts = trainer.train_dataloader.batch_at(epoch, number)["prompts"]  # type: ignore[union-attr]
        self._wake(trainer, module)
        run, self._own = self._share(module, prompts, self.sampling, iteration, True, module.needs_greedy)
        self._ahead.start(iteration, prompts.index.tolist(), run, module.strategy.root_device)

    def _settle_ahead(self, module: RLHFLightningModule) -> None:
        """Wait for the generation beside the update, if one runs: the engine is free then."""
        if self._ahead.running:
            with self._step(module, "generate"):
                self._ahead.settle(lambda run: self._pool.collect(run)[self._own])

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        rows, lengths = (torch.tensor(list(column)) for column in (self._longest, self._longest.values()))
        ahead = self._ahead.state(self._all_gather)
        return {"ahead": ahead, "rows": rows, "longest": lengths, "further_rounds": self._further_rounds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._longest = dict(zip(*(state_dict[name].tolist() for name in ("rows", "longest")), strict=True))
        self._further_rounds = state_dict.get("further_rounds", 0)
        if self.async_level:
            self._ahead.load(state_dict["ahead"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        option = "async_level: 1" if self.async_level else "filter_groups" if self.filter_groups is not None else None
        if option and not hasattr(trainer.train_dataloader, "batch_at"):
            raise ValueError(
                f"rollout.{option} must know the next batch before it is due: use PromptDataModule, or give your loader a"
                " method batch_at(epoch, number)"
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._settle()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._settle()
        self._wake(trainer, pl_module, average=self.val_average)  # type: ignore[arg-type]

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
        self._sleep(trainer, pl_module)  # type: ignore[arg-type]

    on_test_start = on_validation_start
    on_test_batch_start = on_validation_batch_start
    on_test_end = on_validation_end

    def _wake(self, trainer: pl.Trainer, module: RLHFLightningModule, average: bool = False) -> None:
        """Weights first, synced if they are not the policy's (or its average), then the KV cache: that keeps the peak down."""
        if self.rung.offload_optimizer:
            with self._step(module, "offload"):
                self._host.offload_states(trainer.optimizers)
        if torch.cuda.is_available() and self.rung != Rung(0, False, False):
            torch.cuda.empty_cache()
        with self._step(module, "wake", "weights"):
            self.engine.wake(["weights"])
        version = module.weight_version + average * _AVERAGE
        if self.engine.weight_version != version:
            self._sync(module, version)
        if self.rung.offload_parameters:
            # a reward model is asked while the engine is awake
            scores = self.filter_groups is not None or not trainer.training
            with self._step(module, "offload"):
                for root in _roots(module):
                    if not scores or root is not module.reward_model:
                        self._host.offload_parameters(root)
        with self._step(module, "wake", "kv_cache"):
            self.engine.wake(["kv_cache"])

    def _sleep(self, trainer: pl.Trainer, module: RLHFLightningModule) -> None:
        with self._step(module, "sleep"):
            self.engine.sleep(self.rung.sleep_level)
        if self._host.in_use:
            with self._step(module, "reload"):
                self._reload(trainer, module)

    def _reload(self, trainer: pl.Trainer, module: RLHFLightningModule) -> None:
        """Whatever is on the host comes back."""
        if self._host.in_use:
            self._host.reload(_roots(module), trainer.optimizers, trainer.strategy.root_device)

    def _sync(self, module: RLHFLightningModule, version: int) -> None:
        module.strategy.reshard(module.actor)
        verify = self.verify_sync_every > 0 and self._syncs % self.verify_sync_every == 0
        self._syncs += 1
        dtype = module.strategy.precision_plugin.compute_dtype
        taken = module.hf_named_weights(average=version >= _AVERAGE)
        weights: Iterable[tuple[str, Tensor]] = chain(gather(taken, dtype), module.actor.hf_named_buffers())
        sent = with_checksum(weights) if verify else None
        with self._step(module, "sync"):
            try:
                self.engine.load_weights(sent or weights, version)
            except Exception:
                for _ in weights:  # the other ranks need this one's shards to get as far
                    pass
                raise
            held = self.engine.checksum() if verify else None
            if sent is not None and held is not None:
                if held != sent.checksum:
                    raise RuntimeError(
                        "the engine does not hold the weights that were sent to it: its checksum differs"
                    )
                module.extra_metrics["rollout/checksum_ok"] = 1.0

    def _generate(
        self,
        module: RLHFLightningModule,
        prompts: Prompts,
        sampling: Sampling,
        iteration: int,
        log_probs: bool,
        with_greedy: bool = False,
    ) -> Rollout:
        run, own = self._share(module, prompts, sampling, iteration, log_probs, with_greedy)
        with self._step(module, "generate"):
            return Rollout.build(prompts, self._pool.collect(run)[own], sampling, with_greedy)

    def _share(
        self,
        module: RLHFLightningModule,
        prompts: Prompts,
        sampling: Sampling,
        iteration: int,
        log_probs: bool,
        with_greedy: bool,
    ) -> tuple[Callable[[], list[Completion]], slice]:
        """See `Pool.share`; the requests are in the order of `Rollout.build`."""
        with self._step(module, "generate"):  # of its own: a rank that fails must not miss the exchanges of the pool
            check_lengths(prompts, self._context)
        samples, rows = range(sampling.num_generations), prompts.index.tolist()
        n, last = len(samples) + with_greedy, [None] * with_greedy
        return self._pool.share(
            self.engine,
            [ids for ids in prompts.ids for _ in range(n)],
            sampling,
            seeds=[s for row in rows for s in (*(derive_seed(module.seed, iteration, row, i) for i in samples), *last)],
            log_probs=log_probs,
            images=[one for one in prompts.images for _ in range(n)] if prompts.images else None,
            expected=[self._longest.get(row, math.inf) for row in rows for _ in range(n)],
        )

    @contextmanager
    def _step(self, module: RLHFLightningModule, phase: str, part: str = "") -> Iterator[None]:
        """A span of the rollout that hangs on no rank, fails on all of them or none, and says what to change."""
        what = f"{phase} {part}".rstrip() + f" of {where(module.trainer)}"
        memory = told_by_settings(what, makes_room(part or phase, self, module))
        alone = phase == "generate" and self.engine.tensor_parallel_size > 1
        with agreed(what, alone=alone), watched(what, self.timeout_s), memory, module.phases(phase):
            yield


def _roots(module: RLHFLightningModule) -> list[torch.nn.Module]:
    """The sharded models of a module; not frozen ones whose shards live on the host anyway."""
    frozen = [] if module.settings.offload_reference else ["reference", "reward_model"]
    names = ["actor", "critic", *frozen]
    return [root for name in names if (root := getattr(module, name, None)) is not None]


def run_of(trainer: pl.Trainer, module: RLHFLightningModule, rollout: RolloutCallback) -> Run:
    """The numbers of the run that a trainer is set up for."""
    return read_run(
        module,
        getattr(trainer, "datamodule", None),
        rollout,
        module.strategy,
        config=module.settings.config,
        world_size=trainer.world_size,
        num_nodes=trainer.num_nodes,
        device_type=module.strategy.root_device.type,
        callbacks=trainer.callbacks,  # type: ignore[attr-defined]
    )


def device_memory(device: torch.device) -> int:
    """Bytes of a GPU, 0 of anything else."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def plan_of(trainer: pl.Trainer, module: RLHFLightningModule, rollout: RolloutCallback, memory: int) -> Plan:
    """The plan of the run that a trainer is set up for; see `make_plan`."""
    configs = {name: settings.config for name, settings in module.roles.items()}
    return make_plan(module, rollout, run_of(trainer, module, rollout), configs, memory)
