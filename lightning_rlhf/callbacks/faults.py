"""Faults of the rollout phase end the run: on every rank, soon, in a line that says what happened and what to change.

    agreed           an exception on one rank is one on all, none waits for the others in its next collective
    told_by_settings out of memory, in terms of the settings that help
    check_lengths    a prompt that the engine cannot take

What is only wrong with some responses (empty, aborted, without log-probs) ends nothing: metrics count it.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

from lightning_rlhf.meeting import of_all_ranks
from lightning_rlhf.types import Prompts

if TYPE_CHECKING:
    from lightning_rlhf.callbacks.rollout import RolloutCallback
    from lightning_rlhf.modules.base import RLHFLightningModule

_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "cudaErrorMemoryAllocation")
"""What torch, vLLM's allocator (a plain RuntimeError) and cuBLAS say."""


@contextmanager
def agreed(what: str, *, alone: bool = False) -> Iterator[None]:
    """A step that all ranks end together, which makes it a barrier. Collectives inside are not protected.

    Args:
        what: the step.
        alone: a rank that fails does not wait for the others, which may wait for it inside the step: they end when its
            process does.

    Raises:
        RuntimeError: it failed on another rank; this one's own exception is raised as it is.
    """
    try:
        yield
    except Exception as error:
        if not alone:
            with suppress(Exception):  # the others may be gone
                of_all_ranks(f"{type(error).__name__}: {error}")
        raise
    for rank, message in enumerate(of_all_ranks(None)):
        if message is not None:
            raise RuntimeError(f"{what} failed on rank {rank}: {message}")


@contextmanager
def told_by_settings(what: str, settings: Sequence[str]) -> Iterator[None]:
    """Out of memory becomes one line.

    Args:
        what: the step.
        settings: what to change, as phrases.

    Raises:
        torch.OutOfMemoryError: from the original error.
    """
    try:
        yield
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # what the calls that failed held is free for what comes back
        raise torch.OutOfMemoryError(
            f"{what} ran out of GPU memory{_amounts(str(error))}: {', '.join(settings[:-1])} or {settings[-1]}"
        ) from error


def makes_room(step: str, rollout: RolloutCallback, module: RLHFLightningModule) -> list[str]:
    """Three settings that make room in a step, as phrases, the cheapest first; none that is set already."""
    cache = step in ("kv_cache", "generate")
    own_reference, beside = getattr(module, "reference", None) is not None, rollout.async_level > 0
    settings = {
        f"lower {rollout.engine.memory_settings}": cache,
        "set rollout.async_level: 0": beside,
        "set rollout.sleep_level: 2": step == "reload" and rollout.rung.sleep_level != 2,
        "set rollout.offload_optimizer: true": not beside and not rollout.rung.offload_optimizer,
        # they are needed until the sync
        "set rollout.offload_parameters: true": cache and not beside and not rollout.rung.offload_parameters,
        "set model.offload_reference: true": own_reference and not module.settings.offload_reference,
        "shard over more trainer.devices": True,
        "take a smaller model.model": True,
    }
    return [text for text, helps in settings.items() if helps][:3]


def _is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or any(mark in str(error) for mark in _OUT_OF_MEMORY):
            return True
        error = error.__cause__
    return False


def _amounts(message: str) -> str:
    """What was asked for and what was free, as far as torch says so or the device does now."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", message)
    free = re.search(r"([\d.]+ \w+) is free", message)
    known = [f"{asked[1]} asked"] if asked else []
    if free:
        known.append(f"{free[1]} free")
    elif torch.cuda.is_available() and torch.cuda.is_initialized():
        known.append("{:.2f} of {:.2f} GiB free".format(*(n / 2**30 for n in torch.cuda.mem_get_info())))
    return f" ({', '.join(known)})" if known else ""


def check_lengths(prompts: Prompts, context: int) -> None:
    """`PromptDataModule` has seen to it; another DataModule may not.

    Raises:
        ValueError: a prompt without tokens, or with too many for ``context``.
    """
    for row, ids in zip(prompts.index.tolist(), prompts.ids, strict=True):
        if not 0 < len(ids) < context:
            raise ValueError(
                f"data: a prompt must have 1 to {context - 1} tokens to leave room for a response in the engine's context of"
                f" {context}, that of row {row} has {len(ids)}: drop it in your DataModule, or give that the attribute"
                " max_prompt_length, which the context is made for"
            )
