"""From rows with answers to token ids: demonstrations for supervised fine-tuning, pairs for reward models and DPO.

    row ─▶ Pieces (text, learned?) ─▶ Labelled: token ids and the spans of them that are learned

    messages               [{role, content}, …]                     every assistant turn is learned
    prompt, completion     texts, or a list of messages each        the completion is learned
    text                   text                                     all of it is learned
    prompt, chosen, rejected                                        chosen and rejected are learned
    chosen, rejected       conversations, or texts; what they begin with alike is the prompt

Pieces are tokenised one by one, so that an answer begins at the token where generation would begin it: a rollout of the same
prompt continues the same ids. What ends a turn is the chat template's; a plain text ends with the tokenizer's EOS.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from lightning_rlhf.prompts import PromptEncoder, conversation
from lightning_rlhf.sources import Row
from lightning_rlhf.types import Message, Prompt

Learned = Literal["completions", "last", "all"]
"""Which tokens are learned: every assistant turn, the last one, or all that there are."""


class Piece(NamedTuple):
    """Part of a text, and whether it is learned."""

    text: str
    learned: bool


@dataclass(frozen=True)
class Labelled:
    """Token ids of one sequence; ``spans`` are the ranges of them that are learned, (start, end), ascending, start >= 1."""

    ids: array[int]
    spans: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.ids)


def demonstration(row: Row, encoder: PromptEncoder, learned: Learned = "completions") -> list[Piece]:
    """The pieces of a row that shows how to answer.

    Raises:
        ValueError: it has none of the formats above, or the chat template cannot be cut into turns.
    """
    if row.get("messages") is not None:
        messages = _messages(row["messages"], "messages")
        if learned == "completions":
            return turns(messages, encoder)
        if learned == "last":
            *before, last = _answered(messages)
            return answer(before, [last], encoder)
        return [Piece(encoder.templated(messages), True)]
    if row.get("prompt") is not None and row.get("completion") is not None:
        pieces = answer(row["prompt"], row["completion"], encoder)
    elif isinstance(row.get("text"), str) and row["text"]:
        pieces = [Piece(_ended(row["text"], encoder), True)]
    else:
        raise ValueError(f"needs messages, prompt and completion, or text, it has {_filled(row)}")
    return [Piece(piece.text, True) for piece in pieces] if learned == "all" else pieces


def preference(row: Row) -> tuple[Any, Any, Any]:
    """Prompt, better and worse answer of a row, each a text or messages.

    Raises:
        ValueError: it has none of the formats above, or the two answers are the same.
    """
    chosen, rejected, prompt = row.get("chosen"), row.get("rejected"), row.get("prompt")
    if not chosen or not rejected:
        raise ValueError(
            f"needs chosen and rejected, and a prompt unless they are conversations; it has {_filled(row)}"
        )
    if chosen == rejected:
        raise ValueError("has the same chosen and rejected: drop it")
    if _is_whole(chosen) and _is_whole(rejected):  # a prompt beside them is their beginning once more
        chosen, rejected = _messages(chosen, "chosen"), _messages(rejected, "rejected")
        if chosen[:-1] != rejected[:-1]:
            raise ValueError("must have a chosen and a rejected that differ in their last message only")
        prompt, chosen, rejected = chosen[:-1], chosen[-1:], rejected[-1:]
    elif prompt is None:
        prompt = _beginning(chosen, rejected) if isinstance(chosen, str) and isinstance(rejected, str) else ""
        if not prompt:
            raise ValueError("needs a prompt, or a chosen and a rejected that begin with it or are whole conversations")
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return prompt, chosen, rejected


def _beginning(chosen: str, rejected: str) -> str:
    """The words that two texts begin with alike: the prompt, as TRL takes it, which may end inside a word."""
    common = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    return "" if common in (chosen, rejected) or not (words := re.match(r"(.*)\s", common, re.DOTALL)) else words[1]


def answer(prompt: Any, completion: Any, encoder: PromptEncoder) -> list[Piece]:
    """Prompt and completion, each a text or messages; the completion is learned."""
    before = encoder.render(_sides(prompt, completion, encoder)[0])
    return [Piece(before, False), Piece(_rest(whole(prompt, completion, encoder), before), True)]


def whole(prompt: Any, completion: Any, encoder: PromptEncoder) -> str:
    """The same in one text, with what ends the answer: as reward models read it."""
    asked, reply = _sides(prompt, completion, encoder)
    if isinstance(asked, str):
        return _ended(f"{encoder.render(asked)}{reply}", encoder)
    last = asked[-1]
    if last["role"] == "assistant" and isinstance(completion, str) and isinstance(last["content"], str):
        # the prompt was the beginning of the answer
        return encoder.templated([*asked[:-1], last | {"content": last["content"] + completion}])
    return encoder.templated([*asked, *reply])


def _sides(prompt: Any, completion: Any, encoder: PromptEncoder) -> tuple[Any, Any]:
    """Both as texts, or both as messages where one of them is, or the encoder wraps texts."""
    asked = _checked(prompt, "prompt")
    reply = completion if isinstance(completion, str) else _messages(completion, "answer")
    if not isinstance(reply, str) and reply[-1]["role"] != "assistant":
        raise ValueError(f"has a wrong answer: it must end in an assistant message, got one of the {reply[-1]['role']}")
    if isinstance(asked, str) and isinstance(reply, str) and not encoder.chat_template:
        return asked, reply
    return (
        [{"role": "user", "content": asked}] if isinstance(asked, str) else asked,
        [{"role": "assistant", "content": reply}] if isinstance(reply, str) else reply,
    )


def turns(messages: Sequence[Message], encoder: PromptEncoder) -> list[Piece]:
    """A conversation in pieces: the assistant's turns are learned, what follows the last of them is left out."""
    pieces: list[Piece] = []
    done = ""
    for i, message in enumerate(_answered(messages)):
        if message["role"] != "assistant":
            continue
        if i == 0:
            raise ValueError("must not begin with an assistant message")
        before, after = encoder.render(list(messages[:i])), encoder.templated(messages[: i + 1])
        pieces += [Piece(_rest(before, done), False), Piece(_rest(after, before), True)]
        done = after
    return pieces


def _answered(messages: Sequence[Message]) -> Sequence[Message]:
    """Up to the last assistant message."""
    end = max((i for i, message in enumerate(messages, 1) if message["role"] == "assistant"), default=0)
    if not end:
        raise ValueError("has no assistant message to learn from")
    return messages[:end]


def tokenise(rows: Sequence[Sequence[Piece]], encoder: PromptEncoder) -> list[Labelled]:
    """Token ids of rows of pieces, and which of them are learned. A row begins with the special tokens that a text does."""
    first = iter(encoder([row[0].text for row in rows]))
    rest = iter(encoder.bare([piece.text for row in rows for piece in row[1:]]))
    found = []
    for row in rows:
        ids: array[int] = array("i")
        spans = []
        for number, piece in enumerate(row):
            start = max(len(ids), 1)  # nothing predicts the first token
            ids.extend(next(rest) if number else next(first))
            if piece.learned and len(ids) > start:
                spans.append((start, len(ids)))
        found.append(Labelled(ids, tuple(spans)))
    return found


def _rest(text: str, start: str) -> str:
    if not text.startswith(start):
        raise ValueError(
            "cannot be cut into turns: the chat template writes earlier messages in another way once others follow; set"
            " data.train_on to last or all, or take another data.chat_template_args"
        )
    return text[len(start) :]


def _checked(value: Any, name: str) -> Prompt:
    try:
        return conversation(value)
    except ValueError as error:
        raise ValueError(f"has a wrong {name}: it {error}") from error


def _messages(value: Any, name: str) -> list[Message]:
    messages = _checked(value, name)
    if isinstance(messages, str):
        raise ValueError(f"has a wrong {name}: it must be a list of messages with role and content, got text")
    return messages


def _is_whole(value: Any) -> bool:
    """Messages that begin before the answer."""
    return (
        isinstance(value, list)
        and len(value) > 1
        and isinstance(value[0], dict)
        and value[0].get("role") != "assistant"
    )


def _ended(text: str, encoder: PromptEncoder) -> str:
    """A text with one EOS at its end, as in TRL."""
    eos = str(encoder.tokenizer.eos_token or "")
    return text if text.endswith(eos) else text + eos


def _filled(row: Row) -> str:
    return ", ".join(name for name, value in row.items() if value not in (None, "", [])) or "no columns"
