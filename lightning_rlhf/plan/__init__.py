"""What a run will do and need, from its configuration alone: meshes, batch arithmetic, memory, and what cannot work.

    read_run ─▶ Run ─▶ problems(run)                       what `RolloutCallback` asks in every run
                 └──▶ make_plan ─▶ Plan ─▶ summary, full   at the start of a fit, and ``lightning-rlhf plan``
                          └──▶ Choice                     what gives way to the engine: `plan.ladder`

Nothing here reads weights, uses a GPU or talks to other processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_rlhf.flops import dims_of
from lightning_rlhf.hf_config import check_class
from lightning_rlhf.modules.roles import SCORED
from lightning_rlhf.modules.vision import check_vision
from lightning_rlhf.plan.checks import Problem, problems
from lightning_rlhf.plan.ladder import Choice, choose
from lightning_rlhf.plan.memory import GIB, Options, Phase, Role, host
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
        choice: what gives way to the engine, and what one GPU holds at the peak of each phase.
        fixed: the user said what gives way.
        adapters: only they are trained.
        host: parked in the memory of one node.
        kv_token: bytes of the engine's cache per token, on one GPU.
        engine_name: class.
        device_memory: bytes of one GPU, 0 if that is not known.
        problems: what cannot work or costs.
        notes: where figures are not of the run itself.
    """

    model: str
    run: Run
    roles: tuple[Role, ...]
    matmul_parameters: int | None
    choice: Choice
    fixed: bool
    adapters: bool
    host: dict[str, int]
    kv_token: int
    engine_name: str
    device_memory: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()

    @property
    def phases(self) -> tuple[Phase, ...]:
        return self.choice.phases

    @property
    def engine(self) -> EngineMemory:
        """While it is awake."""
        return self.choice.engine

    def with_problems(self, more: Iterable[Problem]) -> Plan:
        """The same, and what else is wrong; errors first."""
        found = dict.fromkeys([*self.problems, *more])
        return replace(self, problems=tuple(sorted(found, key=lambda problem: problem.kind)))

    @property
    def trained(self) -> int:
        return sum(role.shape.trained_parameters for role in self.roles if role.trained)


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
        device_memory: bytes of one GPU; 0 if that is not known.

    Raises:
        NotImplementedError: a model that cannot attend over packed streams.
    """
    settings = module.settings
    shapes: dict[tuple[int, bool, bool], Shape] = {}  # a reference has the actor's, unless that has an adapter
    roles = []
    for name, config in configs.items():
        check_class(config, module.roles[name].key)
        check_vision(config, module.roles[name])
        lora = settings.lora if name in module.learning_rates else None
        key = id(config), name not in SCORED, lora is not None
        if key not in shapes:
            shapes[key] = shape_of(
                config,
                run.compute_dtype,
                sequence_ranks=run.sequence_ranks,
                head=key[1],
                trust_remote_code=settings.trust_remote_code,
                lora=lora,
                freeze_vision=settings.freeze_vision,
                liger=settings.liger,
                compiled=settings.compile,
                min_num_params=run.strategy.min_num_params,
                settings=module.roles[name],
            )
        roles.append(Role(name, shapes[key], trained=name in module.learning_rates))
    policy = roles[0].shape
    if settings.compile and not settings.liger and not policy.compiled:
        notes += (
            "the compiled layers could not be traced: activations are those without model.compile, an upper bound",
        )
    options = Options(
        optimizer_bytes=optimizer_bytes(module.optimizer, run.param_dtype),
        rung=rollout.ladder.usual,
        beside=run.async_level > 0,
        offload_reference=settings.offload_reference,
        offload_activations=settings.offload_activations,
        recomputed=settings.recomputed,
        tiled_mlp=settings.tiled_mlp,
        keep_logits=settings.keep_logits,
        evaluates=module.needs_old_log_probs or module.needs_reference or len(roles) > 1,
        keeps_gathered=run.strategy.reshard_after_forward is False,
        prefetch=run.strategy.prefetch,
        averages=module.ema_decay is not None,
        renews=module.refresh_every is not None,
    )
    size = run.compute_dtype.itemsize
    in_flight = -(-(run.prompts or 256) // run.data_ranks) * (run.num_generations + module.needs_greedy)
    kv_token = size * policy.kv_elements // run.cache_split
    engine = run.engine.plan_memory(
        size * (policy.parameters - (policy.trained_parameters if settings.lora else 0)) // run.engine_ranks,
        kv_token,
        run.context,
        engine_share(in_flight, run.sequence_ranks, run.engine_ranks),
        device_memory,
    )
    choice = choose(run, roles, options, engine, rollout.ladder, device_memory)
    plan = Plan(
        model=settings.model,
        run=run,
        roles=tuple(roles),
        matmul_parameters=_matmul_parameters(run.config),
        choice=choice,
        fixed=rollout.ladder.sleep_level != "auto",
        adapters=settings.lora is not None,
        host=host(run, roles, replace(options, rung=choice.rung), engine),
        kv_token=kv_token,
        engine_name=type(run.engine).__name__,
        device_memory=device_memory,
        problems=tuple(problems(run)),
        notes=notes,
    )
    return plan.with_problems(_memory_problems(plan))


def _matmul_parameters(config: Any) -> int | None:
    try:
        return dims_of(config).matmul_parameters
    except ValueError:
        return None


def _memory_problems(plan: Plan) -> Iterator[Problem]:
    """Estimates warn; what is known to the byte ends the run, unless the user said what gives way."""
    run, device = plan.run, plan.device_memory
    if not device:
        return
    longest = run.engine.context_limit or run.context
    if plan.engine.kv_cache < plan.kv_token * longest:
        yield Problem(
            "error",
            f"the engine's KV cache holds {plan.engine.kv_cache // plan.kv_token:,} tokens beside"
            f" {plan.engine.weights / GIB:.1f} GiB of weights, its longest sequence has {longest:,}: raise"
            " rollout.engine.gpu_memory_utilization or kv_cache_memory_bytes",
        )
    told = set()
    for phase in sorted(plan.phases, key=lambda phase: 0 if plan.fixed else -phase.total):
        if phase.total <= device:
            continue
        message = f"{phase.name} is estimated at {phase.total / GIB:.0f} GiB of the GPU's {device / GIB:.0f}, "
        known = {name: size for name, size in phase.parts.items() if name in _KNOWN}
        if phase.name == "rollout":
            known["engine"] = plan.engine.weights
        if sum(known.values()) <= device or plan.fixed:  # activations and transients are bounds: they only warn
            yield Problem("warning", message + f"most of it {_remedy(plan, phase, phase.parts)}")
            continue
        remedy = _remedy(plan, phase, known)
        if remedy in told:
            continue
        told.add(remedy)
        names = ["weights of the engine" if name == "engine" else name for name, size in known.items() if size]
        yield Problem(
            "error",
            f"nothing fits even if the engine {plan.choice.rung}: {message}{sum(known.values()) / GIB:.0f} of it"
            f" {' + '.join(names)}, most of that {remedy}; rollout.sleep_level: 2 tries it",
        )


_KNOWN = ("parameters", "reference", "optimizer", "average", "gradients")


def _remedy(plan: Plan, phase: Phase, parts: dict[str, int]) -> str:
    """The largest of the parts, and what makes it smaller."""
    largest, run = max(parts, key=lambda name: parts[name]), plan.run
    if largest == "engine":
        return f"engine: {' or '.join(_smaller_engine(plan, phase))}"
    change = _REMEDIES[largest].replace("model.lora", "a smaller model" if plan.adapters else "model.lora")
    switch = "offload_optimizer" if largest == "optimizer" else "offload_parameters"
    moved = getattr(plan.choice.rung, switch) or run.async_level
    if phase.name == "rollout" and largest in ("optimizer", "parameters", "reference") and not moved:
        return f"{largest}: {change}, or set rollout.{switch}"
    return f"{largest}: {change}"


def _smaller_engine(plan: Plan, phase: Phase) -> Iterator[str]:
    run, engine = plan.run, plan.engine
    if hasattr(run.engine, "kv_cache_memory_bytes") and engine.weights > engine.kv_cache:
        splits = run.engine_ranks < run.world_size // run.num_nodes
        yield "raise rollout.engine.tensor_parallel_size" if splits else "use more GPUs, or a smaller model"
    else:
        yield f"lower {run.engine.memory_settings}"
    if phase.name != "rollout":
        yield "set rollout.async_level: 0" if run.async_level else "raise rollout.sleep_level"


_REMEDIES = {
    "activations": "lower model.micro_batch_tokens, or set model.gradient_checkpointing or model.offload_activations",
    "working": "lower model.micro_batch_tokens",
    "optimizer": "use more GPUs, model.lora or an optimizer with less state",
    "parameters": "use more GPUs or model.lora",
    "gradients": "use more GPUs or model.lora",
    "average": "use more GPUs, or leave out model.ema_decay",
    "reference": "use more GPUs, model.offload_reference, or set model.kl.coef to 0",
    "gathered": "leave out trainer.strategy.reshard_after_forward and min_num_params, or use a smaller model",
    "context": "use a larger GPU",
    "gather buffer": "use a larger GPU",
}
