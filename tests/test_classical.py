"""SFT, reward model and DPO against plain transformers: losses, gradients, what they log."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from classical import KINDS, demonstrations, head_of, pairs, train
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from lightning_rlhf import DPOLightningModule, RewardModelLightningModule
from lightning_rlhf.modules.policy import build_policy
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.tiny import write_byte_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")


@cache
def folder_of(seed: int, root: str) -> str:
    """A random model with weights large enough to tell things apart."""
    folder = Path(root, f"model-{seed}")
    size = len(write_byte_tokenizer(folder))
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=size, num_key_value_heads=2, **sizes, pad_token_id=0)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)


def stock(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def answer_log_probs(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    ids = torch.tensor(prompt + answer)
    log_p = model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return log_p.gather(-1, ids[len(prompt) :, None])[:, 0]


def sft_by_hand(model: Any, tokenizer: Any) -> torch.Tensor:
    """The tiny template is ``role: content`` and a line break; a turn ends with it."""
    total, tokens = torch.zeros(()), 0
    for row in demonstrations():
        before = ""
        for message in row["messages"]:
            if message["role"] == "assistant":
                prompt, reply = tokenizer.encode(before + "assistant: "), tokenizer.encode(message["content"] + "\n")
                total, tokens = total - answer_log_probs(model, prompt, reply).sum(), tokens + len(reply)
            before += f"{message['role']}: {message['content']}\n"
    return total / tokens


def reward_by_hand(model: Any, tokenizer: Any, head: torch.Tensor, center: float) -> torch.Tensor:
    losses = []
    for row in pairs():
        texts = [tokenizer.encode(row["prompt"] + row[side] + tokenizer.eos_token) for side in ("chosen", "rejected")]
        hidden = [model.base_model(torch.tensor(ids)[None]).last_hidden_state[0, -1] for ids in texts]
        better, worse = (h @ head for h in hidden)
        losses.append(-F.logsigmoid(better - worse - row["margin"]) + center * (better + worse) ** 2)
    return torch.stack(losses).mean()


def dpo_by_hand(model: Any, tokenizer: Any, reference: Any, kind: str, beta: float, smoothing: float) -> torch.Tensor:
    losses = []
    for row in pairs():
        prompt, ratios = tokenizer.encode(row["prompt"]), []
        for side in ("chosen", "rejected"):
            reply = tokenizer.encode(row[side] + tokenizer.eos_token)
            with torch.no_grad():
                base = answer_log_probs(reference, prompt, reply)
            ratios.append(answer_log_probs(model, prompt, reply) - base)
        h = ratios[0].sum() - ratios[1].sum()
        losses.append(
            {
                "sigmoid": -(1 - smoothing) * F.logsigmoid(beta * h) - smoothing * F.logsigmoid(-beta * h),
                "hinge": (1 - beta * h).clamp(min=0),
                "ipo": (ratios[0].mean() - ratios[1].mean() - 1 / (2 * beta)) ** 2,
            }[kind]
        )
    return torch.stack(losses).mean()


class WithOtherReference(DPOLightningModule):
    """So that ratios are not 0 in the first step."""

    other = ""

    def configure_model(self) -> None:
        super().configure_model()
        self.reference = build_policy(ModelSettings(self.other), self.strategy)
        self.reference.requires_grad_(False)


CASES = {
    "sft": ("sft", {}),
    "reward": ("reward", {"center_rewards_coefficient": 0.1}),
    **{f"dpo-{kind}": ("dpo", {"loss_type": kind, "beta": 0.3}) for kind in ("sigmoid", "hinge", "ipo")},
    "dpo-smooth": ("dpo", {"beta": 0.3, "label_smoothing": 0.2}),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_plain_transformers(case, tmp_path, tmp_path_factory, monkeypatch):
    """One step of plain gradient descent at rate 1 over all rows, in several micro-batches, moves weights by the gradient."""
    kind, options = CASES[case]
    shared = str(tmp_path_factory.getbasetemp())
    own, other = folder_of(1, shared), folder_of(2, shared)
    monkeypatch.setattr(WithOtherReference, "other", other)
    monkeypatch.setitem(KINDS, "dpo", (WithOtherReference, *KINDS["dpo"][1:]))
    heads = []
    monkeypatch.setattr(
        RewardModelLightningModule, "on_train_start", lambda self: heads.append(head_of(self)), raising=False
    )
    plain = {"optimizer": lambda groups: torch.optim.SGD(groups), "lr": 1.0, "max_grad_norm": None}
    data = {"batch_size": 24, "val_size": 0, "shuffle": False}
    module, (row, *_) = train(kind, tmp_path, 1, model={"model": own, **plain, **options}, data=data)
    model, tokenizer = stock(own), AutoTokenizer.from_pretrained(own)
    if kind == "sft":
        loss = sft_by_hand(model, tokenizer)
    elif kind == "reward":
        head = heads[0].clone().requires_grad_()
        loss = reward_by_hand(model, tokenizer, head, 0.1)
    else:
        fixed = {
            "kind": options.get("loss_type", "sigmoid"),
            "beta": 0.3,
            "smoothing": options.get("label_smoothing", 0.0),
        }
        loss = dpo_by_hand(model, tokenizer, stock(other), **fixed)
    assert row["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    wanted = {n: (p.data, p.grad) for n, p in model.named_parameters() if p.grad is not None}
    if kind == "reward":
        wanted["score.weight"] = head.data[None], head.grad[None]
    after = {n: p.detach().full_tensor() for n, p in module.root.hf_named_parameters()}
    assert wanted.keys() == after.keys()
    for name, (before, gradient) in wanted.items():
        torch.testing.assert_close(before - after[name], gradient, rtol=1e-3, atol=2e-6, msg=name)


def test_entropy_and_accuracy_of_tokens_are_those_of_the_logits(tmp_path, tmp_path_factory):
    own = folder_of(1, str(tmp_path_factory.getbasetemp()))
    data = {"batch_size": 24, "val_size": 0, "shuffle": False}
    _, (row, *_) = train("sft", tmp_path, 1, model={"model": own}, data=data)
    model, tokenizer, entropies, right = stock(own), AutoTokenizer.from_pretrained(own), [], []
    for one in demonstrations():
        before = ""
        for message in one["messages"]:
            if message["role"] == "assistant":
                prompt, reply = tokenizer.encode(before + "assistant: "), tokenizer.encode(message["content"] + "\n")
                log_p = model(torch.tensor(prompt + reply)[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                entropies += (-(log_p.exp() * log_p).sum(-1)).tolist()
                right += (log_p.argmax(-1) == torch.tensor(reply)).tolist()
            before += f"{message['role']}: {message['content']}\n"
    assert row["train/entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)
    assert row["train/mean_token_accuracy"] == pytest.approx(sum(right) / len(right))
    assert row["train/num_tokens"] == len(right)
