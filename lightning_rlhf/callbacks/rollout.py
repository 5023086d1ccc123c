"""`RolloutCallback`: owns the engine and fills ``batch["rollout"]`` before the module sees the batch.

    setup                   what gives way to the engine, and what that must know of the run, see `planning`
    on_train_batch_start    wake → generate → sleep, see `rollout_steps`
      filter_groups         generate and score, until enough groups can be learned from, see `filtering`
      async_level 1         take the responses of this iteration, or generate → wake → start those of the next, see `ahead`
    on_validation_start     wake, once per validation loop; generate per batch; sleep at its end

After a failure the engine is closed and everything is reloaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from statistics import mean
from traceback import format_exception_only
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from jsonargparse.typing import NonNegativeInt, PositiveFloat

from lightning_rlhf.callbacks.ahead import Ahead, keys
from lightning_rlhf.callbacks.checkpoint import IterationCheckpoint
from lightning_rlhf.callbacks.faults import agreed
from lightning_rlhf.callbacks.filtering import FilterGroups, Rounds
from lightning_rlhf.callbacks.planning import checked_run, choose_plan, engine_setup
from lightning_rlhf.callbacks.rollout_steps import RolloutSteps
from lightning_rlhf.options import optional_options, options_as
from lightning_rlhf.plan import Plan
from lightning_rlhf.plan.ladder import Ladder, Switch
from lightning_rlhf.rollout.engine import RolloutEngine
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.turns import Conversation
from lightning_rlhf.types import Experience, Prompts, Rollout, Sampling

if TYPE_CHECKING:
    from lightning_rlhf.modules.base import RLHFLightningModule

log = logging.getLogger(__name__)


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
        conversation: responses of several turns, see `rollout.turns`: a function answers what the policy says, and it
            goes on. Lengths of ``sampling`` are then those of a turn.
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
        conversation: Conversation | None = None,
    ) -> None:
        sampling = options_as(Sampling, sampling, "rollout.sampling")
        if sampling.temperature <= 0.0:
            raise ValueError(
                "rollout.sampling.temperature must be positive: greedy responses are for rollout.val_sampling"
            )
        if not isinstance(engine, RolloutEngine | None):
            raise ValueError(
                f"rollout.engine must be an engine, such as lightning_rlhf.rollout.VLLMEngine(), got {engine!r}"
            )
        self.engine = engine or TransformersEngine()
        self.sampling = sampling
        self.val_sampling = options_as(Sampling, val_sampling or sampling.greedy, "rollout.val_sampling")
        filter_groups = optional_options(FilterGroups, filter_groups, "rollout.filter_groups")
        conversation = optional_options(Conversation, conversation, "rollout.conversation")
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
        self.conversation = conversation
        # of the iterations before one, each a batch of prompts: of the one under way, which may begin again, and of the next
        self._further_rounds: dict[int, int] = {}
        awake = Ladder(0, False, False)
        self.ladder = awake if async_level else Ladder(sleep_level, offload_optimizer, offload_parameters)
        self.rung = self.ladder.usual
        self.plan: Plan | None = None
        self.drafted: Plan | None = None  # of the start that goes on, by `PlanSummary`
        self.verify_sync_every = verify_sync_every
        self.log_probs_every = log_probs_every
        self.timeout_s = timeout_s
        self._steps = RolloutSteps(self)
        self._ahead = Ahead()
        self._own = slice(0)

    # -- engine life -------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        module: RLHFLightningModule = pl_module  # type: ignore[assignment]
        if not hasattr(module, "needs_greedy"):
            raise TypeError(f"{type(module).__name__} draws no responses: leave RolloutCallback out")
        others = [c for c in trainer.callbacks if isinstance(c, RolloutCallback) and c is not self]  # type: ignore[attr-defined]
        if others:
            raise ValueError(
                "there are two RolloutCallbacks: configure the one under rollout, not in trainer.callbacks"
            )
        self.check(module)
        run = checked_run(trainer, module, self)
        self.check_draws()
        self.plan, self.drafted = choose_plan(trainer, module, self, stage), None
        self.rung = self.plan.choice.rung if self.plan else self.ladder.usual
        context = engine_setup(trainer, module, self, run, self.plan)
        with agreed("setting up the engine"):
            self.engine.setup(context)
        self._steps.begin(module, min(run.context, self.engine.context_limit or run.context))
        self._ahead, self._all_gather = Ahead(), module.strategy.all_gather_objects_dp

    def check(self, module: RLHFLightningModule) -> None:
        """Raise ValueError if the options do not go with the module's."""
        if self.filter_groups is not None:
            self.filter_groups.check(module.score_names)
        if self.val_average and module.ema_decay is None:
            raise ValueError("rollout.val_average: true needs a moving average: set model.ema_decay")
        if self.conversation is not None and module.frozen_reward is not None:
            raise ValueError(
                "model.reward_model scores one answer, and rollout.conversation has several: leave out one of them"
            )

    def check_draws(self) -> None:
        """Raise ValueError if the engine cannot draw as it is asked to."""
        for sampling in (self.sampling, self.val_sampling):
            self.engine.check_sampling(sampling)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._ahead.generates:  # that takes its time, or hangs, and nobody else has told of the exception yet
            what = format_exception_only(exception)[-1].strip()
            log.warning("%s; the engine is closed once the generation under way has ended", what)
        self.engine.interrupt()
        self._ahead.wait()
        self.close()
        self._steps.reload()

    def close(self) -> None:
        """Close the engine, which the next run with this callback would go on with; that it cannot be is logged, no error."""
        try:
            self.engine.close()
        except Exception:
            log.exception("the engine could not be closed")

    # -- phases ------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: dict[str, Any], batch_idx: int
    ) -> None:
        module: RLHFLightningModule = pl_module  # type: ignore[assignment]
        iteration, prompts = trainer.fit_loop.total_batch_idx, _prompts_of(batch)
        comparable = self.log_probs_every > 0 and self.sampling.replayable
        measured = comparable and iteration % self.log_probs_every == 0
        log_probs = measured or module.correction is not None
        asked = self._keys(prompts) if self.async_level else []
        if self.async_level and self._is_there(iteration, asked, self.sampling.num_generations + module.needs_greedy):
            taken = self._ahead.take(asked)
            batch["rollout"] = Rollout.build(prompts, taken, self.whole(self.sampling), module.needs_greedy)
            module.extra_metrics |= {"rollout/staleness": 1.0, "rollout/ahead_s": self._ahead.seconds}
        else:
            self._steps.wake()
            generate = partial(
                self._steps.generate,
                sampling=self.sampling,
                iteration=iteration,
                log_probs=log_probs,
                with_greedy=module.needs_greedy,
            )
            batch |= {"rollout": generate(prompts)} if self.filter_groups is None else self._filtered(module, generate)
        if self.conversation is not None:
            module.extra_metrics |= self._turns(batch["rollout"])
        if self.async_level:
            self._start_next(trainer, module, iteration + 1)
        else:
            self._steps.sleep()

    def whole(self, sampling: Sampling) -> Sampling:
        """As the module sees it: the length is that of all turns."""
        return sampling if self.conversation is None else self.conversation.whole(sampling)

    def _turns(self, rollout: Rollout) -> dict[str, float]:
        own = [(len(c.turns), sum(c.spans[1::2])) for c in rollout.completions]
        turns, replies = zip(*(one for rank in self._all_gather(own) for one in rank), strict=True)
        return {"completions/mean_turns": mean(turns), "completions/mean_reply_length": mean(replies)}

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
        self._steps.longest |= found

    def _filtered(self, module: RLHFLightningModule, generate: Callable[..., Rollout]) -> dict[str, Any]:
        """Rollout and scores of as many groups as a batch has prompts, see `filtering`."""
        assert self.filter_groups is not None
        trainer, iteration = module.trainer, module.trainer.fit_loop.total_batch_idx
        rounds = Rounds(self.filter_groups, self._all_gather, module.mask_truncated, module.reward_clip)
        before = self._further_rounds.get(iteration, max(self._further_rounds.values(), default=0))
        while not (rounds and rounds.done):
            epoch, number = divmod(iteration + before + len(rounds), int(trainer.num_training_batches))
            prompts = trainer.train_dataloader.batch_at(epoch, number)["prompts"]  # type: ignore[union-attr]
            rollout = generate(prompts, first=len(rounds) * self.sampling.num_generations)
            with module.phases("reward"):
                rounds.add(rollout, module.scores_of(rollout))
        self._further_rounds = {iteration: before, iteration + 1: before + len(rounds) - 1}
        module.extra_metrics |= rounds.metrics
        rollout, scores = rounds.result()
        return {"prompts": rollout.prompts, "rollout": rollout, "scores": scores}

    def _keys(self, prompts: Prompts) -> list[int]:
        return keys(prompts, self.sampling, *(self.conversation.key if self.conversation else ()))

    def _is_there(self, iteration: int, asked: list[int], each: int) -> bool:
        """Whether the responses of this iteration were generated beside the last one's update."""
        self._settle()
        if self._ahead.iteration != iteration:
            return False
        everywhere = all(self._all_gather(self._ahead.has(asked, each)))
        if not everywhere:  # resumed with other data, another sampling, or other numbers of responses
            self._ahead.clear()
        return everywhere

    def _start_next(self, trainer: pl.Trainer, module: RLHFLightningModule, iteration: int) -> None:
        """Begin to generate for the next iteration, if there is one, with the weights of now."""
        epoch, number = divmod(iteration, int(trainer.num_training_batches))
        if 0 <= trainer.max_steps <= trainer.global_step + 1 or epoch == trainer.max_epochs:
            return
        prompts = trainer.train_dataloader.batch_at(epoch, number)["prompts"]  # type: ignore[union-attr]
        self._steps.wake()
        run, self._own = self._steps.share(prompts, self.sampling, iteration, True, module.needs_greedy)
        self._ahead.start(iteration, self._keys(prompts), run, module.strategy.root_device)

    def _settle(self) -> None:
        """Wait for the generation beside the update, if one runs: the engine is free then. What it raised is raised each time."""
        if self._ahead.running:
            try:
                with self._steps.step("generate"):
                    self._ahead.settle(lambda run: self._steps.pool.collect(run)[self._own])
            except Exception as error:  # on all ranks
                self._ahead.clear()
                self._ahead.failure = error
        if self._ahead.failure is not None:
            raise self._ahead.failure

    def state_dict(self) -> dict[str, Any]:
        with suppress(Exception):  # raised when the responses are due: the checkpoint of the update is written first
            self._settle()
        longest = self._steps.longest
        rows, lengths = (torch.tensor(list(column)) for column in (longest, longest.values()))
        ahead = self._ahead.state(self._all_gather)
        return {"ahead": ahead, "rows": rows, "longest": lengths, "further_rounds": self._further_rounds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps.longest = dict(zip(*(state_dict[name].tolist() for name in ("rows", "longest")), strict=True))
        further = state_dict.get("further_rounds", {})
        self._further_rounds = further if isinstance(further, dict) else {-1: further}  # as earlier versions wrote
        if self.async_level:
            self._ahead.load(state_dict["ahead"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.fit_loop.total_batch_idx < 0:  # from the start, whatever run this callback has been through
            self._further_rounds = {}
        option = "async_level: 1" if self.async_level else "filter_groups" if self.filter_groups is not None else None
        if option and not hasattr(trainer.train_dataloader, "batch_at"):
            raise ValueError(
                f"rollout.{option} must know the next batch before it is due: use PromptDataModule, or give your loader a"
                " method batch_at(epoch, number)"
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._settle()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        try:
            self._settle()
        except Exception:
            for saver in trainer.checkpoint_callbacks:  # one that is due waits for a metric that will not come
                if isinstance(saver, IterationCheckpoint) and saver.waits_for_validation:
                    saver.save_now(trainer)
            raise
        self._steps.wake(average=self.val_average)

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: dict[str, Any],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        # iteration -1: the same draws in every validation, so that curves show the policy and not the dice
        batch["rollout"] = self._steps.generate(_prompts_of(batch), self.val_sampling, -1, False)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps.sleep()

    on_test_start = on_validation_start
    on_test_batch_start = on_validation_batch_start
    on_test_end = on_validation_end


def _prompts_of(batch: Any) -> Prompts:
    if not isinstance(batch, dict) or "prompts" not in batch:
        raise ValueError(
            "the batch has no prompts: take PromptDataModule(path=...), which also reads a datasets.Dataset or a list of dicts"
        )
    prompts: Prompts = batch["prompts"]
    return prompts
