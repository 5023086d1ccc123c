"""Packed attention and DeepSpeed-Ulysses sequence parallelism for any transformers model that supports flash attention.

Only public extension points are used; no model is patched:
  * ``transformers.AttentionInterface.register(name, fn)``
  * ``model.set_attn_implementation(name)``
  * the keyword arguments ``cu_seq_lens_q, max_length_q`` which decoders forward to the attention function.

A packed stream holds whole sequences one after the other (batch size 1); ``cu_seqlens`` marks where each begins. With P ranks
in a sequence-parallel group the stream of S tokens is cut into P contiguous pieces, and ONE fused all-to-all turns sequence
shards into head shards around each attention call:

    in    q (S/P, Hq, D)    k, v (S/P, Hkv, D)      every head, a piece of the stream
    mid   q (S, Hq/P, D)    k, v (S, Hkv'/P, D)     the whole stream, a slice of the heads
    out   (S/P, Hq, Dv)

Constraints: batch size 1, no attention mask, no attention dropout, S a multiple of P. KV heads are repeated only as far as
needed, and zero heads are appended where the query heads do not divide (`head_plan`).
Source: DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lightning_rlhf.images import is_vision_language
from lightning_rlhf.kernels import Features, Kernel, choose_kernel, describe

# The collectives are custom ops, not autograd.Function around torch.distributed calls: torch 2.11 compiles the latter into
# silently wrong gradients. Custom ops take plain values only, so groups are looked up by name.
_GROUPS: dict[str, dist.ProcessGroup] = {}


def group_size(group: dist.ProcessGroup | None) -> int:
    """Ranks in a sequence-parallel group; None is a group of one."""
    return 1 if group is None else dist.get_world_size(group)


def _key(group: dist.ProcessGroup) -> str:
    _GROUPS[group.group_name] = group
    return group.group_name


@torch.library.custom_op("lightning_rlhf::all_to_all", mutates_args=())
def _all_to_all(x: Tensor, group: str) -> Tensor:
    """Equal-split all-to-all over dim 0. It is its own inverse, so backward is the same op."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=_GROUPS[group])
    return out


@_all_to_all.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_all_to_all.register_autograd(
    lambda ctx, grad: (_all_to_all(grad, ctx.group), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "group", inputs[1]),
)


@torch.library.custom_op("lightning_rlhf::gather_sequence", mutates_args=())
def _gather_sequence(x: Tensor, group: str, rank: int, size: int) -> Tensor:
    out = x.new_empty((size * x.shape[0], *x.shape[1:]))
    # renamed in torch 2.13: the old name warns there, the new one does not exist in 2.11
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(out, x.contiguous(), group=_GROUPS[group])
    return out


@_gather_sequence.register_fake
def _(x: Tensor, group: str, rank: int, size: int) -> Tensor:
    return x.new_empty((size * x.shape[0], *x.shape[1:]))


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rank, ctx.rows = inputs[2], inputs[0].shape[0]


_gather_sequence.register_autograd(
    lambda ctx, grad: (grad.narrow(0, ctx.rank * ctx.rows, ctx.rows), None, None, None), setup_context=_gather_setup
)


def gather_sequence(x: Float[Tensor, "S_P *rest"], group: dist.ProcessGroup | None) -> Float[Tensor, "S *rest"]:
    """All-gather over dim 0 whose backward keeps the own slice and reduces nothing.

    Right when every rank of the group computes the SAME loss from the gathered tensor: the parameter gradients summed over
    the group are then the gradient of that loss exactly once.
    """
    size = group_size(group)
    if size == 1:
        return x
    assert group is not None
    return _gather_sequence(x, _key(group), dist.get_rank(group), size)


def shard_sequence(x: Float[Tensor, "S *rest"], group: dist.ProcessGroup | None) -> Float[Tensor, "S_P *rest"]:
    """This rank's contiguous piece.

    Raises:
        ValueError: S is no multiple of the group's size.
    """
    size = group_size(group)
    if len(x) % size:
        raise ValueError(f"a stream of {len(x)} tokens cannot be shared by {size} ranks: pad it to a multiple")
    return x if size == 1 else x.chunk(size)[dist.get_rank(group)]


def head_plan(query_heads: int, kv_heads: int, ranks: int) -> tuple[int, int]:
    """(KV repeat factor, zero heads to append) so that query and KV heads both split evenly over ``ranks``.

    Repeats as little as possible, so that the kernel still sees grouped-query attention:
    (32, 8, 4) -> (1, 0); (28, 4, 4) -> (1, 0); (32, 8, 16) -> (2, 0); (28, 4, 8) -> (7, 4), i.e. MHA and 4 zero heads.
    """
    if query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads are no multiple of {kv_heads} key/value heads")
    members = query_heads // kv_heads
    for repeat in range(1, members + 1):
        if members % repeat == 0 and (kv_heads * repeat) % ranks == 0:
            return repeat, 0
    return members, -query_heads % ranks


def scatter_heads(q: Tensor, k: Tensor, v: Tensor, ranks: int, group: str) -> tuple[Tensor, Tensor, Tensor, int]:
    """(S/P, H, D) x 3 with all heads -> (S, H/P, D) x 3 with all tokens, in one all-to-all; also the true head count."""
    (rows, heads, d), kv_heads, dv = q.shape, k.shape[1], v.shape[2]
    repeat, pad = head_plan(heads, kv_heads, ranks)
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    if pad:
        q, k, v = (F.pad(t, (0, 0, 0, pad)) for t in (q, k, v))
    send = torch.cat([t.reshape(rows, ranks, -1).transpose(0, 1) for t in (q, k, v)], dim=-1)
    received = _all_to_all(send, group).view(ranks * rows, -1)  # source rank == position in the stream: no copy
    local_q, local_kv = q.shape[1] // ranks, k.shape[1] // ranks
    q, k, v = received.split([local_q * d, local_kv * d, local_kv * dv], dim=-1)
    return q.unflatten(-1, (local_q, d)), k.unflatten(-1, (local_kv, d)), v.unflatten(-1, (local_kv, dv)), heads


def gather_heads(out: Tensor, heads: int, ranks: int, group: str) -> Tensor:
    """(S, H/P, Dv) -> (S/P, H, Dv), appended heads dropped."""
    tokens, local, dv = out.shape
    received = _all_to_all(out.reshape(ranks, tokens // ranks, local * dv), group)
    return received.transpose(0, 1).reshape(tokens // ranks, ranks * local, dv)[:, :heads]


# -- the function that transformers calls ----------------------------------------------------------


def packed_attention(kernel: Kernel, group: dist.ProcessGroup | None = None) -> Callable[..., tuple[Tensor, None]]:
    """An attention function for `transformers.AttentionInterface` over packed, possibly sequence-sharded streams."""
    ranks = group_size(group)
    rank, name = (0, "") if group is None or ranks == 1 else (dist.get_rank(group), _key(group))

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if cu_seq_lens_q is None or query.shape[0] != 1 or attention_mask is not None:
            # without this check a padded batch would silently attend to its padding
            raise ValueError(
                f"{type(module).__name__}: packed attention needs batch size 1, no attention_mask, and"
                " cu_seq_lens_q/max_length_q"
            )
        if dropout or kwargs.get("position_bias") is not None:
            raise NotImplementedError(
                f"{type(module).__name__}: packed attention has neither dropout nor position_bias: set attention_dropout to 0"
            )
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        if ranks > 1:
            q, k, v, heads = scatter_heads(q, k, v, ranks, name)
            if s_aux is not None:  # a parameter per head: this rank's heads
                local = q.shape[1]
                s_aux = F.pad(s_aux, (0, local * ranks - heads))[rank * local : (rank + 1) * local]
        features = Features(causal=causal, scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
        out = kernel(q, k, v, cu_seq_lens_q, max_length_q, features)  # type: ignore[arg-type]
        if ranks > 1:
            out = gather_heads(out, heads, ranks, name)
        return out[None], None

    return attention


def use_packed_attention(
    model: nn.Module,
    kernel: str,
    device: torch.device,
    group: dist.ProcessGroup | None,
    dtype: torch.dtype = torch.bfloat16,
) -> str:
    """Make a transformers model that computes in ``dtype`` attend over packed streams; returns what the log says of it.

    Raises:
        NotImplementedError: see `set_attention`.
        ValueError: the kernel cannot run here, or lacks what the model's attention needs.
    """
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    sinks = next((p for n, p in model.named_parameters() if n.endswith(".sinks")), None)
    needs = Features(softcap=getattr(config, "attn_logit_softcapping", None), sinks=sinks)
    resolved, function = choose_kernel(kernel, device, dtype, needs)
    # transformers tests names for the substring "flash" and would look for the package
    name = f"packed_{resolved.replace('flash_attention_', 'fa')}_sp{group_size(group)}"
    set_attention(model, name, packed_attention(function, group))
    return f"attention {describe(resolved)}, packed, sequence parallel {group_size(group)}"


def set_attention(model: nn.Module, name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    """Register an attention function over packed streams and make a transformers model use it.

    No mask function is registered under the name, so that transformers builds no mask at all.

    Raises:
        NotImplementedError: the model's attention is not fully described by its arguments (it would be silently wrong).
    """
    from transformers import AttentionInterface

    kind = type(model).__name__
    if getattr(model, "_is_stateful", False) and not getattr(model.config.get_text_config(), "layer_types", None):  # type: ignore[union-attr,operator]
        raise NotImplementedError(f"{kind} cannot be packed: it is recurrent, which mixes the tokens of neighbours")
    # the first flag says that attention needs no mask, the second that every keyword reaches the function
    if not (getattr(model, "_supports_flash_attn", False) and getattr(model, "_supports_attention_backend", False)):
        raise NotImplementedError(
            f"{kind} cannot be packed: its attention needs a mask or a position bias (ALiBi), or does not use"
            " transformers' AttentionInterface"
        )
    AttentionInterface.register(name, function)
    model.set_attn_implementation(name)  # type: ignore[operator]
    if model.config._attn_implementation != name:  # type: ignore[union-attr]
        raise NotImplementedError(f"{kind} does not use transformers' AttentionInterface")


def check_packable(config: Any) -> None:
    """Refuse what would be silently wrong, from the configuration alone.

    Raises:
        NotImplementedError: not a decoder of text, or of text and images; layers other than attention, which mix the tokens
            of packed neighbours; an auxiliary loss; random routing.
    """
    kind = config.model_type
    if config.is_encoder_decoder:
        raise NotImplementedError(f"{kind} is an encoder-decoder model: only decoders can be trained")
    text = config.get_text_config()
    if not is_vision_language(config) and text is not config:
        raise NotImplementedError(f"{kind} takes sound or more beside text: only models of text can be trained")
    others = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention", "attention"}
    if others:
        raise NotImplementedError(
            f"{kind} cannot be packed: its layers of type {', '.join(sorted(others))} are neither full nor sliding attention"
        )
    if getattr(text, "output_router_logits", False):
        raise NotImplementedError(
            f"{kind}: output_router_logits adds an auxiliary loss that is not trained here: set it to false"
        )
    for name, value in text.to_dict().items():
        if "jitter" in name and value:
            raise NotImplementedError(f"{kind}: {name}={value} makes routing random in training: only 0 can be trained")


def position_limit(config: Any) -> int | None:
    """Tokens up to which a sequence's rotary frequencies depend neither on packed neighbours nor on how ranks share it.

    Dynamic and LongRoPE frequencies follow the longest position of the whole input; up to the original length they are fixed.
    None: every length.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    limits = [config.max_position_embeddings for r in kinds if r.get("rope_type") == "dynamic"]
    limits += [r["original_max_position_embeddings"] for r in kinds if r.get("rope_type") == "longrope"]
    return min(limits, default=None)


def longest_sequence(config: Any) -> int:
    """Tokens that a model of this transformers config takes, and that may be packed with others."""
    text = config.get_text_config()
    limits = (getattr(text, "max_position_embeddings", None), position_limit(text))
    return min(limit or 2**31 for limit in limits)
