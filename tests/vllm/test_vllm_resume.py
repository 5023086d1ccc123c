"""A run with a real vLLM that is killed and goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_vllm_run import ENGINE

ROOT = Path(__file__).parent.parent.parent
KILLED = [
    sys.executable,
    "benchmarks/resume.py",
    "--at_once",
    "--config",
    "configs/tiny_ppo.yaml",
    "--steps=5",
    "--kill_at=4",
]


@pytest.mark.vllm
def test_a_killed_run_draws_the_same_responses_after_its_resume():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*KILLED, *ENGINE[:2]], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("as if nothing had happened\n")
    table = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line[2:3].isdigit()]
    assert [row[0].strip() for row in table] == ["1", "2", "3", "4", "5"]
    assert all(cell.strip() in ("", "32 of 32", "0.0e+00") for row in table for cell in row[1:])
