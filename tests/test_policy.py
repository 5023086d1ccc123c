"""Actor, reference and critic against stock transformers models, one unpadded sequence at a time."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from toys import Results, assert_equal_to_stock, packed_results, spawn, stock_results
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Qwen3Config

from lightning_rlhf.modules.critic import build_critic
from lightning_rlhf.modules.loading import meta_parameters
from lightning_rlhf.modules.policy import build_policy
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.packing import pack
from lightning_rlhf.strategy import FSDPUlyssesStrategy

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "tied": LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=2, tie_word_embeddings=True),
    "untied": Qwen3Config(**SIZES, intermediate_size=48, num_key_value_heads=1, head_dim=16, tie_word_embeddings=False),
    "mixture": MixtralConfig(**SIZES, intermediate_size=48, num_key_value_heads=2, num_local_experts=4),
    "dropout": GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.5, attn_pdrop=0.5),
}
PROMPTS = [4, 1, 9, 3]


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (n,), generator=generator) for n in (12, 7, 20, 3)]


def save(name: str, folder: Path) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)


def strategy_of(ranks: int, accelerator: str = "cpu", precision: str = "32-true", **sizes: int) -> FSDPUlyssesStrategy:
    """A strategy on the process group that is there, without a training run; it shards by layers, as it does large models."""
    strategy = FSDPUlyssesStrategy(**{"min_num_params": 0} | sizes)
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=ranks,
        strategy=strategy,
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        barebones=True,
    )
    trainer.strategy.connect(pl.LightningModule())
    trainer.strategy.setup_environment()
    return strategy


def gradients_of(rank: int, folder: str, ranks: int, sizes: dict[str, int]) -> Results:
    strategy = strategy_of(ranks, **sizes)
    assert (strategy.dp_rank, strategy.sp_rank) == divmod(rank, strategy.sequence_parallel_size), "neighbours share"
    actor, critic = build_policy(ModelSettings(folder), strategy), build_critic(ModelSettings(folder), strategy)
    mine = list(range(strategy.dp_rank, 4, strategy.dp_size))
    packed = pack(
        [sequences()[i] for i in mine], [PROMPTS[i] for i in mine], strategy.sequence_parallel_size, strategy.sp_rank
    )
    return packed_results(actor, critic, packed, mine, ranks)


def stock(folder: str) -> Results:
    model, copy = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2))
    examples = zip(sequences(), PROMPTS, [{}] * 4, strict=True)
    return stock_results(model, copy.base_model, examples)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_model_equals_the_stock_model_in_value_and_gradient(name, tmp_path):
    folder = save(name, tmp_path)
    assert_equal_to_stock([gradients_of(0, folder, 1, {})], stock(folder))


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [(2, {}), (2, {"sequence_parallel_size": 2}), (4, {"sequence_parallel_size": 2, "data_parallel_replicate": 2})],
    ids=["dp2", "sp2", "dp2-sp2-replicated"],
)
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_sharded_models_equal_the_stock_model_in_value_and_gradient(name, ranks, sizes, tmp_path):
    folder = save(name, tmp_path)
    assert_equal_to_stock(spawn(gradients_of, ranks, folder, ranks, sizes), stock(folder))


def test_the_head_computes_response_positions_only(tmp_path):
    actor = build_policy(ModelSettings(save("untied", tmp_path)), strategy_of(1))
    seen = []
    actor.model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    actor(pack(sequences(), PROMPTS), 1.0)
    assert seen == [sum(len(ids) - n for ids, n in zip(sequences(), PROMPTS, strict=True))]


def test_the_configuration_stays_as_it_was_read(tmp_path):
    """Dropout is off in the model, and not in the config that an export writes."""
    settings = ModelSettings(save("dropout", tmp_path))
    build_policy(settings, strategy_of(1))
    assert (settings.config.resid_pdrop, settings.config.attn_pdrop) == (0.5, 0.5)


def test_a_reference_is_bfloat16_without_gradients(tmp_path):
    reference = build_policy(ModelSettings(save("tied", tmp_path)), strategy_of(1), frozen=True)
    assert {p.dtype for p in reference.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in reference.parameters())
    assert not reference.training


def test_tied_weights_stay_one_parameter_through_meta_sharding_and_loading(tmp_path):
    actor = build_policy(ModelSettings(save("tied", tmp_path)), strategy_of(1))
    model = actor.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert [n for n, _ in actor.hf_named_parameters()].count("lm_head.weight") == 1
    assert all(p is not model.lm_head.weight for n, p in model.named_parameters() if n == "lm_head.weight")


def test_buffers_are_computed_while_parameters_wait_on_meta():
    with meta_parameters():
        model = AutoModelForCausalLM.from_config(CONFIGS["tied"])
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"
