"""What vLLM is asked and what it answers: from the arguments of `RolloutEngine.generate` to vLLM's, and back.

    prompts, images ─▶ requests_of ─────┬─▶ LLM.generate ─▶ check_answers ─▶ completion_of
    Sampling, seed ──▶ sampling_params ─┘

One request per response.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from lightning_rlhf.images import collapsed
from lightning_rlhf.types import Completion, PromptImages, Sampling

OWN = {
    "n": "rollout.sampling.num_generations",
    "seed": "seed_everything",
    "max_tokens": "rollout.sampling.max_completion_length",
    "min_tokens": "rollout.sampling.min_completion_length",
} | {
    name: f"rollout.sampling.{name}"
    for name in ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos")
}
"""Fields of vLLM's parameters that are this library's to fill, and what to set in their stead."""


def requests_of(prompts: Sequence[Sequence[int]], images: Sequence[PromptImages | None]) -> list[Any]:
    """One per prompt. Pictures that several share, as one object, are hashed once."""
    names = {key: _names(one) for key, one in {id(one): one for one in images if one is not None}.items()}
    return [_request(prompt, one, names.get(id(one))) for prompt, one in zip(prompts, images, strict=True)]


def _names(images: PromptImages) -> list[str]:
    """What vLLM's caches know the pictures by: it would hash all of their pixels again for every response."""
    return [
        hashlib.blake2b(p.tobytes(), digest_size=16, key=repr(p.size).encode()).hexdigest() for p in images.pictures
    ]


def _request(prompt: Sequence[int], images: PromptImages | None, names: list[str] | None) -> Any:
    """Token ids; of a prompt with pictures those with one placeholder each, which vLLM expands itself."""
    from vllm.inputs import TokensPrompt

    if images is None:
        return TokensPrompt(prompt_token_ids=list(prompt))
    return TokensPrompt(
        prompt_token_ids=collapsed(prompt, images),
        multi_modal_data={"image": list(images.pictures)},
        multi_modal_uuids={"image": names},
    )


def sampling_params(sampling: Sampling, seed: int | None, log_probs: bool, eos_token_ids: Iterable[int]) -> Any:
    """vLLM adds the tokenizer's EOS to what ends a response; ``ignore_eos`` leaves it to ``eos_token_ids``.

    Special tokens are part of the text in which ``stop`` is looked for.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    extra = dict(sampling.extra)
    if isinstance(form := extra.get("structured_outputs"), dict):  # as YAML says it; vLLM would find out in `generate`
        extra["structured_outputs"] = StructuredOutputsParams(**form)
    ends = [] if sampling.ignore_eos else sorted({*eos_token_ids, *sampling.stop_token_ids})
    stop = [] if sampling.ignore_eos else list(sampling.stop)
    return SamplingParams(
        **{
            "n": 1,
            "seed": seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_tokens": sampling.max_completion_length,
            "min_tokens": 0 if sampling.ignore_eos else sampling.min_completion_length,
            "stop": stop,
            "stop_token_ids": ends,
            "ignore_eos": True,
            "logprobs": 0 if log_probs else None,
            "flat_logprobs": log_probs,
            "detokenize": bool(stop),
            "skip_special_tokens": False,
            "output_kind": RequestOutputKind.FINAL_ONLY,
            "skip_clone": not sampling.extra,  # nobody else has them
            **extra,
        }
    )


def check_extra(sampling: Sampling) -> None:
    """Raise ValueError if vLLM's parameters have no such field as one of ``sampling.extra``, or do not take its value, or the
    trainer has to know it.
    """
    for name in sorted(sampling.extra.keys() & OWN.keys()):
        raise ValueError(f"rollout.sampling.extra must leave {name} to the trainer: set {OWN[name]}")
    try:
        sampling_params(sampling, None, False, ())
    except Exception as error:  # which kinds differs between versions
        raise ValueError(
            f"rollout.sampling.extra must be fields of vLLM's SamplingParams, got {sampling.extra}: {error}"
        ) from error


def check_answers(
    outputs: Sequence[Any], prompts: Sequence[Sequence[int]], images: Sequence[PromptImages | None]
) -> None:
    """Raise RuntimeError unless there is one answer to each prompt, and to the tokens that the trainer knows it by."""
    if len(outputs) != len(prompts):
        raise RuntimeError(f"vLLM must answer every request, got {len(outputs)} answers to {len(prompts)}")
    for output, prompt, one in zip(outputs, prompts, images, strict=True):
        if one is not None and list(output.prompt_token_ids) != list(prompt):
            raise RuntimeError(
                f"vLLM made {len(output.prompt_token_ids)} tokens of a prompt with images, the trainer {len(prompt)}, or"
                " others: their image processors differ, use the same transformers and preprocessor_config.json"
            )


def completion_of(output: Any, log_probs: bool) -> Completion:
    token_ids = list(output.token_ids)
    taken = None
    if log_probs and getattr(output.logprobs, "token_ids", None) == token_ids:  # flat, and of no other tokens
        taken = list(output.logprobs.logprobs)
    elif log_probs:
        taken = [step[token].logprob for step, token in zip(output.logprobs or (), token_ids, strict=True)]
    reason: Any = output.finish_reason if output.finish_reason in ("stop", "length") else "abort"
    return Completion(token_ids, reason, taken)
