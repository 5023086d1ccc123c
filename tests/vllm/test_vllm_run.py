"""A whole run with a colocated vLLM: after every optimizer step the engine samples from the trainer's own policy."""

from __future__ import annotations

import pytest
from test_runs import QUIET, assert_equal_runs, run

pytestmark = [pytest.mark.vllm]

ENGINE = [
    "--rollout.engine=lightning_rlhf.rollout.VLLMEngine",
    "--rollout.engine.kv_cache_memory_bytes=33554432",
    "--rollout.log_probs_every=1",
    "--trainer.val_check_interval=2",
]


@pytest.mark.parametrize(("devices", "tp"), [(1, 1), (2, 1), (2, 2)])
def test_log_probs_of_engine_and_trainer_agree_in_every_iteration(devices, tp, tmp_path):
    split = [f"--trainer.devices={devices}", f"--rollout.engine.tensor_parallel_size={tp}"]
    rows = run(tmp_path, "tiny_ppo.yaml", *QUIET, *ENGINE, *split)
    trained = [row for row in rows if "reward/mean" in row]
    assert len(trained) == 4
    assert trained[0]["actor/grad_norm"] > 0
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in trained)
    assert any("val/heldout/reward" in row for row in rows)


def test_the_engine_generates_beside_the_update(tmp_path):
    """In a thread of its own: what it draws, and so the run, is what it draws without one."""
    ahead = ["--rollout.async_level=1", "--model.correction={}"]
    first, second = (run(tmp_path / name, "tiny_ppo.yaml", *QUIET, *ENGINE, *ahead) for name in "ab")
    trained = [row for row in first if "reward/mean" in row]
    assert [row.get("rollout/staleness") for row in trained] == [None, 1.0, 1.0, 1.0]
    assert trained[0]["rollout/logprob_diff_max"] < 1e-4 < trained[1]["rollout/logprob_diff_max"]
    assert trained[0]["rollout/is_ess"] > 1 - 1e-6 > trained[2]["rollout/is_ess"] > 0.9
    assert_equal_runs(first, second, 1e-7)
