"""What a run will do and need, from its configuration alone: meshes, batch arithmetic, memory, and what cannot work.

    read_run ─▶ Run ─▶ problems(run)                       what `RolloutCallback` asks in every run
                 └──▶ make_plan ─▶ Plan ─▶ summary, full   at the start of a fit, and ``lightning-rlhf plan``

Nothing here reads weights, uses a GPU or talks to other processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_rlhf.flops import dims_of
from lightning_rlhf.hf_config import check_class
from lightning_rlhf.modules.vision import check_vision
from lightning_rlhf.plan.checks import Problem, problems
from lightning_rlhf.plan.memory import GIB, Options, Phase, Role, host, phases
from lightning_rlhf.plan.run import Run, optimizer_bytes, read_run
from lightning_rlhf.plan.shape import Shape, shape_of
from lightning_rlhf.rollout.engine import EngineMemory
from lightning_rlhf.rollout.sharing import engine_share

if TYPE_CHECKING:
    from lightning_rlhf.callbacks.rollout import RolloutCallback
    from lightning_rlhf.modules.base import RLHFLightningModule

__all__ = ["Plan", "Problem", "Run", "Shape", "make_plan", "problems", "read_run", "shape_of"]


@dataclass(frozen=True)
class Plan:
    """Everything that the tables show.

    Args:
        model: as the user named it.
        run: the numbers.
        roles: the models of the run.
        matmul_parameters: of the policy, those multiplied with each token; None if that is not known.
        phases: peak memory of one GPU.
        host: parked in the memory of one node.
        engine: memory of the engine while it is awake.
        kv_token: bytes of its cache per token, on one GPU.
        engine_name: class.
        sleep_level: of the engine between rollouts.
        device_memory: bytes of one GPU.
        problems: what cannot work or costs.
        notes: where figures are not of the run itself.
    """

    model: str
    run: Run
    roles: tuple[Role, ...]
    matmul_parameters: int | None
    phases: tuple[Phase, ...]
    host: dict[str, int]
    engine: EngineMemory
    kv_token: int
    engine_name: str
    sleep_level: int
    device_memory: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def trained(self) -> int:
        return sum(size.numel() for role in self.roles if role.trained for size in role.shape.trained)


def make_plan(
    module: RLHFLightningModule,
    rollout: RolloutCallback,
    run: Run,
    configs: dict[str, Any],
    device_memory: int,
    notes: tuple[str, ...] = (),
) -> Plan:
    """Build every role on the meta device and add up.

    Args:
        configs: of transformers, by role.
        device_memory: bytes of one GPU.

    Raises:
        NotImplementedError: a model that cannot attend over packed streams.
    """
    settings = module.settings
    shapes: dict[tuple[int, bool, bool], Shape] = {}  # a reference has the actor's, without LoRA
    roles = []
    for name, config in configs.items():
        check_class(config, module.roles[name].key)
        check_vision(config, module.roles[name])
        key = id(config), name != "critic", name in module.learning_rates
        if key not in shapes:
            shapes[key] = shape_of(
                config,
                run.compute_dtype,
                sequence_ranks=run.sequence_ranks,
                head=key[1],
                trust_remote_code=settings.trust_remote_code,
                lora=settings.lora if key[2] else None,
                freeze_vision=settings.freeze_vision,
                liger=settings.liger,
            )
        roles.append(Role(name, shapes[key], trained=name in module.learning_rates))
    policy = roles[0].shape
    options = Options(
        optimizer_bytes=optimizer_bytes(module.optimizer, run.param_dtype),
        offload_optimizer=rollout.offload_optimizer,
        offload_parameters=rollout.offload_parameters,
        offload_reference=settings.offload_reference,
        offload_activations=settings.offload_activations,
        recomputed=settings.recomputed,
        tiled_mlp=settings.tiled_mlp,
        sleep_level=rollout.sleep_level,
        evaluates=module.needs_old_log_probs or module.needs_reference or len(roles) > 1,
        keeps_gathered=run.strategy.reshard_after_forward is False,
        prefetch=run.strategy.prefetch,
    )
    size = run.compute_dtype.itemsize
    in_flight = -(-(run.prompts or 1) // run.data_ranks) * run.num_generations
    kv_token = size * policy.kv_elements // run.cache_split
    engine = run.engine.plan_memory(
        size * policy.parameters // run.engine_ranks,
        kv_token,
        run.context,
        engine_share(in_flight, run.sequence_ranks, run.engine_ranks),
        device_memory,
    )
    plan = Plan(
        model=settings.model,
        run=run,
        roles=tuple(roles),
        matmul_parameters=_matmul_parameters(run.config),
        phases=tuple(phases(run, roles, options, engine)),
        host=host(run, roles, options, engine),
        engine=engine,
        kv_token=kv_token,
        engine_name=type(run.engine).__name__,
        sleep_level=rollout.sleep_level,
        device_memory=device_memory,
        problems=tuple(problems(run)),
        notes=notes,
    )
    found = sorted([*plan.problems, *_memory_problems(plan)], key=lambda problem: problem.kind)
    return replace(plan, problems=tuple(found))


def _matmul_parameters(config: Any) -> int | None:
    try:
        return dims_of(config).matmul_parameters
    except ValueError:
        return None


def _memory_problems(plan: Plan) -> list[Problem]:
    """Estimates only warn, except where the engine's own arithmetic must fail."""
    if plan.run.device_type != "cuda":
        return []
    found = []
    if plan.engine.kv_cache < plan.kv_token * plan.run.longest:
        message = (
            f"the engine's KV cache holds {plan.engine.kv_cache // plan.kv_token} tokens beside"
            f" {plan.engine.weights / GIB:.1f} GiB of weights, the longest sequence has {plan.run.longest}: raise"
            " rollout.engine.gpu_memory_utilization or kv_cache_memory_bytes"
        )
        found.append(Problem("error", message))
    for phase in plan.phases:
        if phase.total > plan.device_memory:
            largest = max(phase.parts, key=lambda name: phase.parts[name])
            message = (
                f"{phase.name} is estimated at {phase.total / GIB:.0f} GiB of the GPU's {plan.device_memory / GIB:.0f},"
                f" most of it {largest}: {_REMEDIES[largest]}"
            )
            found.append(Problem("warning", message))
    return found


_REMEDIES = {
    "activations": "lower model.micro_batch_tokens, or set model.gradient_checkpointing or model.offload_activations",
    "working": "lower model.micro_batch_tokens",
    "engine": "lower rollout.engine.gpu_memory_utilization or raise rollout.sleep_level",
    "optimizer": "use more GPUs, model.lora, an optimizer with less state, or in the rollout rollout.offload_optimizer",
    "parameters": "use more GPUs or model.lora, or in the rollout rollout.offload_parameters",
    "gradients": "use more GPUs or model.lora",
    "reference": "use more GPUs, model.offload_reference, or set model.kl.coef to 0",
    "gathered": "use a smaller model",
    "context": "use a larger GPU",
    "gather buffer": "use a larger GPU",
}
