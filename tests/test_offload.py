"""Optimizer state and parameters wait on the host during rollouts: nothing of the result changes, and everything comes back."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from test_cli import parsed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from toys import TINY_MODULE, even_tokens, fit, quiet_trainer, spawn

from lightning_rlhf import (
    KL,
    FSDPUlyssesStrategy,
    GRPOLightningModule,
    PPOLightningModule,
    PromptDataModule,
    RolloutCallback,
    Sampling,
)
from lightning_rlhf.callbacks.offload import HostMemory
from lightning_rlhf.host_memory import local_of
from lightning_rlhf.rollout import TransformersEngine

pytestmark = pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
COMMON = TINY_MODULE | {"reward": [even_tokens], "kl": KL(coef=0.1), "mini_batches": 2}
BOTH = {"offload_optimizer": True, "offload_parameters": True}


class Spy(TransformersEngine):
    """Looks at the trainer's memory while it generates, and may fail then."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.module: Any = None
        self.fails_at = fails_at
        self.devices: list[set[str]] = []
        self.shards: list[dict[int, int]] = []

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        roots = [root for root in (module.actor, module.critic, module.reference) if root is not None]
        parameters = [p for root in roots for p in root.parameters()]
        states = [s["exp_avg"] for o in module.trainer.optimizers for s in o.state.values()]
        self.devices.append({t.device.type for t in [*parameters, *states]})
        self.shards.append({id(t): t.to_local().data_ptr() for t in parameters})
        if len(self.shards) == self.fails_at:
            raise OSError("the engine broke")
        return super().generate(*args, **kwargs)


def run(folder: Any, options: dict[str, Any], spy: Spy, **kwargs: Any) -> tuple[Any, list[dict[str, float]]]:
    spy.module = module = PPOLightningModule(**COMMON)
    return module, fit(module, folder, 3, {"engine": spy, **options}, num_generations=2, **kwargs)


def test_offload_during_rollouts_changes_no_metric_and_has_spans_of_its_own(tmp_path):
    (plain, kept), (module, moved) = run(tmp_path / "a", {}, Spy()), run(tmp_path / "b", BOTH, spy := Spy())
    assert kept == moved
    assert len(kept) == 3
    assert {"offload", "reload"} <= set(module.phases.seconds)
    assert not {"offload", "reload"} & set(plain.phases.seconds)
    for one, other in zip(plain.parameters(), module.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())
    first, second, third = spy.shards
    assert first == second == third  # identity kept, in the same host memory every time
    assert first != {
        id(p): p.to_local().data_ptr() for root in (module.actor, module.critic) for p in root.parameters()
    }


def test_everything_comes_back_when_the_engine_fails(tmp_path):
    spy = Spy(fails_at=2)
    with pytest.raises(OSError, match="the engine broke"):
        run(tmp_path, BOTH, spy)
    (callback,) = [c for c in spy.module.trainer.callbacks if isinstance(c, RolloutCallback)]
    assert not callback._steps.host.in_use
    away, identity = spy.shards[1], [id(p) for p in spy.module.actor.parameters()]
    assert set(identity) < set(away)
    for parameter in spy.module.actor.parameters():
        assert parameter.to_local().data_ptr() != away[id(parameter)]
        assert parameter.isfinite().all()


class Census(TransformersEngine):
    """Counts the bytes of all tensors of the process when it begins to generate."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
        storages = {(s := t.untyped_storage()).data_ptr(): s.nbytes() for t in tensors if t.device.type == "cpu"}
        self.bytes.append(sum(storages.values()))
        return super().generate(*args, **kwargs)


def _counted(rank: int) -> dict[tuple[int, bool | None], tuple[list[int], int]]:
    found = {}
    for min_num_params, reshard in ((0, True), (10**9, None), (10**9, False)):
        pl.seed_everything(1, verbose=False)
        strategy = FSDPUlyssesStrategy(min_num_params=min_num_params, reshard_after_forward=reshard)
        module, engine = PPOLightningModule(**COMMON | {"micro_batch_tokens": 96}), Census()
        callback = RolloutCallback(engine=engine, sampling=Sampling(max_completion_length=6, num_generations=2))
        trainer = quiet_trainer(callback, devices=2, strategy=strategy, max_steps=3, enable_checkpointing=False)
        trainer.fit(module, datamodule=PromptDataModule(path="toys.prompts", batch_size=16, max_prompt_length=32))
        size = 4 * sum(p.numel() for p in module.actor.parameters())
        found[min_num_params, reshard] = engine.bytes, size
        del module, engine, callback, trainer
    return found


def test_nothing_stays_gathered_while_the_engine_generates():
    """Actor, critic and reference of two ranks, each one unit that its root gathers, hold what layers that are freed hold."""
    for found in spawn(_counted, 2):
        freed, size = found.pop((0, True))
        for held, _ in found.values():
            assert len(held) == 3
            assert all(more - less < size / 20 for more, less in zip(held, freed, strict=True))


class Quantised(torch.optim.Optimizer):
    """Sign descent with a momentum of 8 bits and a scale: what optimizers of other packages look like."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state, grad = self.state[parameter], parameter.grad.to_local()
                    old = state["momentum"].float() * state["scale"] if state else 0.0
                    new = 0.9 * old + grad
                    state["scale"] = new.abs().amax().view(1) / 127 + 1e-20
                    state["momentum"] = (new / state["scale"]).round().to(torch.int8)
                    parameter.to_local().sub_(new.sign(), alpha=group["lr"])


def test_an_optimizer_by_class_path_with_8_bit_state_trains_and_is_offloaded(tmp_path):
    config = parsed("fit", "--model.model=random:tiny", "--data.path=x", "--model.optimizer=test_offload.Quantised")
    assert config.model.init_args.optimizer.class_path == "test_offload.Quantised"
    rows = []
    for name, options in (("kept", {}), ("moved", BOTH)):
        module = GRPOLightningModule(**COMMON, optimizer=Quantised)
        rows.append(fit(module, tmp_path / name, 3, options, num_generations=2))
        assert {s["momentum"].dtype for s in module.trainer.optimizers[0].state.values()} == {torch.int8}
    assert rows[0] == rows[1]
    assert rows[0][-1]["actor/kl_loss"] > 0.0


def test_what_is_away_moves_once_without_its_gradient_and_comes_back_as_it_was():
    root = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(root.parameters())
    root(torch.ones(3)).sum().backward()
    optimizer.step()
    moments = [s for state in optimizer.state.values() for s in (state["exp_avg"], state["exp_avg_sq"])]
    before = [t.detach().clone() for t in (*root.parameters(), *moments)]
    host = HostMemory()
    size = sum(p.nbytes for p in root.parameters())
    assert (host.offload_parameters(root), host.offload_states([optimizer])) == (size, 2 * size)
    assert (host.offload_parameters(root), host.offload_states([optimizer])) == (0, 0)
    assert all(p.grad is None for p in root.parameters())
    assert host.in_use
    host.reload([root], [optimizer], torch.device("cpu"))
    assert not host.in_use
    moments = [s for state in optimizer.state.values() for s in (state["exp_avg"], state["exp_avg_sq"])]
    assert all(map(torch.equal, before, (*root.parameters(), *moments)))


@pytest.fixture
def second_of_two():
    """A process group in which this process is the second of two ranks and talks to nobody: enough to shard."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


class Late(HostMemory):
    """Its copies are complete when they have been waited for, and no sooner, as those from a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _to_host(self, key, tensor):
        host = super()._to_host(key, tensor)
        self.copies.append((local_of(host), local_of(host).clone()))
        local_of(host).fill_(torch.nan)
        return host

    def _wait(self) -> None:
        for host, values in self.copies:
            host.copy_(values)
        super()._wait()


def test_a_shard_shorter_than_others_is_read_once_its_copy_is_complete(second_of_two):
    root = fully_shard(torch.nn.Linear(3, 5), mesh=init_device_mesh("cpu", (2,)))
    before = [p.to_local().clone() for p in root.parameters()]
    assert {len(shard) for shard in before} == {2}  # FSDP2 pads them to 3, on the host
    host = Late()
    host.offload_parameters(root)
    assert all(torch.equal(b, p.to_local()) for b, p in zip(before, root.parameters(), strict=True))
    host.reload([root], [], torch.device("cpu"))
    assert all(torch.equal(b, p.to_local()) for b, p in zip(before, root.parameters(), strict=True))


@pytest.mark.gpu
def test_a_shard_shorter_than_others_comes_back_as_it_was(second_of_two):
    root = torch.nn.Sequential(*(torch.nn.Linear(8192, 8193, bias=False, device="cuda") for _ in range(4)))
    fully_shard(root, mesh=init_device_mesh("cuda", (2,)))
    host = HostMemory()
    for _ in range(2):  # the second time the buffers hold what was there the first time
        for parameter in root.parameters():
            parameter.data.to_local().normal_()
        before = [p.to_local().clone() for p in root.parameters()]
        host.offload_parameters(root)
        assert {p.to_local().device.type for p in root.parameters()} == {"cpu"}
        host.reload([root], [], torch.device("cuda"))
        assert all(torch.equal(b, p.to_local()) for b, p in zip(before, root.parameters(), strict=True))


def test_state_that_is_no_plain_tensor_is_refused():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter]["momentum"] = torch.ones(2).as_subclass(type("Packed", (torch.Tensor,), {}))
    with pytest.raises(NotImplementedError, match=r"Packed tensors, .*: set rollout\.offload_optimizer to false"):
        HostMemory().offload_states([optimizer])


@pytest.mark.gpu
def test_offload_frees_the_bytes_of_parameters_and_moments(tmp_path):
    module, spy, freed = PPOLightningModule(**COMMON), Spy(), Counter()
    spy.module = module
    module.phases.on_start.append(lambda name: freed.update({name: torch.cuda.memory_allocated()}))
    module.phases.on_end.append(lambda name: freed.subtract({name: torch.cuda.memory_allocated()}))
    fit(module, tmp_path, 3, {"engine": spy, **BOTH}, num_generations=2, accelerator="gpu")
    assert spy.devices[-1] == {"cpu"}
    trained = sum(p.to_local().nbytes for root in (module.actor, module.critic) for p in root.parameters())
    frozen = sum(p.to_local().nbytes for p in module.reference.parameters())
    moved = 3 * (trained + frozen) + 2 * (2 * trained)  # before the first step there are no moments
    assert freed["offload"] >= moved
    assert -freed["reload"] >= moved
