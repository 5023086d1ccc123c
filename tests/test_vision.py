"""Vision-language models: packed and sharded against stock transformers, from rows with pictures to resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from test_policy import strategy_of
from toy_vlm import ask, picture, write_vlm
from toys import spawn
from transformers import AutoModelForImageTextToText, AutoTokenizer

from lightning_rlhf.images import ImageEncoder
from lightning_rlhf.modules.policy import build_critic, build_policy
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.packing import pack
from lightning_rlhf.prompts import PromptEncoder, PromptTable

ROWS: list[dict[str, Any]] = [
    {"prompt": ask("what is it?", 1), "images": [picture(20, 30, 1)]},
    {"prompt": ask("compare them", 2), "images": [picture(40, 16, 2), picture(12, 12, 3)]},
    {"prompt": [{"role": "user", "content": "no picture"}]},
    {"prompt": "say <|vision_start|><|image_pad|><|vision_end|>", "image": picture(64, 10, 4)},
]
ANSWERS = [7, 3, 9, 5]


def table_of(folder: str, rows: list[dict[str, Any]] = ROWS, **options: Any) -> PromptTable:
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(folder), vision=ImageEncoder.load(folder), **options)
    return PromptTable.build(rows, range(len(rows)), encoder)


def sequences(folder: str) -> tuple[list[torch.Tensor], list[int], list[Any]]:
    """Prompts of `ROWS` with random answers; one holds a placeholder token that the policy might sample."""
    prompts = table_of(folder).take(range(4))
    generator = torch.Generator().manual_seed(1)
    answers = [torch.randint(3, 262, (n,), generator=generator) for n in ANSWERS]
    ids = [torch.cat([torch.tensor(p), a]) for p, a in zip(prompts.ids, answers, strict=True)]
    return ids, [len(p) for p in prompts.ids], prompts.images


def gradients_of(rank: int, folder: str, ranks: int, sizes: dict[str, int], frozen: bool) -> tuple:
    """Log-probs, entropies, values, and all gradients of a loss over them, from packed and sharded models."""
    strategy = strategy_of(ranks, **sizes)
    settings = ModelSettings(folder, freeze_vision=frozen)
    actor, critic = build_policy(settings, strategy), build_critic(settings, strategy)
    with torch.no_grad():
        for parameter in critic.value_head.parameters():
            parameter.fill_(0.1)
    ids, lengths, images = sequences(folder)
    mine = [[0, 1, 3], [2]][strategy.dp_rank] if strategy.dp_size > 1 else [0, 1, 2, 3]  # one data rank without pictures
    packed = pack(
        [ids[i] for i in mine],
        [lengths[i] for i in mine],
        strategy.sequence_parallel_size,
        strategy.sp_rank,
        [images[i] for i in mine],
    )
    log_probs, entropy = actor(packed, 0.7, True)
    values = critic(packed)
    ((log_probs.sin() + 0.3 * entropy).sum() * ranks).backward()
    (values.square().sum() * ranks).backward()
    grads = {n: p.grad.full_tensor() for n, p in actor.hf_named_parameters() if p.grad is not None}
    critic_grads = {n: p.grad.full_tensor() for n, p in critic.named_parameters() if p.grad is not None}
    outputs = {i: (log_probs[k].detach(), entropy[k].detach(), values[k].detach()) for k, i in enumerate(mine)}
    return outputs, grads, critic_grads


def stock(folder: str) -> tuple:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    backbone = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval().model
    outputs = {}
    for i, (ids, prompt, images) in enumerate(zip(*sequences(folder), strict=True)):
        shown = {}
        if images is not None:
            kinds = torch.zeros(1, len(ids), dtype=torch.int)
            kinds[0, images.slots] = 1
            shown = {"pixel_values": images.pixel_values, "image_grid_thw": images.grid_thw, "mm_token_type_ids": kinds}
        log_p = (model(ids[None], use_cache=False, **shown).logits[0, prompt - 1 : -1] / 0.7).log_softmax(-1)
        log_probs = log_p.gather(-1, ids[prompt:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        hidden = backbone(ids[None], use_cache=False, **shown).last_hidden_state[0, prompt - 1 : -1]
        values = 0.1 * hidden.sum(-1) + 0.1
        ((log_probs.sin() + 0.3 * entropy).sum() + values.square().sum()).backward()
        outputs[i] = (log_probs.detach(), entropy.detach(), values.detach())
    return outputs, dict(model.named_parameters(remove_duplicate=False)), dict(backbone.named_parameters())


def assert_equal_to_stock(results: list[tuple], folder: str, frozen: bool) -> None:
    outputs, parameters, backbone = stock(folder)
    trained = {n for n, p in parameters.items() if p.grad is not None and not (frozen and "visual" in n)}
    assert any("visual" in n for n in trained) != frozen
    seen = set()
    for own, grads, critic_grads in results:
        for i, values in own.items():
            seen.add(i)
            for got, want in zip(values, outputs[i], strict=True):
                torch.testing.assert_close(got[: len(want)], want, rtol=1e-4, atol=1e-5)
        assert grads.keys() == trained
        for name, gradient in grads.items():
            torch.testing.assert_close(gradient, parameters[name].grad, rtol=1e-4, atol=1e-5, msg=name)
        for name, gradient in critic_grads.items():
            if "value_head" not in name:
                want = backbone[name.removeprefix("model.")].grad
                torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-4, msg=name)
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_a_packed_model_equals_the_stock_model_in_value_and_gradient(family, frozen, tmp_path):
    folder = write_vlm(tmp_path, family)
    assert_equal_to_stock([gradients_of(0, folder, 1, {}, frozen)], folder, frozen)


@pytest.mark.parametrize("sizes", [{}, {"sequence_parallel_size": 2}], ids=["dp2", "sp2"])
def test_sharded_models_equal_the_stock_model_in_value_and_gradient(sizes, tmp_path):
    """With its own head, a trained tower, and on two data ranks a rank without any picture."""
    folder = write_vlm(tmp_path, "qwen2_5_vl", tied=False)
    assert_equal_to_stock(spawn(gradients_of, 2, folder, 2, sizes, False), folder, False)
