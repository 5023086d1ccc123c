"""Two checks of a built model with its real weights, once, on short streams: what no list of architectures can know.

* `check_isolation`: a sequence's hidden states depend neither on its packed neighbours, nor on where ranks cut the stream, nor
  on later tokens
* `check_head`: log-probs from hidden states are those of the model's own forward
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method

from lightning_rlhf.packing import Packed, pack
from lightning_rlhf.ulysses import gather_sequence

if TYPE_CHECKING:
    from lightning_rlhf.modules.policy import PackedModel, Policy
    from lightning_rlhf.strategy import FSDPUlyssesStrategy


@torch.no_grad()
def check_isolation(
    root: PackedModel, strategy: FSDPUlyssesStrategy, forward: Callable[[Packed], Any], role: str
) -> float:
    """Log how ``root`` attends, and raise if packed sequences influence each other.

    Collective: every rank calls it, and all of them raise. No random state is touched, and parameters are left sharded.

    Args:
        forward: runs ``root`` on a stream.
        role: of the model, for the log.

    Returns:
        the larger relative change of a sequence's hidden states: of a stream of the same lengths with other tokens around it,
        where only experts of changed sizes round differently, and of another place in another stream, where all kernels may.

    Raises:
        NotImplementedError: it is more than rounding errors.
    """
    a, b, c, d, e = (_tokens(root, n, seed) for seed, n in enumerate((11, 9, 14, 11, 14)))
    tail, other = _tokens(root, 3, 5), _tokens(root, 3, 6)
    states: list[Tensor] = []
    hook = root.decoder.register_forward_hook(lambda _, args, output: states.append(output.last_hidden_state[0]))
    devices = [strategy.root_device] if strategy.root_device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            for sequences in ([a, torch.cat([b, tail]), c], [d, torch.cat([b, other]), e], [c, b, a]):
                forward(_packed(sequences, strategy))
    finally:
        hook.remove()
        strategy.reshard(root)
    one, beside, elsewhere = (
        gather_sequence(piece, strategy.sp_group).float()[start:][: len(b)]
        for piece, start in zip(states, (len(a), len(d), len(c)), strict=True)
    )
    changes = torch.stack([(one - same).norm() for same in (beside, elsewhere)]) / one.norm().clamp_min(1e-12)
    changes = strategy.all_reduce_dp(changes, "max").cpu()
    kind, largest = type(root.model).__name__, changes.max().item()
    exact = states[0].dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    if not (changes <= torch.tensor([1e-3, 1e-3] if exact else [0.1, 0.3])).all():
        raise NotImplementedError(
            f"{kind} cannot be packed: the hidden states of a sequence change by {largest:.1e} with its neighbours and with later"
            " tokens. Some layer mixes tokens outside attention (or is random in training): train another model"
        )
    rank_zero_info(f"{role} {kind}: {root.attention}; packed neighbours change it by {largest:.0e}")
    return largest


@torch.no_grad()
def check_head(policy: Policy, strategy: FSDPUlyssesStrategy) -> None:
    """Raise if the model does something to its logits that `LogProbHead` does not know. Collective.

    Raises:
        NotImplementedError: log-probs differ from those of the model's own forward.
    """
    register_fsdp_forward_method(policy, "stock_log_probs")
    packed = _packed([_tokens(policy, n, n) for n in (9, 12)], strategy)
    own, stock = policy(packed, 1.0)[0], policy.stock_log_probs(packed)
    difference = ((own - stock).abs() / (1.0 + stock.abs())).max()
    strategy.reshard(policy)
    largest = strategy.all_reduce_dp(difference, "max").item()
    if not largest <= 1e-2:
        raise NotImplementedError(
            f"{type(policy.model).__name__} cannot be trained: log-probs of its own forward differ by {largest:.1e} from"
            " what its hidden states and head give. It scales or changes its logits in a way that is not known here"
        )


def _tokens(root: PackedModel, n: int, seed: int) -> Tensor:
    size: int = root.model.config.get_text_config().vocab_size  # type: ignore[union-attr,operator]
    return torch.randint(size, (n,), generator=torch.Generator().manual_seed(seed))


def _packed(sequences: list[Tensor], strategy: FSDPUlyssesStrategy) -> Packed:
    packed = pack(sequences, [1] * len(sequences), strategy.sequence_parallel_size, strategy.sp_rank)
    return packed.to(strategy.root_device)
