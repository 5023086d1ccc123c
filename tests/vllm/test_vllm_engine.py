"""Real vLLM on the CPU against transformers, with weights that move; `pytest -m vllm` in an environment that has it."""

from __future__ import annotations

import gc
import os
import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from toys import spawn
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, PreTrainedModel

from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.turns import Conversation, Speaker
from lightning_rlhf.rollout.vllm import VLLMEngine, version_installed
from lightning_rlhf.rollout.vllm_process import map_again, unmapped_memory
from lightning_rlhf.rollout.weights import gather
from lightning_rlhf.tiny import tiny_model
from lightning_rlhf.types import Completion, Sampling

try:
    version_installed()
    missing = False
except ImportError:
    missing = True

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(missing, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore"),  # its imports warn about deprecations of others
]

EOS = 1
PROMPTS = [[5, 6, 7, 8], [9], list(range(20, 90)), [5, 6, 7, 9, 11]]
GREEDY = Sampling(temperature=0.0, max_completion_length=12)


def setup(**changes: object) -> EngineSetup:
    context = EngineSetup(str(tiny_model()), torch.device("cpu"), torch.float32, (EOS,), 0, 128, 16)
    return replace(context, **changes)  # type: ignore[arg-type]


def build(shorten_steps: bool = True, **changes: object) -> VLLMEngine:
    engine = VLLMEngine(
        kv_cache_memory_bytes=16 << 20,
        shorten_steps=shorten_steps,
        max_num_batched_tokens=128,  # prompts fill several blocks, and few of them a step
        engine_args={"block_size": 32},
    )
    engine.setup(setup(**changes))
    return engine


_running: list[VLLMEngine] = []


@pytest.fixture
def engine() -> VLLMEngine:
    """One engine for all tests: starting it takes seconds, and a process holds one at a time."""
    if not _running or _running[0].llm is None:
        with process_state_kept():
            _running[:] = [build()]
    return _running[0]


def close_running() -> None:
    for engine in _running:
        engine.close()
    _running.clear()


@pytest.fixture(scope="module", autouse=True)
def _closed_at_the_end() -> Iterator[None]:
    yield
    close_running()


def policy(seed: int = 0) -> PreTrainedModel:
    """The tiny model (tied embeddings) with weights large enough for tokens to depend on everything before them."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            layer = parameter.ndim > 1 and len(parameter) < 259
            parameter.add_(torch.randn(parameter.shape, generator=generator) * (0.3 if layer else 0.05))
    return model


def named(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    return list(model.named_parameters(remove_duplicate=False))


def oracle(model: PreTrainedModel, **changes: object) -> TransformersEngine:
    engine = TransformersEngine()
    engine.setup(setup(**changes))
    engine.load_weights(named(model), 1)
    return engine


@torch.no_grad()
def full_log_probs(model: PreTrainedModel, prompt: list[int], token_ids: list[int], temperature: float) -> Tensor:
    logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1] / (temperature or 1.0)
    return logits.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0]


def assert_same(ours: list[Completion], expected: list[Completion]) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        torch.testing.assert_close(torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=1e-4, rtol=0)


@contextmanager
def process_state_kept() -> Iterator[None]:
    def state() -> tuple[object, ...]:
        return (
            dict(os.environ),
            torch.get_num_threads(),
            torch.set_num_threads,
            torch.get_rng_state().tolist(),
            random.getstate(),
            str(numpy.random.get_state()),
            gc.get_freeze_count(),
            gc.isenabled(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
        )

    torch.manual_seed(123)
    random.seed(9)
    before = state()
    yield
    assert state() == before


def sync(engine: VLLMEngine, model: PreTrainedModel, version: int = 1) -> None:
    engine.wake(["weights"])
    engine.load_weights(named(model), version)
    engine.wake(["kv_cache"])


def test_without_weights_generating_is_an_error(engine: VLLMEngine) -> None:
    with pytest.raises(RuntimeError, match="already an engine"):
        build()
    assert engine.weight_version == -1
    with pytest.raises(RuntimeError, match="no usable weights"):
        engine.generate([[5]], GREEDY, seeds=[0])


def test_a_start_that_fails_leaves_room_for_the_next() -> None:
    close_running()
    engine = VLLMEngine(kv_cache_memory_bytes=1 << 10)
    with process_state_kept(), pytest.raises(ValueError, match="memory for the cache"):
        engine.setup(setup())
    assert not dist.is_initialized()
    engine.kv_cache_memory_bytes = 16 << 20
    engine.setup(setup())
    engine.close()


def test_an_engine_whose_cache_is_larger_than_the_next_run_has_room_for_is_built_anew() -> None:
    close_running()
    engine, sizes, kept = VLLMEngine(), [], []
    for size in (32 << 20, 16 << 20, 24 << 20, 16 << 20, None):
        before = engine.llm
        engine.setup(setup(kv_cache_memory_bytes=size))
        kept.append(engine.llm is before)
        sizes.append(engine.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)
    engine.close()
    assert kept == [False, False, True, True, True]
    assert sizes[0] == 2 * sizes[1]
    assert sizes[1:] == [sizes[1]] * 4


@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep_wake_and_sync_twice_give_the_new_weights_output(engine: VLLMEngine, level: int) -> None:
    outputs = []
    for version in (1, 2):
        model = policy(10 * level + version)
        sync(engine, model, version)
        assert engine.weight_version == version
        outputs.append(engine.generate(PROMPTS, GREEDY, seeds=[0] * 4, log_probs=True))
        assert_same(outputs[-1], oracle(model).generate(PROMPTS, GREEDY, seeds=[0] * 4, log_probs=True))
        engine.sleep(level)
        assert engine.weight_version == (-1 if level == 2 else version)
        if level:
            with pytest.raises(RuntimeError):
                engine.generate([[5]], GREEDY, seeds=[0])
    assert outputs[0] != outputs[1]
    engine.wake(["weights", "kv_cache"])
    if level == 2:
        with pytest.raises(RuntimeError, match="no usable weights"):
            engine.generate([[5]], GREEDY, seeds=[0])
    else:
        assert_same(engine.generate(PROMPTS, GREEDY, seeds=[0] * 4, log_probs=True), outputs[-1])


def test_cached_prefixes_of_old_weights_are_not_used(engine: VLLMEngine) -> None:
    prompt = [list(range(3, 103))]
    for seed in (1, 2):
        model = policy(seed)
        sync(engine, model)
        assert_same(
            engine.generate(prompt, GREEDY, seeds=[0], log_probs=True),
            oracle(model).generate(prompt, GREEDY, seeds=[0], log_probs=True),
        )


def test_the_order_of_a_phase_is_guarded(engine: VLLMEngine) -> None:
    engine.sleep(1)
    with pytest.raises(RuntimeError, match="asleep"):
        engine.load_weights(named(policy()), 1)
    with pytest.raises(RuntimeError, match="must not wake before the weights"):
        engine.wake(["kv_cache"])
    engine.wake(["weights"])
    engine.load_weights(named(policy()), 1)
    with pytest.raises(RuntimeError, match="no usable weights"):
        engine.generate([[5]], GREEDY, seeds=[0])
    engine.wake(["weights", "kv_cache"])
    assert engine.generate([[5]], GREEDY, seeds=[0])


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_log_probs_are_those_of_the_sampled_distribution(engine: VLLMEngine, temperature: float) -> None:
    model = policy()
    sync(engine, model)
    sampling = Sampling(temperature=temperature, max_completion_length=12)
    prompts = [p for p in PROMPTS for _ in range(3)]
    out = engine.generate(prompts, sampling, seeds=range(12), log_probs=True)
    for prompt, completion in zip(prompts, out, strict=True):
        expected = full_log_probs(model, prompt, completion.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-4, rtol=0)
    assert engine.generate([[5]], sampling, seeds=[0])[0].log_probs is None


def test_seeds_decide_the_sample_and_the_global_generators_are_left_alone(engine: VLLMEngine) -> None:
    sync(engine, policy())
    sampling = Sampling(max_completion_length=12)
    seeds = [1, 2, 2**62 + 5, 1]
    with process_state_kept():
        first = engine.generate([[5, 6]] * 4, sampling, seeds=seeds)
    torch.manual_seed(999)
    assert engine.generate([[5, 6]] * 4, sampling, seeds=seeds) == first
    assert first[0] == first[3]
    assert len({tuple(c.token_ids) for c in first}) == 3
    assert engine.generate([[5, 6]], sampling, seeds=[2]) == [first[1]], "whatever shares the batch"


def test_seeded_prompts_that_do_not_fit_a_step_together(engine: VLLMEngine) -> None:
    sync(engine, policy())
    prompts = [[5 + (i * j) % 80 for j in range(100)] for i in range(1, 6)]
    sampling = Sampling(max_completion_length=8)
    together = engine.generate(prompts, sampling, seeds=range(5))
    assert together == [engine.generate([prompt], sampling, seeds=[i])[0] for i, prompt in enumerate(prompts)]


def test_a_request_without_a_seed_is_greedy_among_others_that_are_not(engine: VLLMEngine) -> None:
    sync(engine, policy())
    sampling = Sampling(temperature=1.3, top_p=0.9, max_completion_length=12)
    mixed = engine.generate([p for p in PROMPTS for _ in (0, 1)], sampling, seeds=[7, None] * 4, log_probs=True)
    assert [c.token_ids for c in mixed[1::2]] == [c.token_ids for c in engine.generate(PROMPTS, GREEDY, seeds=[1] * 4)]
    assert mixed[::2] != mixed[1::2]


def test_ends_of_responses_are_those_of_the_embedded_engine() -> None:
    """Several EOS ids; the tokenizer's own is not among them. Steps are vLLM's own."""
    close_running()
    model = policy()
    eos = tuple(range(40, 60))
    engine, embedded = build(shorten_steps=False, eos_token_ids=eos), oracle(model, eos_token_ids=eos)
    assert "schedule" not in vars(engine.llm.llm_engine.engine_core.engine_core.scheduler)
    try:
        engine.load_weights(named(model), 1)
        prompts = [[i, i + 1] for i in range(3, 243, 6)]
        for sampling in (
            replace(GREEDY, max_completion_length=20),
            # up to the minimum length vLLM bans the tokenizer's EOS in any case
            replace(GREEDY, max_completion_length=20, min_completion_length=4, stop_token_ids=(EOS,)),
            replace(GREEDY, max_completion_length=20, stop_token_ids=tuple(range(60, 90))),
            replace(GREEDY, max_completion_length=20, ignore_eos=True),
        ):
            ours = engine.generate(prompts, sampling, seeds=[0] * 40, log_probs=True)
            theirs = embedded.generate(prompts, sampling, seeds=[0] * 40, log_probs=True)
            assert_same(ours, theirs)
            stopped = [c for c in ours if c.finish_reason == "stop"]
            assert bool(stopped) != sampling.ignore_eos
            assert all(c.token_ids[-1] in {*eos, *sampling.stop_token_ids} for c in stopped)
        text = AutoTokenizer.from_pretrained(tiny_model()).decode(ours[0].token_ids)
        stops = replace(sampling, ignore_eos=False, stop=(text[2:4],))
        assert_same(
            engine.generate(prompts, stops, seeds=[0] * 40, log_probs=True),
            embedded.generate(prompts, stops, seeds=[0] * 40, log_probs=True),
        )
        never_eos = engine.generate([[5, 6]] * 64, Sampling(max_completion_length=40), seeds=range(64))
        assert any(EOS in c.token_ids[:-1] for c in never_eos), "the tokenizer's EOS ended a response"
    finally:
        engine.close()


def test_stop_strings_are_those_of_the_embedded_engine() -> None:
    """Of special tokens and of several bytes, and those that come before the minimum length."""
    close_running()
    model = policy()
    engine, embedded = build(eos_token_ids=(255,)), oracle(model, eos_token_ids=(255,))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    try:
        engine.load_weights(named(model), 1)
        prompts = [[i, i + 1] for i in range(3, 243, 3)]
        free = engine.generate(prompts, replace(GREEDY, max_completion_length=24), seeds=[0] * 80)
        texts = [tokenizer.decode(c.token_ids) for c in free]
        several = next(s for text in texts for s in text if ord(s) > 127 and s != "\ufffd")
        plain = next(text[2:4] for text in texts if text[:6].isascii() and text[2:4].isprintable())
        ended = 0
        for stop in ("<|im_end|>", "<|endoftext|>", several, plain):
            for least in (0, 4, 12):
                banned = (EOS,) if least else ()  # vLLM bans the tokenizer's in any case
                sampling = Sampling(
                    1, 0.0, max_completion_length=24, min_completion_length=least, stop=(stop,), stop_token_ids=banned
                )
                ours, theirs = (e.generate(prompts, sampling, seeds=[0] * 80) for e in (engine, embedded))
                assert ours == theirs
                ended += sum(c.finish_reason == "stop" and c.token_ids[-1] not in (255, *banned) for c in ours)
                assert all(len(c.token_ids) > least for c in ours)
        assert ended > 20
    finally:
        engine.close()


def test_too_long_a_prompt_names_both_numbers_and_the_engine_stays_usable(engine: VLLMEngine) -> None:
    sync(engine, policy())
    with pytest.raises(ValueError, match=r"max_model_len is 128\), got 128"):
        engine.generate([[5], [5] * 128], GREEDY, seeds=[0, 0])
    with pytest.raises(ValueError, match="there must be one seed per prompt, got 2 for 1"):
        engine.generate([[5]], GREEDY, seeds=[0, 0])
    cut = engine.generate([[5] * 120], replace(GREEDY, ignore_eos=True), seeds=[0])[0]
    assert (len(cut.token_ids), cut.finish_reason) == (8, "length")


def test_packed_weights_have_no_checksum(engine: VLLMEngine) -> None:
    sync(engine, policy())
    assert engine.checksum() is None


def test_an_error_closes_the_engine_and_it_can_be_built_again(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from named(policy())[:5]
        raise OSError("shard lost")

    with pytest.raises(OSError, match="shard lost"):
        engine.load_weights(broken(), 1)
    assert engine.weight_version == -1
    with pytest.raises(RuntimeError, match="not running"):
        engine.generate([[5]], GREEDY, seeds=[0])
    assert not dist.is_initialized(), "the group that vLLM made for itself is gone with it"
    model = policy(4)
    engine.setup(setup())
    engine.load_weights(named(model), 2)
    assert_same(
        engine.generate(PROMPTS, GREEDY, seeds=[0] * 4, log_probs=True),
        oracle(model).generate(PROMPTS, GREEDY, seeds=[0] * 4, log_probs=True),
    )

    def out_of_blocks(*_: object, **options: object) -> None:
        raise OSError("out of blocks")

    monkeypatch.setattr(engine.llm, "generate", out_of_blocks)  # requests may be left in its scheduler
    with pytest.raises(OSError, match="out of blocks"):
        engine.generate(PROMPTS, GREEDY, seeds=[0] * 4)
    assert engine.llm is None
    assert engine.weight_version == -1
    engine.close()


def test_nothing_of_a_closed_engine_is_alive(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is would keep vLLM from starting another engine with a sleep mode in this process."""
    from vllm.model_executor.models import interfaces

    sync(engine, policy())
    model = engine._model()
    cached = lru_cache(lambda self: self)  # as a method of Qwen2.5-VL's tower
    monkeypatch.setattr(type(model), "cached", cached, raising=False)
    assert model.cached() is model
    monkeypatch.setattr(interfaces, "_language_model_by_module", {model: model})  # weak since vLLM 0.32
    alive = [weakref.ref(one) for one in (engine.llm, engine._worker, model, next(model.parameters()))]
    del model
    engine.close()
    assert [one() for one in alive] == [None] * 4


def test_a_finalizer_that_holds_the_model_keeps_none_of_it(engine: VLLMEngine) -> None:
    """That of vLLM 0.26 does, and only runs when the engine, which may be part of a cycle, is collected."""
    core = engine.llm.llm_engine
    core.itself = core
    core._finalizer.detach()
    core._finalizer = weakref.finalize(core, lambda model: None, engine._model())
    alive = [weakref.ref(one) for one in engine._model().parameters()]
    del core
    engine.close()
    assert not any(one() is not None for one in alive)


@pytest.mark.parametrize("experts", [0, 8])
def test_what_is_made_of_the_weights_is_made_again(experts: int, tmp_path: Path) -> None:
    """Layers of multi-head latent attention compute with two matrices that vLLM makes of a loaded one."""
    from vllm.config import ModelConfig

    config = DeepseekV3Config(num_hidden_layers=1, architectures=["DeepseekV3ForCausalLM"])
    config.n_routed_experts = experts
    config.save_pretrained(tmp_path)
    engine = VLLMEngine()
    engine.context = setup(device=torch.device("cuda"))
    for folder, sync in ((tiny_model(), "plain"), (tmp_path, "layerwise")):
        engine._config = SimpleNamespace(model_config=ModelConfig(str(folder), tokenizer=str(tiny_model())))
        assert engine._choose_sync() == sync


# -- two ranks ---------------------------------------------------------------------------------------------------------


def train_and_generate(rank: int) -> tuple[bool, bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for name in ("RANK", "LOCAL_RANK"):  # launchers set them or not
        os.environ.pop(name, None)
    model = policy()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    with process_state_kept():
        engine = build()
    prompts = [[5 + rank, 6, 7], list(range(20 + rank, 60))][: 2 - rank]  # ranks of unequal work
    same, outputs = True, []
    for version in range(2):
        engine.wake(["weights"])
        engine.load_weights(gather(named(model), torch.float32), version)
        engine.wake(["kv_cache"])
        out = engine.generate(prompts, GREEDY, seeds=[0] * len(prompts), log_probs=True)
        engine.sleep(2)
        full = policy()
        with torch.no_grad():
            for name, tensor in gather(named(model), torch.float32):
                full.get_parameter(name).copy_(tensor)
        expected = oracle(full).generate(prompts, GREEDY, seeds=[0] * len(prompts), log_probs=True)
        assert_same(out, expected)
        outputs.append(out)
        ids = torch.tensor([list(range(30, 60))])
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    del engine
    gc.collect()
    alive = torch.ones(1)
    dist.all_reduce(alive)
    return same and outputs[0] != outputs[1], alive.item() == 2.0


@pytest.mark.slow
def test_sharded_policy_feeds_colocated_engines_and_its_process_group_survives_them() -> None:
    assert spawn(train_and_generate, 2) == [(True, True)] * 2


def test_greedy_conversations_are_those_of_transformers(engine: VLLMEngine) -> None:
    model, tokenizer = policy(3), AutoTokenizer.from_pretrained(tiny_model())
    speaker = Speaker(Conversation(lambda turns: str(len(turns)), max_turns=3, max_reply_length=32), tokenizer)
    several = replace(GREEDY, stop_token_ids=tuple(range(0, 258, 5)), max_completion_length=8)
    sync(engine, model)
    done = []
    for one in (engine, oracle(model)):
        generate = partial(one.generate, sampling=several, log_probs=True)
        done.append(speaker(generate, PROMPTS, [{}] * len(PROMPTS), [0] * len(PROMPTS)))
    engine.sleep(2)
    for a, b in zip(*done, strict=True):
        assert (a.token_ids, a.spans, a.replies, a.finish_reason) == (b.token_ids, b.spans, b.replies, b.finish_reason)
        torch.testing.assert_close(
            torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=1e-4, rtol=0, equal_nan=True
        )
    assert max(len(c.turns) for c in done[0]) > 1


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noted", [True, False], ids=["new", "old"])
def test_what_sleeps_of_the_pool_is_found_among_what_torch_holds(noted, monkeypatch):
    """As vLLM keeps its books; older versions do not note which allocation sleeps."""
    from vllm.device_allocator.cumem import AllocationData, CuMemAllocator

    allocator = CuMemAllocator()
    for address, tag in ((100, "weights"), (200, "weights"), (300, "kv_cache")):
        handle = 0, 64, address, 0
        data = AllocationData(handle, tag) if noted else SimpleNamespace(handle=handle, tag=tag)
        if noted:
            data.is_asleep = tag == "kv_cache"
        allocator.pointer_to_data[address] = data
    sizes = {100: (60, 64), 200: (10, 64), 300: (500, 512), 400: (7, 9)}
    held = [{"address": a, "allocated_size": used, "total_size": size} for a, (used, size) in sizes.items()]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: held)
    monkeypatch.setattr(CuMemAllocator, "instance", None)
    assert unmapped_memory({"kv_cache"}) == (0, 0)
    monkeypatch.setattr(CuMemAllocator, "instance", allocator)
    assert unmapped_memory({"kv_cache"}) == (500, 512)
    if not noted:
        assert unmapped_memory({"weights", "kv_cache"}) == (570, 640)
        assert unmapped_memory(set()) == (0, 0)


def test_what_sleeps_of_the_pool_is_mapped_before_it_is_freed(engine, monkeypatch):
    """The pool unmaps what is freed; where there is nothing mapped that is an error that ends the next engine's start."""
    from vllm.device_allocator import cumem

    allocator, mapped, left = cumem.CuMemAllocator(), [], []
    for address, tag in ((100, "weights"), (200, "kv_cache")):
        allocator.pointer_to_data[address] = cumem.AllocationData((0, 64, address, 0), tag, is_asleep=True)
    monkeypatch.setattr(cumem, "create_and_map", lambda handle: mapped.append(handle[2]))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", allocator)
    shutdown = engine.llm.llm_engine.engine_core.shutdown
    monkeypatch.setattr(engine.llm.llm_engine.engine_core, "shutdown", lambda: (left.extend(mapped), shutdown()))
    engine.sleep(2)
    engine.close()
    assert left == [100, 200]

    def full(handle: object) -> None:
        raise RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp:62")

    monkeypatch.setattr(cumem, "create_and_map", full)
    allocator.pointer_to_data[100].is_asleep = True
    map_again({"weights"})


def test_an_engine_without_sleep_mode_has_all_of_its_memory(engine):
    engine.sleep(2)
    assert engine.unmapped == (0, 0)
