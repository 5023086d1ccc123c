from __future__ import annotations

import pytest
import torch

from lightning_rlhf.kernels import check_kernel, choose_kernel, padded_kernel, reference_kernel


def stream(lengths, heads=4, kv_heads=2, dim=16, dtype=torch.float64):
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), h, dim, dtype=dtype, requires_grad=True) for h in (heads, kv_heads, kv_heads))
    return q, k, v, torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths)


def oracle(q, k, v, lengths, window=None, softcap=None, sinks=None):
    """Attention by its definition, one sequence at a time."""
    out = []
    for qi, ki, vi in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        members = q.shape[1] // k.shape[1]
        ki, vi = ki.repeat_interleave(members, 1), vi.repeat_interleave(members, 1)
        scores = torch.einsum("ihd,jhd->hij", qi, ki) * q.shape[-1] ** -0.5
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        i, j = torch.arange(len(qi))[:, None], torch.arange(len(qi))[None]
        hidden = (j > i) | ((i - j >= window) if window else False)
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
        out.append(torch.einsum("hij,jhd->ihd", weights / total, vi))
    return torch.cat(out)


FEATURES = [{}, {"window": 3}, {"softcap": 2.0}, {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)}]


@pytest.mark.parametrize("kernel", [reference_kernel, padded_kernel])
@pytest.mark.parametrize("features", FEATURES, ids=lambda f: next(iter(f), "plain"))
@pytest.mark.parametrize("lengths", [[5, 7, 6, 7], [1, 9, 2]])
def test_a_kernel_is_attention_by_its_definition_in_value_and_gradient(kernel, features, lengths):
    q, k, v, cu, longest = stream(lengths)
    got, want = kernel(q, k, v, cu, longest, **features), oracle(q, k, v, lengths, **features)
    torch.testing.assert_close(got, want)
    weights = torch.randn_like(got)
    for a, b in zip(*(torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["auto", "padded", "reference"])
def test_packed_neighbours_do_not_see_each_other(name):
    kernel = choose_kernel(name, torch.device("cpu"))
    q, k, v, cu, longest = stream([6, 5, 6])
    before = kernel(q, k, v, cu, longest)
    with torch.no_grad():
        for t in (q, k, v):
            t[6:11] += 1.0
    after = kernel(q, k, v, cu, longest)
    assert torch.equal(before[:6], after[:6])
    assert torch.equal(before[11:], after[11:])
    assert not torch.allclose(before[6:11], after[6:11])


def test_an_unknown_kernel_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="must be auto, torch, padded, reference"):
        check_kernel("flash")
