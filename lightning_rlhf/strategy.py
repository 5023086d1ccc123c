"""`FSDPUlyssesStrategy`: the meshes, sharded loading, precision and distributed checkpoints.

    rank = (dp_replicate, dp_shard, sp), sp fastest: a sequence-parallel group stays inside a node

    data mesh (dp, sp)               dp = dp_replicate x dp_shard: who gets different prompts
    fsdp mesh (replicate?, shard)    shard = dp_shard x sp: who holds different parameters

FSDP2 averages gradients over all dp x sp ranks. Actor, critic and reference are FSDP2 roots of their own inside the
LightningModule (hooks of a sharded LightningModule would never fire: Lightning calls ``training_step`` directly).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer
from typing_extensions import override

from lightning_rlhf import restricted, storage
from lightning_rlhf.background import Background
from lightning_rlhf.meeting import store_of_attempt
from lightning_rlhf.ulysses import gather_sequence, shard_sequence

_DTYPES: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "32-true": (torch.float32, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "bf16-true": (torch.bfloat16, None),
}


_STATES = "optimizer_states_of"
"""Key of the metadata: the parameters that each optimizer has state for."""


class FSDP2Precision(Precision):
    """``Trainer(precision=)`` as FSDP2 dtypes: no autocast, no conversion of batches or of buffers.

    (Lightning's own plugins cast rotary frequencies and rewards to bfloat16.)

    ========== ================== ================ =================
    precision  parameters, Adam   compute          gradient reduction
    ========== ================== ================ =================
    32-true    float32            float32          float32
    bf16-mixed float32            bfloat16         float32
    bf16-true  bfloat16           bfloat16         float32
    ========== ================== ================ =================
    """

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in _DTYPES:
            raise ValueError(f"trainer.precision must be one of {', '.join(_DTYPES)}, got {precision!r}")
        self.precision = precision  # type: ignore[assignment]

    @property
    def param_dtype(self) -> torch.dtype:
        """Of the trained parameters and the optimizer's state."""
        return _DTYPES[self.precision][0]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of matrix products and activations."""
        return _DTYPES[self.precision][1] or self.param_dtype

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """For `fully_shard` of a trained module."""
        return MixedPrecisionPolicy(param_dtype=_DTYPES[self.precision][1], reduce_dtype=torch.float32)


class FSDPUlyssesStrategy(ModelParallelStrategy):
    """FSDP2 with DeepSpeed-Ulysses sequence parallelism.

    Args:
        sequence_parallel_size: ranks that share one sequence. 1 switches it off.
        data_parallel_replicate: replicas of the sharded model (hybrid sharding); 1 shards over all ranks, nodes keeps one
            replica on each node.
        process_group_backend: default "cpu:gloo,cuda:nccl" on CUDA and "gloo" on CPU.
        timeout_minutes: of collectives; a rollout may keep ranks waiting for the slowest. `Watchdog` takes two thirds of it.
        prefetch: layers that are gathered ahead of the one that computes; 0 leaves it to FSDP2 (one, in backward).
        reshard_after_forward: false keeps the gathered parameters of trained models until the optimizer's step: one all-gather
            per step instead of two per micro-batch, for the memory of the whole model in the compute dtype; true frees a tied
            embedding too after forward; null frees all but that.

    Raises:
        ValueError: the world size is not a multiple of ``sequence_parallel_size * data_parallel_replicate``, or a
            sequence-parallel group would span nodes.
    """

    def __init__(
        self,
        sequence_parallel_size: int = 1,
        data_parallel_replicate: int | Literal["nodes"] = 1,
        process_group_backend: str | None = None,
        timeout_minutes: float = 30.0,
        prefetch: int = 0,
        reshard_after_forward: bool | None = None,
    ) -> None:
        if prefetch < 0:
            raise ValueError(f"trainer.strategy.prefetch must be 0 (FSDP2's own) or positive, got {prefetch}")
        for name, value in (
            ("sequence_parallel_size", sequence_parallel_size),
            ("data_parallel_replicate", data_parallel_replicate),
        ):
            if value != "nodes" and value < 1:
                raise ValueError(f"trainer.strategy.{name} must be at least 1, got {value}")
        super().__init__(process_group_backend=process_group_backend, timeout=timedelta(minutes=timeout_minutes))
        self.sequence_parallel_size = sequence_parallel_size
        self.data_parallel_replicate = data_parallel_replicate
        self.prefetch, self.reshard_after_forward = prefetch, reshard_after_forward
        self._data_mesh: DeviceMesh | None = None
        self._neighbours: dict[int, dist.ProcessGroup] = {}
        self._background: Background | None = None

    # -- meshes ------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        if self._process_group_backend is None and self.root_device.type == "cuda":
            self._process_group_backend = "cpu:gloo,cuda:nccl"
        self.check_world_size(self.num_nodes * self.num_processes, self.num_nodes)
        self._setup_distributed()  # not super(): that builds Lightning's own (data, tensor) mesh
        device, sp = self.root_device.type, self.sequence_parallel_size
        self._data_mesh = init_device_mesh(device, (self.world_size // sp, sp), mesh_dim_names=("dp", "sp"))
        self._neighbours = {}
        self._background = Background(self.root_device, self._timeout)
        replicas = self.replicas(self.num_nodes)
        if replicas == 1:
            self._device_mesh = init_device_mesh(device, (self.world_size,), mesh_dim_names=("shard",))
        else:
            shape = (replicas, self.world_size // replicas)
            self._device_mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def replicas(self, num_nodes: int) -> int:
        """Copies of the sharded model on so many nodes."""
        return num_nodes if self.data_parallel_replicate == "nodes" else self.data_parallel_replicate

    def check_world_size(self, world_size: int, num_nodes: int = 1) -> None:
        """Raise unless the meshes tile ``world_size`` ranks and sequence-parallel groups lie inside a node."""
        sp, replicas = self.sequence_parallel_size, self.replicas(num_nodes)
        if world_size % (sp * replicas):
            raise ValueError(
                f"{world_size} processes are no multiple of sequence_parallel_size x data_parallel_replicate = {sp} x"
                f" {replicas}: change trainer.devices, trainer.num_nodes or the strategy's sizes"
            )
        if (world_size // num_nodes) % sp:  # its all-to-alls in every layer would cross the network
            raise ValueError(
                f"sequence_parallel_size={sp} must divide the {world_size // num_nodes} processes of a node, a group would"
                " span nodes: lower it or change trainer.devices"
            )

    @override
    def _setup_distributed(self) -> None:
        assert self._timeout is not None
        assert self.accelerator is not None
        if not dist.is_initialized() and (store := store_of_attempt(self._timeout)) is not None:
            self.accelerator.setup_device(self.root_device)
            device_id = None if self.root_device.type == "cpu" else self.root_device
            self.set_world_ranks()
            dist.init_process_group(
                self._get_process_group_backend(),
                store=store,
                rank=self.global_rank,
                world_size=self.world_size,
                timeout=self._timeout,
                device_id=device_id,
            )
        super()._setup_distributed()

    @property
    def data_mesh(self) -> DeviceMesh:
        """(dp, sp)."""
        if self._data_mesh is None:
            raise RuntimeError("the meshes exist once the Trainer has set up the process group")
        return self._data_mesh

    @property
    def dp_size(self) -> int:
        """Data ranks: how many different shares of the prompts there are."""
        return self.data_mesh["dp"].size()

    @property
    def dp_rank(self) -> int:
        """Which share of the prompts this rank has."""
        return self.data_mesh["dp"].get_local_rank()

    @property
    def sp_rank(self) -> int:
        """Which piece of its sequences this rank has."""
        return self.data_mesh["sp"].get_local_rank()

    @property
    def sp_group(self) -> dist.ProcessGroup | None:
        """Ranks that share this rank's sequences, None without sequence parallelism."""
        return None if self.sequence_parallel_size == 1 else self.data_mesh["sp"].get_group()

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.dp_size, "rank": self.dp_rank}

    # -- collectives of the algorithm: over data ranks; only rollouts look at sequence-parallel ranks --

    def all_reduce_dp(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """In place, over the data ranks; ``op`` is "sum" or "max"."""
        if self.dp_size > 1:
            reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
            dist.all_reduce(tensor, op=reduce_op, group=self.data_mesh["dp"].get_group())
        return tensor

    def all_gather_objects_dp(self, value: Any) -> list[Any]:
        """One entry per data rank, in their order; small Python objects and CPU tensors."""
        out: list[Any] = [value] * self.dp_size
        if self.dp_size > 1:
            dist.all_gather_object(out, value, group=self.data_mesh["dp"].get_group())
        return out

    def all_gather_objects(self, value: Any, ranks: int) -> list[Any]:
        """One entry for each of ``ranks`` consecutive ranks, this one among them, of a world that is a multiple of it.

        The first time, all ranks of the world must ask.
        """
        out: list[Any] = [value] * ranks
        if ranks > 1:
            if ranks not in self._neighbours:
                self._neighbours[ranks] = dist.new_subgroups(ranks, timeout=self._timeout, backend="gloo")[0]
            dist.all_gather_object(out, value, group=self._neighbours[ranks])
        return out

    def broadcast_object_sp(self, value: Any) -> Any:
        """The value of the first rank of this sequence-parallel group."""
        group = self.sp_group
        if group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
        return box[0]

    def shard_sequence(self, x: Tensor) -> Tensor:
        """This rank's piece of a packed stream."""
        return shard_sequence(x, self.sp_group)

    def gather_sequence(self, x: Tensor) -> Tensor:
        """The whole stream from the pieces."""
        return gather_sequence(x, self.sp_group)

    # -- precision and devices ---------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> FSDP2Precision:
        return self._fsdp2_precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # Lightning's connector hands over its own plugin for `Trainer(precision=...)`: only the name is of use here
        name = "32-true" if plugin is None else str(plugin.precision)
        self._fsdp2_precision = plugin if isinstance(plugin, FSDP2Precision) else FSDP2Precision(name)

    @override
    def model_to_device(self) -> None:
        pass  # sharded modules are in place already, `.to(device)` would undo offloading

    # -- sharding and loading ----------------------------------------------------------------------

    def shard(
        self,
        root: nn.Module,
        units: list[nn.Module],
        layers: list[nn.Module] | None = None,
        frozen: bool = False,
        on_host: bool = False,
    ) -> None:
        """Make ``root`` an FSDP2 root with ``units`` (decoder layers, an untied head, a value head) as groups of their own.

        ``layers`` are those of the units that run one after the other, in their order: the ones that are prefetched.
        Everything in one unit that trains must have one dtype. A frozen root keeps its own dtype and is gathered layer by
        layer; a float32 unit inside a bf16-mixed root can be sharded beforehand with its own policy (`shard_float32`).
        With ``on_host`` the shards live in host memory, pinned on CUDA, and travel to the device when they are gathered.
        """
        options: dict[str, Any] = {"mesh": self.device_mesh}
        options["mp_policy"] = MixedPrecisionPolicy() if frozen else self.precision_plugin.policy
        if on_host:
            options["offload_policy"] = self._host_policy
        reshard = True if frozen else self.reshard_after_forward
        for unit in units:
            fully_shard(unit, **options, reshard_after_forward=True if reshard is None else reshard)
        fully_shard(root, **options, reshard_after_forward=reshard)
        self._prefetch(layers or [])
        if self.root_device.type == "cpu":  # gloo cannot average
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        if frozen:
            root.requires_grad_(False)
        elif reshard is False:
            root.set_reshard_after_backward(False)  # type: ignore[operator]

    @property
    def _host_policy(self) -> CPUOffloadPolicy:
        return CPUOffloadPolicy(pin_memory=self.root_device.type == "cuda")

    def _prefetch(self, layers: list[nn.Module]) -> None:
        """Gather the next ``prefetch`` layers, in either direction, while one computes."""
        ahead = self.prefetch
        for i, layer in enumerate(layers if ahead else []):
            assert isinstance(layer, FSDPModule)
            layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + ahead])  # type: ignore[arg-type]
            layer.set_modules_to_backward_prefetch(layers[max(0, i - ahead) : i][::-1])  # type: ignore[arg-type]

    def shard_float32(self, unit: nn.Module, on_host: bool = False) -> None:
        """A unit that computes in float32 whatever the precision: its inputs are cast up. ``on_host`` as in `shard`."""
        options: dict[str, Any] = {"offload_policy": self._host_policy} if on_host else {}
        policy = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.float32)
        fully_shard(unit, mesh=self.device_mesh, mp_policy=policy, **options)

    def shard_uncast(self, unit: nn.Module, on_host: bool = False) -> None:
        """A unit that gets its inputs as they are: the blocks of a vision tower take rotary angles in float32."""
        options: dict[str, Any] = {"offload_policy": self._host_policy} if on_host else {}
        policy = replace(self.precision_plugin.policy, cast_forward_inputs=False)
        fully_shard(unit, mesh=self.device_mesh, mp_policy=policy, **options)

    def materialize(self, root: nn.Module, on_host: bool = False) -> None:
        """Allocate a sharded root whose parameters are on the meta device; the values are undefined until loaded.

        ``on_host`` as in `shard`; buffers go to the device in either case.
        """
        device = self.root_device
        home = torch.device("cpu") if on_host else device
        root._apply(lambda t: torch.empty_like(t, device=home) if t.is_meta else t.to(device))

    @staticmethod
    def reshard(root: nn.Module) -> None:
        """Free gathered parameters: after a forward without backward a root still holds them."""
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, *args, **kwargs)
        if self.reshard_after_forward is False:  # what is still gathered is of before the step
            assert self.model is not None
            self.reshard(self.model)
        return result

    # -- checkpoints: a DCP folder, local or remote; of parameters without gradient those that change ------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        # not StateDictOptions(ignore_frozen_params=True): it forgets the second name of tied parameters
        frozen = {n for n, p in self.model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        frozen -= {n for n in frozen if n.startswith(getattr(self.lightning_module, "frozen_in_checkpoints", ()))}
        return {n: t for n, t in get_model_state_dict(self.model).items() if n not in frozen}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.model is not None
        optimizer = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return get_optimizer_state_dict(self.model, optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Collective.

        Raises:
            SaveFailed: the file system did not take it; on all ranks, and what was at ``filepath`` is still there.
        """
        self.background.wait()
        self._write(*self._split(checkpoint), self._agreed(filepath))

    def save_in_background(
        self, checkpoint: dict[str, Any], filepath: Any, then: Callable[[dist.ProcessGroup | None], None]
    ) -> Future[None]:
        """Collective: copy the state to the host and write it while the run goes on, one checkpoint at a time.

        Args:
            checkpoint: as for `save_checkpoint`; it may change afterwards.
            filepath: of rank 0.
            then: called on all ranks, in the thread that wrote, once the checkpoint is complete. For its collectives it gets a
                process group of all ranks, None if there is one rank without groups.

        Returns:
            What ends when ``then`` has; ``result()`` raises as `save_checkpoint` does.
        """
        path = self._agreed(filepath)
        self.background.wait()
        state, content = self._split(checkpoint)
        state = self.background.copied(state)

        def job(group: dist.ProcessGroup | None) -> None:
            self._write(state, content, path, group)
            then(group)

        return self.background.start(job)

    @property
    def background(self) -> Background:
        """The thread that writes checkpoints."""
        if self._background is None:
            raise RuntimeError("checkpoints can be saved once the Trainer has set up the process group")
        return self._background

    def _agreed(self, filepath: Any) -> str:
        return self.broadcast(os.fspath(filepath))  # a str: Path("s3://b") would be a local folder

    def _split(self, checkpoint: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """What all ranks write, and the marker's content, which rank 0 does."""
        state = {"state_dict": checkpoint.pop("state_dict")}
        optimizers = checkpoint.pop("optimizer_states", [])
        state |= {f"optimizer_{i}": _plain(s) for i, s in enumerate(optimizers)}
        checkpoint[_STATES] = [sorted(s["state"]) for s in optimizers]
        return state, storage.packed(_plain(checkpoint)) if self.is_global_zero else b""

    def _write(self, state: dict[str, Any], content: bytes, path: str, group: dist.ProcessGroup | None = None) -> None:
        target = path
        try:
            target = storage.on_rank_zero(lambda: storage.prepare(path), group)
            dcp.save(state, storage_writer=storage.Writer(target), process_group=group)
            storage.on_rank_zero(lambda: storage.finish(target, path, content), group)
        except (OSError, CheckpointException) as error:
            if (failure := storage.failure(error, path)) is None:
                raise
            if self.is_global_zero:
                storage.discard(target)
            raise failure from error

    @override
    def teardown(self) -> None:
        if self._background is not None:
            self._background.close()
        super().teardown()

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            storage.discard_old(os.fspath(filepath))

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Collective.

        Args:
            checkpoint_path: the folder, or the marker in it.
            weights_only: unless False, only what a run writes is unpickled; None lets torch's own variable
                ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` decide, for Lightning passes on nothing else.

        Raises:
            FileNotFoundError: it is not there, or not complete.
            UntrustedCheckpoint: it holds pickles of other classes.
            ValueError: it is of other models.
        """
        assert self.model is not None
        path = self.broadcast(os.fspath(checkpoint_path)).removesuffix(f"/{storage.MARKER}")
        forced = os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true")
        trusted = forced if weights_only is None else not weights_only
        metadata, index = storage.on_rank_zero(lambda: restricted.read(path, trusted))
        getattr(self.lightning_module, "check_checkpoint", lambda *_: None)(path, metadata)
        state: dict[str, Any] = {"state_dict": self.lightning_module_state_dict()}
        for i, optimizer in enumerate(self.optimizers):
            state[f"optimizer_{i}"] = get_optimizer_state_dict(self.model, optimizer)
            # a fresh optimizer names all parameters; one that had no gradient yet (critic warm-up) has no state to load
            names = set(metadata[_STATES][i])
            own = state[f"optimizer_{i}"]
            if other := sorted(names - own["state"].keys()):
                raise ValueError(
                    f"{path!r} was written by a run that trained {other[0]!r} and {len(other) - 1} more parameters that this"
                    " one does not: resume with the model options it was written with"
                )
            own["state"] = {name: entry for name, entry in own["state"].items() if name in names}
        try:
            planner = None if trusted else restricted.Planner(path)
            dcp.load(state, storage_reader=restricted.Reader(path, index), planner=planner)
        except CheckpointException as error:
            for failure, _ in error.failures.values():
                if isinstance(failure, OSError | restricted.UntrustedCheckpoint):
                    raise failure from None
            reason = next((str(e) for e, _ in error.failures.values()), str(error)).splitlines()[0]
            raise ValueError(
                f"{path!r} does not fit this run ({reason}): resume with the model options it was written with"
            ) from error
        partial = StateDictOptions(strict=False)
        set_model_state_dict(self.model, state["state_dict"], options=partial)
        for i, optimizer in enumerate(self.optimizers):
            stored = state[f"optimizer_{i}"]
            set_optimizer_state_dict(self.model, optimizer, optim_state_dict=stored, options=partial)
        return metadata


def _plain(value: Any) -> Any:
    """Containers and numbers as Python's own, so that the file loads without unpickling classes (``weights_only``)."""
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return (
            type(value)(_plain(v) for v in value) if type(value) in (list, tuple, set) else [_plain(v) for v in value]
        )
    for kind in (bool, int, float, str):  # restricted numbers of the command line are subclasses
        if isinstance(value, kind):
            return kind(value)
    return value


for _name, _replicate in (("fsdp_ulysses", 1), ("hsdp_ulysses", "nodes")):
    for _ranks in (1, 2, 4, 8):
        StrategyRegistry.register(
            _name if _ranks == 1 else f"{_name}_sp{_ranks}",
            FSDPUlyssesStrategy,
            description="FSDP2 with DeepSpeed-Ulysses sequence parallelism",
            override=True,
            sequence_parallel_size=_ranks,
            data_parallel_replicate=_replicate,
        )
