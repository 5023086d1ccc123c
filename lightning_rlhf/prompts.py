"""From rows to token ids.

    Rows ─▶ PromptEncoder ─▶ PromptTable ─▶ Prompts

A prompt is tokenised once: the ids that the engine gets are the ids that the policy is trained on. Only ids are held,
as C arrays; rows are fetched for one batch at a time.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from lightning_rlhf.images import ImageEncoder, has_image_parts, pictures_of, with_image_parts
from lightning_rlhf.sources import Row, Rows, first_line
from lightning_rlhf.types import Message, Prompt, PromptImages, Prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK = 1024


def special_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens (one BOS, or none, as a rule) that the tokenizer puts before a text."""
    bare, full = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    return next((full[:i] for i in range(len(full)) if full[i : i + len(bare)] == bare), [])


def conversation(prompt: Any) -> Prompt:
    """A prompt without the None entries by which Arrow fills up keys that only other rows' messages have.

    Raises:
        ValueError: neither text nor a list of messages, or empty.
    """
    if isinstance(prompt, str):
        filled: Any = prompt.strip()
    elif isinstance(prompt, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in prompt):
        prompt = [{k: _parts(v) for k, v in message.items() if v is not None or k == "content"} for message in prompt]
        filled = any(message.get("content") for message in prompt)
    else:
        got = "nothing" if prompt is None else f"{type(prompt).__name__} {str(prompt)[:40]!r}"
        raise ValueError(f"must be text or a list of messages with role and content, got {got}")
    if not filled:
        raise ValueError("is empty")
    return prompt


def _parts(content: Any) -> Any:
    """Content parts without the keys that only parts of another type have: templates ask whether they are there."""
    if not isinstance(content, list):
        return content
    return [{k: v for k, v in part.items() if v is not None} if isinstance(part, dict) else part for part in content]


@dataclass(frozen=True)
class PromptEncoder:
    """Prompt to token ids.

    A conversation goes through the chat template once, with the generation prompt (one that ends in an assistant
    message is continued instead); text is taken as it is unless ``chat_template`` wraps it as one user message. Where
    the tokenizer begins a text with special tokens (a BOS), the ids begin with exactly those, whether or not template
    or text held them. ``vision`` is there for models that take pictures.
    """

    tokenizer: PreTrainedTokenizerBase
    chat_template: bool = False
    system_prompt: str | None = None
    template_args: Mapping[str, Any] | None = None
    vision: ImageEncoder | None = None

    def picture_lengths(self, row: Row) -> list[int]:
        """How many tokens each picture of a row takes.

        Raises:
            ValueError: a picture that cannot be read, or is meant for another kind of model.
        """
        stored = pictures_of(row)
        if self.vision is not None:
            return self.vision.lengths(stored)
        if any(not isinstance(one, str) for one in stored):  # a text in a column called image may be anything
            raise ValueError(
                "has images, but the model takes text only: drop the column, or take a vision-language model"
            )
        return []

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of rendered prompts."""
        prefix = special_prefix(self.tokenizer)
        return [ids if ids[: len(prefix)] == prefix else prefix + ids for ids in self.bare(texts)]

    def bare(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts that do not begin a sequence.

        Raises:
            ValueError: one holds half of a surrogate pair, as a text that was cut inside an emoji does.
        """
        if not texts:
            return []
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                near = text[max(0, error.start - 20) : error.end + 20]
                raise ValueError(f"data: {near!a} is no Unicode text ({error.reason}): mend or drop its row") from None
        return self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]

    def render(self, prompt: Any, pictures: int = 0) -> str:
        """The text that is tokenised, with one placeholder per picture.

        Raises:
            ValueError: the prompt is empty or no prompt at all, or there is no template, or it refuses the prompt.
        """
        messages = conversation(prompt)
        if isinstance(messages, str):
            if not self.chat_template:
                if self.system_prompt is not None:
                    raise ValueError(
                        "is text, to which data.system_prompt cannot be added: set data.chat_template: true"
                    )
                return messages
            messages = [{"role": "user", "content": messages}]
        messages = with_image_parts(messages, pictures)
        if self.vision is None and has_image_parts(messages):
            raise ValueError("has image parts, but the model takes text only: take a vision-language model")
        ends = "continue_final_message" if messages[-1]["role"] == "assistant" else "add_generation_prompt"
        return self.templated(messages, **{ends: True})

    def templated(self, messages: Sequence[Message], **ends: bool) -> str:
        """A conversation as the chat template writes it, behind the system prompt; by default with what ends its last message.

        Raises:
            ValueError: there is no template, or it refuses the conversation.
        """
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        if not self.tokenizer.chat_template:
            raise ValueError("needs a chat template, but the tokenizer has none: give text, or take an instruct model")
        arguments = {**(self.template_args or {}), **ends}
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments))
        except Exception as error:
            raise ValueError(f"is refused by the chat template: {first_line(error)}") from error


@dataclass(frozen=True)
class PromptTable:
    """Rows, and the token ids of those that are used.

    Args:
        rows: the data.
        prompt_column: which column is the prompt.
        columns: the other columns; they flow to the rewards.
        numbers: the rows used, by number.
        ids: token ids of each of them.
        first_index: the `Prompts.index` of row 0.
        vision: reads the pictures of the rows, of models that take some.
    """

    rows: Rows
    prompt_column: str
    columns: tuple[str, ...]
    numbers: Sequence[int]
    ids: list[array[int]]
    first_index: int = 0
    vision: ImageEncoder | None = None

    @classmethod
    def build(
        cls, rows: Rows, numbers: range, encoder: PromptEncoder, prompt_column: str = "prompt", first_index: int = 0
    ) -> PromptTable:
        """Tokenise the rows ``numbers``.

        Raises:
            ValueError: no such column, or a prompt that is none; the first such row is named.
        """
        columns: dict[str, None] = {}
        ids: list[array[int]] = []
        for start in range(0, len(numbers), _CHUNK):
            texts, lengths = [], []
            for number in numbers[start : start + _CHUNK]:
                row = rows[number]
                columns.update(dict.fromkeys(row))
                if prompt_column not in row:
                    raise ValueError(
                        f"data: row {number} has no column {prompt_column!r}, only {', '.join(row) or 'none'}"
                    )
                with _naming(number):
                    lengths.append(encoder.picture_lengths(row))
                    texts.append(encoder.render(row[prompt_column], len(lengths[-1])))
            for number, one, counts in zip(numbers[start:], encoder(texts), lengths, strict=False):
                with _naming(number):
                    ids.append(array("i", encoder.vision.expand(one, counts) if encoder.vision else one))
        columns.pop(prompt_column, None)
        return cls(rows, prompt_column, tuple(columns), numbers, ids, first_index, encoder.vision)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.ids), default=0)

    @cached_property
    def fingerprint(self) -> str:
        """Of all token ids in their order."""
        digest = hashlib.blake2b(digest_size=8)
        for ids in self.ids:
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(ids)
        return digest.hexdigest()

    def where(self, keep: Callable[[array[int]], bool]) -> PromptTable:
        """A table of the prompts whose token ids pass ``keep``."""
        kept = [(number, ids) for number, ids in zip(self.numbers, self.ids, strict=True) if keep(ids)]
        return replace(self, numbers=[number for number, _ in kept], ids=[ids for _, ids in kept])

    def take(self, positions: Sequence[int]) -> Prompts:
        """The prompts at ``positions``, which may be none."""
        numbers = [self.numbers[p] for p in positions]
        rows = [self.rows[number] for number in numbers]
        images: list[PromptImages | None] = []
        for position, number, row in zip(positions, numbers, rows, strict=True):
            stored = pictures_of(row) if self.vision else []
            with _naming(number):
                images.append(self.vision(self.ids[position], stored) if self.vision and stored else None)
        return Prompts(
            ids=[self.ids[p].tolist() for p in positions],
            raw=[conversation(row[self.prompt_column]) for row in rows],
            columns={name: [row.get(name) for row in rows] for name in self.columns},
            index=torch.tensor(numbers, dtype=torch.int64) + self.first_index,
            images=images if any(images) else None,
        )


@contextmanager
def _naming(row: int) -> Iterator[None]:
    """Errors about a prompt, with its row."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"data: the prompt of row {row} {error}") from error
