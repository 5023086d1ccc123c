from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig

from lightning_rlhf.modules import head as head_module
from lightning_rlhf.modules.head import LogProbHead, plain_log_probs

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "scale": {"logit_scale": 0.4},
    "cap": {"softcap": 3.0},
    "bias": {"bias": True},
    "all": {"temperature": 0.6, "logit_scale": 0.4, "softcap": 3.0, "bias": True},
    "banned": {"bias": True, "banned": 100, "temperature": 0.6},
    "no entropy": {"with_entropy": False, "temperature": 0.6, "softcap": 3.0},
}


def compare(
    rows: int = 150,
    vocab: int = 257,
    hidden: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    tile_bytes: int = 2**16,
    *,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    bias: bool = False,
    banned: int = 0,
    with_entropy: bool = True,
    keep_logits: bool = False,
) -> dict[str, tuple[float, bool]]:
    """The head against full logits in float64: per output and gradient, (largest error over largest value, all finite)."""
    torch.manual_seed(0)
    head = LogProbHead(hidden, vocab, bias=bias, dtype=dtype, device=device)
    head.softcap, head.logit_scale, head.tile_bytes, head.keep_logits = softcap, logit_scale, tile_bytes, keep_logits
    with torch.no_grad():
        head.weight.mul_(4.0)
        if banned:
            head.bias[-banned:] = -torch.inf
    h = torch.randn(rows, hidden, dtype=dtype, device=device, requires_grad=True)
    labels = torch.randint(vocab - banned, (rows,), device=device)
    labels[0], labels[-1] = 0, vocab - banned - 1
    weights = torch.randn(2, rows, device=device)
    if rows > 2:
        with torch.no_grad():
            labels[1] = head(h[1:2]).argmax()
    got = head(h, labels, temperature, with_entropy, True, True)
    inputs = {"hidden": h, **dict(head.named_parameters())}
    exact = {name: t.detach().double().requires_grad_() for name, t in inputs.items()}
    log_probs, entropy = plain_log_probs(
        exact["hidden"], exact["weight"], exact.get("bias"), labels, temperature, softcap, logit_scale
    )
    want = (log_probs, entropy if with_entropy else 0.0 * entropy)
    logits = nn.functional.linear(*(exact.get(name) for name in ("hidden", "weight", "bias"))) * logit_scale
    logits = logits if softcap is None else (logits / softcap).tanh() * softcap
    squares = (logits / temperature).softmax(-1).square().sum(-1)
    found = {"log_probs": (got[0], want[0]), "entropy": (got[1], want[1]), "squares": (got[2], squares)}
    found["top"] = (got[3], (logits.argmax(-1) == labels).double())
    terms = 2 if with_entropy else 1
    losses = [(weights[:terms] * torch.stack(out[:terms])).sum() for out in (got, want)]
    grads = [torch.autograd.grad(loss, list(of.values())) for loss, of in zip(losses, (inputs, exact), strict=True)]
    found |= {name: pair for name, *pair in zip(inputs, *grads, strict=True)}
    assert {values.dtype for values in got} == {torch.float32}
    assert not any(values.requires_grad for values in got[2:])
    assert all(g.dtype == dtype for g in grads[0])
    return {
        name: (
            ((a.double() - b).abs().max() / b.abs().max().clamp_min(1e-30)).item(),
            bool(a.isfinite().all()),
        )
        for name, (a, b) in found.items()
    }


def assert_close(found: dict[str, tuple[float, bool]], dtype: torch.dtype = torch.float32, vocab: int = 257) -> None:
    """Outputs are float32 whatever the dtype, gradients have its rounding."""
    for name, (error, finite) in found.items():
        rounded = dtype != torch.float32 and name not in ("log_probs", "entropy", "squares")
        summed = name == "hidden" and vocab > 1e5  # float32 sums over the vocabulary
        assert finite, name
        assert error < (1.5e-2 if rounded else 5e-4 if summed else 1e-5), (name, error)


@pytest.mark.parametrize("vocab", [257, 1000])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_tiled_head_equals_full_logits_in_value_and_gradient(variant, vocab):
    assert_close(compare(vocab=vocab, **VARIANTS[variant]))


@pytest.mark.parametrize("variant", ["plain", "all"])
def test_bfloat16_weights_give_float32_log_probs(variant):
    assert_close(compare(dtype=torch.bfloat16, **VARIANTS[variant]), torch.bfloat16)


@pytest.mark.parametrize("length", [1, 64, 65, 1000, 151936])
@pytest.mark.parametrize("width", [0, 1, 300])
def test_tiles_cover_everything_once_and_stay_within_their_bytes(length, width):
    tiles = head_module._tiles(length, width, 2**16)
    assert [i for t in tiles for i in range(t.start, t.stop)] == list(range(length))
    assert all(4 * width * (t.stop - t.start - 63) <= 2**16 for t in tiles)
    assert all(t.start % 64 == 0 for t in tiles)


def head_and_inputs(rows=13, hidden=16, vocab=257):
    torch.manual_seed(0)
    return LogProbHead(hidden, vocab, bias=False), torch.randn(rows, hidden, requires_grad=True), torch.arange(rows)


@pytest.mark.parametrize("bias", [False, True])
def test_without_labels_it_is_the_linear_layer_that_it_replaces(bias):
    torch.manual_seed(0)
    head, hidden = LogProbHead(16, 257, bias=bias), torch.randn(2, 5, 16)
    torch.testing.assert_close(head(hidden), nn.Linear.forward(head, hidden))


def test_without_entropy_log_probs_and_gradients_stay_the_same():
    head, hidden, labels = head_and_inputs()
    results = []
    for with_entropy in (True, False):
        log_probs, entropy = head(hidden, labels, 0.7, with_entropy)
        results.append((log_probs, *torch.autograd.grad(log_probs.sum(), [hidden, head.weight])))
    assert not entropy.any()
    assert not entropy.requires_grad
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_the_entropy_alone_has_a_gradient():
    head, hidden, labels = head_and_inputs()
    (got,) = torch.autograd.grad(head(hidden, labels)[1].sum(), [hidden])
    (want,) = torch.autograd.grad(plain_log_probs(hidden, head.weight, None, labels)[1].sum(), [hidden])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_what_is_frozen_gets_no_gradient_and_costs_none(frozen, monkeypatch):
    head, hidden, labels = head_and_inputs()
    trained = hidden if frozen == "weight" else head.weight
    (hidden if frozen == "hidden" else head.weight).requires_grad_(False)
    products = []
    matmul = head_module._mm
    monkeypatch.setattr(head_module, "_mm", lambda *args: products.append("_mm") or matmul(*args))
    if frozen == "weight":
        monkeypatch.delattr(torch, "mm")
    (got,) = torch.autograd.grad(sum(t.sum() for t in head(hidden, labels)), [trained])
    assert len(products) == (2 if frozen == "hidden" else 3)  # logits, logits again, gradient of the hidden states
    (want,) = torch.autograd.grad(sum(t.sum() for t in plain_log_probs(hidden, head.weight, None, labels)), [trained])
    torch.testing.assert_close(got, want)


def test_a_second_derivative_is_refused():
    head, hidden, labels = head_and_inputs()
    (gradient,) = torch.autograd.grad(head(hidden, labels)[0].square().sum(), [hidden], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_rows_is_no_error(device):
    head, hidden, labels = head_and_inputs(rows=0)
    head, hidden = head.to(device), hidden.to(device)
    log_probs, _ = head(hidden, labels.to(device))
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
CONFIGS = [
    LlamaConfig(**SMALL, tie_word_embeddings=True),
    Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=2.0),
    CohereConfig(**SMALL, logit_scale=0.25),
    GraniteConfig(**SMALL, logits_scaling=2.5),
]
if hasattr(transformers, "HyperCLOVAXConfig"):
    CONFIGS.append(transformers.HyperCLOVAXConfig(**SMALL, logits_scaling=1.5))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.model_type)
def test_the_replaced_head_knows_the_logit_processing_of_the_model(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(10.0)  # else logits are all near 0, where a soft-cap does nothing
    ids = torch.randint(96, (1, 11))
    log_p = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    want = log_p.gather(-1, ids[0, 1:, None])[:, 0]
    weights = torch.randn(2, 10)
    (weights[0] * want - weights[1] * (log_p.exp() * log_p).sum(-1)).sum().backward()
    want_grads = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    LogProbHead.replace(model)
    hidden = model.base_model(ids, use_cache=False).last_hidden_state[0, :-1]
    got, entropy = model.get_output_embeddings()(hidden, ids[0, 1:])
    (weights[0] * got + weights[1] * entropy).sum().backward()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, want_grads[name], rtol=1e-4, atol=1e-4)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


def test_a_head_that_is_no_plain_linear_layer_is_refused():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    model.set_output_embeddings(nn.Sequential(nn.Linear(32, 96)))
    with pytest.raises(NotImplementedError, match="the language-model head is a Sequential"):
        LogProbHead.replace(model)


def test_an_adapter_on_the_head_is_refused():
    from peft import LoraConfig, inject_adapter_in_model

    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, tie_word_embeddings=False))
    inject_adapter_in_model(LoraConfig(target_modules=["q_proj", "lm_head"]), model)
    with pytest.raises(NotImplementedError, match="it must be a plain nn"):
        LogProbHead.replace(model)


def test_a_model_that_cuts_logits_off_is_refused():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    model.config.unpadded_vocab_size = 90
    with pytest.raises(NotImplementedError, match="90 of the 96 rows"):
        LogProbHead.replace(model)


SHAPES = {  # rows, vocabulary, hidden, bytes of a tile
    "small": (150, 257, 64, 2**16),
    "one row": (1, 1000, 64, 2**30),
    "blocks": (70, 9001, 64, 2**30),
    "wide": (200, 151936, 128, 2**26),
    "beyond 2^31": (16384, 151936, 64, 2**34),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", ["small", "one row", "blocks", "wide"])
def test_on_cuda_the_fused_head_equals_full_logits(shape, variant, dtype):
    rows, vocab, hidden, tile_bytes = SHAPES[shape]
    assert head_module._passes("cuda").__name__.endswith("head_triton")
    assert_close(compare(rows, vocab, hidden, dtype, "cuda", tile_bytes, **VARIANTS[variant]), dtype, vocab)


@pytest.mark.gpu
def test_on_cuda_a_tile_may_have_more_than_two_to_the_31_logits():
    rows, vocab, hidden, tile_bytes = SHAPES["beyond 2^31"]
    assert rows * vocab > 2**31
    torch.manual_seed(0)
    head = LogProbHead(hidden, vocab, bias=False, dtype=torch.bfloat16, device="cuda")
    h = torch.randn(rows, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    labels = torch.randint(vocab, (rows,), device="cuda")
    results = []
    for head.tile_bytes in (tile_bytes, 2**28):  # one tile, and many
        log_probs, entropy = head(h, labels)
        grads = torch.autograd.grad(log_probs.sum() + 0.1 * entropy.sum(), [h, head.weight])
        results.append((log_probs.detach(), entropy.detach(), *grads))
    for one, many in zip(*results, strict=True):
        torch.testing.assert_close(one[-100:], many[-100:], rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_on_cuda_the_head_never_holds_the_logits():
    head = LogProbHead(256, 50000, bias=False, dtype=torch.bfloat16, device="cuda")
    head.tile_bytes = 2**26
    h = torch.randn(8192, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    log_probs, entropy = head(h, torch.randint(50000, (8192,), device="cuda"))
    (log_probs.sum() + entropy.sum()).backward()
    used = torch.cuda.max_memory_allocated() - before
    assert used < 2 * 2**26 + 3 * head.weight.nbytes  # full logits: 25 tiles


def test_the_benchmark_of_the_head_runs(capsys):
    from benchmarks.head import main

    main(["--device", "cpu", "--small", "--repeats", "1"])
    naive, chunked = capsys.readouterr().out.splitlines()[2:]
    assert naive.split(" | ")[1] == "naive"
    errors = [float(e) for e in chunked.strip(" |").split(" | ")[-1].split()]
    assert len(errors) == 4
    assert max(errors) < 2e-2
    assert max(errors[:2]) < 1e-5
