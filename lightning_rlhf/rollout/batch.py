"""Responses in the making, and the batch in which they are drawn token by token.

    prompts that were read ── add ──▶ rows in flight ── draw ──▶ a token for each; those that end leave ──▶ forward pass ──▶ …

**Reproducible draws.** A row has a generator of its own, and a token is the inverse of the cumulative distribution at one
uniform. So a response depends on (weights, prompt, sampling, seed) and not on the rows beside it, except where another batch
shape makes the kernels round differently and a uniform falls into the gap that this leaves between two tokens: with a
vocabulary of 49,152, in float32 and at temperature 1, about one token in 500.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoTokenizer
from transformers.cache_utils import DynamicCache

from lightning_rlhf.rollout.cache import RowCache
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.types import PromptImages, Sampling

Key = tuple[tuple[int, ...], int]
"""Equal for the responses to one prompt: its tokens, and the identity of its pictures."""


@dataclass(slots=True)
class Row:
    """A response in the making; "abort" as long as it is not finished. Without ``rng`` it is the greedy one."""

    prompt: tuple[int, ...]
    images: PromptImages | None
    limit: int
    rng: random.Random | None
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: Literal["stop", "length", "abort"] = "abort"

    @property
    def key(self) -> Key:
        return self.prompt, id(self.images)

    @property
    def shift(self) -> int:
        """From a token's number to its rotary position, behind the prompt: a picture takes fewer positions than tokens."""
        return int(self.images.positions.max()) + 1 - len(self.prompt) if self.images else 0

    def append(self, token: int, log_prob: float, stop: Stop) -> None:
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        if stop.ends(self.token_ids):
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.limit:
            self.finish_reason = "length"


@dataclass(frozen=True)
class ReadPrompts:
    """What responses start from: prompts in a cache, and the row of each."""

    place: dict[Key, int]
    logits: Float[Tensor, "U V"]
    mask: Bool[Tensor, "U L"]
    cache: DynamicCache

    def only(self, key: Key) -> ReadPrompts:
        """One of them; the memory of the others is given back."""
        one = [self.place[key]]
        self.cache.reorder_cache(torch.tensor(one))  # type: ignore[arg-type]
        return ReadPrompts({key: 0}, self.logits[one], self.mask[one], self.cache)


class Batch:
    """The rows in flight, what the next token of each is drawn from, and the columns of the cache that each has filled."""

    logits: Float[Tensor, "n V"]
    mask: Bool[Tensor, "n L"]
    shift: Int[Tensor, "n 1"]

    def __init__(self, cache: RowCache) -> None:
        self.rows: list[Row] = []
        self.cache = cache

    def add(self, rows: Sequence[Row], read: ReadPrompts) -> None:
        """``rows`` begin behind their prompts, which are among those that were read."""
        device = read.logits.device
        select = torch.tensor([read.place[row.key] for row in rows], device=device)
        shift = torch.tensor([[row.shift] for row in rows], device=device)
        self.cache.add(read.cache, select)
        logits, mask = read.logits[select], self._widened(read.mask[select])
        if self.rows:
            logits = torch.cat([self.logits, logits])
            mask = torch.cat([self._widened(self.mask), mask])
            shift = torch.cat([self.shift, shift])
        self.logits, self.mask, self.shift = logits, mask, shift
        self.rows += rows

    def draw(self, sampling: Sampling, stop: Stop) -> Int[Tensor, "n"]:
        """Draw a token for each row, drop the rows that end, return the tokens of the others.

        Raises:
            RuntimeError: logits are not finite.
        """
        early = [[i] for i, row in enumerate(self.rows) if len(row.token_ids) < sampling.min_completion_length]
        if early and stop.ids:
            self.logits[early, stop.ids] = -torch.inf
        uniforms = [torch.nan if row.rng is None else row.rng.random() for row in self.rows]
        tokens, log_probs = draw(
            processed_logits(self.logits, sampling),
            torch.tensor(uniforms, dtype=torch.float64, device=self.logits.device),
        )
        for row, token, log_prob in zip(self.rows, tokens.tolist(), log_probs.tolist(), strict=True):
            if math.isnan(log_prob):
                raise RuntimeError("the policy's logits are not finite: look at its weights, and at its loss before")
            row.append(token, log_prob, stop)
        unfinished = [i for i, row in enumerate(self.rows) if row.finish_reason == "abort"]
        if len(unfinished) < len(self.rows):
            tokens = tokens[self._keep(unfinished)]
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.rows), 1)], 1)
        return tokens

    def _keep(self, rows: list[int]) -> list[int]:
        """Drop all others; the last ones take their places. Returns the rows in their new order."""
        staying, moving = set(rows), [i for i in rows if i >= len(rows)]
        order = [i if i in staying else moving.pop() for i in range(len(rows))]
        self.rows = [self.rows[i] for i in order]
        mask, self.shift = self.mask[order], self.shift[order]
        beginning = int(mask.any(0).int().argmax()) if order else mask.shape[1]  # of the longest row
        self.mask = mask[:, beginning:]
        self.cache.keep(order, self.mask.shape[1])
        return order

    def _widened(self, mask: Bool[Tensor, "k L"]) -> Bool[Tensor, "k C"]:
        return pad(mask, (self.cache.columns - mask.shape[1], 0))


@dataclass(frozen=True)
class Stop:
    """What ends a response: token ids, and strings in the decoded text."""

    ids: list[int]
    strings: tuple[str, ...]
    min_length: int
    tokenizer: Any

    @classmethod
    def build(cls, context: EngineSetup, sampling: Sampling) -> Stop:
        if sampling.ignore_eos:
            return cls([], (), 0, None)
        ids = sorted({*context.eos_token_ids, *sampling.stop_token_ids})
        tokenizer = _tokenizer(context.model, context.trust_remote_code) if sampling.stop else None
        return cls(ids, sampling.stop, sampling.min_completion_length, tokenizer)

    def ends(self, token_ids: list[int]) -> bool:
        if token_ids[-1] in self.ids:
            return True
        if not self.strings or len(token_ids) <= self.min_length:
            return False
        # a token is at least one byte, so a stop string that the last token completes lies within this tail
        tail = token_ids[-(max(len(s.encode()) for s in self.strings) + 4) :]
        early = tail[: max(0, self.min_length - len(token_ids) + len(tail))]
        text, ignored = self._text(tail), len(self._text(early).rstrip("\ufffd"))  # but for a part of a character
        return any(text.find(s, max(0, ignored + 1 - len(s))) >= 0 for s in self.strings)

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""


@lru_cache(maxsize=1)
def _tokenizer(model: str, trust_remote_code: bool) -> Any:
    """Of the policy: it takes a second to read, and a conversation asks for it in each turn."""
    return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)


def processed_logits(logits: Float[Tensor, "B V"], sampling: Sampling) -> Float[Tensor, "B V"]:
    """Logits of the distribution that is sampled: temperature, min-p, top-k, top-p (vLLM's order); -inf where dropped.

    Greedy sampling (temperature 0) leaves the logits alone.
    """
    if sampling.temperature == 0.0:
        return logits
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if sampling.min_p > 0.0:
        floor = logits.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1.0:
        ascending, order = logits.sort(-1)
        tail = ascending.softmax(-1).cumsum(-1) <= 1.0 - sampling.top_p
        tail[:, -1] = False  # the likeliest token always stays
        logits = logits.masked_fill(tail.scatter(-1, order, tail), -torch.inf)
    return logits


def draw(logits: Float[Tensor, "B V"], uniforms: Float[Tensor, "B"]) -> tuple[Int[Tensor, "B"], Float[Tensor, "B"]]:
    """One token per row and its log-prob: the inverse of the cumulative distribution at ``uniforms``, where one is NaN the
    likeliest.
    """
    probs, greedy = logits.softmax(-1), uniforms.isnan()
    tokens = logits.argmax(-1, keepdim=True)
    if not greedy.all():
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        # below the total: one without mass is never drawn
        threshold = uniforms.nan_to_num(0.0)[:, None] * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, threshold, right=True).clamp(max=logits.shape[-1] - 1)  # of NaN beyond
        tokens = torch.where(greedy[:, None], tokens, drawn)
    return tokens[:, 0], probs.gather(-1, tokens).log()[:, 0]
