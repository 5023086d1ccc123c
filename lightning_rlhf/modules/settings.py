"""How models are built: the part of a module's arguments that its models share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from jsonargparse.typing import PositiveInt

from lightning_rlhf.hf_config import load_config
from lightning_rlhf.kernels import check_kernel
from lightning_rlhf.options import optional_options
from lightning_rlhf.paths import local_path
from lightning_rlhf.tiny import TINY

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass(frozen=True)
class LoRA:
    """Train low-rank adapters (Hu et al. 2021, arXiv:2106.09685) and leave the model as it is, see `modules.lora`.

    Args:
        r: rank.
        alpha: the product of the two matrices is multiplied with alpha / r.
        target_modules: linear layers by the end of their names, or all of them but the language-model head; of a
            vision-language model those of its language model.
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
        if self.r < 1 or self.alpha < 1:
            raise ValueError(f"model.lora.r and model.lora.alpha must be at least 1, got {self.r} and {self.alpha}")
        if self.dropout:
            raise ValueError(
                f"model.lora.dropout must be 0, got {self.dropout}: log-probs of rollout and update are of one distribution"
            )
        if self.target_modules == []:
            raise ValueError("model.lora.target_modules must name linear layers, or be all-linear, got an empty list")
        if self.adapter is not None:
            folder = Path(self.adapter).expanduser()
            object.__setattr__(self, "adapter", str(folder))
            self._check_adapter(folder)

    def config(self) -> LoraConfig:
        """In peft's terms, for a causal language model."""
        from peft import LoraConfig

        return LoraConfig(
            task_type="CAUSAL_LM",
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
    | {"exclude_modules", "revision", "runtime_config", "target_modules", "task_type"}
)
"""Entries of an adapter's config that may differ from this run's."""

Recomputed = Literal["off", "full", "selective", "every_second"]
"""Which of a layer's activations are computed again in backward."""


@dataclass(frozen=True)
class ModelSettings:
    """A transformers model and how its forward and backward passes are run.

    Args:
        model: local folder, hub id, URL of a folder (``s3://…``, any file system of fsspec), or ``random:tiny``.
        attention: kernel: auto, torch, padded, reference, or flash_attention_2, 3 or 4 (docs/models.md).
        gradient_checkpointing: recompute layers in backward. full (or true): every layer, a third more time, far less memory;
            selective: what attention returned is kept; every_second: every other layer; off (or false).
        trust_remote_code: run model code that comes with the weights.
        tiled_mlp: tokens of a tile: MLPs run over tiles of the stream and are recomputed in backward; for very long sequences.
        offload_activations: what layers save for backward waits in pinned host memory.
        offload_reference: the shards of frozen models (reference, reward model) live in host memory and are copied when they are
            gathered.
        compile: `torch.compile` each decoder layer.
        keep_logits: of responses, in float32, from forward to backward, in place of a matrix product (CUDA, with Triton).
        liger: Liger's fused RMSNorm, gated MLP and rotary embedding (CUDA; the extra ``liger``).
        lora: train adapters only; null trains all parameters.
        config_overrides: changes of the transformers config, such as {rope_parameters: {rope_type: yarn, factor: 4.0}}; a
            nested config takes its own; the engine gets them too.
        freeze_vision: leave a vision-language model's vision tower as it is; it is then held in the compute dtype.
    """

    key: ClassVar[str] = "model.model"
    """What ``model`` is called in the configuration."""

    reads_policy_tokens: ClassVar[bool] = True
    """Whether sequences of the run go into it as they are."""

    model: str
    attention: str = "auto"
    gradient_checkpointing: Recomputed | bool = "off"
    trust_remote_code: bool = False
    tiled_mlp: PositiveInt | None = None
    offload_activations: bool = False
    offload_reference: bool = False
    compile: bool = False
    keep_logits: bool = False
    liger: bool = False
    lora: LoRA | None = field(default=None, hash=False)
    config_overrides: dict[str, Any] | None = field(default=None, hash=False)
    freeze_vision: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | Path):
            raise ValueError(
                f"{self.key} must be a folder or hub id, got a {type(self.model).__name__}: save_pretrained it, with its"
                " tokenizer, and name the folder"
            )
        object.__setattr__(self, "model", str(self.model))
        object.__setattr__(self, "lora", optional_options(LoRA, self.lora, "model.lora"))
        check_kernel(self.attention)
        if self.recomputed not in get_args(Recomputed):
            raise ValueError(
                f"model.gradient_checkpointing must be one of {', '.join(get_args(Recomputed))}, true or false,"
                f" got {self.gradient_checkpointing!r}"
            )
        if self.tiled_mlp is not None and self.tiled_mlp < 1:
            raise ValueError(
                f"model.tiled_mlp must be at least 1 token, or null to switch it off, got {self.tiled_mlp}"
            )
        if self.tiled_mlp is not None and self.compile:
            raise ValueError(
                "model.tiled_mlp and model.compile exclude each other (a compiled layer would be specialised on each number"
                " of tiles): set one of them to null or false"
            )
        if self.liger and find_spec("liger_kernel") is None:
            raise ValueError("model.liger needs the package: pip install 'lightning-rlhf[liger]', or set it to false")

    @property
    def recomputed(self) -> str:
        """`gradient_checkpointing` with true and false by their names."""
        named = {True: "full", False: "off"}
        return named.get(self.gradient_checkpointing, self.gradient_checkpointing)  # type: ignore[arg-type]

    @cached_property
    def path(self) -> str:
        """Local folder of `model`; downloads it if it is elsewhere."""
        return local_path(self.model, self.trust_remote_code, key=self.key)

    @property
    def source(self) -> str:
        """What others find the model by: a hub id stays one."""
        return self.path if self.model == TINY else self.model

    @cached_property
    def config(self) -> Any:
        """Of transformers, overrides applied."""
        return load_config(self.path, self.config_overrides, self.trust_remote_code)

    @property
    def description(self) -> dict[str, Any]:
        """What a checkpoint has to say of the model so that its tensors are one again: plain containers."""
        text = self.config.get_text_config()
        local = Path(self.model).expanduser()
        return {
            "model": self.model,
            "folder": str(local.resolve()) if local.is_dir() else None,
            "shape": {name: getattr(text, name, None) for name in _SHAPE},
            "lora": None if self.lora is None else asdict(self.lora),
            **{name: getattr(self, name) for name in ("config_overrides", "trust_remote_code", "freeze_vision")},
        }


_SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Options of a transformers config by which a model of another kind or size is told."""


class CriticSettings(ModelSettings):
    """Of a critic that does not start from the policy's model."""

    key = "model.critic"
