"""RLHF and RLVR for Hugging Face language models as plain PyTorch Lightning.

The names here are the ones to use in YAML (``class_path: lightning_rlhf.GRPOLightningModule``) and in code. Each is imported
when it is first used: a process that only runs reward functions loads neither transformers nor Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_rlhf.callbacks.checkpoint import IterationCheckpoint
    from lightning_rlhf.callbacks.filtering import FilterGroups
    from lightning_rlhf.callbacks.hf_export import HFExport
    from lightning_rlhf.callbacks.memory import Memory
    from lightning_rlhf.callbacks.preemption import Preemption
    from lightning_rlhf.callbacks.progress import IterationProgress
    from lightning_rlhf.callbacks.rollout import RolloutCallback
    from lightning_rlhf.callbacks.samples import Samples
    from lightning_rlhf.callbacks.summary import PlanSummary
    from lightning_rlhf.callbacks.throughput import Throughput
    from lightning_rlhf.callbacks.watchdog import Watchdog
    from lightning_rlhf.data import PromptDataModule, ValidationSet
    from lightning_rlhf.modules.base import RLHFLightningModule
    from lightning_rlhf.modules.correction import Correction
    from lightning_rlhf.modules.critic import Critic, build_critic
    from lightning_rlhf.modules.dpo import DPOLightningModule
    from lightning_rlhf.modules.frozen_reward import FrozenRewardModel
    from lightning_rlhf.modules.grpo import GRPOLightningModule
    from lightning_rlhf.modules.kl import KL
    from lightning_rlhf.modules.policy import Policy, build_policy
    from lightning_rlhf.modules.ppo import PPOLightningModule
    from lightning_rlhf.modules.reward_model import RewardModelLightningModule
    from lightning_rlhf.modules.settings import LoRA, ModelSettings
    from lightning_rlhf.modules.sft import SFTLightningModule
    from lightning_rlhf.packing import Packed, pack
    from lightning_rlhf.rollout.turns import Conversation
    from lightning_rlhf.strategy import FSDPUlyssesStrategy
    from lightning_rlhf.supervised import PreferenceDataModule, SFTDataModule
    from lightning_rlhf.types import Completion, Examples, Experience, Prompts, Rollout, Sampling, Scores

_HOMES = {
    "callbacks.checkpoint": ["IterationCheckpoint"],
    "callbacks.filtering": ["FilterGroups"],
    "callbacks.hf_export": ["HFExport"],
    "callbacks.memory": ["Memory"],
    "callbacks.preemption": ["Preemption"],
    "callbacks.progress": ["IterationProgress"],
    "callbacks.rollout": ["RolloutCallback"],
    "callbacks.samples": ["Samples"],
    "callbacks.summary": ["PlanSummary"],
    "callbacks.throughput": ["Throughput"],
    "callbacks.watchdog": ["Watchdog"],
    "data": ["PromptDataModule", "ValidationSet"],
    "modules.base": ["RLHFLightningModule"],
    "modules.correction": ["Correction"],
    "modules.critic": ["Critic", "build_critic"],
    "modules.dpo": ["DPOLightningModule"],
    "modules.frozen_reward": ["FrozenRewardModel"],
    "modules.grpo": ["GRPOLightningModule"],
    "modules.kl": ["KL"],
    "modules.policy": ["Policy", "build_policy"],
    "modules.ppo": ["PPOLightningModule"],
    "modules.reward_model": ["RewardModelLightningModule"],
    "modules.settings": ["LoRA", "ModelSettings"],
    "modules.sft": ["SFTLightningModule"],
    "packing": ["Packed", "pack"],
    "rollout.turns": ["Conversation"],
    "strategy": ["FSDPUlyssesStrategy"],
    "supervised": ["PreferenceDataModule", "SFTDataModule"],
    "types": ["Completion", "Examples", "Experience", "Prompts", "Rollout", "Sampling", "Scores"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module(f"{__name__}.strategy")  # registers its name with Lightning
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
