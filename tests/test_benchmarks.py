"""The benchmarks run where there is no GPU, in small."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_update_is_timed_for_every_length_and_set_of_switches():
    small = ["--shape", "tiny", "--lengths", "16", "64", "--tokens", "128", "--steps", "1"]
    switches = ["--switches", "{gradient_checkpointing: full}", "{lora: {r: 4}}"]
    line = [
        sys.executable,
        str(ROOT / "benchmarks/update.py"),
        *small,
        *switches,
        "--device=cpu",
        "--precision=32-true",
    ]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = re.findall(r"^ +(16|64) +128 +\d+\.\d+ .*?   (\{.*\})$", done.stdout, re.MULTILINE)
    assert rows == [(length, s) for s in switches[1:] for length in ("16", "64")]
