"""The reward of a program: what is taken for one, tests in the forms of the data sets, shares, time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from test_sandbox import pytestmark  # noqa: F401  # runs where the sandbox does
from test_scoring import rollout, same

from lightning_rlhf.code_tests import CodeTests, Printed, program_of, read_tests, same_output
from lightning_rlhf.rewards import RewardError
from lightning_rlhf.scoring import Scorer

DOUBLE = "```python\ndef f(x):\n    return x * 2\nif __name__ == '__main__':\n    print(f(int(input())))\n```"


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeTests]:
    made = CodeTests(timeout=5.0, memory_mb=512)
    yield made
    made.sandbox.close()


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("a\n```python\nx = 1\n```\nb\n```py\nx = 2\n```\n", "x = 2\n"),
        ("```python\nx = 1\n```\nOutput:\n```\n5\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```Python3 title=a\nx = '```'\n```", "x = '```'\n"),
        ("```bash\nls\n```", None),
        ("<think>```python\nx = 1\n```</think> none", None),
        ("```python\nx = 1", None),
        ("  ```python\n  x = 1\n  ```", "  x = 1\n"),
        ("x = 1", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_block_of_python(text: str, program: str | None) -> None:
    assert program_of(text) == program


def test_tests_come_in_the_forms_of_the_data_sets() -> None:
    pairs = [Printed("1\n", "2\n"), Printed("3", "4")]
    assert read_tests({"inputs": ["1\n", "3"], "outputs": ["2\n", "4"]}) == pairs
    assert read_tests(json.dumps({"inputs": ["1\n", "3"], "outputs": ["2\n", "4"], "fn_name": None})) == pairs
    cases = [{"type": "stdin_stdout", "input": "1\n", "output": "2\n"}, {"input": 3, "output": ["4"]}]
    assert read_tests(cases) == read_tests(json.dumps({"language": "python", "test_cases": cases})) == pairs
    assert read_tests(["assert f(1) == 2"]) == read_tests("assert f(1) == 2") == ["assert f(1) == 2"]
    assert read_tests(None) == read_tests([]) == read_tests("") == read_tests({"inputs": [], "outputs": []}) == []
    check = "def check(c):\n    assert c(1) == 2"
    assert read_tests([f"{check}\ncheck(f)"]) == [f"{check}\ncheck(f)"]
    never = "defines check, which nothing calls"
    for wrong, why in (
        (5, "a list of asserts"),
        ([5], "must be text"),
        (["assert ("], "must be Python"),
        (check, never),
    ):
        with pytest.raises(ValueError, match=why):
            read_tests(wrong)
    with pytest.raises(ValueError, match="fn_name must be the name of a function, got 'f; x'"):
        read_tests({"fn_name": "f; x", "inputs": [[1]], "outputs": [1]})


@pytest.mark.parametrize(
    ("printed", "wanted", "equal"),
    [
        ("1 2\n3\n", "1 2 \n3", True),
        ("1\n2", "1 2", False),
        ("1\n\n", "1", True),
        ("0.3333333", "0.33333333", True),
        ("1", "1.0", True),
        ("1.0", "1", False),
        ("100000001", "100000000", False),
        ("x 0.5", "y 0.5", False),
        ("nan", "0.5", False),
        ("", "1", False),
    ],
)
def test_outputs_are_equal_up_to_space_and_rounding(printed: str, wanted: str, equal: bool) -> None:
    assert same_output(printed, wanted) is equal


def test_the_reward_is_the_share_of_tests_passed_and_none_without_tests(reward: CodeTests) -> None:
    logged: dict[str, float] = {}
    tests = [
        ["assert f(1) == 2", "assert f(1) == 3", "assert f('a') == 'aa'", "assert f(2) == 4"],
        {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "5\n"]},
        {"inputs": [[1], [[2]]], "outputs": [[2], [2, 2]], "fn_name": "f"},
        ["assert f(1) == 2"],
        None,
    ]
    completions = [DOUBLE, [{"role": "assistant", "content": DOUBLE}], DOUBLE, "none", DOUBLE]
    assert reward(completions, logged.__setitem__, tests=tests) == [0.75, 0.5, 1.0, 0.0, None]
    assert logged == {"no_code": 0.2, "timed_out": 0.0}
    method = "```python\nclass Solution:\n    def f(self, x, y):\n        return (x, [y])\n```"
    of_class = {"fn_name": "f", "inputs": [[1, "a"], [2, "b"]], "outputs": [[[1, ["a"]]], [2, ["c"]]]}
    assert reward([method], tests=[of_class]) == [0.5]
    assert reward([method], ground_truth=[json.dumps(of_class)], answer=["x"]) == [0.5]
    with pytest.raises(RewardError, match="needs a column of tests, tests or test_cases or"):
        reward([DOUBLE], answer=["x"])


def test_all_or_nothing_and_a_number_of_tests() -> None:
    whole = CodeTests(all_or_nothing=True)
    assert whole([DOUBLE] * 2, tests=[["assert f(1) == 2"] * 2, ["assert f(1) == 2", "assert f(1) == 3"]]) == [1.0, 0.0]
    first = CodeTests(max_tests=1, column="checks")
    assert first([DOUBLE], tests=[["assert False"]], checks=[["assert f(1) == 2", "assert False"]]) == [1.0]
    for one in (whole, first):
        one.sandbox.close()


def test_programs_run_side_by_side_and_a_time_out_ends_a_programs_tests() -> None:
    reward = CodeTests(timeout=0.6, processes=5)
    sleeps = "```python\nimport time\ntime.sleep(60)\n```"
    logged: dict[str, float] = {}
    start = time.monotonic()
    scores = reward([sleeps] * 5 + [DOUBLE], logged.__setitem__, tests=[["assert f(1) == 2"] * 3] * 6)
    assert time.monotonic() - start < 3  # one after the other, or with the rest of the tests: at least 3
    assert scores == [0.0] * 5 + [1.0]
    assert logged["timed_out"] == pytest.approx(5 / 6)
    reward.sandbox.close()


def test_a_row_with_broken_tests_costs_its_own_responses_only(reward: CodeTests) -> None:
    batch = rollout(n=2, tests=[["assert f(1) == 2"], ["assert ("]])
    with pytest.warns(UserWarning, match="reward CodeTests: 2 of 4 .*a test must be Python"):
        scores = Scorer([reward])(batch, [DOUBLE] * 4)
    same(scores.total, [1, 1, float("nan"), float("nan")])
