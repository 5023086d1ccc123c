"""Memory and speed switches: each by its effect, and equal to the plain path in value and gradient."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from test_cli import parsed
from test_policy import save, strategy_of
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from toys import spawn
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3Config

from lightning_rlhf import FSDPUlyssesStrategy
from lightning_rlhf.callbacks.offload import HostMemory
from lightning_rlhf.modules import execution, settings
from lightning_rlhf.modules.critic import build_critic
from lightning_rlhf.modules.execution import HostActivations, apply_execution, bucketed, check_execution
from lightning_rlhf.modules.policy import build_policy
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.packing import Packed, pack
from lightning_rlhf.plan.probe import attention, liger_modules
from lightning_rlhf.precision import FSDP2Precision
from lightning_rlhf.ulysses import set_attention

LAYERS, WIDE, TILE = 4, 72, 16
CONFIG = Qwen3Config(
    vocab_size=97,
    hidden_size=32,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=WIDE,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=1,
)
SDPA, ALL_TO_ALL, GATHER = "_scaled_dot_product_flash_attention_for_cpu", "all_to_all", "_allgather_base_"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(path)
    return str(path)


class Ops(TorchDispatchMode):
    """Counts operators by name; notes the order of all-gathers (g) and attention calls (a), what all-gathers carry, and the
    rows that an MLP has at once."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.order = ""
        self.wide_rows = 0
        self.gathered: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].removesuffix(".default")
        self.count[name] += 1
        self.order += {GATHER: "g", SDPA: "a"}.get(name, "")
        if name == GATHER:
            self.gathered.add(args[1].dtype)
        out = func(*args, **(kwargs or {}))
        if name == "silu":
            self.wide_rows = max(self.wide_rows, out.shape[:-1].numel())
        return out


def stream(*lengths: int, ranks: int = 1, rank: int = 0) -> Packed:
    """Sequences whose content depends on their lengths alone."""
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = [torch.randint(3, 97, (n,), generator=generator) for n in lengths]
    return pack(ids, [1] * len(ids), ranks, rank)


def gradients(actor: Any, packed: Packed, ranks: int = 1) -> dict[str, torch.Tensor]:
    actor.zero_grad()
    log_probs, entropy = actor(packed, 0.7, True)
    ((log_probs.sin() + 0.3 * entropy).sum() * ranks).backward()
    return {n: p.grad.full_tensor().clone() for n, p in actor.named_parameters()}


def counted(actor: Any, packed: Packed, ranks: int = 1) -> tuple[Ops, dict[str, torch.Tensor]]:
    with Ops() as ops:
        grads = gradients(actor, packed, ranks)
    return ops, grads


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], rtol=tolerance, atol=tolerance)


def saved_bytes(actor: Any, packed: Packed) -> int:
    """Of the tensors that a forward pass leaves for backward, gathered parameters left out."""
    seen: dict[int, int] = {}

    def see(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter):
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda t: t):
        outputs = actor(packed, 0.7, True)
    del outputs
    return sum(seen.values())


# -- recomputation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "attention_calls"),
    [("off", 4), (False, 4), ("full", 8), (True, 8), ("selective", 4), ("every_second", 6)],
)
def test_recomputation_changes_no_gradient_and_selective_runs_attention_once(which, attention_calls, folder):
    strategy, packed = strategy_of(1), stream(12, 7, 20, 3)
    plain = gradients(build_policy(ModelSettings(folder), strategy), packed)
    ops, grads = counted(build_policy(ModelSettings(folder, gradient_checkpointing=which), strategy), packed)
    assert ops.count[SDPA] == attention_calls
    assert_close(grads, plain)


def test_recomputation_saves_fewer_bytes(folder):
    strategy, packed = strategy_of(1), stream(12, 7, 20, 3)
    off, half, full = [
        saved_bytes(build_policy(ModelSettings(folder, gradient_checkpointing=which), strategy), packed)
        for which in ("off", "every_second", "full")
    ]
    assert full < 0.6 * half < 0.4 * off


def test_a_pass_without_gradients_recomputes_nothing(folder):
    actor = build_policy(ModelSettings(folder, gradient_checkpointing="selective"), strategy_of(1))
    with torch.no_grad(), Ops() as ops:
        actor(stream(12, 7), 0.7)
    assert ops.count[SDPA] == LAYERS


# -- tiled MLP ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["off", "full"])
def test_a_tiled_mlp_holds_one_tile_and_changes_no_gradient(which, folder):
    strategy, packed = strategy_of(1), stream(12, 7, 20, 3)
    whole, tiled = [
        build_policy(ModelSettings(folder, gradient_checkpointing=which, tiled_mlp=n), strategy) for n in (None, TILE)
    ]
    (all_rows, plain), (one_tile, grads) = counted(whole, packed), counted(tiled, packed)
    assert (all_rows.wide_rows, one_tile.wide_rows) == (42, TILE)
    assert_close(grads, plain, 1e-6)
    assert which == "full" or saved_bytes(tiled, packed) < 0.7 * saved_bytes(whole, packed)
    with torch.no_grad(), Ops() as ops:
        tiled(packed, 0.7)
    assert ops.wide_rows == TILE


def test_experts_are_not_tiled(tmp_path):
    with pytest.raises(NotImplementedError, match=r"MixtralSparseMoeBlock routes tokens to experts .* set it to null"):
        build_policy(ModelSettings(save("mixture", tmp_path), tiled_mlp=8), strategy_of(1))


def test_a_critic_takes_the_same_switches(folder):
    strategy, packed = strategy_of(1), stream(12, 7, 20, 3)
    results = []
    for options in ({}, {"gradient_checkpointing": "selective", "tiled_mlp": TILE, "offload_activations": True}):
        critic = build_critic(ModelSettings(folder, **options), strategy)
        with torch.no_grad():
            critic.value_head.weight.fill_(0.1)
        with Ops() as ops:
            critic(packed).square().sum().backward()
        results.append((ops.wide_rows, {n: p.grad.full_tensor() for n, p in critic.named_parameters()}))
    assert [rows for rows, _ in results] == [42, TILE]
    assert_close(results[1][1], results[0][1], 1e-5)


# -- activations on the host -------------------------------------------------------------------------------------------


class Traced(HostActivations):
    """On the CPU: really copies, and notes in which order layers are called back."""

    smallest = 0
    built: list[Traced] = []

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.calls: list[Any] = []
        self.shapes: list[torch.Size] = []
        self.built.append(self)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tensor.shape)
        return tensor.clone()

    def _call_back(self, saved: Any) -> None:
        if not saved.called_back:
            self.calls.append(next(iter(saved.copies.values())).tensor.shape)
        super()._call_back(saved)


@pytest.mark.parametrize("which", ["full", "off", "selective"])
def test_offloaded_activations_change_no_gradient(which, folder, monkeypatch):
    monkeypatch.setattr(execution, "HostActivations", Traced)
    Traced.built.clear()
    strategy, packed = strategy_of(1), stream(12, 7, 20, 3)
    plain = gradients(build_policy(ModelSettings(folder), strategy), packed)
    settings = ModelSettings(folder, gradient_checkpointing=which, offload_activations=True)
    actor = build_policy(settings, strategy)
    assert_close(gradients(actor, packed), plain)
    (host,) = Traced.built
    hidden = torch.Size([1, 42, 32])
    if which == "off":  # all that layers save, but no parameter
        weights = {p.shape for layer in actor.layers for p in layer.parameters()}
        assert host.moved_bytes > 10 * LAYERS * hidden.numel() * 4
        assert not {s for s in host.shapes if s in weights or s[::-1] in weights}
    else:
        assert host.shapes == [hidden] * LAYERS
        assert host.moved_bytes == LAYERS * hidden.numel() * 4
    assert len(host.calls) == LAYERS
    assert host._last() is None  # backward has let go of everything


def test_a_layer_in_backward_calls_back_the_layer_before_it(folder):
    actor = build_policy(ModelSettings(folder, gradient_checkpointing="full"), strategy_of(1))
    host = Traced(torch.device("cpu"))
    for layer in actor.layers:
        host.wrap(layer)
    seen = []
    for number, layer in enumerate(actor.layers):
        note = partial(lambda number, grad: seen.append((number, len(host.calls))), number)
        layer.register_forward_hook(lambda layer, args, out, note=note: out.register_hook(note) and None)
    gradients(actor, stream(12, 7))
    assert seen == [(3, 0), (2, 2), (1, 3), (0, 4)]  # when each layer's backward begins


class Uses(torch.nn.Module):
    """``steps`` of hidden, each of which saves some tensor several times."""

    def __init__(self, *steps: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.steps = steps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            hidden = step(hidden, self.weight)
        return hidden


def run_offloaded(layer: Uses) -> tuple[Traced, torch.Tensor, torch.Tensor | None]:
    host = Traced(torch.device("cpu"))
    host.wrap(layer)
    hidden = torch.linspace(-1, 1, 64).reshape(4, 16).requires_grad_()
    layer(hidden).sum().backward()
    return host, hidden.grad, layer.weight.grad


def test_what_several_operators_save_travels_once_and_comes_back_as_one_tensor():
    seen = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            seen.append(ctx.saved_tensors[0].data_ptr())
            return 2 * grad

    layer = Uses(lambda x, w: x * w + Noted.apply(x) + Noted.apply(x) + x[:2].square().sum() + x.T.sin().sum())
    host, hidden, weight = run_offloaded(layer)
    assert host.shapes == [(4, 16), (2, 16), (16, 4)]  # other shapes and strides are tensors of their own
    assert host.moved_bytes == (64 + 32 + 64) * 4
    assert len(seen) == 2
    assert len(set(seen)) == 1
    x = torch.linspace(-1, 1, 64).reshape(4, 16)
    expected = layer.weight + 4 + 64 * x.cos()
    expected[:2] += 64 * 2 * x[:2]
    torch.testing.assert_close(hidden, expected)
    torch.testing.assert_close(weight, x.sum(0))


def test_what_is_changed_in_place_travels_again():
    """Without offload autograd would refuse: here each operator gets what it saw."""

    def step(x, w):
        y = 1.0 * x
        before = y * w
        return before + y.add_(1.0) * w

    _, hidden, weight = run_offloaded(Uses(step))
    x = torch.linspace(-1, 1, 64).reshape(4, 16)
    torch.testing.assert_close(weight, (2 * x + 1).sum(0))
    torch.testing.assert_close(hidden, (2 * torch.linspace(0.5, 1.5, 16)).expand(4, 16))


def test_a_tensor_in_the_memory_of_one_that_is_gone_is_another():
    def step(x, w):
        memory = numpy.ones((4, 16), dtype=numpy.float32)
        first = torch.from_numpy(memory) * w
        memory *= 3
        return x + first + torch.from_numpy(memory) * w

    _, _, weight = run_offloaded(Uses(step))
    torch.testing.assert_close(weight, torch.full((16,), 4.0 + 12.0))


def test_copies_go_as_soon_as_their_last_operator_has_run_backward(monkeypatch):
    copies, alive = [], []

    def noted(self, tensor):
        copies.append(weakref.ref(copy := tensor.clone()))
        return copy

    def note(x, w):
        x.register_hook(lambda grad: alive.append(sum(c() is not None for c in copies)))
        return x

    monkeypatch.setattr(Traced, "_to_host", noted)
    twice = lambda x, w: x.sin() + x.cos()  # noqa: E731
    run_offloaded(Uses(twice, note, twice, note, twice, note))
    assert len(copies) == 3
    assert alive == [3, 2, 1]
    assert not any(c() is not None for c in copies)


def test_small_tensors_stay(folder):
    actor = build_policy(ModelSettings(folder, gradient_checkpointing="full"), strategy_of(1))
    host = HostActivations(torch.device("cpu"))
    for layer in actor.layers:
        host.wrap(layer)
    gradients(actor, stream(12, 7))
    assert host.moved_bytes == 0


# -- compilation -------------------------------------------------------------------------------------------------------

STREAMS = [(12, 7, 20, 3), (9, 40), (5,) * 9, (100, 2, 3)]


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at its inputs
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": "selective"},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"gradient_checkpointing": "full", "offload_activations": True}, marks=pytest.mark.slow),
    ],
)
def test_compiled_layers_run_streams_of_any_length_on_two_graphs(options, folder, monkeypatch):
    """Traced and differentiated by torch.compile, run by eager kernels: code generation has its own test."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(HostActivations, "smallest", 0)
    strategy = strategy_of(1)
    plain = build_policy(ModelSettings(folder), strategy)
    actor = build_policy(ModelSettings(folder, compile=True, **options), strategy)
    for lengths in STREAMS:
        assert_close(gradients(actor, stream(*lengths)), gradients(plain, stream(*lengths)), 1e-5)
    assert graphs() == 2  # layers share them; the second is for another power of two of the longest sequence
    with torch.profiler.profile() as profile:
        gradients(actor, stream(9, 40))
    calls = {e.key: e.count for e in profile.key_averages()}
    assert calls[f"aten::{SDPA}"] == LAYERS * (2 if options.get("gradient_checkpointing") == "full" else 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's code generator about itself
@pytest.mark.usefixtures("dynamo")
def test_compiled_code_equals_eager_code(folder):
    strategy = strategy_of(1)
    plain = build_policy(ModelSettings(folder), strategy)
    actor = build_policy(ModelSettings(folder, compile=True, gradient_checkpointing="selective"), strategy)
    for lengths in STREAMS[:3]:
        assert_close(gradients(actor, stream(*lengths)), gradients(plain, stream(*lengths)), 1e-5)
    assert graphs() == 2
    with torch.no_grad():
        for lengths in STREAMS:
            got, want = (model(stream(*lengths), 0.7)[0] for model in (actor, plain))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert graphs() <= 4


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("dynamo")
@pytest.mark.slow
def test_experts_are_compiled_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    folder, strategy = save("mixture", tmp_path), strategy_of(1)
    plain, compiled = [
        gradients(build_policy(ModelSettings(folder, compile=on), strategy), stream(12, 7)) for on in (False, True)
    ]
    assert_close(compiled, plain, 1e-5)


def compiled_on_two_ranks(rank: int, folder: str) -> tuple[int, Any, Any]:
    torch.compile = partial(torch.compile, backend="aot_eager")
    strategy = strategy_of(2, sequence_parallel_size=2)
    packed = stream(12, 7, 20, 3, ranks=2, rank=strategy.sp_rank)
    plain, compiled = [
        build_policy(ModelSettings(folder, compile=on, gradient_checkpointing="selective"), strategy)
        for on in (False, True)
    ]
    gradients(compiled, packed, 2)
    with torch.profiler.profile() as profile:
        grads = gradients(compiled, packed, 2)
    calls = {e.key: e.count for e in profile.key_averages()}
    return calls["lightning_rlhf::all_to_all"], grads, gradients(plain, packed, 2)


@pytest.mark.slow
def test_compiled_layers_with_sequence_parallelism_keep_what_attention_returned(folder):
    for collectives, compiled, plain in spawn(compiled_on_two_ranks, 2, folder):
        assert collectives == 4 * LAYERS
        assert_close(compiled, plain, 1e-5)


def test_lengths_are_bucketed_by_powers_of_two():
    assert [bucketed(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


# -- Liger -------------------------------------------------------------------------------------------------------------


def test_liger_changes_one_model_and_leaves_the_classes_alone(monkeypatch):
    from liger_kernel.transformers.rms_norm import LigerRMSNorm
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP

    stock = AutoModelForCausalLM.from_config(CONFIG)
    source = sys.modules[type(stock).__module__]
    monkeypatch.setattr(source, "apply_rotary_pos_emb", source.apply_rotary_pos_emb)  # put back afterwards
    rotary, model = source.apply_rotary_pos_emb, AutoModelForCausalLM.from_config(CONFIG)
    apply_execution(model, [], ModelSettings("x", liger=True), torch.device("cuda"), trained=True)
    layer = model.model.layers[0]
    assert layer.input_layernorm.forward.__func__ is LigerRMSNorm.forward
    assert layer.mlp.forward.__func__ is LigerSwiGLUMLP.forward
    assert source.apply_rotary_pos_emb is not rotary
    assert (source.Qwen3RMSNorm, source.Qwen3MLP) == (type(layer.input_layernorm), type(layer.mlp))
    assert "forward" not in vars(AutoModelForCausalLM.from_config(CONFIG).model.norm)


@pytest.mark.usefixtures("dynamo")
def test_dynamo_says_nothing_of_what_liger_remembers(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    set_attention(model, "nothing", attention(1))
    ids, bounds = torch.zeros(1, 64, dtype=torch.long, device="meta"), torch.zeros(2, dtype=torch.int32, device="meta")
    with liger_modules(model), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        settings = ModelSettings("x", liger=True, compile=True)
        apply_execution(model, list(model.model.layers), settings, torch.device("cuda"), trained=True)
        model.model(input_ids=ids, position_ids=ids, use_cache=False, cu_seq_lens_q=bounds, max_length_q=64)
    assert not [w for w in told if "lru_cache" in str(w.message)]


def test_liger_is_refused_where_it_cannot_run(folder, monkeypatch):
    with pytest.raises(ValueError, match=r"model\.liger needs a CUDA device, got cpu: set it to false"):
        build_policy(ModelSettings(folder, liger=True), strategy_of(1))
    with pytest.raises(NotImplementedError, match="Liger has no kernels for gpt2"):
        check_execution(ModelSettings("x", liger=True), torch.device("cuda"), GPT2Config())
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'lightning-rlhf\[liger\]'"):
        ModelSettings("x", liger=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gradient_checkpointing": "some"},
            r"must be one of off, full, selective, every_second, true or false, got 'some'",
        ),
        ({"tiled_mlp": 0}, "tiled_mlp must be at least 1 token"),
        ({"tiled_mlp": 8, "compile": True}, "exclude each other"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ModelSettings("x", **options)


def test_a_model_without_named_layers_is_refused():
    with pytest.raises(NotImplementedError, match="Linear does not name its layers"):
        apply_execution(torch.nn.Linear(1, 1), [], ModelSettings("x", compile=True), torch.device("cpu"), trained=True)


@pytest.mark.parametrize(("written", "meant"), [("off", "off"), ("false", "off"), ("true", "full"), ("selective",) * 2])
def test_recomputation_is_chosen_by_name_or_by_true_and_false(written, meant):
    config = parsed("fit", "--model.model=random:tiny", "--data.path=x", f"--model.gradient_checkpointing={written}")
    value = config.model.init_args.gradient_checkpointing
    assert ModelSettings("x", gradient_checkpointing=value).recomputed == meant


# -- two ranks ---------------------------------------------------------------------------------------------------------

SWITCHES: dict[str, dict[str, Any]] = {
    "off": {},
    "full": {"gradient_checkpointing": "full"},
    "selective": {"gradient_checkpointing": "selective"},
    "tiled": {"tiled_mlp": 8, "gradient_checkpointing": "every_second", "offload_activations": True},
}
SHARDINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefetch": {"prefetch": 2},
    "kept": {"reshard_after_forward": False},
    "freed": {"reshard_after_forward": True},
    "whole": {"min_num_params": 10**6},
    "whole, kept": {"min_num_params": 10**6, "reshard_after_forward": False, "prefetch": 2},
    "whole, freed": {"min_num_params": 10**6, "reshard_after_forward": True},
}


def trained(folder: str, options: dict[str, Any], host: HostMemory | None = None, steps: int = 2) -> tuple:
    """Adam steps of two micro-batches each through the strategy, with ``host`` all is offloaded in between.

    Returns (all-gathers, parameters, order of all-gathers and attention calls).
    """
    strategy, module = FSDPUlyssesStrategy(**{"min_num_params": 0} | options), pl.LightningModule()
    module.trainer = pl.Trainer(barebones=True, accelerator="cpu", devices=2, strategy=strategy)
    strategy.connect(module)
    strategy.setup_environment()
    module.actor = actor = build_policy(ModelSettings(folder), strategy)
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    identity = [id(p) for p in actor.parameters()]
    with Ops() as ops:
        for step in range(steps):
            for micro in range(2):
                log_probs, _ = actor(stream(9 + strategy.dp_rank, 5 + step, 3 + micro), 0.7)
                log_probs.sin().sum().backward()
            strategy.optimizer_step(optimizer, lambda: None)
            optimizer.zero_grad()
            if host is not None:
                before = [p.full_tensor() for p in actor.parameters()]
                shards = sum(p.to_local().nbytes for p in actor.parameters())
                assert host.offload_states([optimizer]) == 2 * shards
                assert host.offload_parameters(actor) == shards
                assert host.offload_parameters(actor) == host.offload_states([optimizer]) == 0  # away already
                assert all(torch.equal(p.full_tensor(), b) for p, b in zip(actor.parameters(), before, strict=True))
                host.reload([actor], [optimizer], torch.device("cpu"))
                assert not host.in_use
                assert identity == [id(p) for p in actor.parameters()]
    return ops.count[GATHER], [p.full_tensor().detach() for p in actor.parameters()], ops.order


def on_two_ranks(rank: int, folder: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    strategy = strategy_of(2, sequence_parallel_size=2)
    packed = stream(12, 7, 20, 3, ranks=2, rank=strategy.sp_rank)
    for name, options in SWITCHES.items():
        ops, grads = counted(build_policy(ModelSettings(folder, **options), strategy), packed, 2)
        facts[name] = (ops.count[ALL_TO_ALL], ops.count[SDPA], grads)
    for name, options in SHARDINGS.items():
        facts[name] = trained(folder, options)
    facts["offloaded"] = trained(folder, {}, HostMemory())
    strategy = strategy_of(2)
    strategy.precision_plugin = FSDP2Precision("bf16-mixed")
    actor = build_policy(ModelSettings(folder), strategy)
    facts["masters"] = {p.dtype for p in actor.parameters()}
    facts["gathered"] = counted(actor, stream(9, 5), 2)[0].gathered
    with torch.no_grad():
        facts["reference"] = [
            build_policy(ModelSettings(folder, offload_reference=on_host), strategy, frozen=True)(stream(9, 5), 1.0)[0]
            for on_host in (False, True)
        ]
    return facts


@pytest.fixture(scope="module")
def two_ranks(folder) -> list[dict[str, Any]]:
    return spawn(on_two_ranks, 2, folder)


@pytest.mark.parametrize(("name", "collectives", "attention"), [("full", 6, 2), ("selective", 4, 1), ("tiled", 5, 1.5)])
def test_switches_are_exact_with_sequence_parallelism(name, collectives, attention, two_ranks):
    """Per layer: two all-to-alls in forward, two in backward, two more when they are computed again."""
    for facts in two_ranks:
        assert facts["off"][:2] == (4 * LAYERS, LAYERS)
        assert facts[name][:2] == (collectives * LAYERS, attention * LAYERS)
        assert_close(facts[name][2], facts["off"][2], 1e-6)


@pytest.mark.parametrize("name", [*SHARDINGS, "offloaded"])
def test_sharding_options_and_offload_change_no_parameter(name, two_ranks):
    for facts in two_ranks:
        for got, want in zip(facts[name][1], facts["plain"][1], strict=True):
            assert torch.equal(got, want)


def test_parameters_that_stay_gathered_are_gathered_once_per_step(two_ranks):
    """4 layers, the untied head and embedding in each of 2 steps of 2 micro-batches; the root has only the last norm."""
    gathers = {name: two_ranks[0][name][0] for name in SHARDINGS}
    assert gathers["kept"] == 2 * (LAYERS + 3)
    assert gathers["plain"] > 3 * gathers["kept"]
    assert gathers["prefetch"] == gathers["plain"] < gathers["freed"]


def test_a_small_model_is_gathered_as_a_whole(two_ranks):
    gathers = {name: two_ranks[0][name][0] for name in SHARDINGS}
    assert gathers["whole, kept"] == 2  # a step
    assert gathers["whole"] == 2 * 2  # a micro-batch
    assert gathers["whole, freed"] == 2 * 2 * 2  # once more in backward


def test_prefetched_layers_are_gathered_before_the_layer_that_computes(two_ranks):
    ahead = {name: two_ranks[0][name][2].index("a") for name in ("plain", "prefetch")}
    assert ahead["prefetch"] == ahead["plain"] + 2


def test_float32_masters_are_gathered_as_bfloat16(two_ranks):
    for facts in two_ranks:
        assert facts["masters"] == {torch.float32}
        assert facts["gathered"] == {torch.bfloat16}


def test_a_reference_on_the_host_gives_the_same_log_probs(two_ranks):
    for facts in two_ranks:
        kept, on_host = facts["reference"]
        assert torch.equal(kept, on_host)


def test_a_reference_on_the_host_is_sharded_with_its_policy(folder, monkeypatch):
    from lightning_rlhf import strategy as module

    seen = []
    shard = module.fully_shard
    monkeypatch.setattr(module, "fully_shard", lambda *a, **k: seen.append(k.get("offload_policy")) or shard(*a, **k))
    build_policy(ModelSettings(folder, offload_reference=True), strategy_of(1), frozen=True)
    assert len(seen) == LAYERS + 3
    assert all(isinstance(policy, CPUOffloadPolicy) for policy in seen)
    seen.clear()
    build_policy(ModelSettings(folder, offload_reference=True), strategy_of(1))  # the actor stays
    assert seen == [None] * (LAYERS + 3)


def test_a_negative_prefetch_is_refused():
    with pytest.raises(ValueError, match=r"trainer\.strategy\.prefetch must be 0 .* got -1"):
        FSDPUlyssesStrategy(prefetch=-1)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def on_gpu(precision: str = "bf16-mixed") -> FSDPUlyssesStrategy:
    strategy = FSDPUlyssesStrategy()
    trainer = pl.Trainer(barebones=True, accelerator="gpu", devices=1, strategy=strategy, precision=precision)
    trainer.strategy.connect(pl.LightningModule())
    strategy.setup_environment()
    return strategy


@pytest.mark.gpu
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:TensorFloat32 tensor",
    "ignore:.*should not be instantiated:DeprecationWarning",  # dynamo in front of Liger's functions
)
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize(
    "options",
    [
        {"liger": True},
        {"compile": True},
        {"gradient_checkpointing": "selective"},
        {"tiled_mlp": 256},
        {"offload_activations": True},
        {"gradient_checkpointing": "full", "offload_activations": True, "liger": True},
        {"gradient_checkpointing": "selective", "offload_activations": True, "liger": True, "compile": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_switches_are_exact_on_a_gpu(options, folder, monkeypatch):
    from transformers.models.qwen3 import modeling_qwen3

    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", modeling_qwen3.apply_rotary_pos_emb)
    monkeypatch.setattr(HostActivations, "smallest", 0)
    strategy, packed = on_gpu(), stream(200, 700, 90).to("cuda")
    plain = gradients(build_policy(ModelSettings(folder), strategy), packed)
    for name, got in gradients(build_policy(ModelSettings(folder, **options), strategy), packed).items():
        assert (got - plain[name]).norm() < 0.03 * plain[name].norm() + 1e-4, name


@pytest.mark.gpu
def test_offloaded_activations_leave_the_device(folder, monkeypatch):
    monkeypatch.setattr(HostActivations, "smallest", 1 << 14)
    strategy, packed, held = on_gpu(), stream(200, 700, 90).to("cuda"), []
    for offload in (False, True):
        actor = build_policy(
            ModelSettings(folder, gradient_checkpointing="full", offload_activations=offload), strategy
        )
        gradients(actor, packed)
        actor.zero_grad()
        before = torch.cuda.memory_allocated()
        outputs = actor(packed, 0.7)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        del outputs, actor
    assert held[0] - held[1] >= 0.9 * LAYERS * 992 * 32 * 2  # the inputs of 4 layers in bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [False, True])
def test_a_reference_on_the_host_takes_no_device_memory_between_passes(tied, tmp_path):
    folder = str(tmp_path)
    config = Qwen3Config(**CONFIG.to_dict() | {"tie_word_embeddings": tied})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    strategy, packed, held, log_probs = on_gpu(), stream(200, 700, 90).to("cuda"), [], []
    for on_host in (False, True):
        before = torch.cuda.memory_allocated()
        settings = ModelSettings(folder, offload_reference=on_host)
        reference = build_policy(settings, strategy, frozen=True)
        with torch.no_grad():
            log_probs.append(reference(packed, 1.0)[0])
        strategy.reshard(reference)
        held.append(torch.cuda.memory_allocated() - before - log_probs[-1].nbytes)
        assert {p.device.type for p in reference.parameters()} == {"cpu" if on_host else "cuda"}
        assert all(p.to_local().is_pinned() for p in reference.parameters()) == on_host
        shard = sum(p.to_local().nbytes for p in reference.parameters())
        del reference
    assert torch.equal(*log_probs)
    assert held[0] - held[1] >= 0.9 * shard
