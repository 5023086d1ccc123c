"""A whole run with a colocated vLLM: after every optimizer step the engine samples from the trainer's own policy."""

from __future__ import annotations

import pytest
from test_runs import QUIET, run

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
