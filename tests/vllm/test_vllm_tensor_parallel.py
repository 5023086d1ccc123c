"""One real vLLM on two ranks: sharded weights, shared prompts, and a checksum over both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_vllm_engine import GREEDY, assert_same, named, oracle, policy, setup
from test_vllm_engine import pytestmark as needs_vllm
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toys import pooled, spawn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen2Config

from lightning_rlhf import FSDPUlyssesStrategy
from lightning_rlhf.rollout.sharing import Pool
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.vllm import VLLMEngine
from lightning_rlhf.rollout.weights import gather, with_checksum
from lightning_rlhf.tiny import tiny_model

pytestmark = [*needs_vllm, pytest.mark.slow]


def build(**changes: object) -> VLLMEngine:
    """As on CUDA: linear layers whose weights no kernel library packs, so that plain syncs and checksums work."""
    import vllm._custom_ops
    import vllm.model_executor.layers.utils

    vllm._custom_ops._supports_onednn = False
    vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
    engine = VLLMEngine(tensor_parallel_size=2, kv_cache_memory_bytes=16 << 20)
    engine.setup(setup(**changes))
    return engine


def load(engine: VLLMEngine, weights: Iterator[tuple[str, Tensor]]) -> bool | None:
    """Whether the engine holds what was sent, None if it cannot say."""
    engine.wake(["weights"])
    sent = with_checksum(weights)
    engine.load_weights(sent, 1)
    engine.wake(["kv_cache"])
    held = engine.checksum()
    return None if held is None else held == sent.checksum


def altered(named: list[tuple[str, Tensor]], stale: str, here: bool) -> Iterator[tuple[str, Tensor]]:
    """The stream, counted as sent, with a tensor that this rank's engine gets as it was before."""
    for name, tensor in named:
        yield name, tensor * 0.5 if here and name == stale else tensor


def untied(folder: Path) -> str:
    """Two key/value heads, one for each rank; a head of its own; a vocabulary that does not divide."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    config = Qwen2Config(vocab_size=259, num_hidden_layers=1, tie_word_embeddings=False, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # biases begin at 0, norms at 1
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model()).save_pretrained(folder)
    return str(folder)


def one_engine_on_both(rank: int, folder: str) -> list[bool | None]:
    for name in ("RANK", "LOCAL_RANK"):
        os.environ.pop(name, None)
    strategy = FSDPUlyssesStrategy()
    pool = Pool(1, 2, rank, lambda value: strategy.all_gather_objects(value, 2))
    model = policy()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    engine = build()  # one key/value head, which both ranks hold
    assert "schedule" in vars(engine.llm.llm_engine.engine_core.engine_core.scheduler)  # on each rank, of its own
    prompts = [[5 + rank, 6, 7], list(range(20 + rank, 60))][: 2 - rank]
    arguments = {"seeds": [0] * len(prompts), "log_probs": True}
    found, outputs = [], []
    for mode in ("layerwise", "plain"):
        engine._sync_mode = mode
        found.append(load(engine, gather(named(model), torch.float32)))
        outputs.append(pooled(pool, engine, prompts, GREEDY, **arguments))
        full = policy()
        with torch.no_grad():
            for name, tensor in gather(named(model), torch.float32):
                full.get_parameter(name).copy_(tensor)
        assert_same(outputs[-1], oracle(full).generate(prompts, GREEDY, **arguments))
        engine.sleep(2)
        ids = torch.tensor([list(range(30, 60))])
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert outputs[0] != outputs[1]
    load(engine, iter(named(full)))
    with pytest.raises(ValueError, match="got 128"):  # of one rank, and an error on both
        pooled(pool, engine, [[5] * (128 if rank else 3)], GREEDY, seeds=[0])
    assert pooled(pool, engine, prompts, GREEDY, **arguments) == outputs[1]
    found += stale(engine, full, rank)
    engine.close()
    engine = build(model=folder)
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine._sync_mode = "plain"
    found += [load(engine, iter(named(other))), *stale(engine, other, rank)]
    embedded = TransformersEngine()
    embedded.setup(setup(model=folder))
    embedded.load_weights(named(other), 1)
    assert_same(
        engine.generate([[5, 6]], GREEDY, seeds=[0], log_probs=True),
        embedded.generate([[5, 6]], GREEDY, seeds=[0], log_probs=True),
    )
    engine.close()
    return found


def stale(engine: VLLMEngine, model: PreTrainedModel, rank: int) -> list[bool | None]:
    """A norm on the second rank only, a fused matrix on the second rank only, an embedding on both; then none."""
    weights = [(name, tensor.detach()) for name, tensor in named(model)]
    found = []
    for name, here in (
        ("model.layers.0.input_layernorm.weight", rank == 1),
        ("model.layers.0.self_attn.k_proj.weight", rank == 1),
        ("model.layers.0.mlp.down_proj.weight", rank == 1),
        ("model.embed_tokens.weight", True),
    ):
        sent = with_checksum(weights)
        engine.load_weights(altered(list(sent), name, here), 1)
        found.append(engine.checksum() == sent.checksum)
    return [*found, load(engine, iter(weights))]


def test_two_ranks_generate_and_hold_what_one_would(tmp_path):
    stale_ones = [False, False, False, False, True]
    expected = [None, True, *stale_ones, True, *stale_ones]
    assert spawn(one_engine_on_both, 2, untied(tmp_path)) == [expected] * 2
