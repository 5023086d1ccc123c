"""Which engine generates what, when ranks share prompts (sequence parallelism) or an engine (tensor parallelism).

    data rank   sp consecutive ranks: they have the same requests and all need the responses
    engine      tp consecutive ranks: they must be given the same requests in the same order
    pool        lcm(sp, tp) consecutive ranks: whole data ranks and whole engines

    requests of a data rank ─ gather ─▶ of the pool ─ near-equal pieces ─▶ each engine generates ─ gather ─▶ own responses

Engines of a pool are replicas of each other. Every response has its own seed, so that it does not depend on the split. Pieces are
contiguous: responses to one prompt mostly meet in one engine, whose cache then holds the prompt once. Within a piece those start
first that are expected to be longest: an engine that cannot run all at once would else end with a few of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_rlhf.rollout.engine import RolloutEngine
from lightning_rlhf.types import Completion, PromptImages, Sampling


@dataclass(frozen=True)
class Pool:
    """The ranks among which requests are shared, as one of them sees it.

    Args:
        sp: ranks of a data rank.
        tp: ranks of an engine.
        rank: this one, counted within the pool.
        all_gather: one picklable object per rank of the pool -> their list.
    """

    sp: int
    tp: int
    rank: int
    all_gather: Callable[[Any], list[Any]]

    @property
    def size(self) -> int:
        return pool_size(self.sp, self.tp)

    def share(
        self,
        engine: RolloutEngine,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[int | None],
        log_probs: bool = False,
        images: Sequence[PromptImages | None] | None = None,
        expected: Sequence[float] | None = None,
        talk: Callable[..., list[Completion]] | None = None,
        rows: Sequence[dict[str, Any]] | None = None,
    ) -> tuple[Callable[[], list[Completion]], slice]:
        """`RolloutEngine.generate` for the requests of this data rank, with the work of the pool spread over its engines.

        A collective of the pool, if that is more than a data rank.

        Args:
            expected: lengths of the responses, in any unit.
            talk: makes several turns of each, see `turns.Speaker`, with ``rows``, the columns of each prompt.

        Returns:
            The work of this rank's engine, to be done by `collect` or before it; only with ``tp`` above 1 does it talk to other
            ranks. And which of the pool's responses are this data rank's.
        """
        none = [None] * len(prompts)
        own = list(zip(prompts, seeds, images or none, expected or none, rows or none, strict=True))
        shares: list[Any] = [own]
        if self.size > self.sp:
            shares = self.all_gather(own if self.rank % self.sp == 0 else None)[:: self.sp]
        requests = [request for share in shares for request in share]
        engines = self.size // self.tp
        begin, end = (len(requests) * (self.rank // self.tp + i) // engines for i in (0, 1))

        def run() -> list[Completion]:
            order = sorted(range(begin, end), key=lambda i: -(requests[i][3] or 0))
            ids, draws, shown, _, columns = zip(*(requests[i] for i in order), strict=True) if order else [()] * 5
            generate = partial(engine.generate, sampling=sampling, log_probs=log_probs)
            if talk is None:
                pictures: dict[str, Any] = {"images": shown} if any(shown) else {}
                done = generate(ids, seeds=draws, **pictures)
            else:
                done = talk(generate, ids, columns, draws)
            return [completion for _, completion in sorted(zip(order, done, strict=True), key=lambda pair: pair[0])]

        before = sum(map(len, shares[: self.rank // self.sp]))
        return run, slice(before, before + len(own))

    def collect(self, run: Callable[[], list[Completion]]) -> list[Completion]:
        """The responses of all engines of the pool. A collective of the pool.

        The ranks of a data rank get the same objects, whatever their engines' kernels do.

        Raises:
            RuntimeError: an engine of another rank failed; the message is its error.
        """
        if self.sp == 1:
            return run()
        done: list[Completion] = []
        failure: Exception | None = None
        try:
            done = run()
        except Exception as error:
            if self.tp > 1:  # ranks that are still inside the engine would never come to the exchange
                raise
            failure = error
        results = self.all_gather(
            (done if self.rank % self.tp == 0 else [], failure and f"{type(failure).__name__}: {failure}")
        )
        if failure is not None:
            raise failure
        if messages := [message for _, message in results if message]:
            raise RuntimeError(f"the engine of another rank failed: {messages[0]}")
        return [completion for completions, _ in results for completion in completions]


def pool_size(sp: int, tp: int) -> int:
    """Ranks of a pool."""
    return math.lcm(sp, tp)


def engine_share(responses: int, sp: int, tp: int) -> int:
    """Most responses of one engine when a data rank has so many."""
    return -(-responses * tp // sp)
