"""A plan as text: a summary of seven lines for the start of a run, a table with all parts for ``lightning-rlhf plan``."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lightning_rlhf.plan import Plan, Run, problems
from lightning_rlhf.plan.memory import GIB


def show(text: Group) -> None:
    """To the terminal, or into a log at a width of 120."""
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(text)


def summary(plan: Plan) -> Group:
    """Meshes, arithmetic, peaks, and what the estimate finds; the checks' own warnings come from the `RolloutCallback`."""
    table = _grid()
    for key, value in _lines(plan).items():
        table.add_row(key, value)
    title, unit = _memory(plan)
    peaks = "   ".join(f"{phase.name} {phase.total / unit:.1f}" for phase in plan.phases)
    table.add_row(title, f"{peaks}   of {plan.device_memory / GIB:.0f} (estimate)" if _on_gpu(plan) else peaks)
    told = problems(plan.run)
    return Group(table, *_remarks(replace(plan, problems=tuple(p for p in plan.problems if p not in told))))


def full(plan: Plan) -> Group:
    """The summary with every part of the memory."""
    table = _grid()
    for key, value in (_lines(plan) | _details(plan)).items():
        table.add_row(key, value)
    memory = Table(box=None, pad_edge=False, header_style="bold")
    title, unit = _memory(plan)
    memory.add_column(title)
    for phase in plan.phases:
        memory.add_column(phase.name, justify="right")
    names = dict.fromkeys(name for phase in plan.phases for name in phase.parts)
    for name in names:
        parts = [phase.parts.get(name, 0) for phase in plan.phases]
        if any(parts):
            memory.add_row(name, *(f"{part / unit:.2f}" if part else "" for part in parts))
    totals = [f"{phase.total / unit:.2f}" for phase in plan.phases]
    memory.add_row("total" + (f" of {plan.device_memory / GIB:.0f}" if _on_gpu(plan) else ""), *totals, style="bold")
    return Group(table, Text(), memory, *_remarks(plan))


def _lines(plan: Plan) -> dict[str, str]:
    run, policy = plan.run, plan.roles[0].shape
    trained = " + ".join(role.name for role in plan.roles if role.trained)
    frozen = "".join(f", frozen {role.name}" for role in plan.roles if not role.trained)
    steps = f"{run.ppo_epochs} x {run.mini_batches} optimizer steps" + (
        f" of {run.responses // run.mini_batches:,} responses" if run.responses else ""
    )
    micro = f"streams of {run.budget:,} tokens" + (
        f", at most {run.micro_batches} per step and data rank" if run.micro_batches else ""
    )
    return {
        "model": f"{plan.model}: {_count(policy.parameters)} parameters; trains {trained}{frozen}",
        "ranks": f"{run.world_size} = {run.replicas} x {run.shards} shards; {run.data_ranks} data ranks x sp {run.sequence_ranks}"
        + (f"; {run.num_nodes} nodes" if run.num_nodes > 1 else ""),
        "precision": f"{run.precision}: {_dtype(run.param_dtype)} trained parameters and optimizer,"
        f" {_dtype(run.compute_dtype)} compute",
        "iteration": f"{_number(run.prompts)} prompts x {run.num_generations} = {_number(run.responses)} responses; {steps}",
        "tokens": f"{_number(run.prompt_length)} + {run.response_length:,} = up to"
        f" {run.longest if run.prompt_length else run.positions:,} per sequence; {micro}",
        "engine": f"{run.world_size // run.engine_ranks} x {plan.engine_name}"
        + (f" on {run.engine_ranks} GPUs" if run.engine_ranks > 1 else "")
        + f", context {run.context:,}, {plan.choice.reason}",
    }


def _details(plan: Plan) -> dict[str, str]:
    run = plan.run
    rates = ", ".join(f"{name} {rate:g}" for name, rate in run.learning_rates.items())
    policy = plan.roles[0].shape
    details = {
        "parameters": "; ".join(f"{role.name} {role.shape.parameters:,}" for role in plan.roles)
        + (f"; {plan.matmul_parameters:,} of the policy's in matrix products" if plan.matmul_parameters else ""),
        "trained": f"{plan.trained:,} parameters, learning rates: {rates}",
        "per data rank": f"{_share(run, run.prompts)} prompts, {_share(run, run.responses)} responses",
        "micro-batch": f"at most {run.stream_tokens(run.mini_batches):,} tokens on each GPU",
        "activations": f"{policy.saved_bytes:,.0f} bytes per token, {policy.layer_bytes:,.0f} per"
        f" {'compiled ' * policy.compiled}layer",
        "KV cache": f"{plan.kv_token:,} bytes per token, {plan.engine.kv_cache // plan.kv_token:,} tokens",
    }
    if policy.tower_bytes:
        seen = run.image_tokens(run.mini_batches)
        details["vision tower"] = f"{policy.tower_bytes:,.0f} bytes per image token, at most {seen:,} in a micro-batch"
    parked = {name: size for name, size in plan.host.items() if size}
    if parked:
        title, unit = _memory(plan)
        details[f"{title[:3]} per host"] = ", ".join(f"{name} {size / unit:.1f}" for name, size in parked.items())
    return details


def _remarks(plan: Plan) -> list[Text]:
    notes = [Text(f"note: {note}", style="dim") for note in plan.notes]
    styles = {"note": "bold", "error": "red", "warning": "yellow"}
    return notes + [Text(f"{problem.kind}: {problem.message}", style=styles[problem.kind]) for problem in plan.problems]


def _grid() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _memory(plan: Plan) -> tuple[str, int]:
    """What the columns are, and their unit."""
    name, unit = ("GiB", GIB) if plan.choice.peak.total > GIB else ("MiB", 2**20)
    return f"{name} per {'GPU' if _on_gpu(plan) else 'process'}", unit


def _on_gpu(plan: Plan) -> bool:
    return plan.run.device_type == "cuda"


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _number(value: int | None) -> str:
    return f"{value:,}" if value else "?"


def _share(run: Run, value: int | None) -> str:
    return _number(value and value // run.data_ranks)


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
