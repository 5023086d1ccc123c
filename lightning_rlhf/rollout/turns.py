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

    def whole(self, sampling: Sampling) -> Sampling:
        """The same with the length of all turns and replies."""
        total = self.max_turns * sampling.max_completion_length + (self.max_turns - 1) * self.max_reply_length
        return replace(sampling, max_completion_length=total)


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
        ValueError: there is no chat template for the role, or a reply has no room in what it puts around it.
    """

    def __init__(
        self,
        conversation: Conversation,
        tokenizer: PreTrainedTokenizerBase,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        self.conversation, self.tokenizer = conversation, deepcopy(tokenizer)  # it may speak in a thread of its own
        self._before, self._after = "", ""
        if conversation.role is not None:
            self._before, self._after = self._around(template_args or {})
        around = len(self._encoded(self._before)) + len(self._encoded(self._after))
        if around >= conversation.max_reply_length:
            raise ValueError(
                f"rollout.conversation.max_reply_length={conversation.max_reply_length} must be above {around}, the tokens that"
                " the chat template puts around a reply: raise it"
            )
        names = inspect.signature(conversation.reply).parameters.values()
        self._all = any(p.kind is p.VAR_KEYWORD for p in names)
        self._named = {p.name for p in names}

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
            RuntimeError: ``reply`` failed for every response that it was asked about at a time, or gave no text.
        """
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
        columns = {name: value for name, value in talk.row.items() if self._all or name in self._named}
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
            if len(errors) == len(asked):
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
        before = self._before
        if turn:  # the template ends a turn as the policy may have done
            before = before.removeprefix(str(self.tokenizer.decode(turn[-1])))
        limit, content = self.conversation.max_reply_length, self._encoded(reply)
        ids = self._encoded(before + reply + self._after)
        while len(ids) > limit:
            content = content[: len(content) - max(1, len(ids) - limit)]
            reply = str(self.tokenizer.decode(content))
            ids = self._encoded(before + reply + self._after)
        return ids, reply

    def _around(self, arguments: Mapping[str, Any]) -> tuple[str, str]:
        """What the chat template writes between an assistant's text and a reply, and between that and the next turn."""
        role, tokenizer = self.conversation.role, self.tokenizer
        if not tokenizer.chat_template:
            raise ValueError(
                f"rollout.conversation.role={role} needs a chat template, and the tokenizer has none: set role to null, which"
                " puts replies behind turns as they are"
            )
        turn, reply = "\u2767turn\u2767", "\u2767reply\u2767"
        said = (("user", "x"), ("assistant", turn), (str(role), reply))
        messages = [{"role": who, "content": what} for who, what in said]
        try:
            text = str(
                tokenizer.apply_chat_template(messages, tokenize=False, **{**arguments, "add_generation_prompt": True})
            )
        except Exception as error:
            raise ValueError(
                f"rollout.conversation.role={role} is refused by the chat template: {_said(error)}"
            ) from error
        before, found, after = text.rpartition(turn)[2].partition(reply)
        if turn not in text or not found:
            raise ValueError(
                f"rollout.conversation.role={role}: the chat template does not write such a message as it is: take another role"
            )
        return before, after

    def _encoded(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def _said(error: Exception) -> str:
    """In one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
