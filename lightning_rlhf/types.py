"""What one phase of an iteration hands to the next.

    PromptDataModule ── Prompts ──▶ RolloutCallback ── Rollout ──▶ score, log-probs, advantages ── Experience ──▶ update

Shape legend
    P   prompts on this data rank                      n   responses per prompt (``Sampling.num_generations``)
    B   responses on this data rank, P·n               G   responses of all data ranks: the iteration's global batch
    T   the longest response of the batch              S   tokens of a packed stream

Responses are prompt-major: response ``i`` belongs to prompt ``i // n``. Every ``(B, T)`` or ``(G, T)`` tensor is aligned with
the RESPONSE: column 0 is its first token, and ``mask`` is 1 on the tokens that were sampled. Masks come from lengths, never
from token ids, so a pad token equal to the EOS is harmless. `shift_labels` is the only place where tokens are shifted: index
``t`` of everything computed by the policy concerns ``labels[t]``.

All classes are frozen; ``to(device)`` returns a copy (Lightning moves batches with it).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Message: TypeAlias = dict[str, Any]
Prompt: TypeAlias = str | list[Message]
"""A prompt as the data set has it: plain text, or a conversation."""

IGNORE = -100
"""Label of a position that predicts nothing: the end of a sequence, a prompt token, padding."""


class Movable:
    """``.to`` for frozen dataclasses: Lightning's own mover refuses to set their fields."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Any:
        moved = {}
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if isinstance(value, Tensor | Movable):
                moved[f.name] = value.to(device, non_blocking=non_blocking)
        return replace(self, **moved)  # type: ignore[type-var]


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn.

    Args:
        num_generations: responses per prompt, n.
        temperature: divides the logits; 0 is greedy (validation only).
        top_p: nucleus mass, 1 keeps the whole distribution.
        top_k: keep the k likeliest tokens, 0 keeps all.
        min_p: drop tokens below this share of the likeliest token's probability, 0 keeps all.
        max_completion_length: longest response in tokens.
        min_completion_length: no EOS before this many tokens, and stop strings among them are passed over.
        stop: strings that end a response (they stay in its token ids); of special tokens, too.
        stop_token_ids: ids that end a response besides the model's own EOS ids.
        ignore_eos: sample to ``max_completion_length`` whatever is drawn (benchmarks).
        extra: handed to the engine's own sampling parameters as they are.
    """

    num_generations: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_completion_length: int = 256
    min_completion_length: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks = {
            "num_generations": (self.num_generations >= 1, "at least 1"),
            "temperature": (0.0 <= self.temperature < float("inf"), "0 (greedy) or positive"),
            "top_p": (0.0 < self.top_p <= 1.0, "in (0, 1]"),
            "top_k": (self.top_k >= 0, "0 (off) or positive"),
            "min_p": (0.0 <= self.min_p < 1.0, "in [0, 1)"),
            "max_completion_length": (self.max_completion_length >= 1, "at least 1"),
            "min_completion_length": (
                0 <= self.min_completion_length <= self.max_completion_length,
                "between 0 and max_completion_length",
            ),
            "stop": (not isinstance(self.stop, str) and all(self.stop), "a tuple or list of texts, none of them empty"),
            "stop_token_ids": (
                not isinstance(self.stop_token_ids, int) and all(i >= 0 for i in self.stop_token_ids),
                "a tuple or list of ids, 0 or more",
            ),
        }
        for name, (holds, what) in checks.items():
            if not holds:
                raise ValueError(f"sampling.{name} must be {what}, got {getattr(self, name)}")

    @property
    def greedy(self) -> Sampling:
        """One response of the likeliest tokens, else the same."""
        return replace(self, num_generations=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)

    @property
    def replayable(self) -> bool:
        """Whether every token is drawn from softmax(logits / temperature), which is all that the trainer computes."""
        truncated = self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0
        kept_going = self.min_completion_length > 0 and not self.ignore_eos
        return not (truncated or kept_going or self.extra)


@dataclass(frozen=True)
class PromptImages:
    """The I pictures of one prompt of L tokens: patches for the vision tower, and where its F features go.

    ``slots`` are the prompt's placeholder tokens, one per feature; ``lengths`` the features of each picture; ``positions`` the
    rotary positions of the prompt's tokens, see `images`. ``pictures`` (PIL, upright, RGB) are for engines with an image
    processor of their own. Everything stays on the host until it is used, and on the data rank that has the prompt, though the
    ranks of its engine get a copy.
    """

    pixel_values: Float[Tensor, "patches d"]
    grid_thw: Int[Tensor, "I 3"]
    slots: Int[Tensor, "F"]
    positions: Int[Tensor, "L 3"]
    lengths: tuple[int, ...]
    pictures: tuple[Any, ...]


@dataclass(frozen=True)
class Prompts(Movable):
    """The prompts of one data rank, tokenised once.

    ``index`` is the row in the data set; seeds depend on it, so a prompt draws the same responses on any number of ranks.
    ``images`` has an entry per prompt, None for one without; it is None when no prompt has any.
    """

    ids: list[list[int]]
    raw: list[Prompt]
    columns: dict[str, list[Any]]
    index: Int[Tensor, "P"]
    images: list[PromptImages | None] | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Completion:
    """One response as the engine returns it.

    ``log_probs`` are of the distribution that was sampled from (temperature applied), or None when not asked for.
    ``finish_reason``: "stop" (an EOS id or a stop condition), "length" (cut at the limit) or "abort".
    ``spans``: of a conversation the lengths of the policy's turns and of what answered them, in turn; empty where all tokens
    are one turn. ``replies`` are the texts of the answers; their tokens have the log-prob NaN.
    """

    token_ids: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    log_probs: list[float] | None = None
    spans: tuple[int, ...] = ()
    replies: tuple[str, ...] = ()

    @property
    def mask(self) -> list[float]:
        """1 on tokens that were sampled."""
        spans = self.spans or (len(self.token_ids),)
        return [*chain.from_iterable([1.0 - i % 2] * n for i, n in enumerate(spans))]

    @property
    def turns(self) -> list[list[int]]:
        """Token ids of each turn of the policy."""
        ends = [*accumulate(self.spans or (len(self.token_ids),))]
        return [self.token_ids[start:end] for start, end in zip([0, *ends[1::2]], ends[::2], strict=True)]


@dataclass(frozen=True)
class Rollout(Movable):
    """The responses of one data rank: what the `RolloutCallback` adds to the batch as ``batch["rollout"]``.

    ``group`` is the prompt's row in the data set: members of a group share it, whichever rank they live on. ``greedy`` has the
    greedy response to each prompt, for estimators that take its score as a baseline; it is scored, and trained on never.
    """

    prompts: Prompts
    completions: list[Completion]
    sampling: Sampling
    group: Int[Tensor, "B"]
    mask: Float[Tensor, "B T"]
    sampler_log_probs: Float[Tensor, "B T"] | None = None
    greedy: Rollout | None = None

    @classmethod
    def build(
        cls, prompts: Prompts, completions: list[Completion], sampling: Sampling, with_greedy: bool = False
    ) -> Rollout:
        """Align ragged completions: masks from lengths, log-probs beside them when every completion has some.

        Args:
            with_greedy: behind the sampled responses to each prompt comes its greedy one.
        """
        n = sampling.num_generations
        if with_greedy:
            last = slice(n, None, n + 1)
            greedy = cls.build(prompts, completions[last], sampling.greedy)
            sampled = [c for i, c in enumerate(completions) if i % (n + 1) < n]
            return replace(cls.build(prompts, sampled, sampling), greedy=greedy)
        if len(completions) != len(prompts) * n:
            raise ValueError(
                f"{len(prompts)} prompts with {n} responses each need {len(prompts) * n} completions, got {len(completions)}"
            )
        log_probs = [c.log_probs for c in completions if c.log_probs is not None]
        return cls(
            prompts=prompts,
            completions=completions,
            sampling=sampling,
            group=prompts.index.repeat_interleave(n),
            mask=right_pad([c.mask for c in completions]),
            # of a distribution that the trainer does not compute they are not comparable with the policy's
            sampler_log_probs=right_pad(log_probs)
            if len(log_probs) == len(completions) and sampling.replayable
            else None,
        )

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def several_turns(self) -> bool:
        """Whether responses are conversations, and may hold replies."""
        return any(completion.spans for completion in self.completions)


@dataclass(frozen=True)
class Scores:
    """Rewards of the responses of one data rank, before they are gathered.

    ``total`` is NaN where a response has no score: it is then left out of its group and of the loss. ``failed`` are
    those that could not be scored; on the others of these every function abstained.
    ``parts`` has each reward function's own values; ``metrics`` scalars and ``columns`` lists they logged. ``tokens`` is what
    of ``total`` belongs to tokens (process rewards); the rest is the last token's.
    """

    total: Float[Tensor, "B"]
    parts: dict[str, Float[Tensor, "B"]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    failed: Bool[Tensor, "B"] | None = None
    tokens: Float[Tensor, "B T"] | None = None

    @property
    def failures(self) -> int:
        """Responses that could not be scored."""
        return 0 if self.failed is None else int(self.failed.sum())

    def judged_by(self, name: str | None) -> Float[Tensor, "B"]:
        """What says whether a response is right: one function's values, or with None the total.

        Raises:
            ValueError: there is no such function.
        """
        if name is None:
            return self.total
        if name not in self.parts:
            raise ValueError(
                f"model.val_metric must be one of the reward functions {', '.join(self.parts)}, got {name!r}"
            )
        return self.parts[name]


@dataclass(frozen=True)
class Experience(Movable):
    """The whole iteration's responses, equal on every rank, ready for the update.

    ``sequences`` are prompt + response token ids, ``prompt_lengths`` where the response begins, ``max_length`` the longest
    response allowed, ``parts`` the values of K reward functions, NaN where one abstained. A row whose mask is 0 throughout (empty
    or without a score) takes part in nothing. ``old_log_probs`` is None when the update's own forward pass stands for it (one
    optimizer step per rollout: the ratio is exactly 1). ``importance`` are the weights of a rollout correction that was computed
    over the iteration and ``importance_mean`` what they are divided by; ``chosen`` are the tokens of an optimizer step that its
    loss treats differently. ``baselines`` are the scores of the greedy responses to each response's prompt, ``sum_pi_squared`` is
    Σ_v π_old(v)² over the vocabulary at each token. ``scores`` say by ``model.val_metric`` whether a response is right (NaN where
    there is none), ``positive`` the shares of tokens in the likelihood of right responses that an optimizer step adds.

    Pictures do not travel: if any prompt has some, ``home`` is the data rank of each row, on which alone it is computed, and
    ``images`` has those of this data rank by row, one object for all responses to a prompt.
    """

    sequences: list[Int[Tensor, "_"]]
    prompt_lengths: list[int]
    group: Int[Tensor, "G"]
    mask: Float[Tensor, "G T"]
    rewards: Float[Tensor, "G T"]
    temperature: float
    max_length: int
    parts: Float[Tensor, "G K"] | None = None
    sampler_log_probs: Float[Tensor, "G T"] | None = None
    old_log_probs: Float[Tensor, "G T"] | None = None
    ref_log_probs: Float[Tensor, "G T"] | None = None
    values: Float[Tensor, "G T"] | None = None
    advantages: Float[Tensor, "G T"] | None = None
    returns: Float[Tensor, "G T"] | None = None
    importance: Float[Tensor, "G T"] | None = None
    importance_mean: float = 1.0
    chosen: Bool[Tensor, "G T"] | None = None
    baselines: Float[Tensor, "G"] | None = None
    sum_pi_squared: Float[Tensor, "G T"] | None = None
    scores: Float[Tensor, "G"] | None = None
    positive: Float[Tensor, "G T"] | None = None
    home: list[int] | None = None
    images: dict[int, PromptImages] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sequences)


@dataclass(frozen=True)
class Examples(Movable):
    """The labelled sequences of one optimizer step, equal on every rank: N of them, ``size`` to an example.

    A pair is an example of two, the better answer first. ``masks`` are 1 on the tokens that are learned, from ``prompt_lengths``
    on; ``margins``, one per pair, say how much better an answer is. Sequences and masks stay on the host until they are packed.
    """

    sequences: list[Int[Tensor, "_"]]
    prompt_lengths: list[int]
    masks: list[Float[Tensor, "_"]]
    size: int = 1
    margins: Float[Tensor, "pairs"] | None = None

    @cached_property
    def tokens(self) -> int:
        """That are learned."""
        return sum(int(mask.sum()) for mask in self.masks)

    def __len__(self) -> int:
        """Examples, not sequences."""
        return len(self.sequences) // self.size


def shift_labels(sequence: Int[Tensor, "L"], prompt_length: int) -> Int[Tensor, "L"]:
    """THE token shift: ``labels[t]`` is the response token that position ``t`` predicts, `IGNORE` elsewhere."""
    labels = torch.full_like(sequence, IGNORE)
    labels[prompt_length - 1 : -1] = sequence[prompt_length:]
    return labels


def right_pad(rows: Sequence[Sequence[float]]) -> Float[Tensor, "B T"]:
    """Ragged rows to a float tensor, padded with 0 on the right; T is at least 1."""
    out = torch.zeros(len(rows), max((len(r) for r in rows), default=0) or 1)
    for i, row in enumerate(rows):
        if len(row):
            out[i, : len(row)] = torch.as_tensor(row, dtype=torch.float32)
    return out


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from what it should depend on: a hash, so that neighbours are independent in every generator."""
    key = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
