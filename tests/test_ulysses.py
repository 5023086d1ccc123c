from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_policy import strategy_of
from toys import spawn
from transformers import AutoModelForCausalLM, FalconConfig, LlamaConfig, Qwen2Config

from lightning_rlhf.kernels import reference_kernel
from lightning_rlhf.ulysses import (
    gather_sequence,
    head_plan,
    packed_attention,
    position_limit,
    shard_sequence,
    use_packed_attention,
)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [((32, 8, 4), (1, 0)), ((28, 4, 4), (1, 0)), ((32, 8, 16), (2, 0)), ((28, 4, 8), (7, 4)), ((7, 7, 2), (1, 1))],
)
def test_kv_heads_are_repeated_as_little_as_possible(heads, expected):
    query, kv, ranks = heads
    repeat, zeros = head_plan(*heads)
    assert (repeat, zeros) == expected
    assert (query + zeros) % ranks == 0
    assert (kv * repeat + (zeros if kv * repeat == query else 0)) % ranks == 0


def test_heads_that_are_no_groups_are_refused():
    with pytest.raises(ValueError, match="10 query heads are no multiple of 4"):
        head_plan(10, 4, 2)


def sharded_attention(rank: int, heads: int, kv_heads: int) -> tuple[torch.Tensor, ...]:
    """This rank's gradients, and the whole output, of attention over a sequence that all ranks share."""
    torch.manual_seed(0)
    group, cu = dist.group.WORLD, torch.tensor([0, 5, 12, 16], dtype=torch.int32)
    whole = [torch.randn(1, h, 16, 8, dtype=torch.float64) for h in (heads, kv_heads, kv_heads)]
    own = [shard_sequence(t.transpose(0, 2), group).transpose(0, 2).clone().requires_grad_() for t in whole]
    attention = packed_attention(reference_kernel, group)
    out, _ = attention(torch.nn.Identity(), *own, cu_seq_lens_q=cu, max_length_q=7, is_causal=True)
    full = gather_sequence(out[0], group)
    weights = torch.arange(full.numel(), dtype=torch.float64).view_as(full).sin()
    (full * weights).sum().backward()
    return full.detach(), *(t.grad for t in own)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 1), (3, 1)])
def test_attention_over_a_shared_sequence_equals_attention_on_one_rank(heads, kv_heads):
    torch.manual_seed(0)
    cu = torch.tensor([0, 5, 12, 16], dtype=torch.int32)
    q, k, v = (torch.randn(1, h, 16, 8, dtype=torch.float64).requires_grad_() for h in (heads, kv_heads, kv_heads))
    out, _ = packed_attention(reference_kernel)(
        torch.nn.Identity(), q, k, v, cu_seq_lens_q=cu, max_length_q=7, is_causal=True
    )
    weights = torch.arange(out.numel(), dtype=torch.float64).view_as(out[0]).sin()
    (out[0] * weights).sum().backward()
    results = spawn(sharded_attention, 2, heads, kv_heads)
    for full, *_ in results:
        torch.testing.assert_close(full, out[0].detach())
    for i, t in enumerate((q, k, v), start=1):
        torch.testing.assert_close(torch.cat([r[i] for r in results], dim=2), t.grad)


def through_the_strategy(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[str]]:
    """This rank's piece, the whole stream, its gradient, and what is said of streams that do not divide."""
    strategy = strategy_of(2, sequence_parallel_size=2)
    x = torch.arange(18.0).view(6, 3).requires_grad_()
    piece = strategy.shard_sequence(x)
    whole = strategy.gather_sequence(2 * piece)
    (whole * torch.arange(18.0).view(6, 3)).sum().backward()
    said = []
    for length in (5, 1):
        try:
            strategy.shard_sequence(torch.ones(length, 3))
        except ValueError as error:
            said.append(str(error))
    return piece.detach(), whole.detach(), x.grad, said


def test_the_strategy_cuts_a_stream_and_puts_it_together_again():
    """Each rank's gradient is that of its own piece, together they are that of the loss."""
    stream = torch.arange(18.0).view(6, 3)
    (first, whole, grad, said), (second, other, rest, also) = spawn(through_the_strategy, 2)
    torch.testing.assert_close(torch.cat([first, second]), stream)
    torch.testing.assert_close((whole, other), (2 * stream, 2 * stream))
    assert grad[3:].count_nonzero() == rest[:3].count_nonzero() == 0
    torch.testing.assert_close(grad + rest, 2 * stream)
    message = "a stream of {} tokens cannot be shared by 2 ranks: pad it to a multiple"
    assert said == also == [message.format(5), message.format(1)]


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_a_padded_batch_is_refused_instead_of_attending_to_padding():
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SMALL, intermediate_size=32, num_key_value_heads=1))
    use_packed_attention(model, "auto", torch.device("cpu"), None)
    with pytest.raises(ValueError, match="packed attention needs batch size 1"):
        model(torch.ones(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"packed attention needs .* cu_seq_lens_q/max_length_q"):
        model(torch.ones(1, 4, dtype=torch.long))
    layout = {"cu_seq_lens_q": torch.tensor([0, 4], dtype=torch.int32), "max_length_q": 4}
    with pytest.raises(ValueError, match="packed attention needs batch size 1, no attention_mask"):
        packed_attention(reference_kernel)(model, *[torch.ones(1, 2, 4, 8)] * 3, torch.ones(1, 1, 4, 4), **layout)


def test_a_model_without_the_attention_interface_is_refused():
    model = AutoModelForCausalLM.from_config(FalconConfig(**SMALL))
    with pytest.raises(NotImplementedError, match="Falcon"):
        use_packed_attention(model, "auto", torch.device("cpu"), None)


def test_rotary_embeddings_that_look_at_the_whole_input_have_a_limit():
    def rope(**parameters):
        return LlamaConfig(max_position_embeddings=64, rope_parameters={"rope_theta": 1e4, **parameters})

    assert position_limit(LlamaConfig()) is None
    assert position_limit(rope(rope_type="yarn", factor=2.0)) is None
    assert position_limit(rope(rope_type="dynamic", factor=2.0)) == 64
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    assert position_limit(rope(rope_type="longrope", original_max_position_embeddings=16, **factors)) == 16
