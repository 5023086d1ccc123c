"""FLOPs against published figures, real parameter counts and torch's own counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3NextConfig,
    Starcoder2Config,
)

from lightning_rlhf.flops import Dims, Passes, dims_of, forward_flops, frozen, peak_flops, training_flops, update_flops
from lightning_rlhf.modules.lora import trained_matrices

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 4}
CONFIGS = [
    Qwen2Config(**SMALL),
    Qwen2Config(**SMALL, tie_word_embeddings=True),
    LlamaConfig(**SMALL),
    Qwen3Config(**SMALL, head_dim=32),
    Gemma3TextConfig(**SMALL, head_dim=16),
    Starcoder2Config(**SMALL),
    Qwen2MoeConfig(**SMALL, **EXPERTS, num_experts=4, decoder_sparse_step=2, shared_expert_intermediate_size=48),
    Glm4MoeConfig(**SMALL, **EXPERTS, n_routed_experts=4, head_dim=16, first_k_dense_replace=1),
]


def qwen_7b() -> Dims:
    return dims_of(
        Qwen2Config(
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            vocab_size=152064,
        )
    )


def test_the_honest_basis_lacks_the_embedding_look_up() -> None:
    lengths, dims = [100, 7, 512], qwen_7b()
    difference = training_flops(dims, lengths, lookup=True) - training_flops(dims, lengths)
    assert difference == pytest.approx(6 * 152064 * 3584 * sum(lengths))
    assert forward_flops(dims, lengths) == training_flops(dims, lengths) / 3


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.model_type)
def test_matmul_parameters_are_those_of_the_real_model(config: Any) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = {n: p.numel() for n, p in model.named_parameters(remove_duplicate=False) if p.dim() > 1}
    lookup = matrices.pop("model.embed_tokens.weight")
    dims = dims_of(config)
    assert dims.matmul_parameters == sum(matrices.values())
    assert dims.lookup_parameters == lookup
    assert dims.layers + dims.window_layers == config.num_hidden_layers


def test_only_the_experts_that_a_token_meets_count() -> None:
    few, all_ = (
        dims_of(Qwen2MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=k, moe_intermediate_size=32)) for k in (2, 8)
    )
    assert all_.matmul_parameters - few.matmul_parameters == 4 * 6 * 3 * 64 * 32


def test_forward_flops_are_what_torch_counts() -> None:
    config = LlamaConfig(**SMALL, attn_implementation="eager")
    model, dims, length = AutoModelForCausalLM.from_config(config), dims_of(config), 24
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False)
    full_attention = 4 * length**2 * dims.head_dim * dims.heads * dims.layers  # torch counts the masked half too
    assert counter.get_total_flops() == pytest.approx(forward_flops(dims, [length]) + full_attention / 2, rel=1e-3)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # of transformers 5.24 to peft
def test_frozen_matrices_have_no_gradient_of_their_own() -> None:
    config, length, r = LlamaConfig(**SMALL, attn_implementation="eager"), 24, 8
    model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=r, target_modules="all-linear"))
    model.get_input_embeddings().register_forward_hook(lambda *args: args[-1].requires_grad_())  # as in a deep model
    trained, added = trained_matrices(model)
    assert trained == added == sum(p.numel() for p in model.parameters() if p.requires_grad)
    full, dims = dims_of(config), frozen(dims_of(config), trained, added)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False).logits.sum().backward()
    masked = 12 * length**2 * dims.head_dim * dims.heads * dims.layers / 2  # torch counts the masked half too
    assert counter.get_total_flops() == pytest.approx(training_flops(dims, [length]) + masked, rel=1e-3)
    without = training_flops(full, [length]) - 2 * full.matmul_parameters * length
    assert training_flops(dims, [length]) == pytest.approx(without + 6 * added * length)
    lookup = training_flops(dims, [length], lookup=True) - training_flops(dims, [length])
    assert lookup == pytest.approx(4 * full.lookup_parameters * length)


def test_a_sliding_window_counts_the_pairs_inside_it() -> None:
    dims = Dims(matmul_parameters=0, lookup_parameters=0, heads=2, head_dim=8, layers=0, window_layers=3, window=16)
    full = Dims(matmul_parameters=0, lookup_parameters=0, heads=2, head_dim=8, layers=3)
    for length in (5, 16, 100):
        pairs = sum(min(t, 16) for t in range(length))  # left Riemann sum of min(t, w), half a row below the integral
        assert training_flops(dims, [length]) == pytest.approx(12 * 3 * 16 * (pairs + min(length, 16) / 2))
    assert training_flops(dims, [12]) == training_flops(full, [12])
    assert training_flops(dims, [100]) < training_flops(full, [100])


def test_windows_are_read_from_the_config() -> None:
    mixed = dims_of(Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=128, layer_types=None))
    assert mixed.window == 128
    assert mixed.window_layers > 0
    for config in (Qwen2Config, PreTrainedConfig):  # the second keeps the window that is switched off
        off = dims_of(config(**SMALL, sliding_window=128, use_sliding_window=False))
        assert (off.layers, off.window_layers) == (4, 0)


def test_a_value_head_has_one_output() -> None:
    policy, critic = dims_of(CONFIGS[0]), dims_of(CONFIGS[0], outputs=1)
    assert policy.matmul_parameters - critic.matmul_parameters == 64 * 255


def test_an_update_adds_up_its_models() -> None:
    actor, critic = dims_of(CONFIGS[0]), dims_of(CONFIGS[0], outputs=1)
    lengths = [10, 30]
    both = training_flops(actor, lengths) + training_flops(critic, lengths)
    assert update_flops([Passes(actor, 2, 2), Passes(critic, 2, 2)], lengths) == pytest.approx(2 * both)
    assert update_flops([Passes(actor, 1, 0)], lengths) == pytest.approx(forward_flops(actor, lengths))
    assert update_flops([], lengths) == 0


@pytest.mark.parametrize("config", [GPT2Config(), DeepseekV3Config(), Qwen3NextConfig()], ids=lambda c: c.model_type)
def test_models_that_the_formula_does_not_cover_are_refused(config: Any) -> None:
    with pytest.raises(ValueError, match=f"the FLOPs of a {type(config).__name__} are not known"):
        dims_of(config)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA H20-3e", 148),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("AMD Instinct MI300X OAM", 1307),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("cpu", None),
    ],
)
def test_the_peak_is_found_by_the_whole_word(name: str, tera: float | None) -> None:
    assert peak_flops(name) == (None if tera is None else tera * 1e12)
