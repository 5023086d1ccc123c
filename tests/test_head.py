from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig

from lightning_rlhf.modules.head import LogProbHead, plain_log_probs


def head_and_oracle(rows=13, hidden=16, vocab=257, *, bias=False, dtype=torch.float64, chunk=5):
    torch.manual_seed(0)
    head = LogProbHead(hidden, vocab, bias=bias, dtype=dtype)
    head.chunk = chunk
    return head, torch.randn(rows, hidden, dtype=dtype, requires_grad=True), torch.randint(vocab, (rows,))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("vocab", [257, 1000])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_chunked_head_equals_full_logits_in_value_and_gradient(vocab, bias, temperature, softcap):
    head, hidden, labels = head_and_oracle(vocab=vocab, bias=bias, dtype=torch.float32)
    head.softcap = softcap
    weights = torch.randn(2, len(labels))
    inputs = [hidden, *head.parameters()]
    got = head(hidden, labels, temperature)
    want = plain_log_probs(hidden, head.weight, head.bias, labels, temperature, softcap)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)
    got_grads = torch.autograd.grad((weights * torch.stack(got)).sum(), inputs)
    want_grads = torch.autograd.grad((weights * torch.stack(want)).sum(), inputs)
    for g, w in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(g, w, rtol=2e-5, atol=2e-5)


def test_without_entropy_log_probs_and_gradients_stay_the_same():
    head, hidden, labels = head_and_oracle(dtype=torch.float32)
    results = []
    for with_entropy in (True, False):
        log_probs, entropy = head(hidden, labels, 0.7, with_entropy)
        results.append((log_probs, *torch.autograd.grad(log_probs.sum(), [hidden, head.weight])))
    assert not entropy.any()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_banned_tokens_give_finite_entropy_and_gradients():
    head, hidden, labels = head_and_oracle(bias=True, dtype=torch.float32)
    with torch.no_grad():
        head.bias[100:] = -torch.inf
    labels = labels % 100
    log_probs, entropy = head(hidden, labels)
    grads = torch.autograd.grad(log_probs.sum() + entropy.sum(), [hidden, head.weight])
    assert entropy.isfinite().all()
    assert all(g.isfinite().all() for g in grads)
    _, want = plain_log_probs(hidden, head.weight, head.bias, labels)
    torch.testing.assert_close(entropy, want)


def test_bfloat16_weights_give_float32_log_probs():
    head, hidden, labels = head_and_oracle(dtype=torch.bfloat16)
    log_probs, _ = head(hidden, labels)
    exact, _ = plain_log_probs(hidden.float(), head.weight.float(), None, labels)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, exact, rtol=1e-5, atol=1e-5)


def test_no_rows_is_no_error():
    head, hidden, _ = head_and_oracle(rows=0, dtype=torch.float32)
    log_probs, _ = head(hidden, torch.zeros(0, dtype=torch.long))
    log_probs.sum().backward()
    assert not head.weight.grad.any()


SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, tie_word_embeddings=True),
        Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=2.0),
        CohereConfig(**SMALL, logit_scale=0.25),
        GraniteConfig(**SMALL, logits_scaling=2.5),
    ],
    ids=lambda c: c.model_type,
)
def test_the_replaced_head_knows_the_logit_processing_of_the_model(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(96, (1, 11))
    with torch.no_grad():
        want = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        LogProbHead.replace(model)
        hidden = model.base_model(ids, use_cache=False).last_hidden_state[0, :-1]
        got, _ = model.get_output_embeddings()(hidden, ids[0, 1:])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


def test_a_head_that_is_no_plain_linear_layer_is_refused():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    model.set_output_embeddings(nn.Sequential(nn.Linear(32, 96)))
    with pytest.raises(NotImplementedError, match="the language-model head is a Sequential"):
        LogProbHead.replace(model)
