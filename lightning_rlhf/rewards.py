"""Ready-made reward functions. `scoring.Scorer` runs these and yours.

A reward function gets keyword arguments, of which it takes those it names, or all of them with ``**columns``:

    prompts, completions, completion_ids    one entry per response; conversations have completions [{"role", "content"}]
    every column of the data set            one entry per response
    trainer_state, log_metric, log_extra    see `scoring`

and returns one number per response, or None where it has no opinion. Parameters of a reward are its constructor's:

    reward:
      - lightning_rlhf.rewards.exact_answer
      - {class_path: lightning_rlhf.rewards.LengthPenalty, init_args: {max_length: 1024, buffer: 256}}
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lightning_rlhf.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Completion: TypeAlias = str | list[Message]

_ANSWER_COLUMNS = ("answer", "solution", "ground_truth")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ANSWER_LINE = re.compile(r"answer:[ \t]*(\S[^\n]*)", re.IGNORECASE)


class RewardError(ValueError):
    """A reward that is wrong for every response (no such column, a result of the wrong length): the run stops."""


def text_of(completion: Completion) -> str:
    """The text of a completion, whether plain or a list of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def final_answer(text: str) -> str:
    r"""What a response gives as its answer, by the first of these that it contains, the last occurrence of it.

    ``\boxed{...}``, ``<answer>...</answer>``, the line after ``####``, the line after ``answer:``; else all of it. A
    reasoning block that ends in ``</think>`` is left out before.
    """
    text = text.rpartition("</think>")[2]
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    if tagged := _ANSWER_TAG.findall(text):
        return tagged[-1].strip()
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0].strip()
    if lines := _ANSWER_LINE.findall(text):
        return lines[-1].strip()
    return text.strip()


def normal_answer(text: str) -> str:
    """The `final_answer` without regard to case, runs of white space, dollar signs around it and a full stop at its end."""
    return " ".join(final_answer(text).split()).removesuffix(".").strip("$ ").casefold()


def _last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}`` whose braces balance."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if not depth:
                return text[start:end]
    return None


def exact_answer(completions: Sequence[Completion], **columns: Any) -> list[float | None]:
    """1 where the final answer equals that of the column ``answer``, ``solution`` or ``ground_truth``, else 0.

    Both by their `normal_answer`. No arithmetic: 0.5 is not 1/2, see `numeric_answer`. None without answer.
    """
    pairs = zip(map(text_of, completions), _answers(columns), strict=True)
    return [None if answer is None else float(normal_answer(c) == normal_answer(str(answer))) for c, answer in pairs]


def first_number(
    completions: Sequence[Completion], log_extra: Callable[..., None] | None = None, **columns: Any
) -> list[float | None]:
    """1 where the first run of digits in the completion is exactly the answer, else 0. Logs it as ``pred``."""
    found = [re.search(r"\d+", text_of(completion)) for completion in completions]
    first = [number and number.group() for number in found]
    if log_extra is not None:
        log_extra("pred", first)
    pairs = zip(first, _answers(columns), strict=True)
    return [None if answer is None else float(number == str(answer).strip()) for number, answer in pairs]


def numeric_answer(completions: Sequence[Completion], **columns: Any) -> list[float | None]:
    """1 where the final answer is mathematically equal to the reference (fractions, LaTeX, sets, ...), else 0.

    By `math-verify`. None where the reference is no mathematical expression. Its time-outs use signals, which exist in
    a process's main thread only: they act in the worker processes of a `Scorer` with ``workers``. Elsewhere the
    scorer's own time-out has to do, which cannot stop a runaway simplification from using up a core.

    Raises:
        ImportError: math-verify is not installed.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError("rewards.numeric_answer needs math-verify: pip install 'lightning-rlhf[math]'") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it was called without a time-out
    seconds: Any = 5 if threading.current_thread() is threading.main_thread() else None

    def equal(text: str, answer: str) -> float | None:
        marked = answer if re.search(r"\$|\\boxed|\\\(|\\\[|####", answer) else f"${answer}$"
        gold = parse(marked, parsing_timeout=seconds)
        if not gold:
            return None
        found = parse(text.rpartition("</think>")[2], parsing_timeout=seconds)
        return float(verify(gold, found, timeout_seconds=seconds))

    pairs = zip(completions, _answers(columns), strict=True)
    return [None if answer is None else equal(text_of(c), str(answer)) for c, answer in pairs]


def reasoning_gym(
    completions: Sequence[Completion], task: Sequence[str], task_args: Sequence[dict[str, Any]], entry: Sequence[Any]
) -> list[float]:
    """The score that the task's own verifier gives to the final answer, from 0 to 1. For ``data.task``."""
    rows = zip(completions, task, task_args, entry, strict=True)
    return [float(_verifier(t, json.dumps(a, sort_keys=True))(final_answer(text_of(c)), e)) for c, t, a, e in rows]


@lru_cache(maxsize=64)
def _verifier(task: str, args: str) -> Callable[[str, Any], float]:
    from reasoning_gym import create_dataset

    return create_dataset(
        task, size=1, seed=0, **json.loads(args)
    ).score_answer  # some verifiers read the task's options


class FormatReward:
    r"""1 where the completion matches ``pattern`` from end to end, else 0.

    Args:
        pattern: regular expression; a dot matches line breaks too. By default one reasoning block, then anything.
    """

    def __init__(self, pattern: str = r"<think>(?!.*<think>).*?</think>.*") -> None:
        self.pattern = re.compile(pattern, re.DOTALL)

    def __call__(self, completions: Sequence[Completion]) -> list[float]:
        return [float(self.pattern.fullmatch(text_of(c).strip()) is not None) for c in completions]


class LengthPenalty:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13), times ``factor``.

    0 up to ``max_length - buffer`` tokens, then falling linearly to ``-factor`` at ``max_length``, and no lower. The paper's
    L_max is ``max_length`` (20480 there), its L_cache ``buffer`` (4096). Replies in a conversation have no length.

    Args:
        max_length: tokens at which the whole penalty is due, as a rule ``max_completion_length``.
        buffer: tokens over which it builds up.
        factor: size of the whole penalty.
    """

    def __init__(self, max_length: int, buffer: int, factor: float = 1.0) -> None:
        if not 0 < buffer <= max_length:
            raise ValueError(
                f"LengthPenalty needs 0 < buffer <= max_length, got buffer={buffer}, max_length={max_length}"
            )
        self.max_length, self.buffer, self.factor = max_length, buffer, factor

    def __call__(
        self, completion_ids: Sequence[Sequence[int]], completion_mask: Sequence[Sequence[int]] | None = None
    ) -> list[float]:
        free = self.max_length - self.buffer
        lengths = map(sum, completion_mask) if completion_mask else map(len, completion_ids)
        return [-self.factor * min(max(length - free, 0) / self.buffer, 1.0) for length in lengths]


class RewardModel:
    """The logit of a sequence-classification model with one label, over prompt and completion in its own chat template.

    Loaded on first use, in the process that trains (never in a worker).

    Args:
        path: folder or hub id.
        dtype: of its weights.
        batch_size: sequences per forward pass.
        device: the GPU of this process, or else the CPU, if not given.
        chat_template: wrap text prompts as one user message too; conversations always go through the template.
    """

    in_process = True

    def __init__(
        self,
        path: str,
        dtype: str = "bfloat16",
        batch_size: int = 16,
        device: str | None = None,
        chat_template: bool = False,
    ) -> None:
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"RewardModel.dtype must name a torch dtype such as bfloat16 or float32, got {dtype!r}")
        self.path, self.dtype, self.batch_size, self.device = path, dtype, batch_size, device
        self.chat_template = chat_template
        self._loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase, int | None] | None = None
        self._lock = threading.Lock()  # fast tokenizers are not made for several threads

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        with self._lock, torch.inference_mode():
            model, tokenizer, padding = self._loaded = self._loaded or self._load()
            ids = [self._ids(tokenizer, p, c) for p, c in zip(prompts, completions, strict=True)]
            for one in ids:
                while len(one) > 1 and one[-1] == padding:  # as in transformers, also if an EOS doubles as padding
                    one.pop()
            order = sorted(range(len(ids)), key=lambda i: len(ids[i]))  # neighbours of like length need little padding
            scores = dict[int, float]()
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                scores.update(zip(batch, _classify(model, [ids[i] for i in batch]), strict=True))
        return [scores[i] for i in range(len(ids))]

    def _load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, int | None]:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            model, report = AutoModelForSequenceClassification.from_pretrained(
                self.path, num_labels=1, dtype=getattr(torch, self.dtype), output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(self.path)
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise RewardError(f"cannot load {self.path!r} as a model with one label ({reason})") from error
        if lacking := ", ".join(sorted(report["missing_keys"])):  # a language model: the head would be random
            raise RewardError(f"needs a trained reward model, but {self.path!r} lacks {lacking}")
        model = model.to(device).eval().requires_grad_(False)
        return model, tokenizer, model.config.get_text_config().pad_token_id

    def _ids(self, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, completion: Completion) -> list[int]:
        if isinstance(prompt, str) and not self.chat_template:
            return tokenizer(prompt + text_of(completion))["input_ids"]
        if not tokenizer.chat_template:
            raise RewardError(f"needs a chat template for conversations, which the tokenizer of {self.path!r} has not")
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = tokenizer.apply_chat_template(
            [*asked, {"role": "assistant", "content": text_of(completion)}], tokenize=False
        )
        return tokenizer(text, add_special_tokens=False)["input_ids"]


def _classify(model: PreTrainedModel, batch: list[list[int]]) -> list[float]:
    """Scores of right-padded sequences.

    Classification heads find the last token as the last that is not the padding id, which a model need not have: an id that no
    sequence contains is taken for it.
    """
    longest, config = max(map(len, batch)), model.config.get_text_config()
    unused = set(range(config.vocab_size)).difference(*batch)
    if not unused and len(batch) > 1:
        return [score for ids in batch for score in _classify(model, [ids])]
    config.pad_token_id = padding = min(unused, default=None)
    filled = [ids + [padding or 0] * (longest - len(ids)) for ids in batch]
    attention = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in batch]
    tensors = {"input_ids": torch.tensor(filled), "attention_mask": torch.tensor(attention)}
    logits = model(**{name: tensor.to(model.device) for name, tensor in tensors.items()}).logits
    return logits[:, 0].float().tolist()


def _answers(columns: dict[str, Any]) -> Sequence[Any]:
    for name in _ANSWER_COLUMNS:
        if name in columns:
            return columns[name]
    raise RewardError(f"needs one of the columns {', '.join(_ANSWER_COLUMNS)}; the data has none of them")
