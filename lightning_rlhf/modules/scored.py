"""`ScoredModule`: from responses to rewards, in training and in validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jsonargparse.typing import NonNegativeInt
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_rlhf.modules.critic import Critic
from lightning_rlhf.modules.frozen_reward import (
    FrozenRewardModel,
    build_reward_model,
    check_reward_model,
    scores_of_all,
)
from lightning_rlhf.modules.numbers import Finite, PositiveFloat
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.modules.training import TrainedModule
from lightning_rlhf.modules.validation import ValidationMetrics
from lightning_rlhf.options import optional_options
from lightning_rlhf.rewards import RewardError
from lightning_rlhf.scoring import GIVEN, NO_REWARD, Scorer, answers_of, check_free
from lightning_rlhf.types import Completion, Rollout, Scores
from lightning_rlhf.ulysses import longest_sequence

RewardFunction = Callable[..., Any]


class ScoredModule(TrainedModule):
    """Reward functions, and validation with them. Override point: `score`.

    Args:
        model: see `TrainedModule`.
        reward: functions, or their dotted paths, in TRL's signature ``f(prompts, completions, **columns)`` or verl's
            ``f(data_source, solution_str, ground_truth, extra_info)``; not needed when `score` is overridden.
        reward_weights: one per function, default 1.
        reward_clip: lowest and highest reward of a response in training, e.g. [-5, 5]; metrics and validation have it unclipped.
        reward_timeout: seconds one scoring of an iteration's responses may take per function; null is no limit.
        reward_workers: processes for reward functions; 0 runs them in this process.
        reward_model: a frozen model whose score is added to the functions' as ``reward_model``.
        val_success: a validation response with at least this reward solves its prompt (mean@k, pass@k, maj@k).
        val_metric: name of the reward function that ``val_success`` speaks of, where others shape the reward; null is the whole
            reward.
        val_before_train: validate the model as it is before the first iteration; a resumed run does not.
        **kwargs: see `TrainedModule`.

    Attributes:
        last_scores: of the last responses, for callbacks.
    """

    def __init__(
        self,
        model: str,
        reward: list[RewardFunction] | None = None,
        reward_weights: list[Finite] | None = None,
        reward_clip: tuple[float, float] | None = None,
        reward_timeout: PositiveFloat | None = 60.0,
        reward_workers: NonNegativeInt = 0,
        reward_model: FrozenRewardModel | None = None,
        val_success: Finite = 1.0,
        val_metric: str | None = None,
        val_before_train: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        self.scorer = Scorer(
            [] if reward is None else reward, reward_weights, timeout=reward_timeout, workers=reward_workers
        )
        reward_model = optional_options(FrozenRewardModel, reward_model, "model.reward_model")
        if reward_model is not None and "reward_model" in (reward.name for reward in self.scorer.rewards):
            raise ValueError(
                "model.reward: a function called reward_model has no name of its own beside model.reward_model: rename it"
            )
        self.frozen_reward = reward_model
        self.reward_model: Critic | None = None
        self._given: dict[str, tuple[Tensor, float]] = {}
        if reward_clip is not None and not reward_clip[0] < reward_clip[1]:
            raise ValueError(f"model.reward_clip must be [lowest, highest], got {list(reward_clip)}")
        self.reward_clip = reward_clip
        self.val_success, self.val_metric, self.val_before_train = val_success, val_metric, val_before_train
        if val_metric is not None and self.score_names is not None:
            Scores(torch.zeros(0), dict.fromkeys(self.score_names, torch.zeros(0))).judged_by(val_metric)
        self.last_scores: Scores
        self._validation: dict[int, ValidationMetrics] = {}

    @property
    def roles(self) -> dict[str, ModelSettings]:
        if self.frozen_reward is None:
            return super().roles
        return super().roles | {"reward_model": self._reward_settings}

    @cached_property
    def _reward_settings(self) -> ModelSettings:
        assert self.frozen_reward is not None
        return self.frozen_reward.settings(self.settings)

    def check_options(self) -> None:
        if self.score_names == []:
            raise ValueError(NO_REWARD)
        self._check_columns()
        super().check_options()

    def _check_columns(self) -> None:
        """Raise RewardError if a function asks for what the data has not, where the data is there and says what it has."""
        data = self._trainer and getattr(self._trainer, "datamodule", None)
        if self.score_names is None:
            return
        found = (getattr(data, "train_table", None), *getattr(data, "val_tables", {}).values())
        tables = [table for table in found if table is not None]
        for table in tables:
            for reward in self.scorer.rewards:
                reward.check_columns([*table.columns, *GIVEN])

    def check_role(self, name: str, config: Any) -> None:
        if name == "reward_model":
            check_reward_model(self.roles[name], config)
        super().check_role(name, config)

    def configure_model(self) -> None:
        super().configure_model()
        if self.frozen_reward is not None and self.reward_model is None:
            self.reward_model = build_reward_model(self.roles["reward_model"], self.strategy)

    def teardown(self, stage: str) -> None:
        self.scorer.close()

    def score(self, rollout: Rollout) -> Scores | Tensor | Sequence[float | None]:
        """One reward per response of this rank; None or NaN leaves the response out. Override it to bring your own.

        Called for training and validation, on the first rank of each sequence-parallel group only.
        """
        return self.scorer(rollout, self.decode(rollout), self.trainer, given=self._given, decode=self.decode_ids)

    @property
    def score_names(self) -> list[str] | None:
        """Of what `score` adds up; None if it is a subclass's own."""
        if type(self).score is not ScoredModule.score:
            return None
        names = [reward.name for reward in self.scorer.rewards]
        return names if self.frozen_reward is None else [*names, "reward_model"]

    def decode(self, rollout: Rollout) -> list[str]:
        """Texts of the responses, special tokens left out; of a conversation the policy's turns, a line break between them."""
        return ["\n".join(map(self.decode_ids, c.turns)) for c in rollout.completions]

    def decode_ids(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    @property
    def part_weights(self) -> list[float]:
        """Of the reward functions and the reward model, in the order of `Scores.parts`."""
        return [*self.scorer.weights, *([] if self.frozen_reward is None else [self.frozen_reward.weight])]

    def scores_of(self, rollout: Rollout) -> Scores:
        """`score`, run once per data rank; a failure on any rank ends all of them with its message."""
        self._given = self._ask_reward_model(rollout)
        result: Any = None
        failure: BaseException | None = None
        try:
            if self.strategy.sp_rank == 0:
                value = self.score(rollout)
                made = value if isinstance(value, Scores) else Scores(_as_rewards(value, len(rollout)))
                _check_scores(made, rollout.completions)
                result = _detached(made)
        except Exception as error:
            failure = error
        told = failure and (self.trainer.global_rank, f"{type(failure).__name__}: {failure}")
        result, told = self.strategy.broadcast_object_sp((result, told))
        failures = [one for one in self.strategy.all_gather_objects_dp(told) if one]
        if failure is not None:
            raise failure
        if failures:
            rank, message = failures[0]
            kind = RewardError if message.startswith(RewardError.__name__) else RuntimeError
            raise kind(f"score() failed on rank {rank}: {message}")
        return result

    def _ask_reward_model(self, rollout: Rollout) -> dict[str, tuple[Tensor, float]]:
        """Its scores of this rank's responses, as `Scorer` takes them. Collective."""
        model, root = self.frozen_reward, self.reward_model
        if model is None or root is None:
            return {}
        sequences: list[Tensor] = []
        failure = None
        try:
            n = rollout.sampling.num_generations
            prompts = [p for p in rollout.prompts.raw for _ in range(n)]
            rows = rollout.prompts.index.repeat_interleave(n).tolist()
            sequences = model.token_ids(prompts, self.decode(rollout), rows)
        except ValueError as error:
            failure = str(error)
        for message in self.strategy.all_gather_objects_dp(failure):  # on all ranks: the others would wait
            if message is not None:
                raise ValueError(message)
        limit = longest_sequence(root.model.config)
        return {"reward_model": (scores_of_all(root, sequences, self.strategy, self.split, limit), model.weight)}

    # -- validation --------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Validation before training; here every callback has begun, the module's hook being the last."""
        super().on_train_start()
        trainer = self.trainer
        if not self.val_before_train or trainer.global_step:
            return
        if not trainer.enable_validation:
            rank_zero_warn("model.val_before_train has nothing to validate on: set data.val_path or data.val")
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        rollout = rollout_of(batch)
        self.last_scores = self.scores_of(rollout)
        if dataloader_idx not in self._validation:
            metrics = ValidationMetrics(self.validation_set(dataloader_idx), self.val_success, self.val_metric)
            self._validation[dataloader_idx] = metrics.to(self.device)
        n = rollout.sampling.num_generations
        answers = answers_of(self.last_scores, self.decode(rollout)) if n > 1 else ()
        self._validation[dataloader_idx].update(rollout.prompts.index, self.last_scores, n, answers)

    def on_validation_epoch_end(self) -> None:
        self.log_validated(
            {k: value for metrics in self._validation.values() for k, value in metrics.compute().items()}
        )
        self._validation.clear()


def _as_rewards(value: Any, responses: int) -> Tensor:
    """What a `score` of one's own gave, as numbers.

    Raises:
        ValueError: it is none.
    """
    try:
        values = [math.nan if one is None else one for one in value] if isinstance(value, Sequence) else value
        return torch.as_tensor(values, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        got = f"a {type(value).__name__} of which {error}" if isinstance(value, Sequence) else type(value).__name__
        raise ValueError(
            f"score() must return a number or None for each of {responses} responses, got {got}"
        ) from error


def _check_scores(scores: Scores, completions: Sequence[Completion]) -> None:
    """Raise ValueError unless they are tensors with one row per response, with metrics under names of their own."""
    for name in scores.metrics:
        try:
            check_free(name)
        except RewardError as error:
            raise ValueError(f"score(): Scores.metrics {error}") from None
    rows = len(completions)
    given = {"one reward per response": scores.total}
    given |= {f"Scores.parts[{name!r}] with one row per response": part for name, part in scores.parts.items()}
    if scores.failed is not None:
        given["Scores.failed with one row per response"] = scores.failed
    for what, value in given.items():
        if (shape := _shape(value)) != (rows,):
            raise ValueError(f"score() must return {what}: ({rows},), got {shape}")
    if scores.tokens is not None:
        longest = max((len(c.token_ids) for c in completions), default=0)
        shape = _shape(scores.tokens)
        if not isinstance(shape, tuple) or len(shape) != 2 or shape[0] != rows or shape[1] < longest:
            raise ValueError(
                f"score() must return Scores.tokens with a reward for each token: ({rows}, {longest}), got {shape}"
            )


def _shape(value: Any) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _detached(scores: Scores) -> Scores:
    """Without the gradients of a torch model that gave them: the policy's backward passes would go on into it."""
    parts = {name: part.detach() for name, part in scores.parts.items()}
    tokens = None if scores.tokens is None else scores.tokens.detach()
    return replace(scores, total=scores.total.detach(), parts=parts, tokens=tokens)


def rollout_of(batch: dict[str, Any]) -> Rollout:
    """The responses that a callback put into a batch.

    Raises:
        ValueError: there are none.
    """
    if "rollout" not in batch:
        raise ValueError(
            "the batch has no responses: put a lightning_rlhf.RolloutCallback into Trainer(callbacks=[...])"
        )
    rollout: Rollout = batch["rollout"]
    return rollout
