"""Bytes on one GPU in each phase of an iteration, and on the hosts.

    rollout     parameters  reference  optimizer  engine, awake      gather buffer
    log_prob    parameters  reference  optimizer  engine, asleep     working  gathered
    update      parameters  reference  optimizer  engine, asleep     working  gathered  gradients  activations

Sharded state is exact. Activations are what autograd keeps (`plan.shape`) for a full micro-batch; the other transients are upper
bounds of what is alive at once:

    working     the larger of two that are never alive together: the head (a chunk of logits in float32, once or twice, and in
                bfloat16 for the products; the weight's gradient), and the layer at work (as large as what it keeps for
                backward, twice that when it is recomputed)
    gathered    the root's parameters, two layers' parameters; in backward the root's and a unit's gradients, and the float32
                copy that is reduced

Fragmentation is not modelled; what the CUDA context, NCCL and the libraries hold besides is `CONTEXT`, an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_rlhf.modules.head import LogProbHead
from lightning_rlhf.plan.run import Run
from lightning_rlhf.plan.shape import Shape
from lightning_rlhf.rollout.engine import EngineMemory

GIB = 2**30
CONTEXT = 3 * GIB // 2
"""Of a CUDA process outside torch's allocator: context, NCCL, cuBLAS workspaces."""
BUCKET = 1 << 29
"""Of the weight sync, see `rollout.weights.gather`."""


@dataclass(frozen=True)
class Role:
    """A model of the run: actor, reference or critic."""

    name: str
    shape: Shape
    trained: bool


@dataclass(frozen=True)
class Phase:
    """Peak bytes on one GPU, by what holds them."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Options:
    """What trades memory for time.

    Args:
        optimizer_bytes: state per element of a trained parameter.
        offload_optimizer: it waits on the host during rollouts.
        checkpointing: layers are recomputed in backward.
        sleep_level: of the engine between rollouts.
        evaluates: there is a pass without gradients before the update.
        with_entropy: the loss has an entropy bonus.
    """

    optimizer_bytes: float
    offload_optimizer: bool
    checkpointing: bool
    sleep_level: int
    evaluates: bool
    with_entropy: bool = False


def phases(run: Run, roles: list[Role], options: Options, engine: EngineMemory) -> list[Phase]:
    """The phases of an iteration in their order."""
    held = resident(run, roles, options)
    asleep = {"engine": engine.total if options.sleep_level == 0 else 0}
    trained = [role for role in roles if role.trained]
    rollout = held | {"engine": engine.total, "gather buffer": min(BUCKET, engine.weights)}
    if options.offload_optimizer:
        rollout["optimizer"] = 0
    found = [Phase("rollout", rollout)]
    if options.evaluates:
        passes = [_transients(run, role, options, backward=False) for role in roles]
        found.append(Phase("log_prob", held | asleep | _worst(passes)))
    passes = [_transients(run, role, options, backward=True) for role in trained]
    gradients = sum(_sharded(run, role) for role in trained)
    found.append(Phase("update", held | asleep | {"gradients": gradients} | _worst(passes)))
    return found


def resident(run: Run, roles: list[Role], options: Options) -> dict[str, int]:
    """What stays on the GPU through the iteration."""
    trained = [role for role in roles if role.trained]
    elements = sum(role.shape.shard(run.shards) for role in trained)
    return {
        "context": CONTEXT if run.device_type == "cuda" else 0,
        "parameters": elements * run.param_dtype.itemsize,
        "reference": 2 * sum(role.shape.shard(run.shards) for role in roles if not role.trained),
        "optimizer": int(elements * options.optimizer_bytes),
    }


def host(run: Run, roles: list[Role], options: Options, engine: EngineMemory) -> dict[str, int]:
    """Bytes that the GPUs of one node park in its host memory during an iteration."""
    processes = run.world_size // run.num_nodes
    optimizer = resident(run, roles, options)["optimizer"] if options.offload_optimizer else 0
    return {
        "optimizer": processes * optimizer,
        "engine weights": processes * engine.weights if options.sleep_level == 1 else 0,
    }


def _transients(run: Run, role: Role, options: Options, *, backward: bool) -> dict[str, int]:
    shape, size = role.shape, run.compute_dtype.itemsize
    tokens = run.stream_tokens(run.mini_batches if backward else 1)
    layer = int(tokens * shape.layer_bytes)
    rows = -(-tokens * run.response_length // run.longest)
    chunk = min(rows, LogProbHead.chunk) * shape.vocabulary
    unit = max(shape.units, default=0)
    if not backward:
        size = size if role.trained else 2
        return {"working": max(chunk * 4, layer), "gathered": size * (shape.root + 2 * unit)}
    kept = shape.saved_bytes
    if options.checkpointing:
        kept += shape.layers * (shape.hidden * size - shape.layer_bytes)
    kept_rows = rows * (shape.hidden * size + 20)  # what the head saves: inputs, labels, three floats
    head = chunk * (4 + size + (4 if options.with_entropy else 0)) + 4 * shape.vocabulary * shape.hidden
    return {
        "activations": int(tokens * kept) + kept_rows,
        "working": max(head, layer * (2 if options.checkpointing else 1)),
        "gathered": size * 2 * shape.root + (3 * size + 4) * unit,
    }


def _worst(passes: list[dict[str, int]]) -> dict[str, int]:
    return max(passes, key=lambda parts: sum(parts.values()))


def _sharded(run: Run, role: Role) -> int:
    return role.shape.shard(run.shards) * run.param_dtype.itemsize
