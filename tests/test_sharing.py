"""Requests shared among engines: whatever the split, every rank gets what one engine would give to its prompts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from toys import TINY_MODULE, even_tokens, pooled, quiet_trainer, spawn

from lightning_rlhf import FSDPUlyssesStrategy, GRPOLightningModule, PromptDataModule, RolloutCallback
from lightning_rlhf.rollout import TransformersEngine
from lightning_rlhf.rollout.sharing import Pool, engine_share, pool_size
from lightning_rlhf.types import Completion, Sampling

SAMPLING = Sampling(max_completion_length=3)


class FakeEngine:
    """Answers with the request itself; ``asked`` has the requests of its calls."""

    def __init__(self, broken: bool = False) -> None:
        self.asked: list[list[tuple[Any, ...]]] = []
        self.broken = broken

    def generate(self, prompts, sampling, *, seeds, log_probs=False, images=None):
        if self.broken:
            raise ValueError("out of blocks")
        requests = list(zip(map(tuple, prompts), seeds, images or [None] * len(prompts), strict=True))
        self.asked.append(requests)
        return [Completion([*prompt, seed], "stop", [float(seed)] * log_probs) for prompt, seed, _ in requests]


class Meeting:
    """`all_gather` among threads."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


def on_every_rank(world: int, sp: int, tp: int, work: Callable[[int, Pool], Any]) -> list[Any]:
    """What ``work(rank, pool)`` returned, or the error it raised, on each rank."""
    size = pool_size(sp, tp)
    meetings = [Meeting(size) for _ in range(world // size)]

    def run(rank: int) -> Any:
        meeting, place = meetings[rank // size], rank % size
        try:
            return work(rank, Pool(sp, tp, place, lambda value: meeting.all_gather(place, value)))
        except Exception as error:
            return error

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(run, range(world)))


def requests_of(data_rank: int) -> tuple[list[list[int]], list[int]]:
    """Unequal numbers of prompts, none on data rank 2; three responses to each."""
    prompts = [[data_rank, i] for i in range([2, 5, 0, 1][data_rank % 4]) for _ in range(3)]
    return prompts, [100 * data_rank + i for i in range(len(prompts))]


@pytest.mark.parametrize(
    ("world", "sp", "tp"),
    [
        (1, 1, 1),
        (4, 2, 1),
        (4, 1, 2),
        (4, 2, 2),
        (4, 4, 2),
        (4, 2, 4),
        (4, 1, 4),
        (4, 4, 1),
        (6, 2, 3),
        (8, 4, 2),
        (12, 4, 6),
    ],
)
def test_any_split_gives_the_responses_of_one_engine(world, sp, tp):
    engines = [FakeEngine() for _ in range(world)]

    def work(rank: int, pool: Pool) -> list[Completion]:
        prompts, seeds = requests_of(rank // sp)
        return pooled(pool, engines[rank], prompts, SAMPLING, seeds=seeds, log_probs=True)

    for rank, responses in enumerate(on_every_rank(world, sp, tp, work)):
        prompts, seeds = requests_of(rank // sp)
        assert responses == FakeEngine().generate(prompts, SAMPLING, seeds=seeds, log_probs=True)
    asked = [engine.asked[0] for engine in engines]
    assert all(asked[rank] == asked[rank - rank % tp] for rank in range(world)), "the ranks of an engine must agree"
    total = sum(len(requests_of(data_rank)[0]) for data_rank in range(world // sp))
    assert sum(map(len, asked[::tp])) == total, "a response was drawn twice"
    pools = [asked[i : i + pool_size(sp, tp)] for i in range(0, world, pool_size(sp, tp))]
    assert all(max(map(len, pool)) - min(map(len, pool)) <= 1 for pool in pools)
    assert max(map(len, asked)) <= engine_share(15, sp, tp)


def test_pictures_stay_with_their_prompts():
    def work(rank: int, pool: Pool) -> list[tuple[Any, ...]]:
        engine = FakeEngine()
        pooled(pool, engine, [[rank], [9]], SAMPLING, seeds=[rank, 9], images=[f"picture {rank}", None])
        return engine.asked[0]

    seen = on_every_rank(2, 1, 2, work)
    assert seen == [[((0,), 0, "picture 0"), ((9,), 9, None), ((1,), 1, "picture 1"), ((9,), 9, None)]] * 2


def test_each_conversation_has_its_own_prompt_row_and_seed_in_whatever_order_they_start():
    held: list[tuple[Any, ...]] = []

    def talk(generate: Any, prompts: Any, rows: Any, seeds: Any) -> list[Completion]:
        held.extend(zip(prompts, rows, seeds, strict=True))
        return generate(prompts, seeds=seeds)

    prompts, rows = [[row] for row in range(3)], [{"row": row} for row in range(3)]
    pool = Pool(1, 1, 0, lambda value: [value])
    done = pooled(pool, FakeEngine(), prompts, SAMPLING, seeds=[5, 6, 7], expected=[1, 3, 2], talk=talk, rows=rows)
    assert held == [([1], {"row": 1}, 6), ([2], {"row": 2}, 7), ([0], {"row": 0}, 5)]
    assert [one.token_ids for one in done] == [[0, 5], [1, 6], [2, 7]]


def test_when_an_engine_fails_the_ranks_that_share_its_prompts_hear_of_it():
    def work(rank: int, pool: Pool) -> list[Completion]:
        return pooled(pool, FakeEngine(broken=rank == 1), [[5]] * 4, SAMPLING, seeds=range(4))

    errors = on_every_rank(4, 2, 1, work)
    assert [type(error) for error in errors] == [RuntimeError, ValueError, list, list]
    assert str(errors[0]) == "the engine of another rank failed: ValueError: out of blocks"


def test_a_rank_of_a_shared_engine_that_fails_waits_for_nobody():
    def never(value: Any) -> list[Any]:
        raise AssertionError("a collective")

    with pytest.raises(ValueError, match="out of blocks"):
        pooled(Pool(2, 2, 0, never), FakeEngine(broken=True), [[5]], SAMPLING, seeds=[0])


# -- processes ---------------------------------------------------------------------------------------------------------


def share(rank: int, tp: int) -> list[Completion]:
    """dp 2 x sp 2."""
    strategy = FSDPUlyssesStrategy(sequence_parallel_size=2)
    size = pool_size(2, tp)
    pool = Pool(2, tp, rank % size, lambda value: strategy.all_gather_objects(value, size))
    prompts, seeds = requests_of(rank // 2)
    return pooled(pool, FakeEngine(), prompts, SAMPLING, seeds=seeds)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 4])
def test_four_processes(tp):
    shares = [requests_of(data_rank) for data_rank in (0, 0, 1, 1)]
    expected = [FakeEngine().generate(prompts, SAMPLING, seeds=seeds) for prompts, seeds in shares]
    assert spawn(share, 4, tp) == expected


@pytest.mark.parametrize(("world", "sp", "tp"), [(1, 1, 1), (2, 2, 1), (4, 2, 2)])
def test_the_longest_start_first_and_come_back_in_their_places(world, sp, tp):
    engines = [FakeEngine() for _ in range(world)]
    prompts = [[row] for row in range(6) for _ in range(2)]
    expected = [float(length) for length in (3, 9, 4, float("inf"), 9, 1) for _ in range(2)]

    def work(rank: int, pool: Pool) -> list[Completion]:
        return pooled(pool, engines[rank], prompts, SAMPLING, seeds=range(12), expected=expected)

    for responses in on_every_rank(world, sp, tp, work):
        assert [one.token_ids for one in responses] == [[row, 2 * row + i] for row in range(6) for i in range(2)]
    started = [[request[0][0] for request in engine.asked[0]] for engine in engines]
    if world == 1:
        assert started == [[3, 3, 1, 1, 4, 4, 2, 2, 0, 0, 5, 5]]
    elif tp == 1:
        assert started == [[1, 1, 2, 2, 0, 0], [3, 3, 4, 4, 5, 5]]


def rows() -> list[dict[str, str]]:
    return [{"prompt": f"say {word} "} for word in ("yes", "no", "a", "b", "one", "two", "three", "four")]


class OfLengths(TransformersEngine):
    """The first response to a prompt is as long as its tokens say, the second one has one token."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[list[int]]] = []

    def generate(self, prompts: Any, *args: Any, **options: Any) -> list[Completion]:
        self.asked.append([list(prompt) for prompt in prompts])
        done, wanted = super().generate(prompts, *args, **options), []
        for i, (prompt, one) in enumerate(zip(prompts, done, strict=True)):
            ids = one.token_ids[: 1 if i % 2 else length_of(prompt)]
            wanted.append(Completion(ids, "length", one.log_probs and one.log_probs[: len(ids)]))
        return wanted


def length_of(prompt: list[int]) -> int:
    return 1 + 3 * sum(prompt) % 8


@pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
def test_responses_are_expected_to_be_as_long_as_the_longest_to_their_prompt_was():
    engine = OfLengths()
    sampling = Sampling(max_completion_length=8, num_generations=2, ignore_eos=True)
    rollout = RolloutCallback(engine, sampling)
    trainer = quiet_trainer(rollout, max_steps=3, enable_checkpointing=False)
    module = GRPOLightningModule(**TINY_MODULE, reward=[even_tokens])
    trainer.fit(module, datamodule=PromptDataModule(path="test_sharing.rows", batch_size=4))
    batches = [trainer.train_dataloader.batch_at(*place)["prompts"] for place in ((0, 0), (0, 1), (1, 0))]
    last = [list(ids) for ids in batches[2].ids]
    expected = sorted(last, key=lambda ids: -length_of(ids))
    assert expected != last
    assert engine.asked[0] == [list(ids) for ids in batches[0].ids for _ in range(2)], "of the first nothing is known"
    assert engine.asked[2] == [ids for ids in expected for _ in range(2)]
    again = RolloutCallback()
    again.load_state_dict(rollout.state_dict())
    known = {
        int(row): length_of(list(ids)) for batch in batches for row, ids in zip(batch.index, batch.ids, strict=True)
    }
    assert again._steps.longest == rollout._steps.longest == known
