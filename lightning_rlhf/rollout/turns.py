"""Responses of several turns: what the policy says is answered by a function of the user's, and the policy goes on.

    prompt ─▶ turn ─▶ reply ─▶ turn ─▶ … ─▶ turn        one response, one sequence
                ▲        └ masked: in the context of what follows, in no loss
                └ sampled: learned

A turn stays as it was drawn, the reply is put behind it in the tokens of the chat template, and the engine gets all of it as its
next prompt: nothing that was sampled is tokenised again.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jsonargparse.typing import PositiveInt

from lightning_rlhf.types import Completion, Sampling, derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Generate = Callable[..., list[Completion]]
"""`RolloutEngine.generate` but for prompts and seeds."""

_TURN, _REPLY = "\u2767turn\u2767", "\u2767reply\u2767"


@dataclass(frozen=True)
class Conversation:
    """How turns are answered. `Sampling.max_completion_length` is then the length of a turn.

    Args:
        reply: a function by dotted path, ``f(turns, **columns) -> str | None``. ``turns`` are the texts since the prompt, the
            policy's and the replies in turn; ``columns`` those of the prompt's row that it names (all with ``**``), and
            ``prompt``. None ends the conversation. It runs in threads, and has to answer equal arguments equally for runs to be
            repeatable.
        max_turns: of the policy; the last one is not answered.
        max_reply_length: tokens of a reply with what the chat template puts around it; a longer one is cut.
        role: of the reply in the chat template; null puts its text behind the turn as it is, without a template.
        threads: replies that are computed at once.
    """

    reply: Callable[..., str | None]
    max_turns: PositiveInt = 4
    max_reply_length: PositiveInt = 256
    role: str | None = "user"
    threads: PositiveInt = 16

    def __post_init__(self) -> None:
        if not callable(self.reply):
            raise ValueError(
                f"rollout.conversation.reply must be a function, in YAML its dotted path, got {self.reply!r}"
            )
        for name in ("max_turns", "max_reply_length", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.conversation.{name} must be at least 1, got {getattr(self, name)}")

    def whole(self, sampling: Sampling) -> Sampling:
        """The same with the length of all turns and replies."""
        total = self.max_turns * sampling.max_completion_length + (self.max_turns - 1) * self.max_reply_length
        return replace(sampling, max_completion_length=total)

    @property
    def key(self) -> tuple[Any, ...]:
        """What responses depend on, in words that are the same in every process."""
        name = getattr(self.reply, "__qualname__", type(self.reply).__qualname__)
        return name, self.max_turns, self.max_reply_length, self.role


@dataclass
class _Talk:
    """One response as it grows."""

    prompt: list[int]
    row: Mapping[str, Any]
    seed: int | None
    pieces: list[list[int]] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    log_probs: list[float] | None = field(default_factory=list)
    finish_reason: Any = "stop"

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *(token for piece in self.pieces for token in piece)]

    def add(self, ids: list[int], text: str, log_probs: list[float] | None) -> None:
        self.pieces.append(ids)
        self.turns.append(text)
        self.log_probs = None if log_probs is None or self.log_probs is None else self.log_probs + log_probs

    @property
    def completion(self) -> Completion:
        ids = [token for piece in self.pieces for token in piece]
        spans = tuple(map(len, self.pieces))
        return Completion(ids, self.finish_reason, self.log_probs, spans, tuple(self.turns[1::2]))


class Speaker:
    """Holds the conversations of a run.

    Args:
        conversation: how turns are answered.
        tokenizer: of the policy.
        template_args: further variables of the chat template.

    Raises:
        ValueError: there is no chat template for the role, or a reply has no room in what it puts around it, or ``reply`` is
            a coroutine.
    """

    def __init__(
        self,
        conversation: Conversation,
        tokenizer: PreTrainedTokenizerBase,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        self.conversation, self.tokenizer = conversation, deepcopy(tokenizer)  # it may speak in a thread of its own
        self._arguments, self._start = template_args or {}, self._tokens("\n")
        before, after = ("", "") if conversation.role is None else self._around()
        self._end = self._encoded(before)[:1]
        around = len(self._encoded(before + after))
        if around >= conversation.max_reply_length:
            raise ValueError(
                f"rollout.conversation.max_reply_length={conversation.max_reply_length} must be above {around}, the tokens that"
                " the chat template puts around a reply: raise it"
            )
        if any(map(inspect.iscoroutinefunction, (conversation.reply, type(conversation.reply).__call__))):
            raise ValueError("rollout.conversation.reply must be a plain function, not async: it runs in threads")
        names = list(inspect.signature(conversation.reply).parameters.values())
        self._all = any(p.kind is p.VAR_KEYWORD for p in names)
        self._first, self._named = {p.name for p in names[:1]}, {p.name for p in names[1:]}
        by_name = [p for p in names[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._needed = {p.name for p in by_name if p.default is p.empty}

    def __call__(
        self,
        generate: Generate,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[Mapping[str, Any]],
        seeds: Sequence[int | None],
    ) -> list[Completion]:
        """One response per prompt, in their order.

        Args:
            generate: one turn for each of some prompts: ``generate(prompts, seeds=...)``.
            rows: columns of each prompt.

        Raises:
            ValueError: ``reply`` names a column that there is not.
            RuntimeError: it failed, or gave no text, for every first turn.
        """
        if rows and (missing := sorted(self._needed - rows[0].keys())):
            columns = ", ".join(rows[0]) or "no column"
            raise ValueError(f"rollout.conversation.reply asks for {missing[0]!r}, which is none of {columns}")
        talks = [_Talk(list(p), row, seed) for p, row, seed in zip(prompts, rows, seeds, strict=True)]
        going = talks
        with ThreadPoolExecutor(self.conversation.threads, thread_name_prefix="reply") as pool:
            for number in range(self.conversation.max_turns):
                if number:
                    going = self._answered(going, list(pool.map(self._asked, going)))
                if not going:
                    break
                draws = [t.seed if t.seed is None or not number else derive_seed(t.seed, number) for t in going]
                for talk, turn in zip(going, generate([t.ids for t in going], seeds=draws), strict=True):
                    talk.add(turn.token_ids, self._decoded(turn.token_ids), turn.log_probs)
                    talk.finish_reason = turn.finish_reason
                going = [talk for talk in going if talk.finish_reason == "stop"]
        return [talk.completion for talk in talks]

    def _asked(self, talk: _Talk) -> str | Exception | None:
        columns = {
            name: deepcopy(value)  # responses to one prompt share it
            for name, value in talk.row.items()
            if name not in self._first and (self._all or name in self._named)
        }
        try:
            reply = self.conversation.reply(list(talk.turns), **columns)
            if not (reply is None or isinstance(reply, str)):
                raise TypeError(f"a reply is a text or None, got {type(reply).__name__}")
        except Exception as error:
            return error
        return reply

    def _answered(self, asked: list[_Talk], replies: list[str | Exception | None]) -> list[_Talk]:
        """Those that go on. A response without a reply counts as one that the engine gave up: it is in no loss."""
        errors = [reply for reply in replies if isinstance(reply, Exception)]
        if errors:
            told = f"rollout.conversation.reply failed for {len(errors)} of {len(asked)} responses, first with"
            told = f"{told} {_said(errors[0])}"
            if len(errors) == len(asked) and len(asked[0].turns) == 1:  # later on few may be left
                raise RuntimeError(told) from errors[0]
            log.warning("%s; they are left out", told)
        going = []
        for talk, reply in zip(asked, replies, strict=True):
            if isinstance(reply, Exception):
                talk.finish_reason = "abort"
            elif reply is not None:
                ids, text = self._between(reply, talk.pieces[-1])
                talk.add(ids, text, [math.nan] * len(ids))
                going.append(talk)
        return going

    def _between(self, reply: str, turn: Sequence[int]) -> tuple[list[int], str]:
        """Tokens from the end of ``turn`` to the beginning of the next one, and the reply as far as it has room."""
        limit = self.conversation.max_reply_length
        drop = bool(self._end) and list(turn[-1:]) == self._end  # the template ends a turn as the policy has done
        ids = self._encoded(self._written(reply))[drop:]
        content = self._encoded(reply) if len(ids) > limit else []
        while len(ids) > limit and content:
            content = content[: len(content) - max(1, len(ids) - limit)]
            reply = str(self.tokenizer.decode(content)).rstrip("\ufffd")  # a part of a character
            ids = self._encoded(self._written(reply))[drop:]
        return ids, reply

    def _around(self) -> tuple[str, str]:
        """What the chat template writes between an assistant's text and a reply, and between that and the next turn."""
        role = self.conversation.role
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"rollout.conversation.role={role} needs a chat template, and the tokenizer has none: set role to null, which"
                " puts replies behind turns as they are"
            )
        before, found, after = self._written(_REPLY).partition(_REPLY)
        if not found:
            raise ValueError(
                f"rollout.conversation.role={role}: the chat template does not write such a message: take another role"
            )
        return before, after

    def _written(self, reply: str) -> str:
        """What the chat template makes of a reply: all from the end of an assistant's text to the beginning of the next."""
        role = self.conversation.role
        if role is None:
            return reply
        said = (("user", "x"), ("assistant", _TURN), (role, reply))
        messages = [{"role": who, "content": what} for who, what in said]
        arguments = {**self._arguments, "add_generation_prompt": True}
        try:
            text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
        except Exception as error:
            raise ValueError(
                f"rollout.conversation.role={role} is refused by the chat template: {_said(error)}"
            ) from error
        return text.partition(_TURN)[2]

    def _encoded(self, text: str) -> list[int]:
        """Of a text that stands inside of one: tokenizers may put a space before what begins it."""
        ids = self._tokens("\n" + text)
        return ids[len(self._start) :] if ids[: len(self._start)] == self._start else self._tokens(text)

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def _said(error: Exception) -> str:
    """In one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
