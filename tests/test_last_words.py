"""Runs of two ranks, started by hand as on two nodes, of which one differs, fails or is killed: who says what."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from test_cli import CONFIGS
from test_launch import ITSELF, on_a_free_port, outcomes
from toys import spawn

from lightning_rlhf import last_words
from lightning_rlhf.last_words import Ended, exchanged, is_echo
from lightning_rlhf.meeting import check_alike
from lightning_rlhf.options import flat

FIT = ["-m", "lightning_rlhf", "fit", "--config", str(CONFIGS / "tiny_grpo.yaml"), "--trainer.logger=false"]
NODES = [
    "--trainer.devices=1",
    "--trainer.num_nodes=2",
    "--trainer.enable_progress_bar=false",
    "--trainer.callbacks=[]",
]
CALLS = [0]


def killed_in_its_second_call(completions: list[str], **_: Any) -> list[float]:
    CALLS[0] += 1
    if CALLS[0] == 2 and os.environ["NODE_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(text)) for text in completions]


def fails_and_then_breaks_its_contract(completions: list[str], **_: Any) -> list[float]:
    CALLS[0] += 1
    if os.environ["NODE_RANK"] == "1":
        if CALLS[0] > 17:  # what fails is called again for each of the 16 responses
            return [1.0]
        raise ValueError("no connection to the judge")
    return [float(len(text)) for text in completions]


def nodes(folder: Path, first: list[str], second: list[str]) -> list[tuple[int, list[str]]]:
    """Exit status of each node and what is said by this package; ``first`` and ``second`` are their own options."""
    own = {"PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parent.parent}"}
    commands = [
        [*ITSELF, *FIT, *NODES, f"--trainer.default_root_dir={folder}", *options] for options in (first, second)
    ]
    found = on_a_free_port(
        lambda port: outcomes(
            folder,
            [(line, own | {"NODE_RANK": str(i), "MASTER_PORT": port}) for i, line in enumerate(commands)],
        )
    )
    said = [
        [line for line in text.splitlines() if "lightning-rlhf: " in line or "on rank " in line] for _, text in found
    ]
    return [(status, lines) for (status, _), lines in zip(found, said, strict=True)]


@pytest.mark.slow
def test_other_options_on_one_rank_are_refused_by_all_in_one_line(tmp_path):
    (first, said), (second, nothing) = nodes(tmp_path, ["--trainer.max_steps=2"], ["--trainer.max_steps=3"])
    assert first == second == 1
    message = "trainer.max_steps is 3 on rank 1 and 2 on rank 0: start all processes with the same options"
    assert said == [f"lightning-rlhf: error: {message}"]
    assert nothing == []


@pytest.mark.slow
def test_other_data_on_one_rank_is_refused_by_all_in_one_line(tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, rows in zip(paths, (16, 24), strict=True):
        path.write_text("".join(f'{{"prompt": "{i}+1="}}\n' for i in range(rows)))
    (first, said), (second, nothing) = nodes(tmp_path, *([f"--data.path={p}", "--data.val_size=0"] for p in paths))
    assert first == second == 1
    (line,) = said
    rows = r"of 24 rows \(fingerprint \w+\) on rank 1 and of 16 rows \(fingerprint \w+\) on rank 0"
    assert re.fullmatch(
        rf"lightning-rlhf: error: data: the training set is {rows}: give all nodes the same files", line
    )
    assert nothing == []


@pytest.mark.slow
def test_a_file_that_one_node_lacks_is_named_by_that_node_and_by_the_first(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1="}\n' * 16)
    missing = f"data.path: there is no file '{tmp_path}/b.jsonl'"
    (first, said), (second, own) = nodes(
        tmp_path, *([f"--data.path={tmp_path}/{name}.jsonl", "--data.val_size=0"] for name in "ab")
    )
    assert first == second == 1
    assert own == [f"lightning-rlhf: error (rank 1): {missing}"]
    assert said == [f"lightning-rlhf: error: rank 1 failed: FileNotFoundError: {missing}"]


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_below_the_error_of_the_other(tmp_path):
    options = ["--model.init_args.reward=[test_last_words.killed_in_its_second_call]"]
    (first, said), (second, _) = nodes(tmp_path, options, options)
    assert (first, second) == (1, -signal.SIGKILL)
    message = "rank 1 ended without a word: killed, out of host memory for example, or stuck"
    assert said[-1].endswith(f"lightning-rlhf: {message}")


@pytest.mark.slow
def test_a_reward_that_fails_on_one_rank_is_told_of_with_its_rank(tmp_path):
    options = ["--model.init_args.reward=[test_last_words.fails_and_then_breaks_its_contract]"]
    (first, said), (second, own) = nodes(tmp_path, options, options)
    assert first == second == 1
    name = "fails_and_then_breaks_its_contract"
    wrong = f"reward {name} must return one number per response, 16, got 1"
    assert said == [f"lightning-rlhf: error: score() failed on rank 1: RewardError: {wrong}"]
    lost, error = own
    assert f"reward {name}: 16 of 16 responses could not be scored on rank 1 and are left out" in lost
    assert error == f"lightning-rlhf: error (rank 1): {wrong}"


@pytest.mark.parametrize(
    ("environment", "speaks"),
    [
        pytest.param({"NODE_RANK": "1"}, True, marks=pytest.mark.slow),
        pytest.param({"NODE_RANK": "1", "LOCAL_RANK": "1"}, False, marks=pytest.mark.slow),
        ({"RANK": "8", "LOCAL_RANK": "0"}, True),
        ({"SLURM_PROCID": "9", "SLURM_LOCALID": "1"}, False),
    ],
)
def test_what_a_node_cannot_import_is_said_by_its_first_process(environment, speaks, tmp_path):
    command = [*ITSELF, *FIT, "--model.init_args.reward=[no_such_module.reward]"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert ("No module named 'no_such_module'" in done.stderr) is speaks


def compared(rank: int, values: list[dict[str, Any]]) -> str:
    try:
        check_alike(values[rank], "start anew")
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"a": 1, "b": [1, "x"]}, {"a": 1, "b": [1, "x"]}, ""),
        ({"a": 1}, {"a": 2}, "a is 2 on rank 1 and 1 on rank 0: start anew"),
        ({"a": 1}, {"a": 1, "b": 3}, "b is 3 on rank 1 and None on rank 0: start anew"),
        ({"a": math.nan}, {"a": math.nan}, ""),
        ({"path": "/data/a"}, {"path": "/disk/a"}, ""),
        ({"path": "a/b"}, {"path": "s3://bucket/b"}, ""),
        ({"path": "a/b"}, {"path": "a/c"}, "path is a/c on rank 1 and a/b on rank 0: start anew"),
    ],
)
def test_what_ranks_have_in_common_but_places(first, second, said):
    assert spawn(compared, 2, [first, second]) == [said, said]


def test_options_by_their_names_on_a_command_line():
    config = {"model": {"class_path": "A", "init_args": {"kl": {"coef": 0.1}}}, "reward": ["a", {"b": 1}], "none": {}}
    assert flat(config) == {
        "model.class_path": "A",
        "model.kl.coef": 0.1,
        "reward[0]": "a",
        "reward[1].b": 1,
        "none": {},
    }


LOST = "[pair.cc:537] gloo/transport/tcp/pair.cc Read error [127.0.0.1]:916: Connection reset by peer"


def last_words_of(rank: int, errors: list[Exception | None]) -> Ended | None:
    last_words.ECHO_S = last_words.OWN_S = 1.0
    error = errors[rank]
    ended = None if error is None else exchanged(error)
    dist.barrier()  # the store lives until all have read
    return ended


@pytest.mark.parametrize(
    ("errors", "causes", "same"),
    [
        ([ValueError("a"), ValueError("a")], [None, None], True),
        ([ValueError("a"), ValueError("b")], [None, None], False),
        ([RuntimeError(LOST), KeyError("b")], ["rank 1 failed: KeyError: 'b'", None], False),
        (
            [RuntimeError(LOST), None],
            ["rank 1 ended without a word: killed, out of host memory for example, or stuck"],
            False,
        ),
    ],
)
def test_each_rank_knows_what_the_others_ended_with(errors, causes, same):
    found = spawn(last_words_of, 2, errors)
    assert [ended.cause for ended in found if ended is not None] == causes
    assert found[1] is None or found[1].said_by_first is same


def test_the_others_are_not_waited_for_where_there_are_none():
    assert exchanged(ValueError("alone")) is None


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (RuntimeError(LOST), True),
        (dist.DistNetworkError("the store is gone"), True),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (RuntimeError("score() failed on rank 1: KeyError: 'b'"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # of a store of checkpoints, say
    ],
)
def test_an_echo_is_an_error_of_a_connection_between_ranks(error, echo):
    assert is_echo(error) is echo
