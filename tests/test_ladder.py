"""The memory ladder: the cheapest rung that fits is taken, on all ranks the same, and none of them changes a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from test_cli import QUIET, parsed
from test_plan import planned, run_of
from toys import TINY_MODULE, even_tokens, fit, spawn

from lightning_rlhf import KL, FSDPUlyssesStrategy, GRPOLightningModule, LoRA, PPOLightningModule, RolloutCallback
from lightning_rlhf.callbacks import planning, summary
from lightning_rlhf.cli import main
from lightning_rlhf.plan import Plan, make_plan
from lightning_rlhf.plan.known import known_config
from lightning_rlhf.plan.ladder import MARGIN, Ladder
from lightning_rlhf.plan.memory import GIB, Rung
from lightning_rlhf.rollout import TransformersEngine, VLLMEngine
from lightning_rlhf.rollout.cache import ROOM
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.tiny import tiny_model

AWAKE, SLEEPS = Rung(0, False, False), Rung(2, False, False)
STATE_AWAY, ALL_AWAY = Rung(2, True, False), Rung(2, True, True)
CONFIGS = Path(__file__).parent.parent / "configs"
TOKEN = 28672  # bytes of the KV cache: 2 x 28 layers x 2 heads x 128 x 2 bytes
RUN = {"strategy": FSDPUlyssesStrategy(), "world_size": 1, "num_nodes": 1}


@pytest.fixture(scope="module")
def config() -> Any:
    return known_config("Qwen/Qwen2.5-1.5B")


def plan_of(
    config: Any, memory: float, engine: Any = None, run: dict[str, Any] | None = None, module: Any = None, **ladder: Any
) -> Plan:
    """1.5 B parameters on one GPU of ``memory`` GiB: 128 responses, up to 500 tokens."""
    module = module or GRPOLightningModule("random:tiny")
    callback = RolloutCallback(engine=engine or VLLMEngine(), **ladder)
    numbers = run_of(config=config, engine=callback.engine, **RUN | (run or {}))
    return make_plan(module, callback, numbers, {"actor": config}, int(memory * GIB))


# -- the choice --------------------------------------------------------------------------------------------------------


def test_rungs_are_what_the_user_left_open_and_the_optimizer_goes_first():
    moves = [(False, False), (True, False), (True, True)]
    assert Ladder().rungs == [Rung(level, *move) for level in (0, 2) for move in moves]
    assert Ladder(1, False, True).rungs == [Rung(1, False, True)]
    assert Ladder(2, False).rungs == [SLEEPS, Rung(2, False, True)]
    assert Ladder("auto", True, False).rungs == [Rung(0, True, False), STATE_AWAY]
    assert (Ladder().usual, Ladder(1, True).usual) == (SLEEPS, Rung(1, True, False))


@pytest.mark.parametrize(
    ("memory", "cache", "rung"),
    [(139, 2, AWAKE), (40, 2, AWAKE), (34, 2, SLEEPS), (38, 12, STATE_AWAY), (34, 20, ALL_AWAY)],
)
def test_each_rung_is_taken_where_nothing_cheaper_fits(config, memory, cache, rung):
    """State 23 GiB with gradients, weights 3: awake a small cache needs 34 GiB, and a large one is more than the state."""
    engine, room = VLLMEngine(kv_cache_memory_bytes=cache * GIB), memory * GIB * (1 - MARGIN)
    plan = plan_of(config, memory, engine)
    assert plan.choice.rung == rung
    assert plan.choice.peak.total <= room
    assert not plan.problems
    for cheaper in Ladder().rungs[: Ladder().rungs.index(rung)]:
        switches = {"offload_optimizer": cheaper.offload_optimizer, "offload_parameters": cheaper.offload_parameters}
        other = plan_of(config, memory, engine, sleep_level=cheaper.sleep_level, **switches)
        assert other.choice.rung == cheaper
        assert other.choice.peak.total > room


def test_nothing_moves_that_would_not_help(config):
    """The update alone is beyond the margin: the rollout fits beside the optimizer's state."""
    plan = plan_of(config, 30, VLLMEngine(kv_cache_memory_bytes=GIB))
    assert plan.choice.peak.name == "update"
    assert 30 * GIB * (1 - MARGIN) < plan.choice.peak.total < 30 * GIB
    assert plan.choice.rung == SLEEPS
    assert not plan.problems


def test_the_reason_is_one_line(config):
    cache = VLLMEngine(kv_cache_memory_bytes=2 * GIB)
    awake, sleeps = (plan_of(config, memory, cache).choice.reason for memory in (139, 34))
    assert awake == "stays awake: 33 of 139 GiB at the peak (update); KV cache 2.0 GiB"
    assert sleeps == "sleeps (level 2): 28 of 34 GiB at the peak (update), 33 if it stays awake; KV cache 2.0 GiB"


def test_a_device_of_unknown_size_keeps_what_was_usual(config):
    assert plan_of(config, 0).choice.rung == SLEEPS
    assert plan_of(config, 0, sleep_level=0, offload_optimizer=True).choice.rung == Rung(0, True, False)
    assert plan_of(config, 0).choice.reason == "sleeps (level 2)"


def test_the_embedded_engine_awake_keeps_its_weights_alone(config):
    phases = plan_of(config, 139, TransformersEngine()).phases
    weights = plan_of(config, 139).engine.weights
    assert [phase.parts["engine"] - weights for phase in phases] == [64 * (500 + ROOM) * TOKEN, 0]


# -- the KV cache ------------------------------------------------------------------------------------------------------


def test_the_cache_is_as_large_as_the_work(config):
    engine = plan_of(config, 139).engine
    assert engine.kv_cache == 129 * 512 * TOKEN  # 128 responses and one to spare, in blocks of 16 tokens
    assert engine.least == 2 * 512 * TOKEN
    less = VLLMEngine(engine_args={"max_num_seqs": 10, "block_size": 100})
    assert plan_of(config, 139, less).engine.kv_cache == 11 * 500 * TOKEN
    assert plan_of(config, 139, run={"prompts": 2048}).engine.kv_cache == 1025 * 512 * TOKEN
    assert plan_of(config, 80, run={"prompts": 2048, "prompt_length": 4000}).engine.kv_cache == int(0.3 * 80 * GIB)
    assert plan_of(config, 139, run={"prompts": None}).engine.kv_cache == 1025 * 512 * TOKEN


def test_the_cache_takes_what_is_free_if_that_is_less(config):
    large = {"prompts": 2048, "prompt_length": 4000}
    plan = plan_of(config, 32, sleep_level=2, offload_optimizer=False, offload_parameters=False, run=large)
    rollout = plan.phases[0]
    assert plan.engine.least < plan.engine.kv_cache < int(0.3 * 32 * GIB)
    assert rollout.total == int(32 * GIB * (1 - MARGIN))
    assert plan.choice.reason.endswith(f"KV cache {plan.engine.kv_cache / GIB:.1f} GiB, 9.6 wanted")
    assert plan_of(config, 20, sleep_level=2, offload_optimizer=False, run=large).engine.kv_cache == plan.engine.least


def test_what_the_user_fixed_is_no_ones_to_choose(config):
    for engine in (
        VLLMEngine(gpu_memory_utilization=0.5),
        VLLMEngine(engine_args={"gpu_memory_utilization": 0.5}),
        VLLMEngine(gpu_memory_utilization=0.2, engine_args={"gpu_memory_utilization": 0.5}),
    ):
        memory = plan_of(config, 80, engine).engine
        assert (memory.least, memory.total) == (None, 40 * GIB)
    for engine in (
        VLLMEngine(kv_cache_memory_bytes=5 * GIB),
        VLLMEngine(engine_args={"kv_cache_memory_bytes": 5 * GIB}),
    ):
        memory = plan_of(config, 80, engine).engine
        assert (memory.least, memory.kv_cache) == (None, 5 * GIB)


def test_vllm_gets_the_cache_of_the_plan_unless_the_user_fixed_one():
    def arguments(engine: VLLMEngine, chosen: int | None) -> tuple[Any, Any]:
        path, cpu = str(tiny_model()), torch.device("cpu")
        setup = EngineSetup(path, cpu, torch.float32, (1,), 0, 64, 4, kv_cache_memory_bytes=chosen)
        given = engine._llm_arguments(setup)
        return given["kv_cache_memory_bytes"], given["gpu_memory_utilization"]

    assert arguments(VLLMEngine(), 12345) == (12345, 0.4)
    assert arguments(VLLMEngine(kv_cache_memory_bytes=77), 12345) == (77, 0.4)
    assert arguments(VLLMEngine(gpu_memory_utilization=0.7), None) == (1 << 30, 0.7)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization must be in \(0, 1\], got 0.0"):
        VLLMEngine(gpu_memory_utilization=0.0)


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_where_nothing_fits_the_run_ends_with_what_to_change(config):
    (error,) = plan_of(config, 20).problems
    assert error.kind == "error"
    assert error.message == (
        "nothing fits even if the engine sleeps (level 2), optimizer state on the host in rollouts: update is estimated at 28 GiB"
        " of the GPU's 20, 23 of it parameters + optimizer + gradients, most of that optimizer: use more GPUs, model.lora or an"
        " optimizer with less state; rollout.sleep_level: 2 tries it"
    )
    (fixed,) = plan_of(config, 20, sleep_level=2).problems
    assert fixed.kind == "warning"
    assert fixed.message.startswith(
        "update is estimated at 28 GiB of the GPU's 20, most of it optimizer: use more GPUs"
    )


def test_adapters_are_not_recommended_to_a_run_that_trains_nothing_else(config):
    adapters = GRPOLightningModule("random:tiny", lora=LoRA(r=4, target_modules=["q_proj"]))
    update = plan_of(config, 4, sleep_level=2, module=adapters).problems[-1]
    assert update.message.endswith("most of it parameters: use more GPUs or a smaller model")


def test_a_rollout_that_does_not_fit_names_the_switch_that_is_off(config):
    cache = VLLMEngine(kv_cache_memory_bytes=5 * GIB)
    plan = plan_of(config, 29, cache, sleep_level=2, offload_optimizer=False, offload_parameters=False)
    (warning,) = plan.problems
    assert warning.message.startswith("rollout is estimated at 30 GiB of the GPU's 29, most of it optimizer")
    assert warning.message.endswith("or set rollout.offload_optimizer")
    awake = plan_of(config, 29, VLLMEngine(kv_cache_memory_bytes=12 * GIB), sleep_level=0).problems
    assert awake[-1].message.startswith(
        "update is estimated at 43 GiB of the GPU's 29, most of it engine: lower rollout"
    )
    assert awake[-1].message.endswith("or raise rollout.sleep_level")


def test_what_is_known_to_be_too_much_is_named_and_not_the_estimates(config):
    """Activations are the largest part, and no micro-batch makes room for the state."""
    plan = plan_of(config, 20, run={"micro_batch_tokens": 60000})
    update = plan.phases[-1]
    assert max(update.parts, key=update.parts.get) == "activations"
    error = plan.problems[0].message
    assert "23 of it parameters + optimizer + gradients, most of that optimizer: use more GPUs, model.lora" in error
    assert "micro_batch_tokens" not in error


def test_an_engine_whose_weights_do_not_fit_must_be_split():
    large = known_config("meta-llama/Llama-3.1-70B")
    one = plan_of(large, 80, run={"world_size": 64, "num_nodes": 8, "prompts": 128})
    (error,) = [p.message for p in one.problems if p.kind == "error"]
    assert "rollout is estimated at" in error
    assert "131 of it weights of the engine, most of that engine: raise rollout.engine.tensor_parallel_size;" in error
    four = plan_of(large, 80, VLLMEngine(tensor_parallel_size=4), {"world_size": 64, "num_nodes": 8, "prompts": 128})
    assert not [p for p in four.problems if "rollout is" in p.message]


def test_a_rollout_makes_room_though_the_update_is_estimated_at_too_much(config):
    """Activations are bounds, the run is tried: its rollout must fit, and gets the cache that is free then."""
    plan = plan_of(config, 24, VLLMEngine(kv_cache_memory_bytes=2 * GIB))
    rollout, update = plan.phases
    assert update.total > 24 * GIB
    assert plan.choice.rung == STATE_AWAY
    assert rollout.total < 24 * GIB * (1 - MARGIN)
    assert [problem.kind for problem in plan.problems] == ["warning"]


# -- in a run ----------------------------------------------------------------------------------------------------------

COMMON = TINY_MODULE | {"reward": [even_tokens], "kl": KL(coef=0.1), "mini_batches": 2}


class Counting(TransformersEngine):
    """Counts syncs, and notes at which level it was put to sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs, self.levels = 0, set[int]()

    def load_weights(self, *args: Any) -> None:
        self.syncs += 1
        super().load_weights(*args)

    def sleep(self, level: int) -> None:
        self.levels.add(level)
        super().sleep(level)


class Twice(RolloutCallback):
    """Has two generation phases in front of each update."""

    def on_train_batch_start(self, *args: Any) -> None:
        super().on_train_batch_start(*args)
        super().on_train_batch_start(*args)


@pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
def test_no_rung_changes_a_metric_or_a_weight_and_held_weights_are_not_sent_twice(tmp_path, monkeypatch):
    monkeypatch.setattr("toys.RolloutCallback", Twice)
    runs = {}
    cases = {
        "unknown device": ({}, 0),
        "large device": ({}, 8 * GIB),
        "level 1": ({"sleep_level": 1}, 8 * GIB),
        "level 2": ({"sleep_level": 2, "offload_optimizer": True, "offload_parameters": True}, 8 * GIB),
    }
    for name, (options, memory) in cases.items():
        monkeypatch.setattr(planning, "device_memory", lambda device, memory=memory: memory)
        module, engine = PPOLightningModule(**COMMON), Counting()
        rows = fit(module, tmp_path / name, 2, {"engine": engine, **options}, num_generations=2)
        runs[name] = rows, [p.to_local() for p in module.parameters()], engine.levels, engine.syncs
    assert [levels for _, _, levels, _ in runs.values()] == [{2}, {0}, {1}, {2}]
    assert [syncs for _, _, _, syncs in runs.values()] == [4, 2, 2, 4]
    rows, weights, *_ = runs["unknown device"]
    for other_rows, other_weights, *_ in runs.values():
        assert other_rows == rows
        assert all(map(torch.equal, other_weights, weights))


def test_a_run_that_cannot_fit_ends_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "device_memory", lambda device: GIB // 1024)
    engine = Counting()
    with pytest.raises(
        ValueError, match=r"nothing fits even if the engine sleeps .*: update is estimated at .* tries it"
    ):
        fit(PPOLightningModule(**COMMON), tmp_path, 1, {"engine": engine})
    assert engine.model is None


@pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
def test_a_start_plans_once(tmp_path, monkeypatch, capsys):
    made, make = [], planning.make_plan
    for place in (planning, summary):
        monkeypatch.setattr(place, "device_memory", lambda device: 8 * GIB)
    monkeypatch.setattr(planning, "make_plan", lambda *args: made.append(make(*args)) or made[-1])
    monkeypatch.chdir(tmp_path)
    main(["fit", "--config", str(CONFIGS / "tiny_grpo.yaml"), *QUIET, "--trainer.max_steps=1"])
    assert "stays awake: " in capsys.readouterr().out
    assert len(made) == 1


def test_without_a_plan_a_run_is_as_usual(tmp_path, monkeypatch):
    def fails(*args: Any) -> None:
        raise RuntimeError("no meta kernel")

    monkeypatch.setattr(planning, "device_memory", lambda device: 8 * GIB)
    monkeypatch.setattr(planning, "make_plan", fails)
    engine = Counting()
    with pytest.warns(UserWarning, match=r"cannot choose rollout\.sleep_level, the engine sleeps \(level 2\): no meta"):
        fit(GRPOLightningModule(**TINY_MODULE, reward=[even_tokens]), tmp_path, 1, {"engine": engine})
    assert engine.levels == {2}


@pytest.mark.parametrize(("memory", "warned"), [(GIB, 0), (1000, 1)])
def test_a_host_without_room_for_what_is_parked_there_is_told_of(memory, warned, tmp_path, monkeypatch, recwarn):
    module = GRPOLightningModule(**TINY_MODULE, reward=[even_tokens])
    monkeypatch.setattr(planning, "device_memory", lambda device: 8 * GIB)
    monkeypatch.setattr(planning, "host_memory", lambda: memory)
    fit(module, tmp_path, 1, {"engine": Counting(), "sleep_level": 2, "offload_optimizer": True})
    lines = [str(w.message) for w in recwarn if "park" in str(w.message)]
    assert len(lines) == warned
    assert all("(optimizer 0): leave an offload" in line for line in lines)


def test_the_memory_of_a_control_group_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "CONTROL_GROUPS", ())
    whole = planning.host_memory()
    assert whole > GIB
    for content, expected in (("max", whole), ("123456\n", 123456), (str(2 * whole), whole)):
        (tmp_path / "limit").write_text(content)
        monkeypatch.setattr(planning, "CONTROL_GROUPS", (tmp_path / "none", tmp_path / "limit"))
        assert planning.host_memory() == expected


def chosen(rank: int, memory: list[int]) -> tuple[Rung, int]:
    planning.device_memory = lambda device: memory[rank]
    module, callback = GRPOLightningModule("random:tiny"), RolloutCallback(engine=VLLMEngine())
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=FSDPUlyssesStrategy(), barebones=True)
    module.trainer = trainer
    trainer.strategy.connect(module)
    trainer.strategy.setup_environment()
    plan = planning.choose_plan(trainer, module, callback, "fit")
    return plan.choice.rung, plan.engine.kv_cache


@pytest.mark.slow
def test_ranks_with_other_devices_choose_the_same():
    first, second = spawn(chosen, 2, [8 * GIB, GIB])  # by its own size the second would refuse
    assert first == second
    assert first[0] == AWAKE


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "value"), [("auto", "auto"), ("0", 0), ("1", 1), ("2", 2)])
def test_levels_of_the_command_line(given, value):
    rollout = parsed("fit", "--config", str(CONFIGS / "tiny_grpo.yaml"), f"--rollout.sleep_level={given}").rollout
    assert rollout.sleep_level == value
    assert (rollout.offload_optimizer, rollout.offload_parameters) == ("auto", "auto")


@pytest.mark.parametrize(("given", "value"), [("auto", "auto"), ("true", True), ("false", False)])
def test_switches_of_the_command_line(given, value):
    options = [f"--rollout.{name}={given}" for name in ("offload_optimizer", "offload_parameters")]
    rollout = parsed("fit", "--config", str(CONFIGS / "tiny_grpo.yaml"), *options).rollout
    assert [rollout.offload_optimizer, rollout.offload_parameters] == [value, value]


def test_a_switch_that_is_neither_is_one_line(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(CONFIGS / "tiny_grpo.yaml"), "--rollout.offload_optimizer=maybe"])
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "error" in one]
    assert "rollout.offload_optimizer: must be one of ['auto'] or a bool, got maybe" in line


def test_the_command_prints_the_level_and_why(capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    command = ["--config", str(CONFIGS / "ppo.yaml"), "--devices=1"]
    out = planned(capsys, *command, "--device_memory_gb=139")
    assert "VLLMEngine, context 1,536, stays awake: 52 of 139 GiB at the peak (update); KV cache 9.0 GiB" in out
    out = planned(capsys, *command, "--device_memory_gb=48")
    assert "context 1,536, sleeps (level 2): 42 of 48 GiB at the peak (update)" in out
    assert "sleeps (level 2) parameters" in planned(capsys, "--config", str(CONFIGS / "tiny_grpo.yaml"))
