"""The embedded engine: a stock Hugging Face model with a decoding loop of its own.

It needs nothing beyond the base install and is the oracle that other engines are tested against. Every rank holds a
whole, unsharded copy, filled by `load_weights`, so that decoding needs no collective and no rank waits for another.

    prompts ── unique, sorted by length ──▶ common prefix once ──▶ rest of each prompt once ──▶ one row per response
            ──▶ draw, drop finished rows, forward one token ──▶ ...

**Reproducible draws.** A row has a generator of its own, and a token is the inverse of the cumulative
distribution at one uniform. So a response depends on (weights, prompt, sampling, seed) and not on the rows beside it,
except where another batch shape makes the kernels round differently and a uniform falls into that gap (about one token
in 10^6 in float32).
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AutoTokenizer
from transformers.cache_utils import DynamicCache, DynamicLayer

from lightning_rlhf.hf_config import load_config
from lightning_rlhf.images import auto_class, prefill_inputs
from lightning_rlhf.rollout.engine import EngineMemory, EngineSetup, NamedTensors, RolloutEngine
from lightning_rlhf.rollout.weights import checksum
from lightning_rlhf.types import Completion, PromptImages, Sampling


class TransformersEngine(RolloutEngine):
    """Generates with `transformers` in this process.

    Args:
        batch_size: most responses decoded at once; more are decoded one batch after the other.
        dtype: of weights and compute; "auto" is the trainer's.
    """

    def __init__(self, batch_size: int = 64, dtype: Literal["auto", "float32", "bfloat16"] = "auto") -> None:
        if batch_size < 1:
            raise ValueError(f"rollout.engine.batch_size must be at least 1, got {batch_size}")
        self.batch_size = batch_size
        self.dtype = dtype
        self.model: Any = None
        self._asleep: set[str] = set()

    def setup(self, context: EngineSetup) -> None:
        if self.model is not None:
            return
        self.context = context
        dtype = context.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
        config = load_config(context.model, context.config_overrides, context.trust_remote_code)
        model: Any = auto_class(config).from_pretrained(
            context.model, config=config, dtype=dtype, trust_remote_code=context.trust_remote_code
        )
        model.to(device=context.device)
        self.model = model.eval().requires_grad_(False)
        self._shapes = [p.shape for p in self.model.parameters()]
        self._forward_arguments = set(inspect.signature(self.model.forward).parameters)
        layers = DynamicCache(config=self.model.config).layers
        self._full_attention = all(type(layer) is DynamicLayer for layer in layers)

    def plan_memory(self, weights: int, kv_token: int, context: int, sequences: int, device: int) -> EngineMemory:
        """A batch's cache, which grows with its responses and is gone after it."""
        batch = min(sequences, self.batch_size)
        return replace(super().plan_memory(weights, kv_token, context, batch, device), reserved=False)

    # ── memory and weights ───────────────────────────────────────────────────────────────────────────────────────────

    def wake(self, tags: Sequence[str]) -> None:
        if "weights" in tags and "weights" in self._asleep:
            for parameter, shape in zip(self.model.parameters(), self._shapes, strict=True):
                if parameter.shape != shape:  # dropped: memory to load into
                    parameter.data = parameter.data.new_empty(shape, device=self.context.device)
                parameter.data = parameter.data.to(self.context.device)
        self._asleep -= set(tags)

    def sleep(self, level: int) -> None:
        if level == 0 or self.model is None:
            return
        self._asleep = {"weights", "kv_cache"}
        for parameter in self.model.parameters():
            parameter.data = parameter.data.cpu() if level == 1 else parameter.data.new_empty(0)
        if level == 2:
            self.weight_version = -1
        if self.context.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def load_weights(self, weights: NamedTensors, version: int) -> None:
        if "weights" in self._asleep:
            raise RuntimeError("the engine's weights are asleep: wake(['weights']) before load_weights")
        self.weight_version = -1  # until all of them are there
        held = self.model.state_dict(keep_vars=True)
        missing = {id(tensor): name for name, tensor in held.items()}  # persistent buffers too
        for name, tensor in weights:
            if name not in held:
                raise ValueError(
                    f"the engine's model has no weight {name!r}: names must be those of {type(self.model).__name__}"
                )
            if held[name].shape != tensor.shape:
                raise ValueError(
                    f"weight {name!r} must have shape {tuple(held[name].shape)}, got {tuple(tensor.shape)}"
                )
            held[name].copy_(tensor)
            missing.pop(id(held[name]), None)
        if missing:
            first = min(missing.values())
            raise ValueError(
                f"{len(missing)} weights were not sent to the engine, the first is {first!r}: send all of them"
            )
        self.weight_version = version

    def checksum(self) -> int | None:
        if self.weight_version < 0 or "weights" in self._asleep:
            return None
        return checksum(self.model.state_dict(keep_vars=True).items())

    def close(self) -> None:
        self.model = None
        self.weight_version = -1

    # ── generation ───────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[int],
        log_probs: bool = False,
        images: Sequence[PromptImages | None] | None = None,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`. Greedy log-probs are those of the untruncated distribution at temperature 1.

        Raises:
            RuntimeError: no usable weights, or asleep.
            ValueError: a prompt that leaves no room for a response, or sampling options this engine does not have.
        """
        self._check_usable(sampling)
        shown = images or [None] * len(prompts)
        rows = [self._row(*entry, sampling) for entry in zip(prompts, seeds, shown, strict=True)]
        stop = _Stop.build(self.context, sampling)
        order = sorted(rows, key=lambda row: (len(row.prompt), row.prompt))
        for start in range(0, len(order), self.batch_size):
            self._generate_batch(order[start : start + self.batch_size], sampling, stop)
        return [Completion(r.token_ids, r.finish_reason, r.log_probs if log_probs else None) for r in rows]

    def _check_usable(self, sampling: Sampling) -> None:
        if self.model is None or self._asleep or self.weight_version < 0:
            raise RuntimeError("the engine holds no usable weights: wake it and load_weights before generate")
        if sampling.extra:
            raise ValueError(f"sampling.extra must be empty with the TransformersEngine, got {sorted(sampling.extra)}")

    def _row(self, prompt: Sequence[int], seed: int, images: PromptImages | None, sampling: Sampling) -> _Row:
        room = self.context.max_model_len - len(prompt)
        if not prompt or room < 1:
            raise ValueError(
                f"a prompt must have 1 to {self.context.max_model_len - 1} tokens (max_model_len is "
                f"{self.context.max_model_len}), got {len(prompt)}: shorten it or raise max_model_len"
            )
        return _Row(tuple(prompt), images, min(room, sampling.max_completion_length), random.Random(seed))

    def _generate_batch(self, rows: list[_Row], sampling: Sampling, stop: _Stop) -> None:
        unique = {row.key: row for row in rows}
        logits, mask, cache = self._prefill(list(unique.values()))
        place = {key: i for i, key in enumerate(unique)}
        select = self._index([place[row.key] for row in rows])
        cache.reorder_cache(select)
        logits, mask = logits[select], mask[select]
        shift = self._index([[row.shift] for row in rows])
        while True:
            step = len(rows[0].token_ids)
            if step < sampling.min_completion_length:
                logits[:, stop.ids] = -torch.inf
            uniforms = torch.tensor([row.rng.random() for row in rows], dtype=torch.float64, device=logits.device)
            tokens, log_probs = draw(processed_logits(logits, sampling), uniforms, greedy=sampling.temperature == 0)
            for row, token, log_prob in zip(rows, tokens.tolist(), log_probs.tolist(), strict=True):
                row.append(token, log_prob, stop)
            keep = [i for i, row in enumerate(rows) if row.finish_reason == "abort"]
            if not keep:
                return
            if len(keep) < len(rows):
                select = self._index(keep)
                cache.reorder_cache(select)
                tokens, mask, shift, rows = tokens[select], mask[select], shift[select], [rows[i] for i in keep]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
            logits = self._forward(tokens[:, None], mask, cache, shift=shift)

    def _prefill(self, rows: list[_Row]) -> tuple[Float[Tensor, "U V"], Bool[Tensor, "U L"], DynamicCache]:
        """Next-token logits, mask and cache of different prompts; their common beginning is computed once."""
        cache = DynamicCache(config=self.model.config)
        prompts = [row.prompt for row in rows]
        # not beyond the first picture: equal placeholders may stand for different ones
        shared = min(self._shared_length(prompts), *(int(r.images.slots[0]) for r in rows if r.images), len(prompts[0]))
        head = torch.ones(len(prompts), shared, dtype=torch.bool, device=self.context.device)
        if shared:
            self._forward(self._index([prompts[0][:shared]]), head[:1], cache)
            cache.reorder_cache(self._index([0] * len(prompts)))
        ids, mask = left_pad([prompt[shared:] for prompt in prompts], self.context.pad_token_id)
        mask = torch.cat([head, mask.to(head.device)], 1)
        shown = {}
        if any(row.images for row in rows):
            shown = prefill_inputs([(len(row.prompt), row.images) for row in rows], shared, self.context.device)
        return self._forward(ids.to(head.device), mask, cache, **shown), mask, cache

    def _shared_length(self, prompts: list[tuple[int, ...]]) -> int:
        """Tokens of the common prefix worth a forward pass of their own.

        Padding then lies between prefix and rest, which a sliding window (counted in cache slots) would miscount.
        """
        if not self._full_attention:
            return 0
        first, last = min(prompts), max(prompts)  # what these two share, all between them share
        differ = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
        shared = min(next(differ, len(first)), min(map(len, prompts)) - 1)
        return shared if shared * (len(prompts) - 1) >= _WORTH_A_PASS else 0

    def _forward(
        self,
        ids: Int[Tensor, "B q"],
        mask: Bool[Tensor, "B L"],
        cache: DynamicCache,
        shift: Int[Tensor, "B 1"] | int = 0,
        **shown: Tensor,
    ) -> Float[Tensor, "B V"]:
        positions = (mask.cumsum(-1) - 1).clamp_(min=0)[:, -ids.shape[1] :] + shift
        optional = {"position_ids": positions, "logits_to_keep": self._index([ids.shape[1] - 1])} | shown
        arguments: dict[str, Any] = {k: v for k, v in optional.items() if k in self._forward_arguments}
        # transformers 5.24 has a new name for it
        arguments["cache" if "cache" in self._forward_arguments else "past_key_values"] = cache
        out = self.model(input_ids=ids, attention_mask=mask, use_cache=True, **arguments)
        return out.logits[:, -1].float()

    def _index(self, values: Sequence[Any]) -> Any:
        return torch.tensor(values, device=self.context.device)


_WORTH_A_PASS = 64
"""Prompt tokens that a common prefix must save before it gets a forward pass of its own."""


@dataclass(slots=True)
class _Row:
    """A response in the making; "abort" as long as it is not finished."""

    prompt: tuple[int, ...]
    images: PromptImages | None
    limit: int
    rng: random.Random
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: Literal["stop", "length", "abort"] = "abort"

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """Equal for the responses to one prompt."""
        return self.prompt, id(self.images)

    @property
    def shift(self) -> int:
        """From a token's number to its rotary position, behind the prompt: a picture takes fewer positions than tokens."""
        return int(self.images.positions.max()) + 1 - len(self.prompt) if self.images else 0

    def append(self, token: int, log_prob: float, stop: _Stop) -> None:
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        if stop.ends(self.token_ids):
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.limit:
            self.finish_reason = "length"


@dataclass(frozen=True)
class _Stop:
    """What ends a response: token ids, and strings in the decoded text."""

    ids: list[int]
    strings: tuple[str, ...]
    min_length: int
    tokenizer: Any

    @classmethod
    def build(cls, context: EngineSetup, sampling: Sampling) -> _Stop:
        if sampling.ignore_eos:
            return cls([], (), 0, None)
        ids = sorted({*context.eos_token_ids, *sampling.stop_token_ids})
        tokenizer = None
        if sampling.stop:
            tokenizer = AutoTokenizer.from_pretrained(context.model, trust_remote_code=context.trust_remote_code)
        return cls(ids, sampling.stop, sampling.min_completion_length, tokenizer)

    def ends(self, token_ids: list[int]) -> bool:
        if token_ids[-1] in self.ids:
            return True
        if not self.strings or len(token_ids) <= self.min_length:
            return False
        # a token is at least one byte, so a stop string that the last token completes lies within this tail
        tail = token_ids[-(max(len(s.encode()) for s in self.strings) + 4) :]
        text = self.tokenizer.decode(tail, skip_special_tokens=False)
        return any(s in text for s in self.strings)


def left_pad(rows: Sequence[Sequence[int]], value: int) -> tuple[Int[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """Ragged token ids padded on the left, and the mask of what is real."""
    length = max(map(len, rows))
    ids = torch.tensor([[value] * (length - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[False] * (length - len(row)) + [True] * len(row) for row in rows])
    return ids, mask


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


def draw(
    logits: Float[Tensor, "B V"], uniforms: Float[Tensor, "B"], greedy: bool
) -> tuple[Int[Tensor, "B"], Float[Tensor, "B"]]:
    """One token per row and its log-prob: the argmax, or the inverse of the cumulative distribution at ``uniforms``."""
    probs = logits.softmax(-1)
    if greedy:
        tokens = logits.argmax(-1, keepdim=True)
    else:
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        threshold = uniforms[:, None] * cumulative[:, -1:]  # below the total: a token without mass is never drawn
        tokens = torch.searchsorted(cumulative, threshold, right=True)
    return tokens[:, 0], probs.gather(-1, tokens).log()[:, 0]
