"""The short form of ``make combinations``."""

from __future__ import annotations

import pytest
from combinations import differ, differences


@pytest.mark.parametrize("seed", [108, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1000, 1010))])
def test_a_combination_of_options_gives_the_same_run_however_it_is_split_and_resumed(seed):
    assert differences(seed) == []


def test_another_metric_a_missing_one_and_a_missing_step_are_differences():
    nan = float("nan")
    run = {0: {"a": 1.0, "b": nan}, 1: {"a": 2.0}}
    assert differ(run, {1: {"a": 2.0}}) == []
    assert differ(run, {0: {"a": 1.001, "b": nan}, 1: {"a": 2.0}}, rounded=True) == []
    assert differ(run, {1: {"a": 2.0 + 1e-12}}) == ["a of step 1 is 2.000000000001, not 2.0"]
    assert differ(run, {1: {"a": 2.01}}, rounded=True) == ["a of step 1 is 2.01, not 2.0"]
    assert differ(run, {0: {"a": 1.0}}, rounded=True) == [
        "b of step 0 is in one of them only",
        "ended after step 0, not 1",
    ]
