"""The run that a Trainer is set up for in numbers, its plan, and what the engine must know of both. Nothing is loaded yet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_rlhf.plan import Plan, Run, make_plan, problems, read_run
from lightning_rlhf.plan.checks import too_long
from lightning_rlhf.plan.memory import GIB
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.sharing import engine_share

if TYPE_CHECKING:
    from lightning_rlhf.callbacks.rollout import RolloutCallback
    from lightning_rlhf.modules.base import RLHFLightningModule


CONTROL_GROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where Linux says what a container may use, by version of control groups."""


def run_of(trainer: pl.Trainer, module: RLHFLightningModule, rollout: RolloutCallback) -> Run:
    """The numbers of the run that a trainer is set up for."""
    return read_run(
        module,
        getattr(trainer, "datamodule", None),
        rollout,
        module.strategy,
        config=module.settings.config,
        world_size=trainer.world_size,
        num_nodes=trainer.num_nodes,
        device_type=module.strategy.root_device.type,
        callbacks=trainer.callbacks,  # type: ignore[attr-defined]
    )


def device_memory(device: torch.device) -> int:
    """Bytes of a GPU, 0 of anything else."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def host_memory() -> int:
    """Bytes of this machine, or of the control group that the process is in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = [text for limit in CONTROL_GROUPS if limit.exists() and (text := limit.read_text().strip()).isdigit()]
    return min([total, *map(int, found)])


def plan_of(trainer: pl.Trainer, module: RLHFLightningModule, rollout: RolloutCallback, memory: int) -> Plan:
    """The plan of the run that a trainer is set up for; see `make_plan`."""
    configs = {name: settings.config for name, settings in module.roles.items()}
    return make_plan(module, rollout, run_of(trainer, module, rollout), configs, memory)


def checked_run(trainer: pl.Trainer, module: RLHFLightningModule, rollout: RolloutCallback) -> Run:
    """`run_of`, or ValueError if something cannot work; what only costs warns, what may not be meant is logged."""
    module.check_options()
    run = run_of(trainer, module, rollout)
    for problem in problems(run):
        if problem.kind == "error":
            raise ValueError(problem.message)
        tell = rank_zero_info if problem.kind == "note" else rank_zero_warn
        tell(problem.message)
    limit = module.check_models()
    if run.prompt_length and run.context > limit:
        raise ValueError(too_long(run, limit))
    return run


def choose_plan(trainer: pl.Trainer, module: RLHFLightningModule, rollout: RolloutCallback, stage: str) -> Plan | None:
    """The plan, whose rung decides what gives way to the engine; None where there is none, see `Ladder.usual`.

    Raises:
        ValueError: nothing fits.
    """
    memory = module.strategy.broadcast(device_memory(module.strategy.root_device))  # one answer on all ranks
    if not memory:
        return None
    try:
        plan = rollout.drafted or plan_of(trainer, module, rollout, memory)
    except Exception as error:  # a model that trains, but that the meta device cannot run
        rank_zero_warn(f"the plan cannot choose rollout.sleep_level, the engine {rollout.ladder.usual}: {error}")
        return None
    errors = [problem.message for problem in plan.problems if problem.kind == "error"]
    if errors and stage == "fit":
        raise ValueError(errors[0])
    rank_zero_info(f"engine {plan.choice.reason}")
    if (parked := sum(plan.host.values())) > (there := host_memory()):
        parts = ", ".join(f"{name} {size / GIB:.0f}" for name, size in plan.host.items() if size)
        rank_zero_warn(
            f"the GPUs of a node park {parked / GIB:.0f} GiB in its memory, which has {there / GIB:.0f} ({parts}): leave an"
            " offload, rollout.sleep_level: 1 or async_save out, or use more nodes"
        )
    return plan


def engine_setup(
    trainer: pl.Trainer, module: RLHFLightningModule, rollout: RolloutCallback, run: Run, plan: Plan | None
) -> EngineSetup:
    """See `EngineSetup`; without a ``plan`` the size of the KV cache is the engine's to choose."""
    strategy, data = module.strategy, getattr(trainer, "datamodule", None)
    sizes = [
        engine_share(
            -(-getattr(data, name, 256) // strategy.dp_size) * responses,
            strategy.sequence_parallel_size,
            rollout.engine.tensor_parallel_size,
        )
        for name, responses in (
            ("batch_size", rollout.sampling.num_generations + module.needs_greedy),
            ("val_batch_size", rollout.val_sampling.num_generations),
        )
        if isinstance(getattr(data, name, 256), int)
    ]
    return EngineSetup(
        model=module.model_path,
        device=strategy.root_device,
        dtype=strategy.precision_plugin.compute_dtype,
        eos_token_ids=module.eos_token_ids,
        pad_token_id=module.pad_token_id,
        max_model_len=run.context,
        max_num_seqs=max(sizes),
        seed=module.seed,
        trust_remote_code=module.settings.trust_remote_code,
        config_overrides=module.settings.config_overrides,
        kv_cache_memory_bytes=None if plan is None or plan.engine.least is None else plan.engine.kv_cache,
        beside=rollout.async_level > 0,
    )
