"""`lightning-rlhf rewards`: what reward functions say of rows of the data, without a model."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.cli import main
from lightning_rlhf.rewards import exact_answer
from lightning_rlhf.scoring import Scorer
from lightning_rlhf.trial import JUNK, try_rewards

CONFIG = str(Path(__file__).parent.parent / "configs/tiny_grpo.yaml")


def picky(completions: list[Any], answer: list[str], log_extra: Any, **_: Any) -> list[float | None]:
    """Raises on an empty answer to 3, has no opinion on 5."""
    if "" in completions and answer[0] == "3":
        raise ValueError("nothing to read")
    time.sleep(0.01)
    return [None if a == "5" else float(len(c)) for c, a in zip(completions, answer, strict=True)]


ROWS = [
    {"prompt": f"{i}?", "answer": str(i), "talk": [{"role": "assistant", "content": f"it is {i}"}]} for i in range(10)
]


def trials(*functions: Any, **options: Any) -> Any:
    texts = {"encode": lambda text: list(text.encode()), "decode": lambda ids: bytes(ids).decode()}
    return try_rewards(
        Scorer(functions, weights=[0.5] * len(functions)), ROWS, prompt_column="prompt", **texts, **options
    )


def test_rows_come_evenly_and_each_kind_of_answer_has_a_score_a_row() -> None:
    (one,) = trials(exact_answer, count=5, completion="4")
    assert one.scores == {
        "answer": [1.0] * 5,
        "completion": [0.0, 0.0, 1.0, 0.0, 0.0],  # rows 0, 2, 4, 6, 8
        "empty": [0.0] * 5,
        "junk": [0.0] * 5,
    }
    assert (one.name, one.weight, len(one.seconds)) == ("exact_answer", 0.5, 5)
    assert len(trials(exact_answer, count=50)[0].seconds) == 10


def test_errors_and_abstentions_are_told_apart_and_errors_name_their_row() -> None:
    (one,) = trials(picky, count=10, completion_column="talk")
    assert one.scores["talk"] == pytest.approx([7.0] * 5 + [float("nan")] + [7.0] * 4, nan_ok=True)
    assert one.scores["junk"][3] == len(JUNK)
    assert one.abstained == {"talk": 1, "empty": 1, "junk": 1}
    assert len(one.errors) == 1
    assert one.errors[0].startswith("row 3: reward picky: 1 of 3 responses could not be scored")
    assert "ValueError: nothing to read" in one.errors[0]
    assert min(one.seconds) > 0.01


def test_the_command_prints_a_table_and_ends_in_an_error_if_there_was_one(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    line = ["rewards", "--config", CONFIG, f"--data.path={tmp_path}/rows.jsonl", "--data.val_size=0", "--rows=10"]
    main([*line, "--model.reward=[lightning_rlhf.rewards.exact_answer]"])
    table = [text.split() for text in capsys.readouterr().out.splitlines()]
    assert table[0] == ["reward", "answer", "mean", "lowest", "highest", "abstained", "errors"]
    assert table[1] == ["exact_answer", "answer", "1", "1", "1", "0", "0"]
    assert table[2] == ["empty", "0", "0", "0", "0", "0"]
    assert table[4][:5] == ["exact_answer,", "weight", "1:", "10", "calls,"]
    with pytest.raises(SystemExit) as ended:
        main([*line, "--model.reward=[test_trial.picky]", "--completion_column=talk"])
    assert ended.value.code == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "picky talk 7 7 7 1 0" in out
    assert "empty 0 0 0 1 1" in out
    assert "error: row 3: reward picky: 1 of 3 responses" in out


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("--completion_column=nope", "rewards.completion_column: the data has no column 'nope', only prompt, answer"),
        ("--data.prompt_column=nope", "data.prompt_column: the data has no column 'nope', only prompt, answer"),
        ("--rows=0", "rows: got 0, must be >0"),
        ("--model.init_args.reward=null", "there is no reward to try: set model.reward"),
        (
            "--model.init_args.reward=[lightning_rlhf.rewards.reasoning_gym]",
            "asks for 'task', which is none of answer, prompts",
        ),
    ],
)
def test_mistakes_end_in_one_line(mistake: str, message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["rewards", "--config", CONFIG, mistake])
    assert ended.value.code not in (0, None)
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1
    assert message in lines[0]


def test_a_function_of_turns_is_tried_on_one() -> None:
    def turned(turns: list[list[str]], **_: Any) -> list[float]:
        return [float(len(own)) for own in turns]

    (one,) = trials(turned, count=1)
    assert one.scores == {"answer": [1.0], "empty": [1.0], "junk": [1.0]}
