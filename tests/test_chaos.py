"""The short form of ``make chaos``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_killed_runs_end_as_if_nothing_had_happened():
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    line = [sys.executable, "tests/chaos.py", "--kills", "2", "--inside_saves", "--seed", "7"]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1]
    kills, beside, resumes = map(
        int, re.match(r"\d+ runs, (\d+) kills .* (\d+) of them .* (\d+) resumes", last).groups()
    )
    assert (kills, beside) == (2, 1), last
    assert resumes > 0, last
    assert last.endswith(" 0 differences")
