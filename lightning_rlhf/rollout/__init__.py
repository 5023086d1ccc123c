"""Engines that generate the responses.

The names here are the ones to use in YAML: ``class_path: lightning_rlhf.rollout.VLLMEngine``.
"""

from lightning_rlhf.rollout.engine import EngineSetup, RolloutEngine
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.vllm import VLLMEngine

__all__ = ["EngineSetup", "RolloutEngine", "TransformersEngine", "VLLMEngine"]
