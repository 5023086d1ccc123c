"""How models are built: the part of a module's arguments that its models share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse.typing import PositiveInt

from lightning_rlhf.kernels import check_kernel
from lightning_rlhf.tiny import TINY, local_path

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass(frozen=True)
class LoRA:
    """Train low-rank adapters (Hu et al. 2021, arXiv:2106.09685) and leave the model as it is, see `modules.lora`.

    Args:
        r: rank.
        alpha: the product of the two matrices is multiplied with alpha / r.
        target_modules: linear layers by the end of their names, or all of them but the language-model head.
        modules_to_save: modules that are trained as a whole beside the adapters, e.g. [lm_head].
        dropout: must be 0.
        rslora: multiply with alpha / sqrt(r) instead (Kalajdzievski 2023, arXiv:2312.03732).
        adapter: local folder of an adapter in peft's format to start from. Its settings must be the ones above.
    """

    r: PositiveInt = 16
    alpha: PositiveInt = 32
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    modules_to_save: list[str] | None = None
    dropout: float = 0.0
    rslora: bool = False
    adapter: str | None = None

    def __post_init__(self) -> None:
        if self.dropout:
            raise ValueError(
                f"model.lora.dropout must be 0, got {self.dropout}: log-probs of rollout and update are of one distribution"
            )
        if self.target_modules == []:
            raise ValueError("model.lora.target_modules must name linear layers, or be all-linear, got an empty list")
        if self.adapter is not None:
            self._check_adapter(Path(self.adapter))

    def config(self, base: str | None = None) -> LoraConfig:
        """In peft's terms; ``base`` is the folder or hub id of the causal language model that it is for."""
        from peft import LoraConfig

        return LoraConfig(
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
            r=int(self.r),  # of the command line they are of a class of their own
            lora_alpha=int(self.alpha),
            use_rslora=self.rslora,
            target_modules=self.target_modules,
            modules_to_save=self.modules_to_save,
        )

    def _check_adapter(self, folder: Path) -> None:
        """Raise unless ``folder`` holds an adapter with these settings (its layers are compared when they are there)."""
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            if not (folder / file).is_file():
                raise FileNotFoundError(f"model.lora.adapter: {folder} must be a local folder with an {file}")
        from peft import PeftConfig

        own, theirs = self.config().to_dict(), PeftConfig.from_pretrained(str(folder)).to_dict()
        if theirs.get("init_lora_weights") in (True, False, "gaussian"):  # others have changed the base
            theirs["init_lora_weights"] = own["init_lora_weights"]
        for settings in (own, theirs):
            settings["modules_to_save"] = sorted(settings.get("modules_to_save") or ())
        other = [
            name for name in own.keys() - _FREE if own[name] != theirs.get(name) and (own[name] or theirs.get(name))
        ]
        if other:
            differences = ", ".join(f"{name} {theirs.get(name)} (here {own[name]})" for name in sorted(other))
            raise ValueError(
                f"model.lora.adapter: {folder} was trained with {differences}: set model.lora alike, or start anew"
            )


_FREE = frozenset(
    {"auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "lora_dropout", "peft_version"}
    | {"revision", "runtime_config", "target_modules", "task_type"}
)
"""Entries of an adapter's config that may differ from this run's."""


@dataclass(frozen=True)
class ModelSettings:
    """A transformers model and how its forward and backward passes are run.

    Args:
        model: local folder or hub id, or ``random:tiny``.
        attention: kernel: auto, torch, padded, reference, or a transformers name such as flash_attention_3.
        gradient_checkpointing: recompute layers in backward: a third more time, far less memory.
        trust_remote_code: run model code that comes with the weights.
        lora: train adapters only; null trains all parameters.
    """

    model: str
    attention: str = "auto"
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    lora: LoRA | None = None

    def __post_init__(self) -> None:
        check_kernel(self.attention)

    @cached_property
    def path(self) -> str:
        """Local folder of `model`; downloads it if it is a hub id."""
        return local_path(self.model, self.trust_remote_code)

    @property
    def source(self) -> str:
        """What others find the model by: a hub id stays one."""
        return self.path if self.model == TINY else self.model
