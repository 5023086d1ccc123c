"""The benchmarks run where there is no GPU, in small."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from math import inf, log, nan
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import pytest
import torch
from toys import spawn

from benchmarks.lengths import Lengths
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


# -- a whole step beside TRL -------------------------------------------------------------------------

SMALL = ["--device=cpu", "--shape=tiny", "--prompts=2", "--generations=2", "--prompt_tokens=8", "--lengths"]
NEEDS_TRL = pytest.mark.skipif(find_spec("trl") is None, reason="needs trl==1.16")


def benchmark(name: str, monkeypatch) -> Any:
    """benchmarks/``name``.py, as it is run."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module(name)


@pytest.fixture
def step(monkeypatch) -> Any:
    return benchmark("step", monkeypatch)


def test_a_fixed_length_is_that_of_every_response():
    lengths = Lengths.parse("fixed:1024")
    assert lengths.longest == 1024
    assert {lengths(i, j) for i in range(3) for j in range(50)} == {1024}


def test_lengths_are_log_normal_up_to_the_longest():
    drawn = [Lengths.parse("lognormal:400,0.8,1000000")(i, j) for i in range(20) for j in range(256)]
    assert mean(map(log, drawn)) == pytest.approx(log(400), abs=0.04)
    assert stdev(map(log, drawn)) == pytest.approx(0.8, abs=0.03)
    cut = [Lengths.parse("lognormal:400,0.8,1000")(i, j) for i in range(20) for j in range(256)]
    assert max(cut) == 1000
    assert 0.10 < sum(n == 1000 for n in cut) / len(cut) < 0.15  # P(z > ln(2.5) / 0.8) = 0.126
    assert median(cut) == pytest.approx(400, rel=0.05)
    assert min(Lengths.parse("lognormal:1,3,9")(0, j) for j in range(50)) == 1


def test_lengths_depend_on_iteration_index_and_numbers_only(step):
    lengths = Lengths.parse("lognormal:400,0.8,4096")
    assert [lengths(i, j) for i in range(2) for j in range(3)] == [137, 189, 326, 839, 99, 226]
    assert step.Lengths is not Lengths  # the scripts import the module under another name
    assert step.Lengths.parse("lognormal:400.0,0.8,4096")(1, 2) == lengths(1, 2)
    assert Lengths.parse("lognormal:400,0.8,4095")(1, 2) != lengths(1, 2)


@pytest.mark.parametrize(
    "text",
    ["1024", "fixed:", "fixed:1,2", "fixed:0", "fixed:1.5", "uniform:1,2,3", "lognormal:9,1,8", "lognormal:9,-1,9"],
)
def test_lengths_that_make_no_sense_are_refused(text):
    with pytest.raises(ValueError, match="lengths must"):
        Lengths.parse(text)


@pytest.mark.slow
def test_arguments_that_are_not_those_of_the_script_go_to_our_side(step, tmp_path):
    line = ["--lengths=fixed:9", "--trl", "{beta: 1}", "--model.init_args.compile", "true", "--rollout.sleep_level=0"]
    a = step.parse([*line, f"--out={tmp_path}", "--prompt_tokens=20480"])
    assert a.trl == {"beta": 1}
    assert a.micro_batch_tokens == 20489  # the longest sequence fits
    command = step.our_command(a, Path("model"), Path("data"), tmp_path / "ours")
    assert command[-3:] == ["--model.init_args.compile", "true", "--rollout.sleep_level=0"]
    parsed = subprocess.run([*command, "--print_config"], cwd=ROOT, capture_output=True, text=True)
    assert parsed.returncode == 0, parsed.stderr[-2000:]
    assert "compile: true" in parsed.stdout
    assert "lengths: fixed:9" in parsed.stdout


@pytest.mark.parametrize("line", [["--warmup=7"], ["--steps=2"], ["--shape=9b"]])
def test_arguments_that_cannot_be_are_refused(line, step, capsys):
    with pytest.raises(SystemExit):
        step.parse(line)


def recorded(seconds: float, **more: Any) -> dict[str, Any]:
    rows = [{"step": seconds * k, "generate": 1.0, "update": 0.5 * k, "tokens": 3000} for k in (9, 1, 3, 2)]
    names = ("devices", "device", "shape", "prompts", "generations", "prompt_tokens", "lengths")
    work = dict(zip(names, (1, "gpu", "1.5b", 32, 8, 256, "fixed:1024"), strict=True))
    return {"version": "1.16.0", "rows": rows, "startup": 20.0, "peak": None, "work": work} | more


def test_the_table_has_medians_ranges_and_ratios(step):
    ours, trl = recorded(2.0), recorded(4.0, peak=80.5, startup=30.0)
    for row in trl["rows"]:
        row["log_prob"] = 0.25
    assert step.table({"ours": ours, "trl": trl}, warmup=1) == TABLE
    alone = step.table({"trl": trl}, warmup=1).splitlines()
    assert alone[0] == "| 1 x gpu, 1.5b, 32 x 8, 256 + fixed:1024 tokens | TRL 1.16.0 |"
    assert alone[2] == "| step, s | 8.000 (4.000 - 12.000) |"


TABLE = """\
| 1 x gpu, 1.5b, 32 x 8, 256 + fixed:1024 tokens | ours | TRL 1.16.0 | TRL / ours |
| --- | --- | --- | --- |
| step, s | 4.000 (2.000 - 6.000) | 8.000 (4.000 - 12.000) | 2.00 |
| generate | 1.000 (1.000 - 1.000) | 1.000 (1.000 - 1.000) | 1.00 |
| log_prob |  | 0.250 (0.250 - 0.250) |  |
| update | 1.000 (0.500 - 1.500) | 1.000 (0.500 - 1.500) | 1.00 |
| rest | 2.000 (0.500 - 3.500) | 5.750 (2.250 - 9.250) | 2.88 |
| tokens/s | 750.0 (500.0 - 1,500.0) | 375.0 (250.0 - 750.0) | 0.50 |
| first step, s | 18.000 | 36.000 | 2.00 |
| start-up, s | 20.000 | 30.000 | 1.50 |
| peak GPU memory, GiB |  | 80.500 |  |"""


def test_our_step_does_the_work_that_was_asked_for(step, tmp_path, capsys):
    line = [*SMALL, "lognormal:8,0.5,16", "--steps=2", "--warmup=1", "--only=ours", "--kl=0.1", f"--out={tmp_path}"]
    step.main(line)
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "table.md").read_text()
    rows = table(printed)
    assert {
        "step, s",
        "wake, sync",
        "generate",
        "reward",
        "reference",
        "update",
        "tokens/s",
        "start-up, s",
    } <= rows.keys()
    result = json.loads((tmp_path / "ours.json").read_text())
    lengths = Lengths.parse("lognormal:8,0.5,16")
    assert [row["tokens"] for row in result["rows"]] == [32 + sum(lengths(i, j) for j in range(4)) for i in range(2)]
    assert 0 < result["startup"] < 200
    a = step.parse(line)
    assert step.load("ours", a) == result
    result["rows"][1]["tokens"] += 1
    with pytest.raises(RuntimeError, match="must have"):
        step.check(result["rows"], a)
    with pytest.raises(RuntimeError, match="must have"):
        step.check(result["rows"][:1], a)
    assert step.load("ours", step.parse([*line, "--prompts=3"])) is None


def test_the_peak_of_memory_is_what_nvidia_smi_saw_on_the_gpus_of_the_run(step, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "$@" > "$(dirname $0)/asked"\nprintf "1024\\n80384\\n2048\\n"\nexec sleep 60\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    assert step.run(["sh", "-c", "sleep 0.5; echo $CUDA_VISIBLE_DEVICES"], tmp_path / "log", devices=2) == 78.5
    assert (tmp_path / "log").read_text() == "3,5\n"
    assert (tmp_path / "asked").read_text().startswith("-i 3,5 ")


@pytest.mark.slow
def test_a_side_that_fails_says_why(step, tmp_path):
    with pytest.raises(RuntimeError, match="is not accepted"):
        step.main([*SMALL, "fixed:4", "--only=ours", f"--out={tmp_path}", "--model.init_args.nothing=1"])


@pytest.mark.parametrize(("other", "agree"), [(1.0, 0), (1.00009, 0), (1.00011, 1), (nan, 1), (inf, 1)])
def test_a_replay_that_differs_fails(other, agree, monkeypatch, capsys):
    replay = benchmark("replay", monkeypatch)
    monkeypatch.setattr(replay, "record", lambda *a: None)
    monkeypatch.setattr(replay, "our_rows", lambda *a: [{"loss": 1.0, "norm": 1.0}] * 2)
    monkeypatch.setattr(replay, "trl_rows", lambda *a: [{"loss": 1.0, "norm": 1.0}, {"loss": 1.0, "norm": other}])
    assert replay.main(["--device=cpu"]) == agree
    assert ("agree to 1e-04" in capsys.readouterr().out) == (agree == 0)


@NEEDS_TRL
@pytest.mark.slow
def test_trl_does_the_same_work(step, tmp_path, capsys):
    step.main([*SMALL, "lognormal:8,0.5,16", "--steps=2", "--warmup=1", "--kl=0.1", f"--out={tmp_path}"])
    rows = table(capsys.readouterr().out)
    for name in ("step, s", "generate", "reference", "update"):
        assert all(rows[name]), name  # ours, TRL, their ratio


@NEEDS_TRL
@pytest.mark.slow
@pytest.mark.parametrize("line", [[], ["--kl=0.1"], ["--kl=0.1", "--precision=bf16-mixed"]])
def test_loss_and_gradient_norm_are_those_of_trl(line, monkeypatch):
    assert benchmark("replay", monkeypatch).main(["--device=cpu", *line]) == 0


@NEEDS_TRL
@pytest.mark.slow
def test_another_kl_coefficient_is_seen_by_the_replay(monkeypatch):
    replay = benchmark("replay", monkeypatch)
    theirs = replay.trl_rows
    monkeypatch.setattr(replay, "trl_rows", lambda a, *rest: theirs(type(a)(**vars(a) | {"kl": 0.11}), *rest))
    assert replay.main(["--device=cpu", "--kl=0.1", "--lr=1e-3"]) == 1


@pytest.mark.slow
def test_curves_of_recipes_are_measured_once_per_seed_and_summed_up(tmp_path, capsys):
    curves = import_module("benchmarks.curves")
    results = tmp_path / "results/curves.json"
    line = ["--model", "random:tiny", "--steps", "2", "--every", "1", "--device", "cpu", "--out", str(tmp_path)]
    line += ["--recipes", "grpo", "vapo", "--plot", str(tmp_path / "curves.png"), "--results", str(results)]
    assert curves.main([*line, "--seeds", "0"]) == 0
    one = json.loads(results.read_text())["runs"]
    assert curves.main([*line, "--seeds", "0", "1"]) == 0
    rows = [row.split("|")[1:-1] for row in capsys.readouterr().out.splitlines() if row.startswith("|")][-4:]
    assert [cell.strip() for cell in rows[0]] == ["held-out accuracy after", "0", "1", "2", "s an iteration"]
    assert [row[0].strip() for row in rows[2:]] == ["grpo", "vapo"]
    assert (tmp_path / "curves.png").stat().st_size > 1000
    two = json.loads(results.read_text())["runs"]
    assert [point["iteration"] for point in two["vapo"]["1"]] == [0, 1, 2]
    assert {recipe: runs["0"] for recipe, runs in two.items()} == {recipe: runs["0"] for recipe, runs in one.items()}
    with pytest.raises(ValueError, match="give another --results"):
        curves.main([*line, "--steps", "3"])
    assert curves.main([*line, "--seeds", "0", "--recipes", "grpo", "no_such_recipe"]) == 1
    assert "no_such_recipe, seed 0 ended with" in capsys.readouterr().err


def test_a_curve_is_the_mean_of_its_seeds_with_their_range():
    curves = import_module("benchmarks.curves")
    runs = [[{"iteration": 0, "accuracy": a, "seconds": 9.0}, {"iteration": 5, "accuracy": b, "seconds": s}] for a, b, s in
            ((0.1, 0.5, 1.0), (0.3, 0.9, 2.0))]  # fmt: skip
    alone, together = curves.table({"grpo": runs}, 1), curves.table({"grpo": runs}, 2)
    assert alone.splitlines()[2] == "| grpo | 0.200 (0.100 - 0.300) | 0.700 (0.500 - 0.900) | 1.50 |"
    assert together.splitlines()[2] == "| grpo | 0.200 (0.100 - 0.300) | 0.700 (0.500 - 0.900) |"


@pytest.mark.slow
def test_scaling_measures_every_row_and_says_why_one_failed(tmp_path, capsys):
    scaling = import_module("benchmarks.scaling")
    line = [
        "--gpus",
        "2",
        "--device",
        "cpu",
        "--shapes",
        "tiny",
        "--prompts",
        "2",
        "--prompt_tokens",
        "8",
        "--tokens",
        "4",
    ]
    line += ["--longest", "64", "--steps", "3", "--out", str(tmp_path)]
    assert scaling.main([*line, "--rows", "step tiny dp"]) == 0
    printed = [row.split("|")[1:-1] for row in capsys.readouterr().out.splitlines()]
    assert [row[0].strip() for row in printed[2:]] == ["step tiny dp 1", "step tiny dp 2", "step tiny dp 2, weak"]
    assert printed[2][-1].strip() == "1.00 on 1"
    assert printed[3][-1].strip().endswith("on 2")
    assert scaling.main([*line, "--rows", "long tiny sp 2"]) == 0
    assert capsys.readouterr().out.startswith("long tiny sp 2: 128 tokens, ")
    result = tmp_path / "long_tiny_sp_2/result.json"
    written = result.stat().st_mtime_ns
    assert scaling.main([*line, "--rows", "long tiny sp 2"]) == 0
    assert result.stat().st_mtime_ns == written  # what is there is not run again
    assert scaling.main([*line, "--rows", "long tiny sp 2", "--longest", "32"]) == 0
    assert "long tiny sp 2: 64 tokens, " in capsys.readouterr().out
    assert scaling.main([*line, "--rows", "reshard"]) == 0
    assert "as if nothing had happened" in capsys.readouterr().out
    wrong = ["--rows", "step tiny dp 1", "--options", "trainer.max_epoch=2", "--out", str(tmp_path / "other")]
    assert scaling.main([*line, *wrong]) == 1
    assert "max_epoch" in capsys.readouterr().out
