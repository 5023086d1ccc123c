"""What vLLM does on a GPU alone: graphs, and memory that sleeps."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from test_vllm_engine import pytestmark as needs_vllm
from toy_vlm import table_of, write_vlm

from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.vllm import VLLMEngine
from lightning_rlhf.tiny import tiny_model
from lightning_rlhf.types import Sampling

pytestmark = [*needs_vllm, pytest.mark.gpu]

GREEDY = Sampling(temperature=0.0, max_completion_length=12, ignore_eos=True)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_an_engine_with_graphs_that_was_closed_asleep_is_built_again_in_the_same_process(level):
    context = EngineSetup(str(tiny_model()), torch.device("cuda", 0), torch.bfloat16, (1,), 0, 64, 8)
    engine = VLLMEngine(kv_cache_memory_bytes=16 << 20, gpu_memory_utilization=0.1, load_format="auto")
    found = []
    for _ in range(2):
        engine.setup(context)
        engine.weight_version = 0
        found.append([one.token_ids for one in engine.generate([[5, 6, 7], [9]], GREEDY, seeds=[None, None])])
        engine.sleep(level)
        engine.close()
    assert found[0] == found[1]
    assert all(len(ids) == 12 for ids in found[0])


def test_an_engine_that_saw_pictures_leaves_nothing_in_the_pool(tmp_path: Path):
    from vllm.device_allocator.cumem import CuMemAllocator

    folder = write_vlm(tmp_path, "qwen2_5_vl", noise=0.2)
    prompts = table_of(folder).take(range(4))
    engine = VLLMEngine(
        kv_cache_memory_bytes=32 << 20, gpu_memory_utilization=0.1, load_format="auto", enforce_eager=True
    )
    engine.setup(EngineSetup(folder, torch.device("cuda", 0), torch.bfloat16, (1,), 0, 512, 8))
    engine.weight_version = 0
    engine.generate(prompts.ids, GREEDY, seeds=[None] * 4, images=prompts.images)
    engine.close()
    assert CuMemAllocator.instance.get_current_usage() == 0, _alive()


def _alive() -> str:
    """What is left in the pool after another collection, and who refers to the outermost modules that are left, and to those."""
    from vllm.device_allocator.cumem import CuMemAllocator

    gc.collect()
    modules = [one for one in gc.get_objects() if isinstance(one, torch.nn.Module)]
    inner = {id(child) for one in modules for child in one.children()}
    outermost = [one for one in modules if id(one) not in inner and any(p.is_cuda for p in one.parameters())]
    lines = [f"{CuMemAllocator.instance.get_current_usage()} bytes after another collection"]
    for module in outermost:
        lines.append(str(type(module)))
        for holder in gc.get_referrers(module):
            if holder is not modules and holder is not outermost:
                beyond = [str(type(one)) for one in gc.get_referrers(holder)]
                names = [str(name) for name in holder][:5] if isinstance(holder, dict) else ""
                lines.append(f"  {type(holder)} {names}: {beyond}")
    return "\n".join(lines)
