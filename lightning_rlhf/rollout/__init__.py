"""Engines that generate the responses.

The names here are the ones to use in YAML: ``class_path: lightning_rlhf.rollout.VLLMEngine``.
"""

from lightning_rlhf.rollout.engine import EngineMemory, EngineSetup, RolloutEngine
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.vllm import VLLMEngine

__all__ = ["EngineMemory", "EngineSetup", "RolloutEngine", "TransformersEngine", "VLLMEngine"]
