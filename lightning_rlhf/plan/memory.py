"""Bytes on one GPU in each phase of an iteration, and on the hosts.

    rollout     parameters  reference  optimizer  engine, at work        gather buffer
    log_prob    parameters  reference  optimizer  engine, unless asleep  working  gathered
    update      parameters  reference  optimizer  engine, unless asleep  working  gathered  gradients  activations

Sharded state is exact. Activations are what autograd keeps (`plan.probe`) for a full micro-batch, those of a trained vision tower
for as many image tokens as that may have (`Run.image_tokens`); the other transients are upper bounds of what is alive at once:

    working     the larger of two that are never alive together: the head (a tile of logits in float32, and in bfloat16 for
                the products; the gradients of its inputs and weight), and the layer at work (as large as what it keeps for
                backward, twice that when it is recomputed; of a tiled MLP one tile)
    gathered    the root's parameters, two layers' parameters; in backward the root's and a unit's gradients, and the float32
                copy that is reduced (of the root's when activations are gone). A small model is all root, and of several GPUs
                what the all-gather brought lives beside the parameters until the forward pass ends

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
    """A model of the run: actor, reference, critic or reward model."""

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
class Rung:
    """What the trainer and its engine give up for each other; see `plan.ladder`.

    Args:
        sleep_level: of the engine between rollouts.
        offload_optimizer: the optimizer's state waits on the host during rollouts.
        offload_parameters: so do the parameters.
    """

    sleep_level: int
    offload_optimizer: bool
    offload_parameters: bool

    def __str__(self) -> str:
        away = {"optimizer state": self.offload_optimizer, "parameters": self.offload_parameters}
        moved = " and ".join(name for name, moves in away.items() if moves)
        level = f"sleeps (level {self.sleep_level})" if self.sleep_level else "stays awake"
        return f"{level}, {moved} on the host in rollouts" if moved else level


@dataclass(frozen=True)
class Options:
    """What trades memory for time.

    Args:
        optimizer_bytes: state per element of a trained parameter.
        rung: what leaves the GPU during rollouts and between them.
        beside: the engine generates while the trainer works.
        offload_reference: it lives on the host.
        offload_activations: what layers keep for backward waits on the host, but for two of them.
        recomputed: which layers are run again in backward, see `ModelSettings`.
        tiled_mlp: tokens of a tile, or None.
        keep_logits: from forward to backward.
        evaluates: there is a pass without gradients before the update.
        keeps_gathered: trained models stay gathered until the optimizer's step.
        prefetch: layers that are gathered ahead.
        averages: a moving average of the actor is kept.
        renews: the reference is, so that checkpoints hold it.
    """

    optimizer_bytes: float
    rung: Rung
    beside: bool
    offload_reference: bool
    offload_activations: bool
    recomputed: str
    tiled_mlp: int | None
    keep_logits: bool
    evaluates: bool
    keeps_gathered: bool = False
    prefetch: int = 0
    averages: bool = False
    renews: bool = False


def phases(run: Run, roles: list[Role], options: Options, engine: EngineMemory) -> list[Phase]:
    """The phases of an iteration in their order."""
    held = resident(run, roles, options)
    asleep = {"engine": engine.total if options.beside else 0 if options.rung.sleep_level else engine.idle}
    trained = [role for role in roles if role.trained]
    policy, size = roles[0].shape, run.compute_dtype.itemsize
    largest = size * max(one.numel() for one in policy.sizes)  # it goes alone
    rollout = held | {"engine": engine.total, "gather buffer": max(largest, min(BUCKET, size * policy.parameters))}
    if options.rung.offload_optimizer:
        rollout["optimizer"] = 0
    if options.rung.offload_parameters:
        rollout["parameters"] = 0
        # a reward model is asked while the engine is awake: in validation, in rounds of filter_groups
        rollout["reference"] = resident(run, [r for r in roles if r.name != "reference"], options)["reference"]
    found = [Phase("rollout", rollout)]
    if options.evaluates:
        passes = [_transients(run, role, options, backward=False) for role in roles]
        found.append(Phase("log_prob", held | asleep | _worst(passes)))
    passes = [_transients(run, role, options, backward=True) for role in trained]
    gradients = sum(role.shape.trained_shard(run.shards) for role in trained) * run.param_dtype.itemsize
    update = held | asleep | {"gradients": gradients} | _worst(passes)
    update.pop("moved")
    found.append(Phase("update", update))
    return found


def resident(run: Run, roles: list[Role], options: Options) -> dict[str, int]:
    """What stays on the GPU through the iteration."""
    trained = [role for role in roles if role.trained]
    elements = sum(role.shape.trained_shard(run.shards) for role in trained)
    base = sum(role.shape.shard(run.shards) for role in trained) - elements  # of LoRA, in the compute dtype
    frozen = [] if options.offload_reference else [role for role in roles if not role.trained]
    average = {"average": 4 * roles[0].shape.trained_shard(run.shards)} if options.averages else {}
    return {
        "context": CONTEXT if run.device_type == "cuda" else 0,
        "parameters": elements * run.param_dtype.itemsize + base * run.compute_dtype.itemsize,
        "reference": sum(_frozen_size(run, role) * role.shape.shard(run.shards) for role in frozen),
        "optimizer": int(elements * options.optimizer_bytes),
        **average,
    }


def host(run: Run, roles: list[Role], options: Options, engine: EngineMemory) -> dict[str, int]:
    """Bytes that the GPUs of one node park in its host memory during an iteration."""
    processes = run.world_size // run.num_nodes
    held = resident(run, roles, options)
    reference = sum(_frozen_size(run, role) * role.shape.shard(run.shards) for role in roles if not role.trained)
    passes = [_transients(run, role, options, backward=True) for role in roles if role.trained]
    kept = {role: role.shape.trained_shard(run.shards) for role in roles}
    saved = run.param_dtype.itemsize * sum(size for role, size in kept.items() if role.trained)
    saved += held["optimizer"] + 4 * kept[roles[0]] * options.averages
    if options.renews:
        saved += 2 * sum(size for role, size in kept.items() if role.name == "reference")
    return {
        "optimizer": processes * held["optimizer"] * options.rung.offload_optimizer,
        "parameters": processes * (held["parameters"] + held["reference"]) * options.rung.offload_parameters,
        "reference": processes * reference * options.offload_reference,
        "activations": processes * max((parts["moved"] for parts in passes), default=0),
        "engine weights": processes * engine.weights if options.rung.sleep_level == 1 else 0,
        "checkpoint": processes * saved * run.async_save,
    }


def _frozen_size(run: Run, role: Role) -> int:
    """Bytes of a parameter: a reference is bfloat16 whatever the run computes in, a reward model is not."""
    return 2 if role.name == "reference" else run.compute_dtype.itemsize


def _transients(run: Run, role: Role, options: Options, *, backward: bool) -> dict[str, int]:
    shape, size = role.shape, run.compute_dtype.itemsize
    tokens = run.stream_tokens(run.mini_batches if backward else 1)
    in_tile = min(tokens, options.tiled_mlp or tokens)
    tile_bytes = int(in_tile * shape.mlp_bytes) if in_tile < tokens else 0
    layer_bytes = shape.layer_bytes - (shape.mlp_bytes if tile_bytes else 0)
    layer = int(tokens * layer_bytes) + tile_bytes
    rows = -(-tokens * run.response_length // run.longest)
    logits = min(4 * rows * shape.vocabulary, LogProbHead.tile_bytes)
    unit = max(shape.units, default=0)
    ahead = 2 + options.prefetch
    if not backward:
        size = size if role.trained else _frozen_size(run, role)
        everything = options.keeps_gathered and role.trained
        brought = shape.root if shape.whole and run.shards > 1 else 0
        return {
            "working": max(logits, layer),
            "gathered": size * ((shape.parameters if everything else shape.root + ahead * unit) + brought),
        }
    input_bytes = shape.hidden * size
    plain, again = shape.layers, 0  # layers that keep everything, and those that are run again
    if options.recomputed != "off":
        again = -(-shape.layers // 2) if options.recomputed == "every_second" else shape.layers
        plain -= again
    attention = again * shape.attention_bytes if options.recomputed == "selective" else 0  # stays on the device
    movable = plain * layer_bytes + again * input_bytes
    held = movable * 2 / max(2, shape.layers) if options.offload_activations else movable
    kept = shape.saved_bytes - shape.layers * shape.layer_bytes + attention + held
    seen = run.image_tokens(run.mini_batches) if shape.tower_bytes else 0
    kept_rows = rows * (input_bytes + 20)  # what the head saves: inputs, labels, three floats
    if options.keep_logits and size < 4:  # `LogProbHead` keeps none that are float32 products
        kept_rows += rows * 4 * shape.vocabulary
    # a tile of logits and, for the products, again in the compute dtype; the gradients of inputs (float32) and weight
    head = logits + logits * size // 4 + rows * shape.hidden * 4 + size * shape.vocabulary * shape.hidden
    activations = int(tokens * kept) + kept_rows + int(seen * shape.tower_bytes)
    root_gradients, unit_gradients = (min(part, shape.trained_parameters) for part in (shape.root, unit))
    return {
        "activations": activations,
        "working": max(head, layer + (layer if again else tile_bytes), int(seen * shape.tower_layer_bytes)),
        "gathered": size * (shape.parameters if options.keeps_gathered else shape.root + ahead * unit)
        + size * root_gradients
        + max((size + 4) * unit_gradients, 4 * root_gradients - activations),
        "moved": int(tokens * (movable - held)),
    }


def _worst(passes: list[dict[str, int]]) -> dict[str, int]:
    return max(passes, key=lambda parts: sum(parts.values()) - parts.get("moved", 0))
