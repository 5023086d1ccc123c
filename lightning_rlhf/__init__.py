"""RLHF and RLVR for Hugging Face language models as plain PyTorch Lightning.

The names here are the ones to use in YAML (``class_path: lightning_rlhf.GRPOLightningModule``) and in code.
"""

from lightning_rlhf.callbacks.checkpoint import IterationCheckpoint
from lightning_rlhf.callbacks.hf_export import HFExport
from lightning_rlhf.callbacks.memory import Memory
from lightning_rlhf.callbacks.rollout import RolloutCallback
from lightning_rlhf.callbacks.samples import Samples
from lightning_rlhf.callbacks.throughput import Throughput
from lightning_rlhf.data import PromptDataModule
from lightning_rlhf.modules.base import KL, RLHFLightningModule
from lightning_rlhf.modules.grpo import GRPOLightningModule
from lightning_rlhf.modules.ppo import PPOLightningModule
from lightning_rlhf.strategy import FSDPUlyssesStrategy
from lightning_rlhf.types import Completion, Experience, Prompts, Rollout, Sampling, Scores

__all__ = [
    "KL",
    "Completion",
    "Experience",
    "FSDPUlyssesStrategy",
    "GRPOLightningModule",
    "HFExport",
    "IterationCheckpoint",
    "Memory",
    "PPOLightningModule",
    "PromptDataModule",
    "Prompts",
    "RLHFLightningModule",
    "Rollout",
    "RolloutCallback",
    "Samples",
    "Sampling",
    "Scores",
    "Throughput",
]
