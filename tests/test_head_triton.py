"""The Triton kernels of the head, interpreted on the CPU in a process of their own (the switch must be set before triton is loaded)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from test_head import VARIANTS, assert_close, compare

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CASES: dict[str, dict[str, Any]] = {
    f"{variant}, {dtype}": {"dtype": dtype, "rows": 5, "tile_bytes": 2**11, **options}
    for variant, options in VARIANTS.items()
    for dtype in DTYPES
}
CASES |= {
    "row tiles": {"rows": 70, "tile_bytes": 2**15},
    "several blocks": {"rows": 5, "vocab": 9000, **VARIANTS["all"]},
    "a block of banned tokens": {"rows": 3, "vocab": 9000, "banned": 5000, "bias": True},
    "large vocabulary": {"rows": 3, "vocab": 151936, "hidden": 8, "tile_bytes": 2**20, "temperature": 0.7},
}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_equal_full_logits_in_value_and_gradient(case, results):
    assert results["launches"] > len(CASES)
    options = {"dtype": "float32", "vocab": 257} | CASES[case]
    assert_close(results[case], DTYPES[options["dtype"]], options["vocab"])


def test_a_label_that_is_no_token_gives_no_number(results):
    assert results["labels -1 and 257"] == [True, True, False]


def main() -> None:
    from lightning_rlhf.modules import head, head_triton

    launches = 0

    def passes(device: str) -> Any:
        nonlocal launches
        launches += 1
        return head_triton

    head._passes = passes  # type: ignore[assignment]
    found: dict[str, Any] = {
        name: compare(**case | {"dtype": DTYPES[case.get("dtype", "float32")]}) for name, case in CASES.items()
    }
    log_probs, _ = head.LogProbHead(8, 257)(torch.randn(3, 8), torch.tensor([-1, 257, 256]))
    print(json.dumps(found | {"launches": launches, "labels -1 and 257": log_probs.isnan().tolist()}))


if __name__ == "__main__":
    main()
