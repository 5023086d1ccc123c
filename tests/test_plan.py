"""The plan: arithmetic by hand, estimates against what is really held, and one line for whatever cannot work."""

from __future__ import annotations

import gc
import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_frozen_reward import reward_model
from test_policy import save, strategy_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toy_vlm import SPECIAL, config_of, write_vlm
from toys import spawn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from benchmarks.random_model import config_of as config_of_shape
from lightning_rlhf import KL, FSDPUlyssesStrategy, GRPOLightningModule, PPOLightningModule, RolloutCallback, Sampling
from lightning_rlhf.cli import main
from lightning_rlhf.modules.critic import build_critic
from lightning_rlhf.modules.execution import apply_execution
from lightning_rlhf.modules.frozen_reward import FrozenRewardModel, build_reward_model
from lightning_rlhf.modules.policy import build_policy
from lightning_rlhf.modules.settings import LoRA, ModelSettings
from lightning_rlhf.packing import pack
from lightning_rlhf.packing import plan as pack_plan
from lightning_rlhf.plan import make_plan, problems
from lightning_rlhf.plan.known import _BY_NAME, known_config
from lightning_rlhf.plan.probe import SavedBytes, attention
from lightning_rlhf.plan.run import Run, optimizer_bytes
from lightning_rlhf.plan.shape import shape_of
from lightning_rlhf.plan.table import full, show
from lightning_rlhf.rollout import TransformersEngine, VLLMEngine
from lightning_rlhf.rollout.cache import ROOM
from lightning_rlhf.rollout.vllm import WORKING
from lightning_rlhf.ulysses import packed_attention, set_attention

CONFIGS = Path(__file__).parent.parent / "configs"
SIZES = {"vocab_size": 211, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
MODELS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=160, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=32, intermediate_size=160),
    "gemma2": Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=16, intermediate_size=160),
    "phi3": Phi3Config(**SIZES, num_key_value_heads=4, intermediate_size=160, pad_token_id=0, eos_token_id=1),
    "mixtral": MixtralConfig(**SIZES, num_key_value_heads=2, intermediate_size=96, num_local_experts=4),
}


def run_of(**changes: Any) -> Run:
    """4 data ranks x sp 2, two replicas; 32 prompts x 4 responses in 2 x 4 optimizer steps."""
    strategy = FSDPUlyssesStrategy(sequence_parallel_size=2, data_parallel_replicate=2)
    run = Run(
        world_size=8,
        num_nodes=2,
        strategy=strategy,
        device_type="cuda",
        precision="bf16-mixed",
        param_dtype=torch.float32,
        compute_dtype=torch.bfloat16,
        config=MODELS["llama"],
        attention="auto",
        prompts=32,
        num_generations=4,
        prompt_length=100,
        response_length=400,
        val_response_length=300,
        learning_rates={"actor": 1e-6},
        ppo_epochs=2,
        mini_batches=4,
        micro_batch_tokens=600,
        engine=VLLMEngine(),
    )
    return replace(run, **changes)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_an_iteration_in_numbers():
    run = run_of()
    assert (run.data_ranks, run.sequence_ranks, run.replicas, run.shards) == (4, 2, 2, 4)
    assert (run.responses, run.longest, run.context, run.budget) == (128, 500, 500, 1200)
    assert run.micro_batches == 4  # 128 responses / 4 steps / 4 ranks = 8 of 500 tokens, 2 in a stream of 1200
    assert run.stream_tokens(4) == 600
    assert run.stream_tokens(64) == 250  # one response of 500 tokens on two GPUs


@pytest.mark.parametrize(
    ("responses", "length", "budget", "ranks"), [(32, 500, 1200, 4), (7, 90, 100, 3), (5, 10, 64, 2)]
)
def test_micro_batches_are_those_that_the_packer_makes(responses, length, budget, ranks):
    run = run_of(
        world_size=ranks,
        num_nodes=1,
        strategy=FSDPUlyssesStrategy(),
        prompts=responses,
        num_generations=1,
        mini_batches=1,
        prompt_length=1,
        response_length=length - 1,
        micro_batch_tokens=budget,
    )
    assert run.micro_batches == len(pack_plan([length] * responses, ranks, budget)[0])


def test_hybrid_sharding_by_nodes():
    run = run_of(strategy=FSDPUlyssesStrategy(data_parallel_replicate="nodes"), world_size=16, num_nodes=2)
    assert (run.replicas, run.shards, run.data_ranks) == (2, 8, 16)


# -- checks ------------------------------------------------------------------------------------------------------------

SIX = {"world_size": 6, "strategy": FSDPUlyssesStrategy(), "prompts": 36}

CHECKS = {
    "tiles": (
        {"world_size": 6, "num_nodes": 1, "prompts": 30},
        "error",
        "6 processes are no multiple of sequence_parallel_size x data_parallel_replicate = 2 x 2",
    ),
    "nodes": (
        {"world_size": 4, "num_nodes": 4},
        "error",
        "sequence_parallel_size=2 must divide the 1 processes of a node, a group would span nodes",
    ),
    "heads": (
        {"config": LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3)},
        "warning",
        "does not divide the 9 attention heads: 1 zero heads are appended and key/value heads repeated 3 times, attention"
        " does 11% more work; 1 divides them",
    ),
    "groups": (
        {"config": LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=2)},
        "error",
        "9 query heads are no multiple of 2 key/value heads",
    ),
    "budget": (
        {"micro_batch_tokens": 249},
        "error",
        "the longest sequence has 500 tokens (prompt + response), a micro-batch holds 498: raise model.micro_batch_tokens",
    ),
    "positions": (
        {"response_length": 2000, "micro_batch_tokens": 4000},
        "error",
        "= 2100 exceed the model's 2048 positions: lower one of them",
    ),
    "validation positions": (
        {"val_response_length": 1949},
        "error",
        "data.max_prompt_length + rollout.val_sampling.max_completion_length = 2049 exceed the model's 2048 positions",
    ),
    "positions and turns": (
        {"response_length": 2000, "micro_batch_tokens": 4000, "turns": 3},
        "error",
        "the 3 turns of rollout.sampling.max_completion_length and the replies of rollout.conversation = 2100 exceed",
    ),
    "prompts": ({"prompts": 30}, "error", "data.batch_size=30 must be a multiple of the 4 data ranks: take 28 or 32"),
    "mini-batches": ({"mini_batches": 129}, "error", "model.mini_batches is 129, a rollout has only 128 responses"),
    "idle ranks": ({"mini_batches": 64}, "warning", "an optimizer step has 2 responses for 4 data ranks"),
    "rounding": (
        {"param_dtype": torch.bfloat16, "precision": "bf16-true"},
        "warning",
        "trainer.precision bf16-true keeps no float32 master weights: most updates at learning rate 1e-06 vanish",
    ),
    "context": (
        {"engine": VLLMEngine(engine_args={"max_model_len": 499})},
        "error",
        "the engine's context of 499 tokens must hold the longest sequence of 500",
    ),
    "engine and node": (
        {"engine": VLLMEngine(tensor_parallel_size=4), "num_nodes": 4},
        "error",
        "rollout.engine.tensor_parallel_size=4 must divide the 2 processes of a node, an engine is made of consecutive ones:"
        " take 2 or change trainer.devices",
    ),
    "engine and world": (
        {"engine": VLLMEngine(tensor_parallel_size=2), "num_nodes": 2} | SIX,
        "error",
        "rollout.engine.tensor_parallel_size=2 must divide the 3 processes of a node",
    ),
    "engine and heads": (
        {"engine": VLLMEngine(tensor_parallel_size=3), "num_nodes": 1} | SIX,
        "error",
        "rollout.engine.tensor_parallel_size=3 must divide the 4 attention heads: take 2",
    ),
    "engine and key/value heads": (
        {
            "engine": VLLMEngine(engine_args={"tensor_parallel_size": 4}),
            "config": LlamaConfig(**SIZES | {"hidden_size": 96, "num_attention_heads": 12}, num_key_value_heads=6),
        },
        "error",
        "rollout.engine.tensor_parallel_size=4 must divide the 6 key/value heads or be a multiple of them: take 2",
    ),
    "engine, heads and node": (
        {"engine": VLLMEngine(tensor_parallel_size=8), "num_nodes": 1, "config": known_config("Qwen/Qwen2.5-7B")},
        "error",
        "rollout.engine.tensor_parallel_size=8 must divide the 28 attention heads: take 4",
    ),
    "one response to a prompt": (
        {"compares": "grpo", "num_generations": 1},
        "note",
        "model.advantage: grpo compares the responses to a prompt with each other, and there is only one, which has no"
        " baseline: set rollout.sampling.num_generations to 2 or more",
    ),
    "one response to a prompt, of which nothing is learned": (
        {"compares": "gdpo", "num_generations": 1},
        "error",
        "model.advantage: gdpo compares the responses to a prompt with each other, and there is only one, whose advantage is"
        " 0: set rollout.sampling.num_generations to 2 or more",
    ),
    "soft-capping": (
        {"config": MODELS["gemma2"]},
        "error",
        "model.attention: torch varlen (FlashAttention-2) has no soft-capped scores, which this model needs",
    ),
    "kernel": (
        {"config": GptOssConfig(), "attention": "flash_attention_4"},
        "warning",
        "model.attention: flash_attention_4 needs the package flash_attn.cute",
    ),
    "rotary": (
        {
            "config": LlamaConfig(
                max_position_embeddings=8192,
                rope_parameters={
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 64,
                    "long_factor": [2.0] * 64,
                    "original_max_position_embeddings": 256,
                    "rope_theta": 1e4,
                },
            )
        },
        "error",
        "= 500 exceed the model's 256 positions",
    ),
}


def test_a_run_that_works_has_no_problems():
    assert problems(run_of()) == []


@pytest.mark.parametrize("name", CHECKS)
def test_what_cannot_work_is_named_with_what_to_change(name):
    changes, kind, message = CHECKS[name]
    (problem,) = problems(run_of(**changes))
    assert problem.kind == kind
    assert message in problem.message
    assert len(problem.message.splitlines()) == 1


def test_sinks_need_no_package():
    assert problems(run_of(config=GptOssConfig())) == []


# -- memory ------------------------------------------------------------------------------------------------------------


class FlashLike(torch.autograd.Function):
    """Attention that computes in float32 and keeps what FlashAttention keeps."""

    @staticmethod
    def forward(ctx, q, k, v):
        members = q.shape[1] // k.shape[1]
        qf, kf, vf = (
            t.float().transpose(0, 1) for t in (q, k.repeat_interleave(members, 1), v.repeat_interleave(members, 1))
        )
        scores = qf @ kf.transpose(-1, -2)
        out = (scores.softmax(-1) @ vf).transpose(0, 1).to(q.dtype).contiguous()
        ctx.save_for_backward(q, k, v, out, scores.logsumexp(-1))
        return out


class Allocated(TorchDispatchMode):
    """Bytes of the tensors made inside that are still alive; views of parameters are none."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.own = {StorageWeakRef(p.untyped_storage()).cdata for p in (*model.parameters(), *model.buffers())}
        self.storages: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages.append((StorageWeakRef(storage), storage.nbytes()))
        return out

    @property
    def alive(self) -> int:
        made = {ref.cdata: size for ref, size in self.storages if not ref.expired()}
        return sum(size for storage, size in made.items() if storage not in self.own)


def bytes_after_forward(
    name: str, checkpointing: bool = False, group: Any = None, ranks: int = 1, tile: int | None = None
) -> float:
    """Per token of one rank, of the real model with real tensors."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.bfloat16).train()
    set_attention(model, f"kept_{ranks}", packed_attention(lambda q, k, v, *_, **__: FlashLike.apply(q, k, v), group))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    settings = ModelSettings(name, tiled_mlp=tile)
    apply_execution(model, list(model.base_model.layers), settings, torch.device("cpu"), trained=True)
    tokens = 96
    stream = {"cu_seq_lens_q": torch.tensor([0, tokens * ranks], dtype=torch.int32), "max_length_q": tokens * ranks}
    ids, positions = torch.arange(tokens)[None], torch.arange(tokens)[None]
    with Allocated(model) as allocated:
        out = model.base_model(input_ids=ids, position_ids=positions, use_cache=False, **stream)
        held = allocated.alive - out.last_hidden_state.nbytes
    return held / tokens


@pytest.mark.parametrize("name", MODELS)
def test_kept_activations_are_what_is_alive_after_a_forward_pass(name):
    shape = shape_of(MODELS[name], torch.bfloat16)
    assert shape.saved_bytes == pytest.approx(bytes_after_forward(name), rel=0.1)


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3"])
def test_a_tiled_mlp_keeps_its_input(name):
    shape = shape_of(MODELS[name], torch.bfloat16)
    assert shape.mlp_bytes == 8 * 160
    kept = shape.saved_bytes - shape.layers * shape.mlp_bytes
    assert kept == pytest.approx(bytes_after_forward(name, tile=32), rel=0.02)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_trained_tower_keeps_what_is_alive_after_its_forward_pass(family):
    config = config_of(family, {token: i for i, token in enumerate((*SPECIAL, *map(chr, range(300))))})
    shape = shape_of(config, torch.bfloat16, freeze_vision=False)
    torch.manual_seed(0)
    tower = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).model.visual

    def attention(module, *qkv, **_):
        return FlashLike.apply(*(t[0].transpose(0, 1) for t in qkv[:3]))[None], None

    set_attention(tower, "kept_tower", attention)
    with Allocated(tower) as allocated:
        out = tower(torch.zeros(144, 96), grid_thw=torch.tensor([[1, 12, 12]]))
        held = (allocated.alive - out.pooler_output.nbytes) / 36
    assert shape.tower_bytes == pytest.approx(held, rel=0.1)
    assert 2 * shape.tower_layer_bytes < shape.tower_bytes < 4 * shape.tower_layer_bytes
    assert shape_of(config, torch.bfloat16).tower_bytes == 0


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("jetmoe", "cannot be planned, though it may train: its layers read values"),
        ("bloom", "cannot be packed: its attention"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(kind, why):
    config = AutoConfig.for_model(kind, num_hidden_layers=1, n_layer=1, hidden_size=64)
    with pytest.raises(NotImplementedError, match=f"ForCausalLM {why}"):
        shape_of(config, torch.bfloat16)


def test_a_plan_leaves_the_config_as_it_is():
    """The run builds its models from it: a tower with the plan's attention would have no backward."""
    vision = config_of("qwen2_5_vl", {token: i for i, token in enumerate((*SPECIAL, *map(chr, range(300))))})
    for config in (vision, MODELS["llama"]):
        parts = [config, config.get_text_config(), getattr(config, "vision_config", config)]
        before = [(part._attn_implementation, part.to_dict()) for part in parts]
        shape_of(config, torch.bfloat16, freeze_vision=False)
        assert [(part._attn_implementation, part.to_dict()) for part in parts] == before


@pytest.mark.parametrize("name", MODELS)
def test_liger_keeps_what_its_autograd_functions_save(name):
    """For each norm its input instead of two copies of it, for the gated MLP not the activated gate."""
    stock, liger = (shape_of(MODELS[name], torch.bfloat16, liger=on) for on in (False, True))
    assert liger.layer_bytes < stock.layer_bytes
    if name == "llama":
        assert stock.layer_bytes - liger.layer_bytes == 8 * 64 + 2 * 160
        assert stock.mlp_bytes - liger.mlp_bytes == 2 * 160
        assert stock.saved_bytes - liger.saved_bytes == 3 * (8 * 64 + 2 * 160) + 4 * 64
    assert shape_of(MODELS[name], torch.bfloat16) == stock  # nothing of Liger is left behind


def saved_by_compiled_layers(name: str, which: str) -> tuple[float, float]:
    """Per token, of the last layer and of a forward pass, of the real model with real tensors."""
    model = AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.bfloat16).train()
    set_attention(model, "kept_compiled", attention(1))
    layers, tokens = list(model.base_model.layers), 96
    settings = ModelSettings(name, compile=True, gradient_checkpointing=which)
    apply_execution(model, layers, settings, torch.device("cpu"), trained=True)
    stream = {"cu_seq_lens_q": torch.tensor([0, tokens], dtype=torch.int32), "max_length_q": tokens}
    ids, saved, after = torch.arange(tokens)[None], SavedBytes(model), []
    for layer in layers:
        layer.register_forward_hook(lambda *_: after.append(saved.total))
    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        model.base_model(input_ids=ids, position_ids=ids, use_cache=False, **stream)
    return (after[-1] - after[-2]) / tokens, saved.total / tokens


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore")  # torch's compiler about itself
@pytest.mark.parametrize("which", ["full", "selective", pytest.param("every_second", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_layers_that_are_recomputed_keep_what_others_do(which, backend, monkeypatch):
    shape = shape_of(MODELS["llama"], torch.bfloat16, compiled=True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    again = 2 * shape.hidden + (shape.attention_bytes if which == "selective" else 0)
    kept = [again, shape.layer_bytes if which == "every_second" else again, again]
    others = shape.saved_bytes - shape.layers * shape.layer_bytes
    assert saved_by_compiled_layers("llama", which) == (again, others + sum(kept))


@pytest.mark.slow
@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore")  # torch's code generator about itself
@pytest.mark.parametrize("name", MODELS)
def test_compiled_layers_keep_what_those_of_the_code_generator_keep(name):
    """Mixtral's routing has a few indices per stream besides, gemma2 its scale of embeddings."""
    shape = shape_of(MODELS[name], torch.bfloat16, compiled=True)
    assert shape.compiled
    assert saved_by_compiled_layers(name, "off") == pytest.approx((shape.layer_bytes, shape.saved_bytes), rel=2e-3)


def test_layers_that_cannot_be_traced_count_as_they_are(monkeypatch):
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no")

    eager = shape_of(MODELS["llama"], torch.bfloat16)
    monkeypatch.setattr(torch, "compile", fails)
    assert shape_of(MODELS["llama"], torch.bfloat16, compiled=True) == eager
    plan = plan_of(_ppo(compile=True), RolloutCallback())
    assert "the compiled layers could not be traced: activations are those without model.compile" in plan.notes[0]


def test_a_compiled_layer_is_counted_with_adapters_and_several_ranks():
    eager, compiled = (
        shape_of(MODELS["llama"], torch.bfloat16, compiled=on, sequence_ranks=2, lora=LoRA(r=8)) for on in (False, True)
    )
    assert compiled.compiled
    assert compiled.layer_bytes < 0.9 * eager.layer_bytes
    assert shape_of(MODELS["llama"], torch.bfloat16, sequence_ranks=2, lora=LoRA(r=8)) == eager


MEASURED = [
    ("1.5b", 1, 32768, False, 108.7),
    ("1.5b", 1, 32768, True, 82.9),
    ("0.5b", 1, 32768, True, 37.6),
    ("7b", 2, 16384, True, 115.5),
]
"""Shape, GPUs, tokens, compiled, GiB: peaks of torch's allocator on H200s, docs/benchmarks.md; all gathered by layers."""


@pytest.mark.parametrize(("shape", "ranks", "tokens", "compiled", "measured"), MEASURED)
def test_an_update_is_predicted_as_it_was_measured(shape, ranks, tokens, compiled, measured, tmp_path):
    """One micro-batch per optimizer step: gradients, which the plan adds, come while the activations go."""
    config_of_shape(shape).save_pretrained(tmp_path)
    module = GRPOLightningModule(str(tmp_path), mini_batches=1, compile=compiled)
    sampling = Sampling(num_generations=1, max_completion_length=1023)
    sizes = {
        "world_size": ranks,
        "num_nodes": 1,
        "strategy": FSDPUlyssesStrategy(min_num_params=0),
        "micro_batch_tokens": tokens,
    }
    lengths = {"prompts": 64, "num_generations": 1, "prompt_length": 1, "response_length": 1023}
    plan = plan_of(module, RolloutCallback(engine=VLLMEngine(), sampling=sampling, sleep_level=2), **sizes, **lengths)
    update = plan.phases[-1]
    predicted = (update.total - update.parts["context"] - update.parts["gradients"]) / 2**30
    assert measured < predicted < 1.03 * measured


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_recomputed_layers_keep_their_inputs():
    shape = shape_of(MODELS["llama"], torch.bfloat16)
    kept = shape.saved_bytes + shape.layers * (2 * shape.hidden - shape.layer_bytes)
    assert kept == pytest.approx(bytes_after_forward("llama", checkpointing=True), rel=0.1)


@pytest.mark.parametrize(("compiled", "norms", "gated"), [(False, 16, 8), (True, 8, 6)])
@pytest.mark.parametrize(("name", "q_heads", "kv_heads"), [("qwen2", 12, 2), ("llama", 32, 8)])
def test_a_layer_of_the_llama_kind_keeps_what_the_formula_says(name, q_heads, kv_heads, compiled, norms, gated):
    h, f, d = 1536, 8960, 128
    kind = {"qwen2": Qwen2Config, "llama": LlamaConfig}[name]
    config = kind(
        hidden_size=h,
        intermediate_size=f,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        head_dim=d,
        num_hidden_layers=2,
    )
    formula = norms * h + 8 + gated * f + 4 * q_heads * d + 4 * kv_heads * d + 4 * q_heads
    assert shape_of(config, torch.bfloat16, compiled=compiled).layer_bytes == pytest.approx(formula, rel=1e-3)


def test_selective_recomputation_keeps_what_the_collectives_brought():
    one, two = (shape_of(MODELS["llama"], torch.bfloat16, sequence_ranks=n).attention_bytes for n in (1, 2))
    assert one == 2 * 4 * 16 + 4 * 4
    assert two == one + 2 * (4 + 2 + 2 + 4) * 16  # q, k, v on the way there, the output on the way back


PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
}


def test_built_in_sizes_give_the_published_parameter_counts():
    assert set(PUBLISHED) == set(_BY_NAME)
    for name, count in PUBLISHED.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(known_config(f"{name}-Instruct"))
        assert sum(p.numel() for p in model.parameters()) == count, name


def _held(strategy: FSDPUlyssesStrategy, folder: str) -> tuple[list[int], int]:
    """Elements of the actor's and the critic's shards, and bytes of Adam's moments of both."""
    roots = build_policy(ModelSettings(folder), strategy), build_critic(ModelSettings(folder), strategy)
    parameters = [p for root in roots for p in root.parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-6)
    optimizer.step()
    moments = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
    elements = [sum(p.to_local().numel() for p in root.parameters()) for root in roots]
    return elements, sum(m.to_local().nbytes for m in moments)


def _predicted(folder: str, ranks: int) -> tuple[list[int], int]:
    config = ModelSettings(folder).config
    elements = [shape_of(config, torch.float32, head=head).shard(ranks) for head in (True, False)]
    return elements, int(sum(elements) * optimizer_bytes(torch.optim.AdamW, torch.float32))


def _on_two_ranks(rank: int, folders: list[str]) -> Any:
    shards = [_held(strategy_of(2), folder) for folder in folders]
    return bytes_after_forward("llama", group=dist.group.WORLD, ranks=2), shards


def test_shards_moments_and_activations_on_two_ranks(tmp_path):
    """The first rank has the longer shards: those are predicted, to the byte."""
    folders = [save(name, tmp_path / name) for name in ("tied", "untied")]
    (first, shards), (second, _) = spawn(_on_two_ranks, 2, folders)
    assert shards == [_predicted(folder, 2) for folder in folders]
    expected = shape_of(MODELS["llama"], torch.bfloat16, sequence_ranks=2).saved_bytes
    assert [first, second] == pytest.approx([expected] * 2, rel=0.1)


def test_shards_and_moments_on_one_rank(tmp_path):
    folder = save("untied", tmp_path)
    assert _held(strategy_of(1), folder) == _predicted(folder, 1)


def _gathered(rank: int, folder: str) -> list[int]:
    """Bytes that a pass without gradients holds after the last layer, more than before; layer by layer, and as a whole."""

    def storages() -> dict[int, int]:
        tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
        return {(s := t.untyped_storage()).data_ptr(): s.nbytes() for t in tensors if t.device.type == "cpu"}

    found = []
    for min_num_params in (0, 10**9):
        actor, most = build_policy(ModelSettings(folder), strategy_of(2, min_num_params=min_num_params)), []
        before = storages()
        actor.layers[-1].mlp.register_forward_hook(lambda *_, most=most: most.append(sum(storages().values())))  # type: ignore[misc]
        with torch.no_grad():
            actor(pack([torch.tensor([3, 5])], [1]), 1.0)
        found.append(most[0] - sum(before.values()))
    return found


def test_what_a_pass_gathers_on_two_ranks_is_predicted(tmp_path):
    """A small model is there twice in its forward pass: as parameters, and as the all-gather brought it."""
    folder = save("untied", tmp_path)
    for seen in spawn(_gathered, 2, folder):
        for min_num_params, held in zip((0, 10**9), seen, strict=True):
            strategy = FSDPUlyssesStrategy(min_num_params=min_num_params)
            sizes = {"strategy": strategy, "world_size": 2, "num_nodes": 1, "compute_dtype": torch.float32}
            plan = plan_of(GRPOLightningModule(folder, mini_batches=2), RolloutCallback(), **sizes)
            (log_prob,) = (phase for phase in plan.phases if phase.name == "log_prob")
            assert log_prob.parts["gathered"] == pytest.approx(held, rel=0.05)


def test_gradients_of_a_small_model_with_an_adapter_are_the_adapters():
    plan = plan_of(GRPOLightningModule("random:tiny", mini_batches=2, lora=LoRA(r=8)), RolloutCallback())
    trained, update = sum(size.numel() for size in plan.roles[0].shape.trained), plan.phases[-1].parts
    assert update["activations"] > 4 * trained
    assert update["gathered"] == 2 * plan.roles[0].shape.parameters + 2 * trained


def test_the_state_of_an_optimizer_is_found_by_asking_it():
    assert optimizer_bytes(torch.optim.AdamW, torch.float32) == 8
    assert optimizer_bytes(torch.optim.AdamW, torch.bfloat16) == 4
    assert optimizer_bytes(torch.optim.SGD, torch.float32) == 0
    assert optimizer_bytes(lambda p: torch.optim.AdamW(p, amsgrad=True), torch.float32) == 12


def plan_of(module: Any, rollout: RolloutCallback, memory: int = 80 * 2**30, **changes: Any):
    run = run_of(config=module.settings.config, engine=rollout.engine, mini_batches=module.mini_batches, **changes)
    return make_plan(module, rollout, run, {name: s.config for name, s in module.roles.items()}, memory)


def _ppo(**changes: Any) -> PPOLightningModule:
    return PPOLightningModule("random:tiny", **({"kl": KL(coef=0.1), "mini_batches": 2} | changes))


def test_phases_hold_what_they_use():
    engine, sampling = VLLMEngine(gpu_memory_utilization=0.5), Sampling(max_completion_length=8)
    plan = plan_of(_ppo(), RolloutCallback(engine=engine, sampling=sampling, sleep_level=2))
    phases = {phase.name: phase.parts for phase in plan.phases}
    assert list(phases) == ["rollout", "log_prob", "update"]
    assert phases["rollout"]["engine"] == 40 * 2**30
    assert phases["update"]["engine"] == 0
    assert phases["update"]["gradients"] == phases["update"]["parameters"] == phases["update"]["optimizer"] // 2
    assert phases["update"]["activations"] > 0
    assert "activations" not in phases["log_prob"]
    assert plan.trained == plan.roles[0].shape.parameters + plan.roles[2].shape.parameters


LAYERS, TOKENS, SHARDS, RANK = 6, 600, 4, 8
ROWS = 400  # of them in responses
TINY = ModelSettings("random:tiny").config
H, F = TINY.hidden_size, TINY.intermediate_size
HEADS, KV, D = TINY.num_attention_heads, TINY.num_key_value_heads, H // TINY.num_attention_heads
LINEAR = [(H, HEADS * D), (H, KV * D), (H, KV * D), (HEADS * D, H), (H, F), (H, F), (F, H)]
LAYER = 16 * H + 8 + 8 * F + 4 * HEADS * D + 4 * KV * D + 4 * HEADS  # bytes per token, see `plan.probe`
INPUT, ATTENTION = 2 * H, 2 * HEADS * D + 4 * HEADS


def shard_of(*sizes: tuple[int, ...]) -> int:
    return sum(-(-first // SHARDS) * math.prod(rest) for first, *rest in sizes)


def base(head: bool) -> int:
    """Elements of the model on one GPU; the critic has a value head, and no other."""
    layer = [size[::-1] for size in LINEAR] + [(HEADS * D,), (KV * D,), (KV * D,), (H,), (H,)]
    return shard_of(*layer * LAYERS, (TINY.vocab_size, H), (H,), *([] if head else [(1, H), (1,)]))


BOTH, ADAPTER = base(True) + base(False), shard_of(*(s for i, o in LINEAR for s in ((RANK, i), (o, RANK)))) * LAYERS
VALUE = shard_of((1, H), (1,))
LORA = {"gradients": 4, "optimizer": 8}
SAVED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[tuple[str, str], float]]] = {
    "gradient_checkpointing full": (
        {"gradient_checkpointing": "full"},
        {},
        {("update", "activations"): TOKENS * LAYERS * (LAYER - INPUT)},
    ),
    "gradient_checkpointing selective": (
        {"gradient_checkpointing": "selective"},
        {},
        {("update", "activations"): TOKENS * LAYERS * (LAYER - INPUT - ATTENTION)},
    ),
    "gradient_checkpointing every_second": (
        {"gradient_checkpointing": "every_second"},
        {},
        {("update", "activations"): TOKENS * (LAYERS // 2) * (LAYER - INPUT)},
    ),
    "tiled_mlp": ({"tiled_mlp": 100}, {}, {("update", "activations"): TOKENS * LAYERS * 8 * F}),
    "a tile longer than the stream": ({"tiled_mlp": TOKENS}, {}, {("update", "activations"): 0}),
    "liger": ({"liger": True}, {}, {("update", "activations"): TOKENS * (LAYERS * (8 * H + 2 * F) + 4 * H)}),
    "compile": ({"compile": True}, {}, {("update", "activations"): TOKENS * LAYERS * (8 * H + 2 * F)}),
    "keep_logits": ({"keep_logits": True}, {}, {("update", "activations"): -4 * ROWS * TINY.vocab_size}),
    "offload_activations": (
        {"offload_activations": True},
        {},
        {
            ("update", "activations"): TOKENS * (LAYERS - 2) * LAYER,
            ("host", "activations"): -SHARDS * TOKENS * (LAYERS - 2) * LAYER,
        },
    ),
    "offload_activations of selective": (
        {"offload_activations": True, "gradient_checkpointing": "selective"},
        {},
        {
            ("update", "activations"): TOKENS * (LAYERS * (LAYER - ATTENTION) - 2 * INPUT),
            ("host", "activations"): -SHARDS * TOKENS * (LAYERS - 2) * INPUT,
        },
    ),
    "offload_optimizer": (
        {},
        {"offload_optimizer": True},
        {("rollout", "optimizer"): 8 * BOTH, ("update", "optimizer"): 0, ("host", "optimizer"): -SHARDS * 8 * BOTH},
    ),
    "offload_parameters": (
        {},
        {"offload_parameters": True},
        {
            ("rollout", "parameters"): 4 * BOTH,
            ("rollout", "reference"): 2 * base(True),
            ("update", "parameters"): 0,
            ("host", "parameters"): -SHARDS * (4 * BOTH + 2 * base(True)),
        },
    ),
    "offload_reference": (
        {"offload_reference": True},
        {},
        {(phase, "reference"): 2 * base(True) for phase in ("rollout", "log_prob", "update")}
        | {("host", "reference"): -SHARDS * 2 * base(True)},
    ),
    "lora": (
        {"lora": LoRA(r=RANK)},
        {},
        {("update", part): size * (BOTH - 2 * ADAPTER - VALUE) for part, size in LORA.items()}
        | {("rollout", "parameters"): 4 * (BOTH - 2 * ADAPTER - VALUE) - 2 * (BOTH - VALUE)}
        | {("update", "reference"): 2 * base(True)},
    ),
    "ema_decay": (
        {"ema_decay": 0.99},
        {},
        {(phase, "total"): -4 * base(True) for phase in ("rollout", "log_prob", "update")},
    ),
    "sgd": ({"optimizer": torch.optim.SGD}, {}, {("update", "optimizer"): 8 * BOTH}),
}
"""Options of the module and of the rollout, and the bytes that they save of a phase or cost a host."""
DEEPER = {"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS}


@pytest.mark.parametrize("name", SAVED)
def test_a_switch_saves_the_bytes_that_it_should(name):
    def held(model: dict[str, Any], rollout: dict[str, Any]) -> dict[tuple[str, str], int]:
        module = _ppo(config_overrides=DEEPER, **model)
        callback = RolloutCallback(engine=VLLMEngine(), **rollout)
        sizes = {"strategy": FSDPUlyssesStrategy(), "world_size": SHARDS, "num_nodes": 1, "prompts": 128}
        sizes |= {"prompt_length": 300, "response_length": 600}
        plan = plan_of(module, callback, micro_batch_tokens=TOKENS, **sizes)
        phases = {(phase.name, part): size for phase in plan.phases for part, size in phase.parts.items()}
        totals = {(phase.name, "total"): phase.total for phase in plan.phases}
        return phases | totals | {("host", part): size for part, size in plan.host.items()}

    model, rollout, expected = SAVED[name]
    plain, switched = held({}, {}), held(model, rollout)
    for (phase, part), size in expected.items():
        saved = plain[phase, part] - switched[phase, part]
        assert saved == pytest.approx(size, rel=1e-3, abs=1), (phase, part)
        if size > 0:
            assert plain[phase, "total"] > switched[phase, "total"], phase


def test_activations_of_one_layer_stay_where_they_are():
    def held(**options: Any) -> tuple[int, int]:
        config = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        plan = plan_of(_ppo(config_overrides=config, **options), RolloutCallback(engine=VLLMEngine()))
        return plan.phases[-1].parts["activations"], plan.host["activations"]

    assert held(offload_activations=True) == held()


def test_a_reward_model_stays_on_the_gpu_in_rollouts():
    """Validation asks it while the engine is awake, and so do the rounds of filter_groups."""
    callback = RolloutCallback(engine=VLLMEngine(), offload_parameters=True)
    plain, scored = (
        plan_of(_ppo(reward_model=one), callback).phases for one in (None, FrozenRewardModel("random:tiny"))
    )
    for without, held in zip(plain, scored, strict=True):
        assert (
            held.parts["reference"] - without.parts["reference"]
            == scored[2].parts["reference"] - plain[2].parts["reference"]
        )
    assert scored[0].parts["reference"] > plain[0].parts["reference"] == 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_frozen_models_take_what_they_are_held_in(precision, tmp_path):
    """A reference is bfloat16 whatever the run computes in, a reward model is not; its float32 head is counted like the rest."""
    strategy, frozen = strategy_of(1, precision=precision), FrozenRewardModel(reward_model(tmp_path))
    policy = ModelSettings("random:tiny")
    reference, scoring = (
        build_policy(policy, strategy, frozen=True),
        build_reward_model(frozen.settings(policy), strategy).model,
    )
    run = {"strategy": strategy, "world_size": 1, "num_nodes": 1}
    run |= {name: getattr(strategy.precision_plugin, name) for name in ("param_dtype", "compute_dtype")}

    def planned(offload: bool, **options: Any) -> int:
        plan = plan_of(_ppo(offload_reference=offload, **options), RolloutCallback(engine=VLLMEngine()), **run)
        return plan.host["reference"] if offload else plan.phases[2].parts["reference"]

    for offload in (False, True):
        alone = planned(offload)
        assert alone == sum(p.nbytes for p in reference.parameters())
        added = planned(offload, reward_model=frozen) - alone
        assert added == pytest.approx(sum(p.nbytes for p in scoring.parameters()), rel=0.01)


def test_an_engine_that_sleeps_leaves_its_weights_on_the_host():
    awake = plan_of(_ppo(), RolloutCallback(engine=VLLMEngine(), sleep_level=0)).phases
    assert awake[2].parts["engine"] == awake[0].parts["engine"] - WORKING > 0
    asleep = plan_of(_ppo(), RolloutCallback(engine=VLLMEngine(), sleep_level=1))
    assert asleep.phases[2].parts["engine"] == 0
    assert asleep.host["engine weights"] == 4 * asleep.engine.weights


def test_a_checkpoint_that_is_written_meanwhile_is_copied_to_the_host():
    """float32 parameters that train, and Adam's two moments, on 4 GPUs; a bfloat16 reference that is renewed."""

    def host(saved: bool, **options: Any) -> int:
        return plan_of(_ppo(**options), RolloutCallback(engine=VLLMEngine()), async_save=saved).host["checkpoint"]

    roles = plan_of(_ppo(), RolloutCallback(engine=VLLMEngine())).roles
    shards = sum(role.shape.trained_shard(4) for role in roles if role.trained)
    renewed = {"kl": KL(coef=0.1, refresh_every=5)}
    saved = 12 * shards
    assert [host(False), host(True)] == [0, 4 * saved]
    reference = 2 * roles[0].shape.shard(4)
    assert [host(False, **renewed), host(True, **renewed)] == [0, 4 * (saved + reference)]


def test_logits_of_a_float32_model_are_not_kept():
    def activations(keep: bool) -> int:
        run = {"strategy": FSDPUlyssesStrategy(), "precision": "32-true", "compute_dtype": torch.float32}
        plan = plan_of(_ppo(keep_logits=keep), RolloutCallback(engine=VLLMEngine()), **run)
        return plan.phases[-1].parts["activations"]

    assert activations(True) == activations(False)


def test_a_tile_at_a_time_is_at_work():
    """Layers that are run again: the tile's inner activations, and their gradients."""

    def working(**options: Any) -> int:
        module = _ppo(gradient_checkpointing="full", mini_batches=1, **options)
        run = {"strategy": FSDPUlyssesStrategy(), "world_size": 1, "num_nodes": 1, "micro_batch_tokens": 10**5}
        plan = plan_of(module, RolloutCallback(engine=VLLMEngine()), prompts=2048, response_length=1, **run)
        return plan.phases[-1].parts["working"]

    assert working() == pytest.approx(2 * 10**5 * LAYER, rel=1e-3)
    assert working() - working(tiled_mlp=1000) == pytest.approx(2 * (10**5 - 1000) * 8 * F, rel=1e-3)


def test_a_trained_tower_has_state_and_activations(tmp_path):
    folder = write_vlm(tmp_path, "qwen2_5_vl")
    tower = AutoModelForImageTextToText.from_pretrained(folder).model.visual
    elements = shard_of(*(p.shape for p in tower.parameters()))

    def parts(frozen: bool) -> dict[str, int]:
        module = GRPOLightningModule(folder, freeze_vision=frozen, mini_batches=2)
        one = {"strategy": FSDPUlyssesStrategy(), "world_size": SHARDS, "num_nodes": 1}
        return plan_of(module, RolloutCallback(engine=VLLMEngine()), micro_batch_tokens=1000, **one).phases[-1].parts

    frozen, trained = parts(True), parts(False)
    assert trained["gradients"] - frozen["gradients"] == 4 * elements
    assert trained["optimizer"] - frozen["optimizer"] == 8 * elements
    assert trained["parameters"] - frozen["parameters"] == (4 - 2) * elements
    kept = shape_of(ModelSettings(folder).config, torch.bfloat16, freeze_vision=False).tower_bytes
    # two sequences of 100 + 400 tokens, each prompt nothing but a picture
    assert trained["activations"] - frozen["activations"] == pytest.approx(200 * kept, rel=1e-3)


def shown(plan: Any, capsys: Any) -> dict[str, str]:
    """The rows of the table, by their names."""
    show(full(plan))
    rows = (re.split(r"  +", line.strip(), maxsplit=1) for line in capsys.readouterr().out.splitlines())
    return {row[0]: row[1] for row in rows if len(row) > 1}


def test_the_table_has_a_trained_tower_and_no_frozen_one(tmp_path, capsys):
    folder = write_vlm(tmp_path, "qwen2_5_vl")
    kept = shape_of(ModelSettings(folder).config, torch.bfloat16, freeze_vision=False).tower_bytes
    one = {"strategy": FSDPUlyssesStrategy(), "world_size": SHARDS, "num_nodes": 1, "micro_batch_tokens": 1000}
    frozen, trained = (
        shown(plan_of(GRPOLightningModule(folder, freeze_vision=f, mini_batches=2), RolloutCallback(), **one), capsys)
        for f in (True, False)
    )
    assert "vision tower" not in frozen
    assert trained["vision tower"] == f"{kept:,.0f} bytes per image token, at most 200 in a micro-batch"


@pytest.mark.parametrize(
    ("engine", "sizes", "unit"), [(VLLMEngine(), {"vocab_size": 2**22}, "GiB"), (TransformersEngine(), {}, "MiB")]
)
def test_the_table_has_what_the_gpus_of_a_node_park_on_their_host(engine, sizes, unit, capsys):
    """Two of four, which share 8 bytes a parameter of moments and a bfloat16 reference; each has the weights of an engine."""
    module = _ppo(config_overrides=DEEPER | sizes, offload_reference=True, critic_lr=1e-5)
    rollout = RolloutCallback(engine=engine, sleep_level=1, offload_optimizer=True)
    run = {"strategy": FSDPUlyssesStrategy(), "world_size": 4, "num_nodes": 2}
    plan = plan_of(module, rollout, device_type="cuda" if unit == "GiB" else "cpu", **run)
    actor, trained = plan.roles[0].shape.parameters, plan.trained
    in_bytes = {"optimizer": 8 * trained / 2, "reference": 2 * actor / 2, "engine weights": 2 * 2 * actor}
    size = {"GiB": 2**30, "MiB": 2**20}[unit]
    expected = ", ".join(f"{name} {held / size:.1f}" for name, held in in_bytes.items())
    assert " 0.0" not in expected
    assert shown(plan, capsys)[f"{unit} per host"] == expected


def test_image_tokens_of_a_micro_batch():
    assert run_of().image_tokens(4) == 3 * 100  # 1200 tokens: two sequences of 500, and room for a part of one
    assert run_of().image_tokens(1) == 2 * 100  # the first may be the last of a prompt's four responses
    assert run_of(micro_batch_tokens=1500).image_tokens(1) == 3 * 100  # six sequences: one, four, and one more


def test_one_optimizer_step_without_reference_needs_no_pass_before_the_update():
    plan = plan_of(GRPOLightningModule("random:tiny"), RolloutCallback())
    assert [phase.name for phase in plan.phases] == ["rollout", "update"]
    assert (
        plan.engine.kv_cache == 16 * (500 + ROOM) * 2 * plan.roles[0].shape.kv_elements
    )  # 8 prompts x 4 on the engines of 2 ranks


def test_ranks_that_share_an_engine_share_its_weights_and_cache():
    alone, shared = (
        plan_of(_ppo(), RolloutCallback(engine=VLLMEngine(tensor_parallel_size=ranks, gpu_memory_utilization=0.5)))
        for ranks in (1, 2)
    )
    assert shared.engine.weights == alone.engine.weights // 2
    assert shared.engine.total == alone.engine.total == 40 * 2**30, "the share of a GPU"
    assert [run_of(engine=VLLMEngine(tensor_parallel_size=n)).cache_split for n in (1, 2, 4)] == [1, 2, 2], "2 heads"


def test_an_adapter_is_not_in_the_engine():
    plain, adapted = (
        plan_of(_ppo(**options), RolloutCallback(engine=VLLMEngine())) for options in ({}, {"lora": LoRA()})
    )
    assert adapted.engine.weights == plain.engine.weights


def test_a_large_parameter_is_gathered_as_a_whole():
    config = known_config("Qwen/Qwen2.5-7B")
    plan = make_plan(_ppo(), RolloutCallback(), run_of(config=config), {"actor": config}, 80 * 2**30)
    assert plan.phases[0].parts["gather buffer"] == 2 * 152064 * 3584


def test_the_cache_must_hold_the_longest_sequence_of_validation_too():
    engine = VLLMEngine(kv_cache_memory_bytes=1000 * 256)
    fits, does_not = (plan_of(_ppo(), RolloutCallback(engine=engine), val_response_length=n) for n in (900, 901))
    assert not fits.problems
    assert "holds 1,000 tokens beside" in does_not.problems[0].message
    assert "its longest sequence has 1,001: raise" in does_not.problems[0].message


def test_what_does_not_fit_is_said_with_what_to_change():
    engine = VLLMEngine(gpu_memory_utilization=0.001)
    plan = plan_of(_ppo(), RolloutCallback(engine=engine, sleep_level=2), memory=2**28)
    error, *warnings = plan.problems
    assert "the engine's KV cache holds" in error.message
    assert "its longest sequence has 500: raise rollout.engine.gpu_memory_utilization" in error.message
    assert [w.message.partition(" ")[0] for w in warnings] == ["rollout", "log_prob", "update"]
    assert "is estimated at 2 GiB of the GPU's 0, most of it context: use a larger GPU" in warnings[0].message


def test_the_embedded_engine_decodes_a_batch_at_a_time():
    assert TransformersEngine(batch_size=2).plan_memory(10, 3, 5, 100, 0).total == 10 + 2 * (5 + ROOM) * 3


# -- the command -------------------------------------------------------------------------------------------------------


def planned(capsys: Any, *arguments: str) -> str:
    main(["plan", *arguments])
    return " ".join(capsys.readouterr().out.split())


def test_the_command_plans_the_first_config_without_hub_weights_or_gpu(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    out = planned(capsys, "--config", str(CONFIGS / "ppo.yaml"), "--devices=4")
    assert "Qwen/Qwen2.5-0.5B-Instruct: 494.0 M parameters; trains actor + critic, frozen reference" in out
    assert "128 prompts x 4 = 512 responses; 1 x 4 optimizer steps of 128 responses" in out
    assert "512 + 1,024 = up to 1,536 per sequence; streams of 16,384 tokens, at most 4 per step and data rank" in out
    assert "the hub cannot be reached: the sizes of Qwen/Qwen2.5-0.5B-Instruct are those that are built in" in out
    assert "total of 80" in out
    assert not dist.is_initialized()


@pytest.mark.parametrize("key", ["model.model", "model.critic"])
def test_a_model_of_the_hub_that_is_unknown_ends_in_one_line(key, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(CONFIGS / "ppo.yaml"), f"--{key}=someone/something"])
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1
    assert f"{key}: the config.json of 'someone/something' cannot be fetched (HF_HUB_OFFLINE is set)" in lines[0]


def test_a_folder_with_nothing_but_a_config_is_enough(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3"].to_dict()))
    small = ["--data.max_prompt_length=64", "--rollout.sampling.max_completion_length=64", "--device_memory_gb=10"]
    out = planned(capsys, "--config", str(CONFIGS / "ppo.yaml"), f"--model.model={tmp_path}", "--devices=2", *small)
    assert "ranks 2 = 1 x 2 shards; 2 data ranks x sp 1" in out
    assert "total of 10" in out
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_the_command_takes_a_saved_config_and_names_of_strategies(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(
            [
                "fit",
                "--config",
                str(CONFIGS / "tiny_grpo.yaml"),
                "--trainer.strategy=hsdp_ulysses_sp2",
                "--print_config",
            ]
        )
    (tmp_path / "saved.yaml").write_text(capsys.readouterr().out)
    out = planned(capsys, "--config", str(tmp_path / "saved.yaml"), "--devices=4", "--trainer.num_nodes=2")
    assert "ranks 8 = 2 x 4 shards; 4 data ranks x sp 2; 2 nodes" in out


def test_the_command_ends_in_an_error_when_the_run_would(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--config", str(CONFIGS / "tiny_grpo.yaml"), "--devices=3"])
    assert ended.value.code == 1
    assert "error: data.batch_size=8 must be a multiple of the 3 data ranks: take 6 or 9" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rollout.filter_groups.metric=right"], "rollout.filter_groups.metric must be one of"),
        (["--rollout.val_average=true"], "rollout.val_average: true needs a moving average: set model.ema_decay"),
        (["--model.init_args.reward=[]"], "model.reward"),
        (
            ["--model.init_args.reward_model.model=random:tiny"],
            "it must be a sequence-classification model with one label",
        ),
        (
            ["--model.init_args.reward_model.model=random:tiny", "--rollout.conversation.reply=json.dumps"],
            "model.reward_model scores one answer, and rollout.conversation has several: leave out one of them",
        ),
    ],
)
def test_the_command_says_what_a_run_says_at_its_start(options, said, capsys):
    with pytest.raises(SystemExit) as ended:
        planned(capsys, "--config", str(CONFIGS / "tiny_grpo.yaml"), *options)
    assert ended.value.code == 1
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("kind", "head", "options", "said"),
    [
        ("qwen3", "Qwen3ForSequenceClassification", [], "its language-model head would be a random one"),
        ("mixtral", "MixtralForCausalLM", ["--model.tiled_mlp=64"], "routes tokens to experts and cannot be tiled"),
    ],
)
def test_the_command_refuses_models_as_a_run_does(kind, head, options, said, capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[kind].to_dict() | {"architectures": [head]}))
    small = ["--data.max_prompt_length=64", "--rollout.sampling.max_completion_length=64", *options]
    with pytest.raises(SystemExit):
        planned(capsys, "--config", str(CONFIGS / "ppo.yaml"), f"--model.model={tmp_path}", "--devices=2", *small)
    assert said in " ".join("".join(capsys.readouterr()).split())


def test_large_numbers_are_readable(capsys):
    long = ["--rollout.sampling.max_completion_length=1500", "--model.init_args.micro_batch_tokens=10000"]
    out = planned(capsys, "--config", str(CONFIGS / "tiny_grpo.yaml"), "--data.batch_size=1024", *long)
    assert "1,024 prompts x 4 = 4,096 responses; 2 x 2 optimizer steps of 2,048 responses" in out
    assert "64 + 1,500 = up to 1,564 per sequence" in out
    assert "per data rank 1,024 prompts, 4,096 responses" in out


def test_another_strategy_has_no_plan(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(CONFIGS / "tiny_grpo.yaml"), "--trainer.strategy=ddp"])
    assert (
        "trainer.strategy must be an FSDPUlyssesStrategy such as fsdp_ulysses, got DDPStrategy"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("shown", [True, False])
def test_a_fit_begins_with_a_short_summary_unless_it_is_switched_off(shown, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    quiet = ["--trainer.logger=false", "--trainer.callbacks=[]", "--trainer.enable_progress_bar=false"]
    more = [f"--trainer.enable_model_summary={shown}", "--trainer.max_steps=1"]
    main(["fit", "--config", str(CONFIGS / "tiny_grpo.yaml"), *quiet, *more])
    out = capsys.readouterr().out
    assert out.count("8 prompts x 4 = 32 responses; 2 x 2 optimizer steps of 16 responses") == shown
