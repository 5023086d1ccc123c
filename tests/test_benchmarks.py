"""The benchmarks run where there is no GPU, in small."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import spawn

from lightning_rlhf.modules import head
from lightning_rlhf.modules.execution import HostActivations

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


LINE = ["--device=cpu", "--shape=tiny"]
EAGER = "^(?!.*compiled)"


@pytest.fixture
def gradients(monkeypatch) -> Any:
    """benchmarks/gradients.py."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(HostActivations, "smallest", HostActivations.smallest)  # the script sets it
    return import_module("gradients")


def table(printed: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if "|" in line]
    return {name: cells for name, *cells in lines[2:]}


def test_gradients_of_every_switch_are_those_of_a_plain_model(gradients, capsys):
    assert gradients.main([*LINE, "--rows", EAGER]) == 0
    found = table(capsys.readouterr().out)
    expected = {row.name: row.micro for row in gradients.rows(1, False) if row.name != "compiled"}
    assert list(found) == list(expected)
    for name, (split, micro, *errors) in found.items():
        assert (split, micro) == ("1 x 1", str(expected[name])), name
        assert all(float(error) < 1e-5 for error in errors), name


def test_gradients_in_bfloat16_are_as_far_off_as_those_of_a_plain_model_in_bfloat16(gradients, capsys):
    assert gradients.main([*LINE, "--rows=base|4", "--precision=bf16-mixed"]) == 0
    found = table(capsys.readouterr().out)
    assert len(found) == 4
    assert all(1e-4 < float(cells[2]) < 0.1 for cells in found.values())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_lost_micro_batch_is_over_the_limit(precision, gradients, capsys, monkeypatch):
    cut = gradients.micro_batches
    monkeypatch.setattr(gradients, "micro_batches", lambda *a: (cut(*a)[0][:3], 0))
    assert gradients.main([*LINE, "--rows=micro", f"--precision={precision}"]) == 1
    assert capsys.readouterr().out.endswith("over it: 4 micro-batches\n")


def test_a_missing_term_of_the_gradient_is_over_the_limit(gradients, capsys, monkeypatch):
    whole = head.logit_gradient

    def without_entropy(*args: Any) -> torch.Tensor:
        return whole(*args[:6], None, *args[7:])

    monkeypatch.setattr(head, "logit_gradient", without_entropy)
    assert gradients.main([*LINE, "--rows=base|full"]) == 1
    assert capsys.readouterr().out.endswith("over it: base; recomputed: full\n")


def test_no_number_is_over_the_limit(gradients, capsys, monkeypatch):
    monkeypatch.setattr(gradients, "clip_roles", lambda *a: {"actor": torch.tensor(float("nan"))})
    assert gradients.main([*LINE, "--rows=base"]) == 1
    assert "| inf |" in capsys.readouterr().out


def on_ranks(rank: int, rows: str) -> tuple[int, str]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    torch.compile = partial(torch.compile, backend="aot_eager")
    with redirect_stdout(StringIO()) as out:
        failed = import_module("gradients").main([*LINE, "--rows", rows])
    return failed, out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_of_several_ranks_are_those_of_a_plain_model(ranks, gradients):
    """What is compiled is traced and differentiated, and run by eager kernels."""
    (failed, printed), *others = spawn(on_ranks, ranks, "" if ranks == 2 else "sequence|replicas")
    assert [failed, *others] == [0] + [(0, "")] * (ranks - 1)
    found = table(printed)
    splits = {cells[0] for cells in found.values()}
    assert splits == ({"2 x 1", "1 x 2"} if ranks == 2 else {"2 x 2", "1 x 4", "4 x 1"})
    assert len(found) == (len(gradients.rows(2, False)) if ranks == 2 else 5)
    assert all(float(error) < 1e-5 for cells in found.values() for error in cells[2:])
