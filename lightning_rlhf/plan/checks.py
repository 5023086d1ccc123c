"""What cannot work, found before anything is loaded, each with what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_rlhf.hf_config import check_class
from lightning_rlhf.kernels import Features, MissingKernel, choose_kernel
from lightning_rlhf.modules.advantages import NOTHING_ALONE
from lightning_rlhf.plan.run import Run
from lightning_rlhf.sampler import check_batch_size
from lightning_rlhf.ulysses import check_packable, head_plan


@dataclass(frozen=True)
class Problem:
    """An error ends the run, a warning says what it will cost, a note what may not be meant; ``message`` is one line."""

    kind: Literal["error", "note", "warning"]
    message: str


def problems(run: Run) -> list[Problem]:
    """All that is wrong with a run, errors first."""
    checks = (meshes, attention, heads, lengths, batches, groups, engine, off_policy, rounding)
    found = [problem for check in checks for problem in check(run)]
    return sorted(found, key=lambda problem: problem.kind)  # stable


def meshes(run: Run) -> Iterator[Problem]:
    """The meshes tile the processes."""
    yield from raised(run.strategy.check_world_size, run.world_size, run.num_nodes)


def attention(run: Run) -> Iterator[Problem]:
    """It is a text model, its layers keep packed neighbours apart, and the kernel has what they ask for."""
    yield from raised(check_packable, run.config)
    yield from raised(check_class, run.config)
    text, device = run.config.get_text_config(), torch.device(run.device_type)
    sinks = torch.empty(0) if text.model_type == "gpt_oss" else None
    needs = Features(softcap=getattr(text, "attn_logit_softcapping", None), sinks=sinks)
    try:
        choose_kernel(run.attention, device, run.compute_dtype, needs)
    except MissingKernel as error:  # here; a run says so when it builds its models
        yield Problem("warning", str(error))
    except ValueError as error:
        yield Problem("error", str(error))


def heads(run: Run) -> Iterator[Problem]:
    """Sequence parallelism splits the heads of attention."""
    ranks, (count, kv) = run.sequence_ranks, run.attention_heads
    if ranks == 1 or not count or not kv:
        return
    try:
        repeat, appended = head_plan(count, kv, ranks)
    except ValueError as error:
        yield Problem("error", str(error))
        return
    if appended:
        fitting = [n for n in range(ranks, 0, -1) if count % n == 0 and run.world_size % n == 0]
        yield Problem(
            "warning",
            f"sequence_parallel_size={ranks} does not divide the {count} attention heads: {appended} zero heads are appended"
            f" and key/value heads repeated {repeat} times, attention does {appended / count:.0%} more work; {fitting[0]}"
            " divides them",
        )


def lengths(run: Run) -> Iterator[Problem]:
    """The longest sequence fits the model's positions and one micro-batch."""
    response = max(run.response_length, run.val_response_length)
    if response >= run.positions or run.context > run.positions:
        yield Problem("error", too_long(run, run.positions))
    if run.longest > run.budget:
        yield Problem(
            "error",
            f"the longest sequence has {run.longest} tokens (prompt + response), a micro-batch holds {run.budget}: raise"
            " model.micro_batch_tokens, or lower data.max_prompt_length or rollout.sampling.max_completion_length",
        )


def batches(run: Run) -> Iterator[Problem]:
    """Prompts split over data ranks, responses over optimizer steps."""
    prompts, responses = run.prompts, run.responses
    if prompts is None or responses is None:
        return
    yield from raised(check_batch_size, prompts, run.data_ranks)
    if run.mini_batches > responses:
        yield Problem(
            "error",
            f"model.mini_batches is {run.mini_batches}, a rollout has only {responses} responses"
            " (data.batch_size x num_generations): lower it",
        )
    elif responses // run.mini_batches < run.data_ranks:
        yield Problem(
            "warning",
            f"an optimizer step has {responses // run.mini_batches} responses for {run.data_ranks} data ranks, some"
            " compute nothing in it: lower model.mini_batches or raise data.batch_size",
        )


def groups(run: Run) -> Iterator[Problem]:
    """What is compared within a group needs a second response in it."""
    if run.compares and run.num_generations == 1:
        nothing = run.compares in NOTHING_ALONE
        yield Problem(
            "error" if nothing else "note",
            f"model.advantage: {run.compares} compares the responses to a prompt with each other, and there is only one,"
            f" {'whose advantage is 0' if nothing else 'which has no baseline'}: set rollout.sampling.num_generations to 2 or"
            " more",
        )


def engine(run: Run) -> Iterator[Problem]:
    """Engines tile the nodes and split the heads, and their context holds the longest sequence."""
    ranks, (count, kv), processes = run.engine_ranks, run.attention_heads, run.world_size // run.num_nodes
    option = f"rollout.engine.tensor_parallel_size={ranks}"
    if processes % ranks:
        yield Problem(
            "error",
            f"{option} must divide the {processes} processes of a node, an engine is made of consecutive ones: take"
            f" {_fitting(run)} or change trainer.devices",
        )
    elif count and count % ranks:
        yield Problem("error", f"{option} must divide the {count} attention heads: take {_fitting(run)}")
    elif kv and kv % ranks and ranks % kv:
        yield Problem(
            "error",
            f"{option} must divide the {kv} key/value heads or be a multiple of them: take {_fitting(run)}",
        )
    limit = run.engine.context_limit
    if limit is not None and limit < run.longest:
        yield Problem(
            "error",
            f"the engine's context of {limit} tokens must hold the longest sequence of {run.longest} (prompt + response):"
            " raise or leave out max_model_len in rollout.engine.engine_args",
        )


def off_policy(run: Run) -> Iterator[Problem]:
    """Responses of an older policy are weighed, by log-probs that are comparable."""
    if run.async_level and not run.corrected:
        yield Problem(
            "error",
            "rollout.async_level: 1 trains on responses of the policy before the last update: set model.correction, {} for its"
            " defaults",
        )
    if run.async_level and run.engine_ranks > 1:
        yield Problem(
            "error",
            f"rollout.async_level: 1 cannot have engines of several ranks, got rollout.engine.tensor_parallel_size="
            f"{run.engine_ranks}: set it to 1, or async_level to 0",
        )
    if run.turns > 1 and run.engine_ranks > 1:
        yield Problem(
            "error",
            "rollout.conversation cannot have engines of several ranks, got rollout.engine.tensor_parallel_size="
            f"{run.engine_ranks}: set it to 1, or leave conversation out",
        )
    if run.corrected and not run.replayable:
        yield Problem(
            "error",
            "model.correction needs responses that are drawn from all tokens: set rollout.sampling.top_p to 1, top_k, min_p and"
            " min_completion_length to 0, and leave out extra, or leave out model.correction",
        )


def rounding(run: Run) -> Iterator[Problem]:
    """Adam moves a weight by about the learning rate; bfloat16 has 8 significant bits.

    A weight of 0.02, as they are typically, has neighbours 2^-13 away, and moves only by more than half of that.
    """
    smallest = min(run.learning_rates.values(), default=1.0)
    if run.param_dtype == torch.bfloat16 and smallest < 2**-14:
        yield Problem(
            "warning",
            f"trainer.precision {run.precision} keeps no float32 master weights: most updates at learning rate {smallest:g}"
            f" vanish in rounding, use bf16-mixed or a rate above {2**-14:.0e}",
        )


def too_long(run: Run, positions: int) -> str:
    """What to say of sequences that are longer than a model's positions."""
    longest = (run.prompt_length or 1) + max(run.response_length, run.val_response_length)
    sampling = "sampling" if run.response_length >= run.val_response_length else "val_sampling"
    response = f"rollout.{sampling}.max_completion_length"
    if run.turns > 1:
        response = f"the {run.turns} turns of {response} and the replies of rollout.conversation"
    return (
        f"data.max_prompt_length + {response} = {longest} exceed the model's {positions} positions: lower one of them"
    )


def _fitting(run: Run) -> int:
    """The next smaller number of ranks of an engine that tiles a node and splits the heads."""
    processes, (count, kv) = run.world_size // run.num_nodes, run.attention_heads
    sizes = (n for n in range(1, run.engine_ranks) if not (processes % n or (count or 1) % n))
    return max(n for n in sizes if not kv or kv % n == 0 or n % kv == 0)


def raised(check: Callable[..., object], *args: Any) -> Iterator[Problem]:
    """What a check that raises says, as an error."""
    try:
        check(*args)
    except (ValueError, NotImplementedError) as error:
        yield Problem("error", str(error))
