from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from lightning_rlhf.kernels import (
    Features,
    MissingKernel,
    WithSinks,
    check_kernel,
    choose_kernel,
    describe,
    padded_kernel,
    reference_kernel,
    torch_kernel,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def stream(lengths, heads=4, kv_heads=2, dim=16, dtype=torch.float64, device="cpu"):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), h, dim, dtype=dtype, device=device, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    )
    return q, k, v, torch.tensor([0, *lengths], device=device).cumsum(0).int(), max(lengths)


def oracle(q, k, v, lengths, features):
    """Attention by its definition, one sequence at a time."""
    window, softcap, sinks = features.window, features.softcap, features.sinks
    out = []
    for qi, ki, vi in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        members = q.shape[1] // k.shape[1]
        ki, vi = ki.repeat_interleave(members, 1), vi.repeat_interleave(members, 1)
        scores = torch.einsum("ihd,jhd->hij", qi, ki) * (features.scale or q.shape[-1] ** -0.5)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        i, j = torch.arange(len(qi))[:, None], torch.arange(len(qi))[None]
        hidden = ((j > i) & features.causal) | ((i - j >= window) if window else False)
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
        out.append(torch.einsum("hij,jhd->ihd", weights / total, vi))
    return torch.cat(out)


SINKS = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)
FEATURES = {
    "plain": Features(),
    "both ways": Features(causal=False),
    "scale": Features(scale=0.7),
    "window": Features(window=3),
    "softcap": Features(softcap=2.0),
    "sinks": Features(sinks=SINKS),
    "window-sinks": Features(window=3, sinks=SINKS),
}


@pytest.mark.parametrize("kernel", [reference_kernel, padded_kernel])
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("lengths", [[5, 7, 6, 7], [1, 9, 2]])
def test_a_kernel_is_attention_by_its_definition_in_value_and_gradient(kernel, name, lengths):
    q, k, v, cu, longest = stream(lengths)
    got = kernel(q, k, v, cu, longest, FEATURES[name])
    want = oracle(q, k, v, lengths, FEATURES[name])
    torch.testing.assert_close(got, want)
    weights = torch.randn_like(got)
    for a, b in zip(*(torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["auto", "padded", "reference"])
def test_packed_neighbours_do_not_see_each_other(name):
    _, kernel = choose_kernel(name, CPU)
    q, k, v, cu, longest = stream([6, 5, 6])
    before = kernel(q, k, v, cu, longest, Features())
    with torch.no_grad():
        for t in (q, k, v):
            t[6:11] += 1.0
    after = kernel(q, k, v, cu, longest, Features())
    assert torch.equal(before[:6], after[:6])
    assert torch.equal(before[11:], after[11:])
    assert not torch.allclose(before[6:11], after[6:11])


def attend(q, k, v):
    """(out, log-sum-exp) of causal attention over one sequence, and what its backward needs."""
    n, scale = len(q), q.shape[-1] ** -0.5
    later = ~torch.ones(n, n, dtype=torch.bool).tril()
    scores = (torch.einsum("ihd,jhd->hij", q, k) * scale).masked_fill(later, -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v), scores.logsumexp(-1)


def attend_backward(grad, q, k, v, out, lse):
    """As flash attention does it: probabilities from the log-sum-exp, row sums from the output."""
    scale = q.shape[-1] ** -0.5
    later = ~torch.ones(len(q), len(q), dtype=torch.bool).tril()
    p = (torch.einsum("ihd,jhd->hij", q, k) * scale).masked_fill(later, -torch.inf).sub(lse[..., None]).exp()
    ds = p * (torch.einsum("ihd,jhd->hij", grad, v) - (grad * out).sum(-1).t()[..., None]) * scale
    dq, dk = torch.einsum("hij,jhd->ihd", ds, k), torch.einsum("hij,ihd->jhd", ds, q)
    return dq, dk, torch.einsum("hij,ihd->jhd", p, grad)


def test_sinks_on_top_of_a_kernel_without_them_are_exact_in_value_and_gradient():
    q, k, v, cu, longest = stream([9], heads=4, kv_heads=4)
    sinks = SINKS.clone().requires_grad_()
    got = WithSinks.apply(q, k, v, sinks, attend, attend_backward)
    want = reference_kernel(q, k, v, cu, longest, Features(sinks=sinks))
    torch.testing.assert_close(got, want)
    weights = torch.randn_like(got)
    inputs = (q, k, v, sinks)
    for a, b in zip(*(torch.autograd.grad((x * weights).sum(), inputs) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("scale", [None, 0.7])
def test_a_stream_of_one_long_sequence_is_attended_in_one_call(scale, monkeypatch):
    """On the CPU with the same call as on CUDA, where cuDNN takes it."""
    monkeypatch.setattr("lightning_rlhf.kernels._LONG", 8)
    q, k, v, *layout = stream([9])
    want = oracle(q, k, v, [9], features := Features(scale=scale))
    weights = torch.randn_like(want)
    for run in (torch_kernel, torch.compile(torch_kernel, fullgraph=True, backend="aot_eager")):
        got = run(q, k, v, *layout, features)
        torch.testing.assert_close(got, want)
        for a, b in zip(
            *(torch.autograd.grad((x * weights).sum(), (q, k, v), retain_graph=True) for x in (got, want)), strict=True
        ):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("features", "window"),
    [(Features(window=3, scale=0.7), (2, 0)), (Features(causal=False), (-1, -1))],
    ids=["window", "both ways"],
)
def test_torch_is_asked_for_what_one_long_sequence_in_one_call_has_not(features, window, monkeypatch):
    """Half precision, a window of tokens to the left, values as wide as keys."""
    asked = []
    monkeypatch.setattr("lightning_rlhf.kernels._LONG", 8)
    monkeypatch.setattr(
        "lightning_rlhf.kernels.varlen_attn", lambda *a, **options: asked.append((a[:3], options)) or a[2]
    )
    q, k, v, *layout = stream([9], dtype=torch.float32)
    out = torch_kernel(q, k, v[..., :5], *layout, features)
    (((*given,), options),) = asked
    assert (options["window_size"], options["scale"]) == (window, features.scale)
    assert {(t.dtype, t.shape[-1]) for t in given} == {(torch.bfloat16, 16)}
    assert torch.equal(out, v[..., :5].bfloat16().float())


def gpu_case(run, asked, lengths, heads, kv_heads, dim):
    """Compare a kernel with the reference in float32."""
    sinks = None if asked.sinks is None else asked.sinks.repeat(heads // 4).float().cuda().requires_grad_()
    features = Features(scale=asked.scale and 0.1, window=asked.window, softcap=asked.softcap, sinks=sinks)
    q, k, v, cu, longest = stream(lengths, heads, kv_heads, dim, torch.bfloat16, "cuda")
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    got = run(q, k, v, cu, longest, features)
    want = reference_kernel(q.float(), k.float(), v.float(), cu, longest, features)
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)
    weights = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad((x.float() * weights).sum(), inputs) for x in (got, want)), strict=True):
        assert (a.float() - b.float()).norm() < 2e-2 * b.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("length", [16383, 16384, 17000])
@pytest.mark.parametrize("name", ["plain", "scale"])
def test_cudnn_takes_one_long_sequence(name, length):
    gpu_case(torch_kernel, FEATURES[name], [length], 4, 2, 128)


@pytest.mark.gpu
@pytest.mark.filterwarnings(  # of the packages that it is built from, about each other
    "ignore:cutlass:DeprecationWarning",
    "ignore:.* is deprecated:DeprecationWarning",
    "ignore:Argument aux_data:UserWarning",
)
@pytest.mark.parametrize("name", ["plain", "scale", "window", "softcap"])
def test_flash_attention_4_equals_the_reference(name):
    try:
        _, kernel = choose_kernel("flash_attention_4", CUDA)
    except MissingKernel as missing:
        pytest.skip(str(missing))
    gpu_case(kernel, FEATURES[name], [40, 3, 129], 8, 2, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(4, 4, 64), (8, 2, 128)], ids=["mha", "gqa"])
@pytest.mark.parametrize("name", ["plain", "scale", "window", "sinks", "window-sinks"])
def test_the_torch_kernel_equals_the_reference_in_value_and_gradient(name, dims):
    gpu_case(torch_kernel, FEATURES[name], [40, 3, 129], *dims)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_kernel_serves_models_with_other_numbers_of_heads():
    """An actor and its critic, say: from the second model on the numbers are symbols."""
    torch._dynamo.reset()
    compiled = torch.compile(padded_kernel, fullgraph=True, backend="eager")
    for heads, kv_heads in ((4, 2), (6, 3), (8, 8), (3, 1)):
        attended = stream([5, 4], heads, kv_heads)
        found, wanted = (kernel(*attended, Features()) for kernel in (compiled, reference_kernel))
        torch.testing.assert_close(found, wanted)


def test_an_unknown_kernel_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="must be auto, torch, padded, reference, flash_attention_2"):
        check_kernel("flash")


def test_auto_follows_the_device_and_the_dtype():
    assert choose_kernel("auto", CPU) == ("padded", padded_kernel)
    assert choose_kernel("auto", CUDA) == ("torch", torch_kernel)
    assert choose_kernel("auto", CUDA, torch.float32) == ("padded", padded_kernel)
    assert describe("torch") == "torch varlen (FlashAttention-2)"
    assert describe("flash_attention_3") == "flash_attention_3"


@pytest.mark.parametrize("name", ["torch", "flash_attention_2"])
def test_a_kernel_for_gpus_is_refused_elsewhere_before_it_is_needed(name):
    with pytest.raises(ValueError, match=f"{name} runs on CUDA in half precision, .* bfloat16 on cpu: set auto"):
        choose_kernel(name, CPU)
    with pytest.raises(ValueError, match="float32 on cuda"):
        choose_kernel(name, CUDA, torch.float32)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("flash_attention_2", r"lightning-rlhf\[flash-attn\]"),
        ("flash_attention_3", "hopper"),
        ("flash_attention_4", "pip"),
    ],
)
def test_a_missing_package_is_named_with_how_to_get_it(name, remedy, monkeypatch):
    for module in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"{name} needs the package flash_attn.*{remedy}"):
        choose_kernel(name, CUDA)


def package(monkeypatch, name, function):
    module = ModuleType(name)
    module.flash_attn_varlen_func = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)


def test_what_a_kernel_lacks_is_refused_with_one_that_has_it(monkeypatch):
    package(monkeypatch, "flash_attn", lambda q, k, v, softcap=0.0: None)
    package(monkeypatch, "flash_attn_interface", lambda q, k, v, s_aux=None: None)
    package(monkeypatch, "flash_attn.cute", lambda q, k, v, softcap=None, learnable_sink=None: None)
    capped, sunk = Features(softcap=50.0), Features(sinks=torch.zeros(4))
    assert choose_kernel("flash_attention_4", CUDA, needs=Features(softcap=1.0, sinks=torch.zeros(4)))
    assert choose_kernel("auto", CUDA, needs=sunk)[0] == "torch"
    assert choose_kernel("flash_attention_2", CUDA, needs=capped)[0] == "flash_attention_2"
    assert choose_kernel("flash_attention_3", CUDA, needs=sunk)[0] == "flash_attention_3"
    assert choose_kernel("reference", CUDA, needs=Features(softcap=1.0, sinks=torch.zeros(4)))[0] == "reference"
    with pytest.raises(ValueError, match=r"torch varlen .* has no soft-capped scores.*set flash_attention_2"):
        choose_kernel("auto", CUDA, needs=capped)
    with pytest.raises(ValueError, match=r"flash_attention_2 has no attention sinks.*set torch"):
        choose_kernel("flash_attention_2", CUDA, needs=sunk)
    with pytest.raises(ValueError, match="flash_attention_3 has no soft-capped scores"):
        choose_kernel("flash_attention_3", CUDA, needs=capped)
