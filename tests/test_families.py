"""Every family of decoders: our packed, sharded actor and critic against the stock model, one sequence at a time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_policy import strategy_of
from test_startup import save_flawed
from toys import even_tokens, fit, spawn
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM

from lightning_rlhf import GRPOLightningModule, IterationCheckpoint
from lightning_rlhf.export import export_checkpoint
from lightning_rlhf.kernels import Features, reference_kernel
from lightning_rlhf.modules.critic import build_critic, check_model
from lightning_rlhf.modules.policy import build_policy
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.packing import pack
from lightning_rlhf.tiny import write_byte_tokenizer
from lightning_rlhf.ulysses import packed_attention

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
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    }
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
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "ernie4_5": {"head_dim": 16},
    "seed_oss": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "nanochat": {},
}
OTHERS = """
afmoe apertus arcee aria_text bitnet codegen cohere cohere2_moe cwm deepseek_v2 diffllama dots1 ernie4_5_moe exaone4
exaone_moe flex_olmo glm glm4_moe_lite gpt_bigcode gptj granite_swa granitemoe granitemoehybrid granitemoeshared helium
hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe laguna mellum mimo_v2_flash minimax_m2 ministral ministral3 moshi olmo
olmoe persimmon solar_open vaultgemma
"""
EVERYTHING = {
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 32,
    "rotary_dim": 8,
}
MORE |= {kind: MIXTURE | GROUPED | EVERYTHING for kind in OTHERS.split() if kind in CONFIG_MAPPING}
MORE["deepseek_v2"] = MORE["glm4_moe_lite"] = FAMILIES["deepseek_v3"]
MORE["granitemoehybrid"] = {
    "layer_types": ["full_attention"] * 2,
    "shared_intermediate_size": 96,
    "num_local_experts": 4,
}
VALUE_HEAD = 0.1 * torch.arange(64.0).cos()  # not constant: normalised states sum to 0
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
        for name, buffer in model.named_buffers():
            if name in model.state_dict():  # what a router adds to its scores
                buffer.add_(torch.randn_like(buffer))
    model.save_pretrained(folder / kind)
    return str(folder / kind)


def loss_of(log_probs: torch.Tensor, entropy: torch.Tensor, mask: torch.Tensor | float = 1.0) -> torch.Tensor:
    return ((log_probs.sin() + 0.3 * entropy) * mask).sum()


def packed_run(folder: str, strategy: Any, with_critic: bool) -> tuple[Any, ...]:
    """(log-probs, entropies), gradients of the actor, and (on one rank) of a critic's backbone."""
    packed = pack(sequences(), PROMPTS, strategy.sequence_parallel_size, strategy.sp_rank)
    actor = build_policy(ModelSettings(folder), strategy)
    outputs = actor(packed, 0.7, True)
    (loss_of(*outputs, packed.response_mask) * strategy.world_size).backward()
    gradients = {n: p.grad.full_tensor() for n, p in actor.hf_named_parameters() if p.grad is not None}
    critic_gradients = {}
    if with_critic:
        critic = build_critic(ModelSettings(folder), strategy)
        with torch.no_grad():
            critic.value_head.weight.to_local().copy_(VALUE_HEAD)
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
            (states @ VALUE_HEAD).square().sum().backward()
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


def assert_equal(got: tuple[Any, ...], want: tuple[Any, ...], kind: str) -> None:
    for a, b in zip(got[0], want[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5, msg=lambda m: f"{kind}: {m}")
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        largest = max((g.abs().max() for g in theirs.values()), default=0.0)
        for name, gradient in theirs.items():
            # a gradient that is truly 0 (the key bias without rotary embeddings) is rounding noise in both
            atol = 1e-4 * max(gradient.abs().max(), 1e-2 * largest)
            own = mine.get(name, torch.zeros_like(gradient))
            torch.testing.assert_close(
                own, gradient, rtol=1e-4, atol=float(atol), msg=lambda m, n=name: f"{kind} {n}: {m}"
            )
        assert mine.keys() <= theirs.keys()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda kind: save(kind, tmp_path_factory.getbasetemp()))


@pytest.mark.parametrize("kind", [*FAMILIES, *(pytest.param(k, marks=pytest.mark.slow) for k in MORE)])
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # OPT; nothing writes into it
def test_a_packed_family_equals_its_stock_model_in_value_and_gradient(kind, folder_of):
    folder = folder_of(kind)
    assert_equal(packed_run(folder, strategy_of(1), True), stock_run(folder, True), kind)


def shared_runs(rank: int, folders: list[str], flawed: str) -> tuple[list[tuple[Any, ...]], str]:
    strategy = strategy_of(2, sequence_parallel_size=2)
    results = [packed_run(folder, strategy, False) for folder in folders]
    with pytest.raises(NotImplementedError) as error:
        build_policy(ModelSettings(flawed), strategy)
    return results, str(error.value)


@pytest.mark.parametrize("kinds", [[*FAMILIES], pytest.param([*MORE], marks=pytest.mark.slow)], ids=["common", "more"])
def test_families_over_two_sequence_ranks_equal_their_stock_models(kinds, folder_of, tmp_path):
    """And a model that mixes packed neighbours is refused by both ranks: one set of processes, since they take long to start."""
    folders = [folder_of(kind) for kind in kinds]
    (first, refusal), (second, other) = spawn(shared_runs, 2, folders, save_flawed("mixed", tmp_path))
    assert refusal == other
    assert "cannot be packed" in refusal
    for kind, folder, *results in zip(kinds, folders, first, second, strict=True):
        stock = stock_run(folder, False)
        for result in results:
            assert_equal(result, stock, kind)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({}, "(?i)mamba.* cannot be packed"),
    "jamba": (
        {"mamba_d_state": 4, "mamba_dt_rank": 4, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
        "(?i)jamba.* cannot be packed",
    ),
    "falcon_h1": (
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
        "(?i)falcon_?h1.* cannot be packed",
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "lfm2 cannot be packed: its layers of type conv are"),
    "qwen3_next": ({"num_experts": 4}, "(?i)qwen3_?next.* cannot be packed"),
    "llama4_text": (
        {"num_local_experts": 2},
        "llama4_text cannot be packed: its layers of type chunked_attention are neither",
    ),
    "rwkv": ({}, "RwkvForCausalLM cannot be packed: it is recurrent"),
    "bloom": ({"n_head": 4, "n_layer": 2}, r"BloomForCausalLM cannot be packed: .*ALiBi"),
    "mpt": ({"d_model": 64, "n_heads": 4, "n_layers": 2}, r"MptForCausalLM cannot be packed: .*ALiBi"),
    "falcon": ({}, "FalconForCausalLM cannot be packed: .*does not use transformers' AttentionInterface"),
    "stablelm": ({}, "StableLmForCausalLM cannot be packed"),
    "t5": ({}, "t5 is an encoder-decoder model"),
    "bart": ({"d_model": 64}, "bart is an encoder-decoder model"),
    "bert": ({"is_decoder": True}, "BertLMHeadModel has cls beside its backbone and head"),
    "dory": ({}, "the language-model head is a DoryLMHead, it must be a plain nn.Linear"),
    "mixtral": ({"output_router_logits": True}, "mixtral: output_router_logits adds an auxiliary loss"),
    "phimoe": ({"num_local_experts": 4}, "phimoe: router_jitter_noise=0.01 makes routing random"),
    "gemma3": ({}, "gemma3 is a vision-language model of a family that cannot be trained"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_would_be_silently_wrong_is_refused_by_name_before_its_weights_are_read(kind, tmp_path):
    if kind not in CONFIG_MAPPING:
        pytest.skip("not in this version of transformers")
    sizes, message = REFUSED[kind]
    config = CONFIG_MAPPING[kind](**(({} if kind == "gemma3" else BASE) | sizes))
    config.save_pretrained(tmp_path)  # there are no weights
    with pytest.raises(NotImplementedError, match=message) as error:
        check_model(ModelSettings(str(tmp_path)), strategy_of(1))
    assert "\n" not in str(error.value)


ASKED: dict[str, list[Features]] = {
    "gemma2": [Features(scale=24**-0.5, window=6, softcap=2.0), Features(scale=24**-0.5, softcap=2.0)],
    "gpt_oss": [Features(scale=0.25, window=6), Features(scale=0.25)],
    "mistral": [Features(scale=0.25, window=6)] * 2,
}


@pytest.mark.parametrize("kind", ASKED)
def test_what_a_model_asks_of_attention_reaches_the_kernel(kind, folder_of):
    asked: list[Features] = []

    def kernel(q, k, v, cu, longest, features):
        asked.append(features)
        return reference_kernel(q, k, v, cu, longest, features)

    AttentionInterface.register("recording", packed_attention(kernel))
    model = AutoModelForCausalLM.from_pretrained(folder_of(kind), attn_implementation="recording")
    packed = pack(sequences(), PROMPTS)
    model(packed.input_ids[None], cu_seq_lens_q=packed.cu_seqlens, max_length_q=packed.max_length, use_cache=False)
    assert [replace(features, sinks=None) for features in asked] == ASKED[kind]
    assert all((features.sinks is not None) == (kind == "gpt_oss") for features in asked)


def test_attention_that_drops_its_keywords_is_refused_at_start(tmp_path, monkeypatch):
    monkeypatch.setitem(MORE, "nemotron", {})
    with pytest.raises(ValueError, match="NemotronAttention: packed attention needs"):
        build_policy(ModelSettings(save("nemotron", tmp_path)), strategy_of(1))


LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}


def test_rotary_embeddings_that_grow_with_the_input_are_limited_to_where_they_do_not(tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES, "phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 16})
    folder, strategy = save("phi3", tmp_path), strategy_of(1)
    assert check_model(ModelSettings(folder), strategy) == 16
    actor = build_policy(ModelSettings(folder), strategy)
    a, b = torch.arange(3, 19), torch.arange(20, 29)
    alone, beside = (actor(pack(s, [1] * len(s)), 1.0)[0][-1][:8] for s in ([b], [a, b]))
    torch.testing.assert_close(alone, beside)
    with pytest.raises(ValueError, match="a sequence of 17 tokens is longer than 16, from where the model's rotary"):
        actor(pack([torch.arange(17), b], [1, 1]), 1.0)


DROPOUTS = {"gpt2": ("resid_pdrop", "attn_pdrop", "embd_pdrop"), "opt": ("dropout", "attention_dropout", "layerdrop")}


@pytest.mark.parametrize("kind", DROPOUTS)
def test_log_probs_in_training_mode_have_no_randomness(kind, tmp_path, monkeypatch):
    sizes = (FAMILIES | MORE)[kind]
    monkeypatch.setitem(FAMILIES, kind, sizes | dict.fromkeys(DROPOUTS[kind], 0.5))
    actor = build_policy(ModelSettings(save(kind, tmp_path)), strategy_of(1))
    assert actor.training
    packed = pack(sequences(), PROMPTS)
    with torch.no_grad():
        first, second = (actor(packed, 1.0)[0] for _ in range(2))
        assert torch.equal(first, second)
        torch.testing.assert_close(actor.eval()(packed, 1.0)[0], first)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(FAMILIES | MORE))
def test_a_run_of_a_family_samples_from_its_own_policy_and_exports_it(kind, tmp_path, monkeypatch):
    sizes = (FAMILIES | MORE)[kind]
    monkeypatch.setitem(MORE, kind, sizes | {"vocab_size": 258, "eos_token_id": 1})
    folder = save(kind, tmp_path)
    write_byte_tokenizer(folder)
    module = GRPOLightningModule(folder, reward=[even_tokens], lr=3e-3, mini_batches=2)
    checkpoint = IterationCheckpoint(tmp_path / "checkpoints", every_n_train_steps=2)
    checked = {"log_probs_every": 1, "verify_sync_every": 1}
    rows = fit(module, tmp_path / "log", 2, checked, callbacks=[checkpoint], num_generations=2)
    assert all(row["rollout/checksum_ok"] == 1.0 and row["rollout/logprob_diff_max"] < 1e-4 for row in rows)
    assert rows[-1]["actor/grad_norm"] > 0.0
    export_checkpoint(checkpoint.best_model_path, str(tmp_path / "exported"), dtype="float32")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    parameters = dict(exported.named_parameters(remove_duplicate=False))
    for name, parameter in module.actor.hf_named_parameters():
        assert torch.equal(parameters[name], parameter.full_tensor()), name


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen2", "mistral", "gpt_oss", "mixtral", "deepseek_v3"])
def test_a_family_on_a_gpu_is_near_its_stock_model(kind, folder_of):
    """The default kernel in bfloat16, whose rounding the start-up checks must let pass; sinks are torch's plus ours."""
    folder = folder_of(kind)
    strategy = strategy_of(1, accelerator="gpu", precision="bf16-mixed")
    actor = build_policy(ModelSettings(folder), strategy)
    assert "torch varlen" in actor.attention
    packed = pack(sequences(), PROMPTS).to(strategy.root_device)
    outputs = actor(packed, 0.7, True)
    loss_of(*outputs, packed.response_mask).backward()
    (log_probs, _), stock_gradients, _ = stock_run(folder, False)
    error = (outputs[0].cpu() - log_probs).abs().sum() / packed.response_mask.sum().cpu()
    assert error < 0.25
    for name, parameter in actor.hf_named_parameters():
        if name in stock_gradients and name.endswith(("_proj.weight", ".sinks")) and parameter.grad is not None:
            got, want = parameter.grad.full_tensor().cpu().flatten(), stock_gradients[name].flatten()
            assert torch.cosine_similarity(got, want, dim=0) > 0.93, name
