"""What vLLM is asked and what becomes of its answers, without an engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from test_vllm_engine import pytestmark as marks

from lightning_rlhf.rollout import vllm
from lightning_rlhf.rollout.vllm import VLLMEngine
from lightning_rlhf.rollout.vllm_requests import _names, check_answers, completion_of, sampling_params
from lightning_rlhf.types import Completion, Sampling


def needs_vllm(test: Callable[[], None]) -> Callable[[], None]:
    for mark in marks:
        test = mark(test)
    return test


ALL = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "temperature": 0.7}


@needs_vllm
def test_every_option_of_a_draw_reaches_vllm() -> None:
    lengths = {"max_completion_length": 9, "min_completion_length": 2}
    ends = {"stop": ("x",), "stop_token_ids": (7, 1)}
    sampling = Sampling(**ALL, **lengths, **ends, extra={"repetition_penalty": 1.5})
    asked = sampling_params(sampling, 2**62 + 5, True, (3, 1))
    assert {name: getattr(asked, name) for name in ALL} == ALL
    assert (asked.max_tokens, asked.min_tokens, asked.seed, asked.n) == (9, 2, 2**62 + 5, 1)
    assert (asked.stop, asked.stop_token_ids, asked.ignore_eos, asked.detokenize) == (["x"], [1, 3, 7], True, True)
    assert (asked.repetition_penalty, asked.skip_clone, asked.logprobs) == (1.5, False, 0)
    on = sampling_params(Sampling(**lengths, **ends, ignore_eos=True), None, False, (3, 1))
    assert (on.stop, on.stop_token_ids, on.min_tokens, on.detokenize) == ([], [], 0, False)
    assert (on.seed, on.logprobs, on.skip_clone) == (None, None, True)


@needs_vllm
def test_the_form_of_a_response_may_come_from_yaml() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    form = sampling_params(Sampling(extra={"structured_outputs": {"choice": ["yes", "no"]}}), 0, False, ())
    assert form.structured_outputs == StructuredOutputsParams(choice=["yes", "no"])
    with pytest.raises(ValueError, match=r"rollout\.sampling\.extra must be fields of vLLM's .*chioce"):
        VLLMEngine().check_sampling(Sampling(extra={"structured_outputs": {"chioce": ["yes", "no"]}}))


@needs_vllm
def test_what_vllm_cannot_draw_is_told_before_anything_is_loaded() -> None:
    engine = VLLMEngine()
    engine.check_sampling(Sampling(extra={"repetition_penalty": 1.5}))
    with pytest.raises(
        ValueError, match=r"rollout\.sampling\.extra must be fields of vLLM's .*'repetition': 1\.5.*repetition"
    ):
        engine.check_sampling(Sampling(extra={"repetition": 1.5}))
    with pytest.raises(ValueError, match=r"got {'repetition_penalty': -1\.0}: .*repetition_penalty"):
        engine.check_sampling(Sampling(extra={"repetition_penalty": -1.0}))
    for name, instead in (
        ("n", "num_generations"),
        ("temperature", "temperature"),
        ("max_tokens", "max_completion_length"),
    ):
        with pytest.raises(ValueError, match=rf"must leave {name} to the trainer: set rollout\.sampling\.{instead}$"):
            engine.check_sampling(Sampling(extra={name: 2}))
    with pytest.raises(ValueError, match="must leave seed to the trainer: set seed_everything"):
        engine.check_sampling(Sampling(extra={"seed": 1}))


def test_a_temperature_that_vllm_would_raise_is_refused() -> None:
    VLLMEngine().check_sampling(Sampling(temperature=0.01))
    with pytest.raises(ValueError, match=r"temperature must be 0 \(greedy\) or at least 0\.01, .*, got 0\.003$"):
        VLLMEngine().check_sampling(Sampling(temperature=0.003))


def test_without_vllm_nothing_is_said_of_what_it_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        raise ImportError

    monkeypatch.setattr(vllm, "version_installed", absent)
    VLLMEngine().check_sampling(Sampling(extra={"repetition": 1.5}))


def output(**options: Any) -> Any:
    return SimpleNamespace(**{"token_ids": (4, 5), "logprobs": None, "finish_reason": "stop"} | options)


@pytest.mark.parametrize(
    ("reason", "told"), [("stop", "stop"), ("length", "length"), ("abort", "abort"), (None, "abort")]
)
def test_a_response_that_did_not_end_as_it_should_was_given_up(reason, told):
    assert completion_of(output(finish_reason=reason), False) == Completion([4, 5], told, None)


@pytest.mark.parametrize("flat", [True, False])
def test_log_probs_are_those_of_the_tokens_that_were_drawn(flat):
    of = {4: -0.5, 5: -1.0, 6: -0.1}
    steps = [{token: SimpleNamespace(logprob=value) for token, value in of.items()}] * 2
    own = SimpleNamespace(token_ids=[4, 5], logprobs=[-0.5, -1.0]) if flat else steps
    assert completion_of(output(logprobs=own), True).log_probs == [-0.5, -1.0]
    assert completion_of(output(logprobs=own), False).log_probs is None


def test_answers_are_one_to_a_prompt_and_to_the_tokens_of_the_trainer():
    answers = [SimpleNamespace(prompt_token_ids=[1, 2]), SimpleNamespace(prompt_token_ids=[3])]
    shown: Any = object()
    check_answers(answers, [[1, 2], [3]], [shown, None])
    check_answers(answers, [[1, 2], [4]], [shown, None])
    with pytest.raises(RuntimeError, match="vLLM must answer every request, got 2 answers to 1"):
        check_answers(answers, [[1, 2]], [None])
    for tokens in ([1, 2, 2], [2, 1]):
        said = re.escape(f"vLLM made 2 tokens of a prompt with images, the trainer {len(tokens)}, or others")
        with pytest.raises(RuntimeError, match=said):
            check_answers(answers, [tokens, [3]], [shown, None])


def test_pictures_of_the_same_pixels_in_other_shapes_have_other_names():
    shapes: Any = SimpleNamespace(pictures=[Image.new("RGB", size) for size in ((2, 3), (3, 2), (2, 3))])
    one, other, again = _names(shapes)
    assert one == again != other
