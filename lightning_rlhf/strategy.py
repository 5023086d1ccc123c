"""`FSDPUlyssesStrategy`: the meshes and what is sharded over them.

    rank = (dp_replicate, dp_shard, sp), sp fastest: a sequence-parallel group stays inside a node

    data mesh (dp, sp)               dp = dp_replicate x dp_shard: who gets different prompts
    fsdp mesh (replicate?, shard)    shard = dp_shard x sp: who holds different parameters

FSDP2 averages gradients over all dp x sp ranks. Actor, critic and reference are FSDP2 roots of their own inside the
LightningModule (hooks of a sharded LightningModule would never fire: Lightning calls ``training_step`` directly).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer
from typing_extensions import override

from lightning_rlhf.background import Background
from lightning_rlhf.checkpointing import DistributedCheckpoints
from lightning_rlhf.host_memory import HostBlocks, local_of
from lightning_rlhf.meeting import check_alike, store_of_attempt
from lightning_rlhf.precision import FSDP2Precision
from lightning_rlhf.run_folders import take_folders
from lightning_rlhf.ulysses import gather_sequence, shard_sequence


class FSDPUlyssesStrategy(DistributedCheckpoints):
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
            embedding, or a small model, too after forward; null frees all but that.
        min_num_params: a model with fewer parameters is one FSDP unit, gathered as a whole, and not layer by layer: what FSDP2
            does around each unit takes the CPU longer than a small layer takes the GPU.

    Raises:
        ValueError: the world size is not a multiple of ``sequence_parallel_size * data_parallel_replicate``, a
            sequence-parallel group would span nodes, or torchrun or SLURM has started another number of processes.
    """

    def __init__(
        self,
        sequence_parallel_size: int = 1,
        data_parallel_replicate: int | Literal["nodes"] = 1,
        process_group_backend: str | None = None,
        timeout_minutes: float = 30.0,
        prefetch: int = 0,
        reshard_after_forward: bool | None = None,
        min_num_params: int = 600_000_000,
    ) -> None:
        if prefetch < 0:
            raise ValueError(f"trainer.strategy.prefetch must be 0 (FSDP2's own) or positive, got {prefetch}")
        for name, value, least in (
            ("sequence_parallel_size", sequence_parallel_size, 1),
            ("data_parallel_replicate", data_parallel_replicate, 1),
            ("min_num_params", min_num_params, 0),
        ):
            if value != "nodes" and value < least:
                raise ValueError(f"trainer.strategy.{name} must be at least {least}, got {value}")
        if not 0.0 < timeout_minutes <= 1e6:  # a timedelta cannot be infinite
            raise ValueError(f"trainer.strategy.timeout_minutes must be above 0, up to 1e6, got {timeout_minutes}")
        super().__init__(process_group_backend=process_group_backend, timeout=timedelta(minutes=timeout_minutes))
        self.sequence_parallel_size = sequence_parallel_size
        self.data_parallel_replicate = data_parallel_replicate
        self.prefetch, self.reshard_after_forward, self.min_num_params = prefetch, reshard_after_forward, min_num_params
        self.options: Mapping[str, Any] = {}  # of the command line, by name: the same on all ranks
        self._data_mesh: DeviceMesh | None = None
        self._neighbours: dict[int, dist.ProcessGroup] = {}

    # -- meshes ------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        self._check_launched()
        if self._process_group_backend is None and self.root_device.type == "cuda":
            self._process_group_backend = "cpu:gloo,cuda:nccl"
        self.check_world_size(self.num_nodes * self.num_processes, self.num_nodes)
        self._setup_distributed()  # not super(): that builds Lightning's own (data, tensor) mesh
        check_alike(self.options, "start all processes with the same options")
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
        assert self._timeout is not None
        for mesh in (self._data_mesh, self._device_mesh):
            for group in mesh.get_all_groups():  # a mesh takes torch's own limit
                _set_pg_timeout(self._timeout, group)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh
        self.open_early()
        if self.is_global_zero and (trainer := self.lightning_module._trainer) is not None:
            take_folders(trainer.loggers)

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

    def _check_launched(self) -> None:
        """Raise ValueError if somebody else has started another number of processes: Lightning goes on with some of them."""
        environment = self.cluster_environment
        if environment is None or isinstance(environment, LightningEnvironment):
            return
        launched, asked = environment.world_size(), self.num_processes * self.num_nodes
        if launched != asked:
            launcher = type(environment).__name__.removesuffix("Environment").replace("TorchElastic", "torchrun")
            raise ValueError(
                f"{launcher} has started {launched} process{'' if launched == 1 else 'es'}, but trainer.devices x"
                f" trainer.num_nodes is {self.num_processes} x {self.num_nodes}: start one process per device (srun"
                " --ntasks-per-node, torchrun --nproc_per_node), or set the two to what was started"
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
        """This rank's piece of a packed stream, whose length is a multiple of ``sequence_parallel_size``."""
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
        """Make ``root`` an FSDP2 root with ``units`` (decoder layers, an untied head) as groups of their own, unless it is small.

        ``layers`` are those of the units that run one after the other, in their order: the ones that are prefetched.
        Everything in one unit that trains must have one dtype. A frozen root keeps its own dtype and is freed after each
        forward; a float32 unit inside a bf16-mixed root can be sharded beforehand with its own policy (`shard_float32`).
        With ``on_host`` the shards live in host memory, pinned on CUDA, and travel to the device when they are gathered.
        """
        options = self._placed(on_host)
        options["mp_policy"] = MixedPrecisionPolicy() if frozen else self.precision_plugin.policy
        reshard = True if frozen else self.reshard_after_forward
        if sum(p.numel() for p in root.parameters()) < self.min_num_params:
            units, layers = [], []
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

    def _placed(self, on_host: bool) -> dict[str, Any]:
        """Of `fully_shard`: over which ranks, and where the shards live."""
        policy = CPUOffloadPolicy(pin_memory=self.root_device.type == "cuda")
        return {"mesh": self.device_mesh, **({"offload_policy": policy} if on_host else {})}

    def _prefetch(self, layers: list[nn.Module]) -> None:
        """Gather the next ``prefetch`` layers, in either direction, while one computes."""
        ahead = self.prefetch
        for i, layer in enumerate(layers if ahead else []):
            assert isinstance(layer, FSDPModule)
            layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + ahead])  # type: ignore[arg-type]
            layer.set_modules_to_backward_prefetch(layers[max(0, i - ahead) : i][::-1])  # type: ignore[arg-type]

    def shard_float32(self, unit: nn.Module, on_host: bool = False) -> None:
        """A unit that computes in float32 whatever the precision: its inputs are cast up. ``on_host`` as in `shard`."""
        policy = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.float32)
        fully_shard(unit, mp_policy=policy, **self._placed(on_host))

    def shard_uncast(self, unit: nn.Module, on_host: bool = False) -> None:
        """A unit that gets its inputs as they are: the blocks of a vision tower take rotary angles in float32."""
        policy = replace(self.precision_plugin.policy, cast_forward_inputs=False)
        fully_shard(unit, mp_policy=policy, **self._placed(on_host))

    def materialize(self, root: nn.Module, on_host: bool = False) -> None:
        """Allocate a sharded root whose parameters are on the meta device; the values are undefined until loaded.

        ``on_host`` as in `shard`; buffers go to the device in either case.
        """
        device, blocks = self.root_device, HostBlocks()
        blocks.expect(sum(local_of(p).nbytes for p in root.parameters()))

        def allocate(tensor: Tensor) -> Tensor:
            if not tensor.is_meta:  # a tied parameter's second name; a buffer
                return tensor if isinstance(tensor, nn.Parameter) else tensor.to(device)
            if on_host:
                return blocks.empty_like(tensor, pinned=device.type == "cuda")
            return torch.empty_like(tensor, device=device)

        root._apply(allocate)

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
