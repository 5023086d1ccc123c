"""The memory ladder: trainer and engine share a GPU, and the cheapest rung on which every phase fits is taken.

    the engine stays awake            nothing moves; a sync writes into weights that are there
    it sleeps between rollouts        level 2: weights and KV cache are unmapped, then mapped and synced again
      + optimizer state on the host   while the engine is awake: two copies of it per iteration
      + parameters on the host        those of every model, as soon as the engine has its weights

Level 1, whose weights wait on the host, is no rung: the next sync replaces them. Neither is an engine that gives back nothing
but its KV cache: vLLM 0.26 has no call for that (0.32 has, ``release_kv_cache_memory``).

The choice depends on the configuration and the size of the GPU, not on what happens to be free: it is the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from lightning_rlhf.plan.memory import GIB, Options, Phase, Role, Rung, phases
from lightning_rlhf.plan.run import Run
from lightning_rlhf.rollout.engine import EngineMemory

Switch = Literal["auto"] | bool

MARGIN = 0.08
"""Of a GPU, kept free. Torch's allocator rounds and splits blocks, the more so as micro-batches differ in length, and what is
outside of it is only assumed. To be too careful costs a fraction of a second per iteration, to be too bold the run."""


@dataclass(frozen=True)
class Ladder:
    """What the user fixed and left open, see `RolloutCallback`."""

    sleep_level: Literal["auto", 0, 1, 2] = "auto"
    offload_optimizer: Switch = "auto"
    offload_parameters: Switch = "auto"

    @property
    def rungs(self) -> list[Rung]:
        """Those that are allowed, the cheapest first. Parameters do not move before the optimizer's state does."""
        levels = [0, 2] if self.sleep_level == "auto" else [self.sleep_level]
        switches = self.offload_optimizer, self.offload_parameters
        moves = product(*([False, True] if switch == "auto" else [switch] for switch in switches))
        wrong_way = (False, True) if switches == ("auto", "auto") else None
        return [Rung(level, *move) for level, move in product(levels, moves) if move != wrong_way]

    @property
    def usual(self) -> Rung:
        """Where the device's memory is not known."""
        level = 2 if self.sleep_level == "auto" else self.sleep_level
        return Rung(level, self.offload_optimizer is True, self.offload_parameters is True)


@dataclass(frozen=True)
class Choice:
    """A rung, and what the engine and the phases take on it.

    Args:
        reason: the rung, its peak, and that of the closest cheaper one; one line.
    """

    rung: Rung
    engine: EngineMemory
    phases: tuple[Phase, ...]
    reason: str

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)


def choose(
    run: Run, roles: list[Role], options: Options, engine: EngineMemory, ladder: Ladder, device_memory: int
) -> Choice:
    """The first rung on which every phase fits, or else the first of those that have the least too much.

    A KV cache whose size is the plan's to choose takes what is free there, if that is less than what is wanted.

    Args:
        options: of all rungs; their own is not read.
        engine: with the KV cache that is wanted.
        device_memory: bytes of one GPU; 0 if that is not known, then the usual rung.
    """

    def on(rung: Rung, engine: EngineMemory) -> Choice:
        return Choice(rung, engine, tuple(phases(run, roles, replace(options, rung=rung), engine)), str(rung))

    if not device_memory:
        return on(ladder.usual, engine)
    room, tried = int(device_memory * (1 - MARGIN)), [on(rung, engine) for rung in ladder.rungs]
    choice = min(tried, key=lambda one: sum(max(0, phase.total - room) for phase in one.phases))
    closest = min(tried[: tried.index(choice)], key=lambda one: one.peak.total, default=None)
    excess = max(phase.total for phase in choice.phases if phase.parts["engine"]) - room
    if excess > 0 and engine.least is not None:
        choice = on(choice.rung, replace(engine, kv_cache=max(engine.least, engine.kv_cache - excess)))
    reason = f"{choice.rung}: {_gib(choice.peak)} of {device_memory / GIB:.0f} GiB at the peak ({choice.peak.name})"
    if closest and closest.peak.total > choice.peak.total:
        reason += f", {_gib(closest.peak)} if it {closest.rung}"
    reason += f"; KV cache {choice.engine.kv_cache / GIB:.1f} GiB"
    reason += f", {engine.kv_cache / GIB:.1f} wanted" if choice.engine != engine else ""
    return replace(choice, reason=reason)


def _gib(phase: Phase) -> str:
    return f"{phase.total / GIB:.0f}"
