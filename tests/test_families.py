"""Every family of decoders: our packed, sharded actor and critic against the stock model, one sequence at a time."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_policy import strategy_of
from toys import spawn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from lightning_rlhf.modules.policy import build_critic, build_policy
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.packing import pack

BASE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
GROUPED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 24, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 6},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    | SLIDING,
    "gemma3_text": {"head_dim": 16} | SLIDING,
    "phi3": {},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2} | SLIDING,
    "qwen3_moe": {"head_dim": 16, "num_experts": 4} | MIXTURE,
    "mixtral": {"num_local_experts": 4},
    "granite": {"logits_scaling": 2.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.7},
    "cohere2": {"logit_scale": 0.3} | SLIDING,
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "starcoder2": {"sliding_window": 6},
    "glm4": {"head_dim": 16},
    "deepseek_v3": {"num_key_value_heads": 4, "n_shared_experts": 1} | LATENT | GROUPED | MIXTURE,
}
MORE: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 16},
    "olmo3": SLIDING,
    "phi": {},
    "glm4_moe": {"head_dim": 16} | GROUPED | MIXTURE,
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 32} | MIXTURE,
    "gpt_neox": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 32},
    "ernie4_5": {"head_dim": 16},
    "seed_oss": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "nanochat": {},
}
LENGTHS, PROMPTS = (12, 7, 20, 3), (4, 1, 9, 2)


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (n,), generator=generator) for n in LENGTHS]


def save(kind: str, folder: Path) -> str:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**(BASE | (FAMILIES | MORE)[kind]))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # large enough for attention patterns, soft-caps and sinks to matter
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder / kind)
    return str(folder / kind)


def loss_of(log_probs: torch.Tensor, entropy: torch.Tensor, mask: torch.Tensor | float = 1.0) -> torch.Tensor:
    return ((log_probs.sin() + 0.3 * entropy) * mask).sum()


def packed_run(folder: str, strategy: Any, with_critic: bool) -> tuple[Any, ...]:
    """(log-probs, entropies), gradients of the actor, and of a critic's backbone."""
    packed = pack(sequences(), PROMPTS, strategy.sequence_parallel_size, strategy.sp_rank)
    actor = build_policy(ModelSettings(folder), strategy)
    outputs = actor(packed, 0.7, True)
    (loss_of(*outputs, packed.response_mask) * strategy.world_size).backward()
    gradients = {n: p.grad.full_tensor() for n, p in actor.hf_named_parameters() if p.grad is not None}
    critic_gradients = {}
    if with_critic:
        critic = build_critic(ModelSettings(folder), strategy)
        with torch.no_grad():
            for parameter in critic.value_head.parameters():
                parameter.fill_(0.1)
        (critic(packed).square().sum() * strategy.world_size).backward()
        critic_gradients = {n: p.grad.full_tensor() for n, p in critic.model.named_parameters() if p.grad is not None}
    return tuple(x.detach() for x in outputs), gradients, critic_gradients


def stock_run(folder: str, with_critic: bool) -> tuple[Any, ...]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    backbone = model.base_model
    critic_gradients: dict[str, torch.Tensor] = {}
    if with_critic:
        for sequence, prompt in zip(sequences(), PROMPTS, strict=True):
            states = backbone(input_ids=sequence[None], use_cache=False).last_hidden_state[0, prompt - 1 : -1]
            (0.1 * states.sum(-1) + 0.1).square().sum().backward()
        critic_gradients = {n: p.grad.clone() for n, p in backbone.named_parameters() if p.grad is not None}
        model.zero_grad()
    width = max(n - p for n, p in zip(LENGTHS, PROMPTS, strict=True))
    outputs = torch.zeros(2, len(LENGTHS), width)
    for i, (sequence, prompt) in enumerate(zip(sequences(), PROMPTS, strict=True)):
        logits = model(input_ids=sequence[None], use_cache=False).logits[0, prompt - 1 : -1] / 0.7
        log_p = logits.log_softmax(-1)
        own = log_p.gather(-1, sequence[prompt:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        loss_of(*own).backward()
        outputs[:, i, : len(own[0])] = torch.stack([x.detach() for x in own])
    gradients = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    return tuple(outputs), gradients, critic_gradients


def assert_equal(got: tuple[Any, ...], want: tuple[Any, ...]) -> None:
    for a, b in zip(got[0], want[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        largest = max((g.abs().max() for g in theirs.values()), default=0.0)
        for name, gradient in theirs.items():
            # a gradient that is truly 0 (the key bias without rotary embeddings) is rounding noise in both
            atol = 1e-4 * max(gradient.abs().max(), 1e-2 * largest)
            own = mine.get(name, torch.zeros_like(gradient))
            torch.testing.assert_close(own, gradient, rtol=1e-4, atol=float(atol), msg=lambda m, n=name: f"{n}: {m}")
        assert mine.keys() <= theirs.keys()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda kind: save(kind, tmp_path_factory.getbasetemp()))


@pytest.mark.parametrize("kind", [*FAMILIES, *(pytest.param(k, marks=pytest.mark.slow) for k in MORE)])
def test_a_packed_family_equals_its_stock_model_in_value_and_gradient(kind, folder_of):
    folder = folder_of(kind)
    assert_equal(packed_run(folder, strategy_of(1), True), stock_run(folder, True))


def shared_runs(rank: int, folders: list[str]) -> list[tuple[Any, ...]]:
    strategy = strategy_of(2, sequence_parallel_size=2)
    return [packed_run(folder, strategy, False) for folder in folders]


@pytest.mark.parametrize("kinds", [[*FAMILIES], pytest.param([*MORE], marks=pytest.mark.slow)], ids=["common", "more"])
def test_families_over_two_sequence_ranks_equal_their_stock_models(kinds, folder_of):
    folders = [folder_of(kind) for kind in kinds]
    for results in spawn(shared_runs, 2, folders):
        for kind, folder, result in zip(kinds, folders, results, strict=True):
            try:
                assert_equal(result, stock_run(folder, False))
            except AssertionError as error:
                raise AssertionError(f"{kind}: {error}") from None
