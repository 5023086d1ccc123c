"""vLLM as a guest: what is undone, and which versions are let in; without an engine."""

from __future__ import annotations

import gc
import os
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lightning_rlhf.rollout import vllm_process
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.vllm import VLLMEngine, capture_sizes
from lightning_rlhf.rollout.vllm_process import (
    check_version,
    fork_rng,
    high_priority_streams,
    is_moe,
    paused_gc,
    reset_encoder_cache,
    unchanged_process_state,
)
from lightning_rlhf.tiny import tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("version", "taken"),
    [("0.21.9", False), ("0.22.0", True), ("0.33.2.post1", True), ("0.34.0", False), ("1.0", False)],
)
def test_the_versions_that_are_let_in_are_those_that_are_installed(version, taken):
    wanted = [
        line for line in (Path(__file__).parents[2] / "pyproject.toml").read_text().splitlines() if "vllm>=" in line
    ]
    (asked,) = (Requirement(line.split('"')[1]).specifier for line in wanted)
    assert asked.contains(version) == taken
    assert asked == SpecifierSet(">=0.22,<0.34")
    if taken:
        check_version(version)
    else:
        with pytest.raises(
            ImportError, match=rf"needs vllm>=0\.22,<0\.34, got {version}: install a version in that range"
        ):
            check_version(version)


def test_what_a_start_does_to_its_process_is_undone_also_when_it_fails(monkeypatch):
    monkeypatch.setenv("KEPT", "a")
    monkeypatch.delenv("NEW", raising=False)
    set_num_threads = torch.set_num_threads

    def state() -> list[Any]:
        draws = random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()
        return [*draws, dict(os.environ), torch.get_num_threads(), torch.set_num_threads, gc.get_freeze_count()]

    before = state()
    with suppress(OSError), unchanged_process_state(CPU):
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)
        os.environ |= {"KEPT": "b", "NEW": "c"}
        set_num_threads(torch.get_num_threads() + 1)
        torch.set_num_threads = lambda number: None
        gc.freeze()
        raise OSError
    assert state() == before


def test_draws_of_the_engine_are_taken_back_but_not_beside_the_trainer():
    def draw() -> None:
        with fork_rng(CPU):
            torch.rand(3)

    before = torch.get_rng_state()
    draw()
    assert torch.equal(torch.get_rng_state(), before)
    thread = Thread(target=draw)
    thread.start()
    thread.join()
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_are_paused_and_no_more(enabled):
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with suppress(OSError), paused_gc():
            assert not gc.isenabled()
            raise OSError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("last", ["first", "second"])
def test_collections_go_on_after_the_last_of_overlapping_pauses(last):
    assert gc.isenabled()
    pauses = {"first": paused_gc(), "second": paused_gc()}
    try:
        for pause in pauses.values():
            pause.__enter__()
        pauses["second" if last == "first" else "first"].__exit__(None, None, None)
        assert not gc.isenabled()
        pauses[last].__exit__(None, None, None)
        assert gc.isenabled()
    finally:
        gc.enable()


def test_streams_are_urgent_for_as_long_as_they_are_asked_for():
    stream = torch.cuda.Stream
    with suppress(OSError), high_priority_streams():
        assert issubclass(torch.cuda.Stream, stream)
        assert torch.cuda.Stream is not stream
        raise OSError
    assert torch.cuda.Stream is stream


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_a_mixture_of_experts_is_known_by_what_a_version_says_of_it(name):
    assert is_moe(SimpleNamespace(hf_text_config=SimpleNamespace(**{name: 8})))
    assert not is_moe(SimpleNamespace(hf_text_config=SimpleNamespace(**{name: 0})))
    assert not is_moe(SimpleNamespace(is_moe=False, hf_text_config=SimpleNamespace(**{name: 8})))


def test_pictures_of_old_weights_are_dropped_or_it_is_an_error(monkeypatch):
    called = []
    core = SimpleNamespace(reset_encoder_cache=lambda: called.append(True))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))
    reset_encoder_cache(llm)
    assert called == [True]
    del core.reset_encoder_cache
    monkeypatch.setattr(vllm_process, "version_installed", lambda: "0.22.0")
    with pytest.raises(RuntimeError, match=r"vLLM 0\.22\.0 cannot drop its cache of images after a weight sync"):
        reset_encoder_cache(llm)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (5, [1, 5]), (64, [1, 8, 64]), (200, [1, 8, 64, 128, 200]), (256, [1, 8, 64, 128, 256])],
)
def test_graphs_are_captured_for_the_full_batch_and_few_others(most, sizes):
    assert capture_sizes(most) == sizes


def test_what_vllm_starts_with_is_the_user_s_before_the_plan_s_before_ours():
    def arguments(device: str = "cuda", engine: VLLMEngine | None = None, **context: Any) -> dict[str, Any]:
        setup = EngineSetup(str(tiny_model()), torch.device(device), torch.bfloat16, (1,), 0, 128, 2000, seed=2**32 + 7)
        return (engine or VLLMEngine())._llm_arguments(replace(setup, **context))

    ours = arguments()
    assert (ours["dtype"], ours["seed"], ours["max_num_seqs"], ours["load_format"]) == ("bfloat16", 7, 1024, "dummy")
    assert (ours["gpu_memory_utilization"], ours["kv_cache_memory_bytes"]) == (0.4, None)
    assert (ours["enable_sleep_mode"], ours["enforce_eager"]) == (True, False)
    assert not ours.keys() & {"hf_overrides", "enable_chunked_prefill"}
    on_cpu = arguments("cpu")
    assert (on_cpu["kv_cache_memory_bytes"], on_cpu["enable_sleep_mode"], on_cpu["enforce_eager"]) == (
        1 << 30,
        False,
        True,
    )
    assert on_cpu["enable_chunked_prefill"] is False
    assert arguments(config_overrides={"x": 1})["hf_overrides"] == {"x": 1}
    assert arguments(kv_cache_memory_bytes=5)["kv_cache_memory_bytes"] == 5
    assert arguments(engine=VLLMEngine(kv_cache_memory_bytes=6), kv_cache_memory_bytes=5)["kv_cache_memory_bytes"] == 6
    wish = {"max_num_batched_tokens": 9, "load_format": "auto", "max_num_seqs": 3}
    asked = arguments(engine=VLLMEngine(max_num_batched_tokens=8, engine_args=wish))
    assert asked.items() >= wish.items()
    assert asked["compilation_config"]["cudagraph_capture_sizes"] == [1, 3]
