"""Shortened steps of vLLM's scheduler against its own: each step's batch, what is held of requests and blocks, what comes out.

The schedulers are driven without a model: the token of a request at a position is a function of both.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from test_vllm_engine import pytestmark as needs_vllm

from lightning_rlhf.rollout import vllm_process
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.vllm import VLLMEngine
from lightning_rlhf.rollout.vllm_scheduler import ShortSteps
from lightning_rlhf.tiny import tiny_model
from lightning_rlhf.types import Sampling

pytestmark = needs_vllm

EOS, STOP = 1, 2
SEQUENCES = 12
TAKEN_OVER = ("add_request", "schedule", "update_from_output")
COUNTERS = (
    "num_computed_tokens",
    "num_in_flight_tokens",
    "num_output_placeholders",
    "is_prefill_chunk",
    "num_preemptions",
)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=16 << 20,
        load_format="auto",
        engine_args={"block_size": 32, "enable_chunked_prefill": True},
    )
    device, dtype = torch.device(request.param), torch.float32 if request.param == "cpu" else torch.bfloat16
    engine.setup(EngineSetup(str(tiny_model()), device, dtype, (EOS,), 0, 128, SEQUENCES))
    engine.weight_version = 0
    yield engine
    engine.close()


def scheduler_of(engine: VLLMEngine) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.scheduler


def fresh(like: Any, ahead: bool, blocks: int, v2: bool) -> Any:
    """An unchanged scheduler of vLLM's with the settings of ``like``."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    like.vllm_config.cache_config.num_gpu_blocks = blocks
    made = (AsyncScheduler if ahead else Scheduler)(
        vllm_config=like.vllm_config,
        kv_cache_config=replace(like.kv_cache_config, num_blocks=blocks),
        structured_output_manager=like.structured_output_manager,
        block_size=like.block_size,
        hash_block_size=like.hash_block_size,
    )
    made.use_v2_model_runner = v2
    return made


def requests(number: int, seed: int, block: int, steps: int) -> list[tuple[int, Any]]:
    """(step at which it arrives, request): all kinds, each second one with the prompt of the one before."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    rng, made, prompt = random.Random(seed), [], [0]
    for i in range(number):
        if i % 2 == 0:
            prompt = [rng.randrange(3, 256) for _ in range(rng.choice([1, 7, block, 2 * block - 1, 2 * block + 5]))]
        kind = rng.choice(["plain"] * 5 + ["log_probs"] * 2 + ["most likely", "every token", "min_tokens"])
        params = SamplingParams(
            max_tokens=40 if kind == "min_tokens" else rng.choice([1, 2, 40, 200]),
            min_tokens=30 if kind == "min_tokens" else 0,
            stop_token_ids=[STOP] if rng.random() < 0.5 else [],
            ignore_eos=True,
            detokenize=False,
            logprobs={"log_probs": 0, "most likely": 2}.get(kind),
            output_kind=RequestOutputKind.DELTA if kind == "every token" else RequestOutputKind.FINAL_ONLY,
        )
        hasher = get_request_block_hasher(block, sha256)
        request = Request(f"r{i}", list(prompt), params, None, arrival_time=float(i), block_hasher=hasher)
        made.append((rng.choice([0, 0, 0, rng.randrange(steps)]), request))
    return made


def session(block: int) -> list[tuple[int, Any]]:
    """A request that ends, is taken up again and ends; between these it waits in a queue of its own."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    made = []
    for arrival, resumable in ((0, True), (30, True), (60, False)):
        params = SamplingParams(max_tokens=9, ignore_eos=True, detokenize=False)
        hasher = get_request_block_hasher(block, sha256)
        request = Request("session", [3] * 5, params, None, block_hasher=hasher, resumable=resumable)
        made.append((arrival, request))
    return made


def token(name: str, position: int) -> int:
    drawn = random.Random(f"{name} {position}").randrange(256)
    return STOP if drawn < 4 else max(drawn, 3)


def drive(
    scheduler: Any, arrivals: list[tuple[int, Any]], ahead: bool, aborts: dict[int, str]
) -> Iterator[tuple[Any, ...]]:
    """Run until all has ended, as vLLM's core does; what is decided in each step, then what came out.

    Nothing new is scheduled for three steps around the first abort; at the others steps are under way.
    """
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
    from vllm.v1.request import RequestStatus

    under_way: deque[tuple[Any, Any]] = deque()
    outputs: dict[str, list[Any]] = {}
    pool, paused = scheduler.kv_cache_manager.block_pool, min(aborts)
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers

    def sampled(batch: Any) -> Any:
        names = list(batch.num_scheduled_tokens)
        tokens, most = [], 0
        for name in names:
            request = scheduler.requests[name]
            most = max(most, request.sampling_params.logprobs or 0)
            position = request.num_computed_tokens - request.num_prompt_tokens
            tokens.append([] if request.is_prefill_chunk else [token(name, position)])
        values = numpy.array([row[0] if row else 0 for row in tokens]).reshape(-1, 1) + numpy.arange(1 + most)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=LogprobsLists(
                values,
                -values.astype(numpy.float32),
                values[:, 0].copy(),
                list(range(len(names) + 1)) if step % 5 == 0 else None,  # as with drafted tokens
            ),
            num_nans_in_logits=dict.fromkeys(names, step) if step % 9 == 0 else None,
        )

    for step in range(100_000):
        for arrival, request in arrivals:
            if arrival == step:
                scheduler.add_request(request)
        if step + 1 == paused:
            scheduler.set_pause_state(PauseState.PAUSED_ALL)
        if step - 2 == paused:
            scheduler.set_pause_state(PauseState.UNPAUSED)
        if step in aborts:
            scheduler.finish_requests([aborts[step]], RequestStatus.FINISHED_ABORTED)
        if scheduler.has_requests():
            batch = scheduler.schedule()
            under_way.appendleft((batch, sampled(batch)))
            held = {
                name: ([getattr(r, c) for c in COUNTERS], r.status, list(r._all_token_ids), list(r.block_hashes))
                for name, r in scheduler.requests.items()
            }
            free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
            cached = [(block.block_hash, block.ref_cnt) for block in pool.blocks]
            tables = {name: [block.block_id for block in blocks] for name, blocks in manager.req_to_blocks.items()}
            running = [request.request_id for request in scheduler.running]
            waiting = [request.request_id for request in scheduler.waiting]
            yield (
                deepcopy(batch),
                deepcopy(held),
                free,
                cached,
                tables,
                dict(manager.num_cached_block),
                list(batch.num_scheduled_tokens),  # the order counts
                running,
                waiting,
                scheduler.prev_step_scheduled_req_ids.copy(),
            )
            if ahead and len(under_way) < 2 and batch.total_num_scheduled_tokens:
                continue
        if under_way:
            done, result = under_way.pop()
            for each in scheduler.update_from_output(done, result).values():
                for output in each.outputs:
                    outputs.setdefault(output.request_id, []).append(deepcopy(output))
            for part in result.logprobs[:3]:
                part.fill(-1)  # they are the runner's: what is wanted later must have been copied
        elif step > max(*aborts, *(arrival for arrival, _ in arrivals)) + 2:
            break
    yield ({name: summary(parts) for name, parts in outputs.items() if parts[-1].finish_reason is not None},)


def summary(parts: list[Any]) -> tuple[Any, ...]:
    tokens = [token for part in parts for token in part.new_token_ids]
    told = [part.new_logprobs for part in parts if part.new_logprobs is not None]
    log_probs = [
        (ids[0], values[0], rank)
        for ids, values, ranks, _ in told
        for ids, values, rank in zip(ids, values, ranks, strict=True)
    ]
    last = parts[-1]
    return tokens, log_probs, parts[0].prefill_stats, last.finish_reason, last.stop_reason, last.num_nans_in_logits


@pytest.mark.parametrize("v2", [False, True], ids=["V1 runner", "V2 runner"])
@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
@pytest.mark.parametrize(
    ("blocks", "number", "budget"),
    [(400, SEQUENCES, 1536), (400, 3 * SEQUENCES, 1536), (400, 2 * SEQUENCES, 17), (14, 2 * SEQUENCES, 1536)],
    ids=["all", "waiting", "chunked", "preempted"],
)
def test_steps_are_those_of_vllm(
    engine: VLLMEngine, ahead: bool, v2: bool, blocks: int, number: int, budget: int
) -> None:
    compare_steps(scheduler_of(engine), ahead, v2, blocks, number, budget, seeds=range(4))


@pytest.mark.parametrize("v2", [False, True], ids=["V1 runner", "V2 runner"])
@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
def test_steps_beside_a_session(engine: VLLMEngine, ahead: bool, v2: bool) -> None:
    like = scheduler_of(engine)
    compare_steps(like, ahead, v2, 400, SEQUENCES - 2, 1536, seeds=range(4), more=session)


def compare_steps(
    like: Any,
    ahead: bool,
    v2: bool,
    blocks: int,
    number: int,
    budget: int,
    seeds: range,
    more: Callable[[int], list[tuple[int, Any]]] | None = None,
) -> None:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256)
    handed: list[int] = []
    rows = preemptions = 0
    for seed in seeds:
        rng, runs = random.Random(seed), []
        aborts = {rng.randrange(5, 60): f"r{rng.randrange(number)}" for _ in range(3)}
        for short in (False, True):
            scheduler = fresh(like, ahead, blocks, v2)
            scheduler.max_num_scheduled_tokens = budget
            if short:
                scheduler.schedule = noting(scheduler, handed)
                ShortSteps(scheduler, ahead)
            arrivals = requests(number, seed, like.block_size, 60) + (more(like.block_size) if more else [])
            runs.append(drive(scheduler, arrivals, ahead, aborts))
        for step, (own, shortened) in enumerate(zip(*runs, strict=True)):
            assert own == shortened, f"step {step} of seed {seed}"
            if len(own) > 1:
                rows += len(own[-3])
                preemptions += sum(held[0][-1] for held in own[1].values())
            else:
                assert step > 50
                assert len(own[0]) >= number - len(aborts)
    seldom = blocks < 100 or more is not None
    assert sum(handed) < (1.0 if seldom else 0.75) * rows, "all went the way of vLLM"
    assert bool(preemptions) == (blocks < 100)


def noting(scheduler: Any, handed: list[int]) -> Callable[..., Any]:
    own = scheduler.schedule

    def schedule(*args: Any) -> Any:
        handed.append(len(scheduler.running))
        return own(*args)

    return schedule


def test_who_counts_on_and_who_is_silent(engine: VLLMEngine) -> None:
    from vllm import PoolingParams, SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams
    from vllm.v1.request import Request

    scheduler = fresh(scheduler_of(engine), True, 400, True)
    ShortSteps(scheduler, ahead=True)

    def until(pooling: Any = None, mm_features: Any = None, resumable: bool = False, **params: Any) -> tuple[int, int]:
        given = {"max_tokens": 9, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY} | params
        sampling = None if pooling else SamplingParams(**given)
        name = f"r{len(scheduler.requests)}"
        request = Request(name, [3] * 5, sampling, pooling, mm_features=mm_features, resumable=resumable)
        scheduler.add_request(request)
        return request.counts_until, request.silent_until

    assert until() == until(logprobs=0) == (14, 14)
    assert until(max_tokens=1000) == (128, 128)  # max_model_len
    assert until(logprobs=1) == until(logprobs=-1) == (14, 0)
    assert until(prompt_logprobs=0) == (14, 0)
    assert until(detokenize=True) == (14, 0)
    assert until(output_kind=RequestOutputKind.CUMULATIVE) == (14, 0)
    repetition = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
    assert until(repetition_detection=repetition) == (14, 0)
    assert until(structured_outputs=StructuredOutputsParams(regex="a")) == (0, 0)
    assert until(resumable=True) == (0, 0)
    assert until(pooling=PoolingParams()) == (0, 0)
    place = PlaceholderRange(offset=0, length=1)
    image = MultiModalFeatureSpec(data=None, modality="image", identifier="one", mm_position=place)
    assert until(mm_features=[image]) == (0, 0)


SAMPLINGS = {
    "no end": Sampling(max_completion_length=70, ignore_eos=True),
    "ends": Sampling(max_completion_length=70, stop_token_ids=tuple(range(10, 20))),
    "strings": Sampling(max_completion_length=70, stop=("a", "7")),
    "greedy": Sampling(max_completion_length=70, temperature=0.0),
}


@pytest.mark.parametrize("log_probs", [False, True], ids=["", "log_probs"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_responses_are_those_of_vllm(engine: VLLMEngine, sampling: Sampling, log_probs: bool) -> None:
    scheduler = scheduler_of(engine)
    prompts = [[5 + i // 2] * (1 + 5 * (i // 2)) for i in range(2 * SEQUENCES - 5)]
    results = []
    for short in (True, False):
        kept = {name: vars(scheduler).pop(name) for name in TAKEN_OVER if not short}
        torch.manual_seed(0)  # on the CPU all draw from this generator
        assert engine.llm.reset_prefix_cache()
        results.append(engine.generate(prompts, sampling, seeds=list(range(len(prompts))), log_probs=log_probs))
        vars(scheduler).update(kept)
    assert results[0] == results[1]
    assert not scheduler.requests
    assert not scheduler.kv_cache_manager.block_pool.get_usage()


def test_other_schedulers_are_left_alone(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = scheduler_of(engine)
    assert vllm_process.scheduler_digest() in vllm_process._READ
    assert all(name in vars(scheduler) for name in TAKEN_OVER)
    for name in TAKEN_OVER:
        monkeypatch.delitem(vars(scheduler), name)
    refused = [
        (scheduler, "connector", object()),
        (scheduler, "num_spec_tokens", 2),
        (scheduler, "hash_block_size", 2 * scheduler.block_size),
        (scheduler, "log_stats", True),
        (Scheduler, "schedule", lambda self: None),
        (vllm_process, "_READ", {}),
    ]
    for owner, name, value in refused:
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, value)
            assert not vllm_process.shorten_steps(engine.llm)
    assert not set(TAKEN_OVER) & set(vars(scheduler))
