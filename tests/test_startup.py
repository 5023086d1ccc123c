"""Models that would be silently wrong are caught when they are built; what is right passes unnoticed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_policy import CONFIGS, save, strategy_of
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_rlhf.modules.critic import build_critic
from lightning_rlhf.modules.policy import build_policy
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.modules.startup import check_isolation


class Mixed(nn.Module):
    """A layer's output and a share of the token before it: a causal convolution that knows nothing of packing."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 0.5 * F.pad(x, (0, 0, 1, 0))[:, :-1]


class Random(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (torch.rand_like(x) if self.training else 1.0)


class FlawedConfig(LlamaConfig):
    model_type = "flawed"
    flaw = "none"


class FlawedForCausalLM(LlamaForCausalLM):
    """A Llama with something that no list of architectures knows."""

    config_class = FlawedConfig

    def __init__(self, config: FlawedConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            if config.flaw in ("mixed", "random"):
                layer.mlp = (Mixed if config.flaw == "mixed" else Random)(layer.mlp)
            if config.flaw == "bidirectional":
                layer.self_attn.is_causal = False

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if self.config.flaw == "scaled":
            output.logits = output.logits * 0.9
        return output


AutoConfig.register("flawed", FlawedConfig)
AutoModelForCausalLM.register(FlawedConfig, FlawedForCausalLM)


def save_flawed(flaw: str, folder: Path) -> str:
    torch.manual_seed(0)
    config = FlawedConfig(**CONFIGS["tied"].to_dict() | {"flaw": flaw})
    model = FlawedForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)


MESSAGES = {
    "mixed": "FlawedForCausalLM cannot be packed: the hidden states of a sequence change by",
    "random": "is random in training",
    "bidirectional": "change by .* with its neighbours and with later tokens",
    "scaled": "FlawedForCausalLM cannot be trained: log-probs of its own forward differ by",
}


@pytest.mark.parametrize("flaw", MESSAGES)
def test_a_flaw_that_no_configuration_shows_is_refused_by_name(flaw, tmp_path):
    with pytest.raises(NotImplementedError, match=MESSAGES[flaw]):
        build_policy(ModelSettings(save_flawed(flaw, tmp_path)), strategy_of(1))


@pytest.mark.parametrize("flaw", ["mixed", "bidirectional"])
def test_bfloat16_references_and_critics_are_checked_too(flaw, tmp_path):
    settings = ModelSettings(save_flawed(flaw, tmp_path))
    with pytest.raises(NotImplementedError, match=r"FlawedForCausalLM cannot be packed"):
        build_policy(settings, strategy_of(1), frozen=True)
    with pytest.raises(NotImplementedError, match=r"LlamaModel cannot be packed"):
        build_critic(settings, strategy_of(1))


def test_the_checks_leave_no_trace_but_a_line_in_the_log(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        strategy = strategy_of(1)
        actor = build_policy(ModelSettings(save("tied", tmp_path)), strategy)
    lines = [m for m in caplog.messages if "LlamaForCausalLM" in m]
    assert len(lines) == 1
    assert lines[0].startswith(
        "actor LlamaForCausalLM: attention padded (one batched call), packed, sequence parallel 1; packed neighbours change"
    )
    state = torch.get_rng_state()
    change = check_isolation(actor, strategy, lambda packed: actor(packed, 1.0), "actor")
    assert 0.0 <= change < 1e-5
    assert torch.equal(torch.get_rng_state(), state)
    assert actor.training
    assert all(isinstance(p, DTensor) and p.grad is None for p in actor.parameters())
    assert not actor.backbone._forward_hooks


def round_by_length(layer: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    """As kernels do that are chosen by the size of their input, and much coarser."""
    noise = torch.randn(output.shape[-2:], generator=torch.Generator().manual_seed(output.shape[-2]))
    return output * (1.0 + 0.1 * noise).to(output)


def test_rounding_that_depends_on_the_stream_is_no_flaw_in_bfloat16(tmp_path):
    folder, strategy = save("tied", tmp_path), strategy_of(1)
    for frozen in (True, False):
        model = build_policy(ModelSettings(folder), strategy, frozen=frozen)
        model.layers[-1].register_forward_hook(round_by_length)

        def check(model=model):
            return check_isolation(model, strategy, lambda packed: model(packed, 1.0), "model")

        if frozen:  # in bfloat16
            assert 0.1 < check() < 0.2
        else:
            with pytest.raises(NotImplementedError, match="cannot be packed"):
                check()
