"""SFT, reward model and PPO against it, one after the other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_pipeline_raises_the_reward_models_score_and_what_it_stands_for(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        [sys.executable, "examples/pipeline/run.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    line = done.stdout.strip().splitlines()[-1]
    numbers = re.search(r"accuracy ([\d.]+); .* score (\S+) -> (\S+), friendly words (\d+)% -> (\d+)%; (\d+) s", line)
    accuracy, before, after, share, later, seconds = map(float, numbers.groups())
    assert accuracy > 0.9
    assert after > before + 1.5
    assert later > share + 25
    assert seconds < 180
