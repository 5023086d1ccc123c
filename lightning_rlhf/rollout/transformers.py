"""The embedded engine: a stock Hugging Face model with a decoding loop of its own.

It needs nothing beyond the base install and is the oracle that other engines are tested against. Every rank holds a
whole, unsharded copy, filled by `load_weights`, so that decoding needs no collective and no rank waits for another.

    prompts ──▶ what all have in common, once ──▶ rest of each prompt, once ──▶ one row per response
                                                        ▲                             │
                                              places of rows that ended ◀── draw, forward one token, …
"""

from __future__ import annotations

import inspect
import random
from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from threading import Event
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from lightning_rlhf.hf_config import load_config
from lightning_rlhf.images import auto_class, prefill_inputs
from lightning_rlhf.rollout.batch import Batch, ReadPrompts, Row, Stop
from lightning_rlhf.rollout.cache import ROOM, RowCache
from lightning_rlhf.rollout.engine import EngineMemory, EngineSetup, NamedTensors, RolloutEngine
from lightning_rlhf.rollout.weights import checksum
from lightning_rlhf.types import Completion, PromptImages, Sampling


class TransformersEngine(RolloutEngine):
    """Generates with `transformers` in this process.

    Args:
        batch_size: most responses decoded at once; when some have ended, others take their places.
        dtype: of weights and compute; "auto" is the trainer's.
    """

    memory_settings = "rollout.engine.batch_size"

    def __init__(self, batch_size: int = 64, dtype: Literal["auto", "float32", "bfloat16"] = "auto") -> None:
        if batch_size < 1:
            raise ValueError(f"rollout.engine.batch_size must be at least 1, got {batch_size}")
        self.batch_size = batch_size
        self.dtype = dtype
        self.model: Any = None
        self._asleep: set[str] = set()
        self._interrupted = Event()

    def setup(self, context: EngineSetup) -> None:
        self._interrupted.clear()
        if self.model is not None and self.keeps(context):
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
        """The cache of a full batch, which grows with its responses and is gone after the last."""
        batch = min(sequences, self.batch_size)
        return replace(super().plan_memory(weights, kv_token, context + ROOM, batch, device), reserved=False)

    def check_sampling(self, sampling: Sampling) -> None:
        if sampling.extra:
            raise ValueError(
                f"rollout.sampling.extra must be empty with the TransformersEngine, got {', '.join(sorted(sampling.extra))}:"
                " leave it out, or take VLLMEngine"
            )

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
        self.weight_version, self._asleep = -1, set()

    # ── generation ───────────────────────────────────────────────────────────────────────────────────────────────────

    def interrupt(self) -> None:
        self._interrupted.set()

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[int | None],
        log_probs: bool = False,
        images: Sequence[PromptImages | None] | None = None,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`. Greedy log-probs are those of the untruncated distribution at temperature 1.

        Raises:
            RuntimeError: no usable weights, or asleep.
            ValueError: a prompt that leaves no room for a response, or sampling options this engine does not have.
        """
        if self.model is None or self._asleep or self.weight_version < 0:
            raise RuntimeError("the engine holds no usable weights: wake it and load_weights before generate")
        self.check_sampling(sampling)
        shown = images or [None] * len(prompts)
        rows = [self._row(*entry, sampling) for entry in zip(prompts, seeds, shown, strict=True)]
        if rows:
            self._decode(rows, sampling, Stop.build(self.context, sampling))
        return [Completion(r.token_ids, r.finish_reason, r.log_probs if log_probs else None) for r in rows]

    def _row(self, prompt: Sequence[int], seed: int | None, images: PromptImages | None, sampling: Sampling) -> Row:
        room = self.context.max_model_len - len(prompt)
        if not prompt or room < 1:
            raise ValueError(
                f"a prompt must have 1 to {self.context.max_model_len - 1} tokens (max_model_len is "
                f"{self.context.max_model_len}), got {len(prompt)}: shorten it or raise max_model_len"
            )
        rng = None if seed is None or sampling.temperature == 0.0 else random.Random(seed)
        return Row(tuple(prompt), images, min(room, sampling.max_completion_length), rng)

    def _decode(self, rows: list[Row], sampling: Sampling, stop: Stop) -> None:
        """Draw all responses in order, ``batch_size`` at once: where enough have ended, the next ones take their places."""
        prefix, read = self._read_prefix(rows), list[ReadPrompts]()
        batch = Batch(RowCache(self.model.config, min(self.batch_size, len(rows))))
        first = {row.key: i for i, row in reversed(list(enumerate(rows)))}
        waiting = deque(sorted(rows, key=lambda row: first[row.key]))  # responses to a prompt come one after the other
        while waiting or batch.rows:
            if self._interrupted.is_set():
                raise RuntimeError("the generation was interrupted")
            room = self.batch_size - len(batch.rows)
            if waiting and room >= min(len(waiting), max(1, self.batch_size // _REFILLS)):
                read = self._fill(batch, waiting, read, prefix)
            tokens = batch.draw(sampling, stop)
            if batch.rows:
                batch.logits = self._forward(tokens[:, None], batch.mask, batch.cache, shift=batch.shift)

    def _fill(
        self, batch: Batch, waiting: deque[Row], read: list[ReadPrompts], prefix: DynamicCache
    ) -> list[ReadPrompts]:
        """The first rows that wait join the batch, as many as it has room for.

        Args:
            read: the prompt of the first of them, if a response to it has begun before.

        Returns:
            The same for the next call.
        """
        room = self.batch_size - len(batch.rows)
        new = [waiting.popleft() for _ in range(min(room, len(waiting)))]
        known = {key for prompts in read for key in prompts.place}
        unread = {row.key: row for row in new if row.key not in known}
        shared = prefix.get_seq_length()
        read = read + [self._read(group, prefix) for group in alike(list(unread.values()), shared)]
        for prompts in read:
            batch.add([row for row in new if row.key in prompts.place], prompts)
        return [prompts.only(waiting[0].key) for prompts in read if waiting and waiting[0].key in prompts.place]

    def _read(self, rows: list[Row], prefix: DynamicCache) -> ReadPrompts:
        """The different prompts of ``rows``, behind what all prompts have in common."""
        cache, shared, device = deepcopy(prefix), prefix.get_seq_length(), self.context.device
        cache.reorder_cache(self._index([0] * len(rows)))
        rest = [torch.tensor(row.prompt[shared:]) for row in rows]
        ids = pad_sequence(rest, True, self.context.pad_token_id, "left")
        mask = torch.arange(ids.shape[1], 0, -1) <= torch.tensor([[len(one)] for one in rest])
        mask = pad(mask, (shared, 0), value=True).to(device)
        shown = {}
        if any(row.images for row in rows):
            shown = prefill_inputs([(len(row.prompt), row.images) for row in rows], shared, device)
        logits = self._forward(ids.to(device), mask, cache, **shown)
        return ReadPrompts({row.key: i for i, row in enumerate(rows)}, logits, mask, cache)

    def _read_prefix(self, rows: list[Row]) -> DynamicCache:
        """What all prompts begin with; nothing where it is not worth a forward pass of its own."""
        cache = DynamicCache(config=self.model.config)
        unique = list({row.key: row for row in rows}.values())
        # not beyond the first picture: equal placeholders may stand for different ones
        pictures = [int(row.images.slots[0]) for row in unique if row.images]
        shared = min(self._shared_length([row.prompt for row in unique]), *pictures, len(unique[0].prompt))
        if shared:
            ids = self._index([unique[0].prompt[:shared]])
            self._forward(ids, torch.ones_like(ids, dtype=torch.bool), cache)
        return cache

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
        cache: Cache,
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
"""Tokens that a forward pass more must save: those of a common prefix, or padding."""

_REFILLS = 8
"""A batch is filled up when an eighth of it has ended: prompts are not read one at a time."""


def alike(rows: Sequence[Row], shared: int) -> list[list[Row]]:
    """Groups of rows that are read together: padded by no more than a quarter, unless that is little.

    Args:
        shared: tokens of each prompt that need not be read.
    """
    groups: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: len(row.prompt)):
        lengths = [len(other.prompt) for other in groups[-1]] if groups else []
        padding = sum(len(row.prompt) - length for length in lengths)
        if lengths and padding <= _WORTH_A_PASS + sum(length - shared for length in lengths) / 4:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
