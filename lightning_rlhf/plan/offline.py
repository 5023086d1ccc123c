"""The plan of a run that is configured but not started: no Trainer, no process group, no engine, no weights.

Of a model on the hub only ``config.json`` is read; where the hub cannot be reached, common public models come from `known`.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from lightning_rlhf.hf_config import load_config, override
from lightning_rlhf.paths import is_hub_id, local_path
from lightning_rlhf.plan import Plan, make_plan, read_run
from lightning_rlhf.plan.checks import raised
from lightning_rlhf.plan.known import known_config
from lightning_rlhf.precision import FSDP2Precision
from lightning_rlhf.strategy import FSDPUlyssesStrategy


def plan_offline(
    module: Any, data: Any, rollout: Any, trainer: Any, devices: int | None = None, device_memory: int = 80 * 2**30
) -> Plan:
    """See `make_plan`.

    Args:
        trainer: the arguments of a Trainer.
        devices: GPUs per node; default what ``trainer`` says.

    Raises:
        ValueError: the trainer has another strategy or a precision that is not supported.
        FileNotFoundError: a model that cannot be found.
    """
    notes = []
    count = devices or _devices(trainer.get("devices", "auto"))
    if count is None:
        count = torch.cuda.device_count() or 1
        notes.append(f"trainer.devices is auto: planned for {count} on each node, --devices N plans for others")
    strategy = _strategy(trainer.get("strategy"))
    strategy.precision_plugin = FSDP2Precision(precision_name(trainer.get("precision")))
    found = {settings: config_of(settings) for settings in module.roles.values()}  # a reference is the actor's
    configs = {name: found[settings][0] for name, settings in module.roles.items()}
    notes += dict.fromkeys(note for _, note in found.values() if note)
    nodes = trainer.get("num_nodes", 1)
    run = read_run(
        module,
        data,
        rollout,
        strategy,
        config=configs["actor"],
        world_size=count * nodes,
        num_nodes=nodes,
        device_type="cpu" if trainer.get("accelerator") == "cpu" else "cuda",
        callbacks=trainer.get("callbacks") or [],
    )
    plan = make_plan(module, rollout, run, configs, device_memory * (run.device_type == "cuda"), tuple(notes))
    # what a run checks at its start
    told = [raised(module.check_options), raised(rollout.check, module), raised(rollout.check_draws)]
    told += [raised(module.check_role, name, config) for name, config in configs.items()]
    return plan.with_problems(chain(*told))


def config_of(settings: Any) -> tuple[Any, str | None]:
    """A model's transformers config without its weights, and a note if it is not the model's own file.

    Raises:
        FileNotFoundError: it is not in the cache, the hub cannot be reached, and it is none of the listed models.
    """
    model, overrides, trust = settings.model, settings.config_overrides, settings.trust_remote_code
    if not is_hub_id(model):
        return load_config(local_path(model, trust, weights=False, key=settings.key), overrides, trust), None
    failure = _unreachable(model)
    if failure is None:
        try:
            return load_config(model, overrides, trust), None
        except OSError as error:
            failure = str(error).strip().splitlines()[0]
    config = known_config(model)
    if config is None:
        raise FileNotFoundError(
            f"{settings.key}: the config.json of {model!r} cannot be fetched ({failure}), and it is none of the models"
            " whose sizes are built in: give a local folder that has one"
        )
    override(config, overrides or {})
    return config, f"the hub cannot be reached: the sizes of {model} are those that are built in"


def _unreachable(model: str) -> str | None:
    """Why ``config.json`` cannot be had, by one short request: the hub's client would try for half a minute."""
    from huggingface_hub import constants, get_session, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return None
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception as error:  # of whichever HTTP library the client uses
        return str(error) or type(error).__name__
    return None


def _devices(value: Any) -> int | None:
    """GPUs per node by ``trainer.devices``; None where that depends on the machine."""
    if value in ("auto", -1, "-1"):
        return None
    if isinstance(value, str) and "," in value:
        value = [part for part in value.split(",") if part]
    try:
        count = len(value) if isinstance(value, list) else int(value)
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError(f"trainer.devices must be a number of GPUs, their list, or auto, got {value!r}")
    return count


def _strategy(value: Any) -> FSDPUlyssesStrategy:
    from lightning.pytorch.strategies import StrategyRegistry

    if isinstance(value, str) and value in StrategyRegistry:
        value = StrategyRegistry.get(value)
    if not isinstance(value, FSDPUlyssesStrategy):
        name = value if isinstance(value, str) else type(value).__name__
        raise ValueError(f"trainer.strategy must be an FSDPUlyssesStrategy such as fsdp_ulysses, got {name}")
    return value


def precision_name(value: Any) -> str:
    """A value of ``trainer.precision`` by its full name."""
    names = {None: "32-true", 32: "32-true", "32": "32-true", "bf16": "bf16-mixed"}
    return names.get(value, value)
