"""What a run will do and need, from its configuration alone: meshes, batch arithmetic, memory, and what cannot work.

    read_run ─▶ Run ─▶ problems(run)                       what `RolloutCallback` asks in every run
                 └──▶ make_plan ─▶ Plan ─▶ summary, full   at the start of a fit, and ``lightning-rlhf plan``
                          └──▶ Choice                     what gives way to the engine: `plan.ladder`

Nothing here reads weights, uses a GPU or talks to other processes.
"""

from __future__ import annotations

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
        device_memory: bytes of one GPU; 0 if that is not known.

    Raises:
        NotImplementedError: a model that cannot attend over packed streams.
    """
    settings = module.settings
    shapes: dict[tuple[int, bool, bool], Shape] = {}  # a reference has the actor's, without LoRA
    roles = []
    for name, config in configs.items():
        check_class(config, module.roles[name].key)
        check_vision(config, module.roles[name])
        key = id(config), name not in SCORED, name in module.learning_rates
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
                compiled=settings.compile,
                min_num_params=run.strategy.min_num_params,
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
        size * policy.parameters // run.engine_ranks,
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
        host=host(run, roles, replace(options, rung=choice.rung), engine),
        kv_token=kv_token,
        engine_name=type(run.engine).__name__,
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
    """Estimates warn; what is known to the byte ends the run, unless the user said what gives way."""
    if not plan.device_memory:
        return []
    found = []
    if plan.engine.kv_cache < plan.kv_token * plan.run.longest:
        message = (
            f"the engine's KV cache holds {plan.engine.kv_cache // plan.kv_token} tokens beside"
            f" {plan.engine.weights / GIB:.1f} GiB of weights, the longest sequence has {plan.run.longest}: raise"
            " rollout.engine.gpu_memory_utilization or kv_cache_memory_bytes"
        )
        found.append(Problem("error", message))
    advice = "set rollout.async_level: 0" if plan.run.async_level else "raise rollout.sleep_level"
    for phase in plan.phases if plan.fixed else [plan.choice.peak]:
        if phase.total > plan.device_memory:
            message = (
                f"{phase.name} is estimated at {phase.total / GIB:.0f} GiB of the GPU's {plan.device_memory / GIB:.0f},"
                f" most of it {_remedy(phase, advice)}"
            )
            state = sum(phase.parts.get(name, 0) for name in ("parameters", "reference", "optimizer", "gradients"))
            sure = (
                not plan.fixed and state > plan.device_memory
            )  # activations and transients are bounds: they only warn
            if sure:
                message = (
                    f"nothing fits even if the engine {plan.choice.rung}: {message}; rollout.sleep_level: 2 tries it"
                )
            found.append(Problem("error" if sure else "warning", message))
    return found


def _remedy(phase: Phase, awake_advice: str) -> str:
    """The largest part, and what makes it smaller."""
    largest = max(phase.parts, key=lambda name: phase.parts[name])
    switch = "offload_optimizer" if largest == "optimizer" else "offload_parameters"
    if phase.name == "rollout" and largest in ("optimizer", "parameters", "reference"):
        return f"{largest}: {_REMEDIES[largest]}, or set rollout.{switch}"
    awake = phase.name != "rollout" and largest == "engine"
    return f"{largest}: {_REMEDIES[largest]}" + (f", or {awake_advice}" if awake else "")


_REMEDIES = {
    "activations": "lower model.micro_batch_tokens, or set model.gradient_checkpointing or model.offload_activations",
    "working": "lower model.micro_batch_tokens",
    "engine": "lower rollout.engine.gpu_memory_utilization or kv_cache_memory_bytes",
    "optimizer": "use more GPUs, model.lora or an optimizer with less state",
    "parameters": "use more GPUs or model.lora",
    "gradients": "use more GPUs or model.lora",
    "reference": "use more GPUs, model.offload_reference, or set model.kl.coef to 0",
    "gathered": "use a smaller model",
    "context": "use a larger GPU",
    "gather buffer": "use a larger GPU",
}
