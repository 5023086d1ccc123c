"""The Triton kernels of the head without a GPU: interpreted, in a process of their own, and compiled for Hopper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from test_head import VARIANTS, assert_close, compare
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
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
    "kept logits": {"dtype": "bfloat16", "rows": 70, "tile_bytes": 2**13, "keep_logits": True},
    "kept logits, all": {"dtype": "bfloat16", "rows": 5, "tile_bytes": 2**11, "keep_logits": True, **VARIANTS["all"]},
    "kept logits in float32": {"rows": 5, "keep_logits": True},
    "large vocabulary": {"rows": 3, "vocab": 151936, "hidden": 8, "tile_bytes": 2**20, "temperature": 0.7},
}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    environment = os.environ | {
        "TRITON_INTERPRET": "1"
    }  # read when triton is imported, which other tests may have done
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_equal_full_logits_in_value_and_gradient(case, results):
    assert results["uses"] > len(CASES)
    options = {"dtype": "float32", "vocab": 257} | CASES[case]
    assert_close(results[case], DTYPES[options["dtype"]], options["vocab"])


def test_kept_logits_save_a_matrix_product(results):
    """The logits, the logits again, and two gradients."""
    assert results["products"] == [4, 3]


def test_a_label_that_is_no_token_gives_no_number(results):
    assert results["labels -1 and 257"] == [True, True, False]


@pytest.mark.parametrize("features", [False, True])
def test_the_kernels_compile_for_hopper_with_wide_loads_and_no_spills(features, tmp_path, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from lightning_rlhf.modules import head_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"COLUMNS": 151936, "HAS_BIAS": features, "HAS_CAP": features, "WITH_ENTROPY": features}
    constants |= {"WITH_SQUARES": features, "WITH_TOP": features, "BLOCK": head_triton.BLOCK}
    types = {
        "d_ptr": "*bf16",
        "bias_ptr": "*bf16",
        "labels_ptr": "*i64",
        "scale": "fp32",
        "cap": "fp32",
        "temperature": "fp32",
    }
    for kernel in (head_triton._row_kernel, head_triton._gradient_kernel):
        names = kernel.arg_names
        signature = {
            name: "constexpr" if name in constants else types.get(name, "*fp32" if name.endswith("_ptr") else "i32")
            for name in names
        }
        source = ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(names.index(name),): value for name, value in constants.items() if name in names},
            attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] in "*i"},
        )
        assembly = compile(source, target=GPUTarget("cuda", 90, 32), options=head_triton.OPTIONS).asm["ptx"]
        assert "ld.global.v4" in assembly
        assert ".local" not in assembly


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name().split("::")[1].split(".")[0] in ("mm", "addmm", "addmm_")
        return func(*args, **kwargs or {})


def main() -> None:
    from lightning_rlhf.modules import head, head_triton

    uses = 0

    def passes(device: str) -> Any:
        nonlocal uses
        uses += 1
        return head_triton

    head._passes = passes
    found: dict[str, Any] = {
        name: compare(**case | {"dtype": DTYPES[case.get("dtype", "float32")]}) for name, case in CASES.items()
    }
    log_probs, _ = head.LogProbHead(8, 257)(torch.randn(3, 8), torch.tensor([-1, 257, 256]))
    products = []
    for keep in (False, True):
        one = head.LogProbHead(16, 257, dtype=torch.bfloat16)
        one.keep_logits = keep
        with torch.no_grad(), Products() as unseen:
            one(torch.randn(2, 16, dtype=torch.bfloat16), torch.tensor([3, 5]))
        with Products() as counted:
            inputs = torch.randn(2, 16, dtype=torch.bfloat16, requires_grad=True)
            one(inputs, torch.tensor([3, 5]))[0].sum().backward()
        assert unseen.count == 1
        products.append(counted.count)
    more = {"uses": uses, "products": products, "labels -1 and 257": log_probs.isnan().tolist()}
    print(json.dumps(found | more))


if __name__ == "__main__":
    main()
