"""No rank holds the model while it is loaded: its shard, and what is read at a time."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from test_policy import strategy_of
from toys import spawn
from transformers import AutoModelForCausalLM, Qwen3Config

from lightning_rlhf.modules import policy as building
from lightning_rlhf.modules.policy import build_policy
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.tiny import tiny_model

MIB = 2**20


def anonymous_bytes() -> int:
    """Memory of this process that is no cached file: the safetensors are mapped."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


class Peak:
    """The largest `anonymous_bytes` while the block runs, above those at its start."""

    def __enter__(self) -> Peak:
        self.start = self.highest = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.is_set():
            self.highest = max(self.highest, anonymous_bytes())
            time.sleep(0.001)

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()
        self.above = max(self.highest, anonymous_bytes()) - self.start


def load(rank: int, folder: str, small: str) -> tuple[int, int]:
    """(peak, bytes of the shard) of a rank that loads a model; a small one first, for what is imported on the way."""
    building.check_isolation = building.check_head = lambda *_: None  # forward passes; what they gather is the device's
    strategy = strategy_of(2)
    build_policy(ModelSettings(small), strategy)
    with Peak() as peak:
        policy = build_policy(ModelSettings(folder), strategy)
    return peak.above, sum(p.to_local().nbytes for p in policy.parameters())


@pytest.mark.slow
def test_a_rank_needs_its_shard_and_little_more_to_load_a_model(tmp_path):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False}
    for name, hidden, layers in (("large", 512, 15), ("small", 32, 1)):
        config = Qwen3Config(
            vocab_size=2000, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, **sizes
        )
        config.bos_token_id = config.eos_token_id = None
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
    full = sum(f.stat().st_size for f in (tmp_path / "large").glob("*.safetensors"))
    assert full > 190 * MIB
    for peak, shard in spawn(load, 2, str(tmp_path / "large"), str(tmp_path / "small")):
        assert shard == pytest.approx(full / 2, rel=0.01)
        assert peak < shard + 0.1 * full, (peak / MIB, shard / MIB)


def written_by_the_second_rank(rank: int, folder: str) -> list[str]:
    return sorted(path.name for path in tiny_model(Path(folder)).iterdir()) if rank == 1 else []


@pytest.mark.slow
def test_the_tiny_model_is_whole_whichever_rank_writes_it(tmp_path):
    _, names = spawn(written_by_the_second_rank, 2, str(tmp_path))
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(names)


def test_a_folder_without_some_weights_is_refused_and_not_filled_with_random_ones(tmp_path):
    strategy, folder = strategy_of(1), str(tiny_model())
    with pytest.raises(
        RuntimeError, match=r"cannot be loaded: .*it has no lm_head\.weight: it is not complete, or not of"
    ):
        build_policy(ModelSettings(folder, config_overrides={"tie_word_embeddings": False}), strategy)
    state = {
        n: t for n, t in AutoModelForCausalLM.from_pretrained(folder).state_dict().items() if "layers.1.mlp" not in n
    }
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(
        RuntimeError, match=r"it has no model\.layers\.1\.mlp\.down_proj\.weight, model\.layers\.1\.mlp\.gate"
    ):
        build_policy(ModelSettings(str(tmp_path)), strategy)
