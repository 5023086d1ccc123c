"""A frozen reward model beside the policy: an FSDP2 root of its own, with its own tokenizer and chat template.

    prompts, response texts ─▶ its template, its token ids ─▶ all data ranks' ─▶ packing plan ─▶ scores (B,) of this rank

As the policy's micro-batches, streams are balanced over data ranks and sequence-sharded; the head is float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.conversations import Piece, tokenise, whole
from lightning_rlhf.modules.batching import Split, example_batches
from lightning_rlhf.modules.critic import Critic, build_critic
from lightning_rlhf.modules.numbers import Finite
from lightning_rlhf.modules.score_head import is_scored, scored_part
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.prompts import PromptEncoder
from lightning_rlhf.types import Examples, Prompt

if TYPE_CHECKING:
    from lightning_rlhf.strategy import FSDPUlyssesStrategy


class RewardModelSettings(ModelSettings):
    """Of a frozen reward model."""

    key = "model.reward_model.model"
    reads_policy_tokens = False


@dataclass(frozen=True)
class FrozenRewardModel:
    """A sequence-classification model with one label that scores responses.

    Args:
        model: local folder, hub id or URL: an AutoModelForSequenceClassification, such as an export of
            `RewardModelLightningModule`.
        weight: of its score in the sum with the reward functions'.
        chat_template: wrap text prompts as one user message of its chat template; conversations always go through it.
        trust_remote_code: run model code that comes with the weights.
    """

    model: str
    weight: Finite = 1.0
    chat_template: bool = False
    trust_remote_code: bool = False

    def settings(self, policy: ModelSettings) -> RewardModelSettings:
        """How it is run: as the policy, and on the host where a reference would be."""
        return RewardModelSettings(
            self.model,
            attention=policy.attention,
            trust_remote_code=self.trust_remote_code,
            offload_reference=policy.offload_reference,
        )

    @cached_property
    def encoder(self) -> PromptEncoder:
        """Its own tokenizer."""
        from transformers import AutoTokenizer

        path = RewardModelSettings(self.model, trust_remote_code=self.trust_remote_code).path
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=self.trust_remote_code)
        return PromptEncoder(tokenizer, self.chat_template)

    def token_ids(self, prompts: Sequence[Prompt], texts: Sequence[str], rows: Sequence[int]) -> list[Tensor]:
        """Of each prompt with its response.

        Args:
            rows: of the prompts, as errors name them.

        Raises:
            ValueError: a prompt that its chat template refuses.
        """
        pieces = []
        for prompt, text, row in zip(prompts, texts, rows, strict=True):
            try:
                pieces.append([Piece(whole(prompt, text, self.encoder), True)])
            except ValueError as error:
                raise ValueError(f"model.reward_model: the prompt of row {row} {error}") from error
        return [torch.tensor(row.ids, dtype=torch.long) for row in tokenise(pieces, self.encoder)]


def check_reward_model(settings: ModelSettings, config: Any) -> None:
    """Raise ValueError if ``config`` is a language model's."""
    if not is_scored(config):
        raise ValueError(
            f"{settings.key}: {settings.model!r} is a {', '.join(config.architectures or ['model without head'])}, it"
            " must be a sequence-classification model with one label: train one, see docs/classical.md"
        )


def build_reward_model(settings: ModelSettings, strategy: FSDPUlyssesStrategy) -> Critic:
    """Sharded and frozen, its backbone in the run's compute dtype: bfloat16, but for 32-true."""
    dtype = strategy.precision_plugin.compute_dtype
    return build_critic(settings, strategy, bias=False, frozen=dtype, role="reward model")


@torch.no_grad()
def scores_of_all(
    root: Critic, sequences: Sequence[Tensor], strategy: FSDPUlyssesStrategy, split: Split, limit: int
) -> Float[Tensor, "B"]:
    """Scores of this data rank's ``sequences``, NaN for those of more than ``limit`` tokens. Collective."""
    shares: list[list[Tensor]] = strategy.all_gather_objects_dp(list(sequences))
    padding = root.model.config.get_text_config().pad_token_id  # type: ignore[union-attr,operator]
    everyone = [scored_part(sequence, padding) for share in shares for sequence in share]
    fitting = [i for i, sequence in enumerate(everyone) if len(sequence) <= limit]
    longest = max((len(everyone[i]) for i in fitting), default=0)
    # no activations are kept: one that is longer than the budget has a stream of its own
    room = replace(split, tokens=max(split.tokens, -(-longest // split.sequence_ranks)))
    examples = Examples([everyone[i] for i in fitting], [1] * len(fitting), masks=[])
    found = torch.zeros(len(fitting), device=split.device)
    for batch in example_batches(examples, room, ends_only=True)[0]:
        found[batch.rows] = root(batch.packed)[:, 0]
    strategy.reshard(root)
    scores = torch.full((len(everyone),), math.nan)
    scores[fitting] = strategy.all_reduce_dp(found).cpu()
    return scores.split([len(share) for share in shares])[split.data_rank]
