"""`ModelRoles`: the models of a run, from their settings to what is trained of them.

    roles ─▶ check_models (no weights) ─▶ configure_model: build, shard, load ─▶ parameter_groups

What is done with them is in `modules.base`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_rlhf.images import ImageEncoder
from lightning_rlhf.manifest import RUN, check_resumed, versions
from lightning_rlhf.modules.copies import average_of, averages, copy_weights, update_average
from lightning_rlhf.modules.critic import Critic, check_model
from lightning_rlhf.modules.policy import Policy, build_policy
from lightning_rlhf.modules.score_head import head_names, is_scored
from lightning_rlhf.modules.settings import ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightning_rlhf.strategy import FSDPUlyssesStrategy


SCORED = ("critic", "reward_model")
"""Roles with a scalar head."""


class ModelRoles(pl.LightningModule):
    """An actor and, where `needs_reference`, a frozen reference; a subclass with more models adds to the methods here.

    Args:
        settings: of the actor.
        lr: its learning rate.

    Attributes:
        ema_decay: of ``average``, the moving average of the actor's weights; None is none.
        iteration: how many the weights have been through; those of a checkpoint once it is loaded.
        weight_version: grows whenever the actor's weights change; an engine with another one is stale.
    """

    ema_decay: float | None = None

    def __init__(self, settings: ModelSettings, lr: float) -> None:
        super().__init__()
        self.settings, self.lr = settings, lr
        self.actor: Policy = None  # type: ignore[assignment]
        self.reference: Policy | None = None
        self.average: nn.Module | None = None
        self.iteration = 0
        self.weight_version = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} is sharded, it cannot be copied: leave out callbacks that do, such as WeightAveraging and"
            " StochasticWeightAveraging; of modules with rollouts model.ema_decay keeps an average"
        )

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *_: Any, **__: Any) -> NoReturn:
        """Refused: shards are read by the strategy of a Trainer.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{checkpoint_path} holds shards, which a Trainer reads: make the module as ever and give them as ckpt_path to fit,"
            " validate or test; lightning-rlhf export makes a Hugging Face model of them"
        )

    @property
    def needs_reference(self) -> bool:
        return False

    @property
    def refresh_every(self) -> int | None:
        """Iterations after which the reference becomes the actor of then."""
        return None

    @property
    def frozen_in_checkpoints(self) -> tuple[str, ...]:
        """Beginnings of the names of parameters that are not trained and that change all the same."""
        changing = {"reference.": self.refresh_every, "average.": self.ema_decay}
        return tuple(name for name, how in changing.items() if how is not None)

    def check_models(self) -> int:
        """Refuse models that cannot be trained here before any weights are loaded; returns the longest sequence that fits."""
        for name, settings in self.roles.items():
            self.check_role(name, settings.config)
            if name in SCORED:
                head_names(settings, bias=name == "critic")
        roles = {(settings, name in SCORED) for name, settings in self.roles.items()}
        limits = [(settings, check_model(settings, self.strategy, critic=critic)) for settings, critic in roles]
        return min(limit for settings, limit in limits if settings.reads_policy_tokens)

    def check_role(self, name: str, config: Any) -> None:
        """Raise ValueError if ``config`` is of a model that cannot be this one."""
        settings = self.roles[name]
        if name not in SCORED and is_scored(config):
            raise ValueError(
                f"{settings.key}: {settings.model!r} is a {config.architectures[0]}, its language-model head would be a random"
                " one: take a language model"
            )

    @property
    def roles(self) -> dict[str, ModelSettings]:
        """The models of a run, in the order they are built; the reference is the one that is not trained."""
        own = {"actor": self.settings}
        if self.needs_reference and self.settings.lora is None:  # with LoRA it is the actor without its adapter
            own["reference"] = self.settings
        return own

    @property
    def learning_rates(self) -> dict[str, float]:
        """Of the trained roles."""
        return {"actor": self.lr}

    @property
    def root(self) -> Policy | Critic:
        """The model that the run is for: what is exported."""
        return self.actor

    def configure_model(self) -> None:
        if self.actor is not None:
            return
        self.actor = build_policy(self.settings, self.strategy, seed=self.seed)
        if "reference" in self.roles:
            self.reference = build_policy(self.settings, self.strategy, frozen=True)
        if self.ema_decay is not None:
            self.average = average_of(self.actor)

    def hf_named_weights(self, average: bool = False) -> Iterator[tuple[str, Tensor]]:
        """`Policy.hf_named_parameters` of the actor, or of its moving average."""
        if not average:
            return self.actor.hf_named_parameters()
        assert self.average is not None
        return self.actor.hf_named_parameters(averages(self.average, self.actor))

    def follow_actor(self) -> None:
        """After an iteration: what changes with the actor's weights, see `copies`."""
        if self.ema_decay is None and self.refresh_every is None:
            return
        self.strategy.reshard(self.actor)
        if self.average is not None and self.ema_decay is not None:
            update_average(self.average, self.actor, self.ema_decay)
        if self.reference is not None and self.refresh_every is not None and self.iteration % self.refresh_every == 0:
            copy_weights(self.actor, self.reference)

    @contextmanager
    def as_reference(self) -> Iterator[Policy]:
        """The frozen reference; with LoRA that is the actor, without its adapter for as long as this lasts."""
        adapter = self.actor.adapter
        with nullcontext() if adapter is None else adapter.disabled():
            yield self.reference or self.actor

    def parameter_groups(self) -> list[dict[str, Any]]:
        """One group per trained role: clipped, checked and logged on its own."""

        def trained(role: str) -> list[nn.Parameter]:
            return [p for p in getattr(self, role).parameters() if p.requires_grad]

        return [{"params": trained(role), "lr": rate, "role": role} for role, rate in self.learning_rates.items()]

    @property
    def description(self) -> dict[str, Any]:
        """What this run is made of, as its checkpoints and its manifest say it; see `manifest`."""
        return {
            "class": f"{type(self).__module__}.{type(self).__qualname__}",
            "precision": self.strategy.precision_plugin.precision,
            "seed_everything": self.seed,
            "roles": {
                name: settings.description for name, settings in self.roles.items() if name in self.learning_rates
            },
            "model.kl.refresh_every": self.refresh_every,
            "model.ema_decay": self.ema_decay,
            "versions": versions(),
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[RUN] = self.description

    def check_checkpoint(self, path: str, checkpoint: dict[str, Any]) -> None:
        """Called by the strategy before it reads tensors: refuse those of a run that this one cannot go on with."""
        if RUN in checkpoint:
            check_resumed(path, checkpoint[RUN], self.description, training=self.trainer.training)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.iteration = checkpoint["global_step"]
        self.weight_version += 1  # whatever an engine holds is of before
        if self.average is not None and checkpoint.get(RUN, {}).get("model.ema_decay") is None:
            update_average(self.average, self.actor, 0.0)  # the run before had none

    # -- around them -----------------------------------------------------------------------------------

    @property
    def model_path(self) -> str:
        """Local folder of the policy's model."""
        return self.settings.path

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Of the policy."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model_path, trust_remote_code=self.settings.trust_remote_code)

    @cached_property
    def vision(self) -> ImageEncoder | None:
        """Reads pictures for a vision-language policy; None if the policy takes text only."""
        return ImageEncoder.load(self.model_path, self.settings.trust_remote_code)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a response: the generation config's, without one the model config's, and the tokenizer's."""
        from transformers import GenerationConfig

        try:
            listed = GenerationConfig.from_pretrained(self.model_path).eos_token_id
        except OSError:  # the folder has none
            listed = getattr(self.settings.config.get_text_config(), "eos_token_id", None)
        ids = listed if isinstance(listed, list) else [listed]
        return tuple(sorted({i for i in (*ids, self.tokenizer.eos_token_id) if i is not None}))

    @property
    def pad_token_id(self) -> int:
        """Filler; it may equal an EOS, since masks come from lengths."""
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else (self.eos_token_ids or (0,))[0])

    @property
    def strategy(self) -> FSDPUlyssesStrategy:
        """Of the trainer.

        Raises:
            TypeError: it is another one.
        """
        strategy = self.trainer.strategy
        if not hasattr(strategy, "data_mesh"):
            raise TypeError(
                f"{type(self).__name__} needs trainer.strategy: fsdp_ulysses, got {type(strategy).__name__}"
            )
        return strategy  # type: ignore[return-value]

    @property
    def seed(self) -> int:
        """Of the run: Lightning's ``seed_everything``."""
        return int(os.environ.get("PL_GLOBAL_SEED", 0))
