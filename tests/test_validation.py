"""What a validation loop reports: the formulas, any split over ranks, several sets, and that training does not notice."""

from __future__ import annotations

import csv
import json
from itertools import combinations
from math import isnan, nan
from pathlib import Path
from statistics import mean
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from pyarrow.parquet import read_table
from toys import TINY_MODULE, spawn

from lightning_rlhf import (
    FSDPUlyssesStrategy,
    GRPOLightningModule,
    IterationCheckpoint,
    PromptDataModule,
    RolloutCallback,
    Samples,
    Sampling,
)
from lightning_rlhf.modules.validation import ValidationMetrics, draws, majority, pass_at_k
from lightning_rlhf.rewards import first_number
from lightning_rlhf.scoring import answers_of
from lightning_rlhf.types import Scores

pytestmark = [
    pytest.mark.filterwarnings("ignore:It is recommended to use `self.log"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

GOLDEN = json.loads((Path(__file__).parent / "goldens" / "rl_math.json").read_text())["validation_n4"]
SCORES = torch.tensor([[0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]])
"""Rewards of four responses to each of two prompts."""
ANSWERS = [[0, 0, 1, 2], [0, 1, 1, 0]]
VOTES = [answer for of_prompt in ANSWERS for answer in of_prompt]


def report(index: list[int], totals: Any, n: int, answers: Any = (), **parts: Any) -> dict[str, float]:
    metrics = ValidationMetrics("sums", 1.0)
    metrics.update(torch.tensor(index), Scores(torch.as_tensor(totals).flatten(), parts), n, answers)
    return {name.removeprefix("sums/"): value for name, value in metrics.compute().items()}


def test_a_function_called_reward_has_a_metric_beside_the_whole_rewards():
    found = report([0], [[3.0, 5.0]], 2, [0, 1], reward=torch.tensor([1.0, 2.0]), other=torch.tensor([2.0, 3.0]))
    assert (found["reward"], found["reward/reward"], found["other"]) == (4.0, 1.5, 2.5)


# -- formulas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", GOLDEN)
def test_goldens(key: str) -> None:
    name, k, *of = key.replace("/", "@").split("@")
    if not of:
        found = report([0, 1], SCORES, 4, VOTES)[key]
    else:
        drawn = SCORES.double()[:, draws(4, int(k))]
        of_draws = {
            "best": drawn.amax(-1),
            "worst": drawn.amin(-1),
            "maj": torch.stack([majority(s, a, int(k)) for s, a in zip(SCORES.double(), ANSWERS, strict=True)]),
        }[name]
        found = float((of_draws.mean(1) if of == ["mean"] else of_draws.std(1, correction=0)).mean())
        if of == ["mean"]:
            assert report([0, 1], SCORES, 4, VOTES)[f"{name}@{k}"] == pytest.approx(found, abs=1e-6)
    assert found == pytest.approx(GOLDEN[key], abs=2e-6)


@pytest.mark.parametrize(("solved", "n"), [(0, 3), (1, 5), (2, 6), (4, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_solution(solved: int, n: int) -> None:
    responses = [i < solved for i in range(n)]
    for k in range(1, n + 1):
        subsets = [any(subset) for subset in combinations(responses, k)]
        assert pass_at_k(solved, n, k) == pytest.approx(mean(subsets))


def test_a_prompt_is_solved_from_the_threshold_on_and_what_could_not_be_scored_is_unsolved() -> None:
    totals = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 2.0, 1.0, 0.5, nan, 0.0, 0.0]  # 1 of 4, 4 of 4, none
    exact = torch.tensor([1.0, nan, nan, nan, 0.0, 0.0] + [nan] * 6)
    result = report([5, 3, 9], totals, 4, list("aaaabbbbcccc"), exact=exact, silent=torch.full((12,), nan))
    assert result["mean@4"] == result["pass@1"] == pytest.approx((0.25 + 1 + 0) / 3)
    assert result["pass@2"] == pytest.approx((0.5 + 1 + 0) / 3)  # 1 - C(3, 2) / C(4, 2)
    assert result["pass@4"] == pytest.approx(2 / 3)
    assert result["reward"] == pytest.approx(6.5 / 11)
    assert result["exact"] == pytest.approx(1 / 3)
    assert isnan(result["silent"])
    # the best of 1, 1, 2, 1 is 2 unless no draw hits it; all draws of the third prompt are of three rewards
    best = [(1 - 0.75**4), 2 - 0.75**4, 0.5 * (1 - (2 / 3) ** 4)]
    assert result["best@4"] == pytest.approx(mean(best), abs=0.03)


def test_one_function_may_say_what_is_solved_whatever_shapes_the_reward() -> None:
    right, penalty = torch.tensor([1.0, 1.0, 0.0, nan]), torch.tensor([0.0, -0.5, 0.0, 0.0])
    scores = Scores(right.nan_to_num() + penalty, {"right": right, "penalty": penalty})
    found = {}
    for name in (None, "right"):
        metrics = ValidationMetrics("sums", 1.0, name)
        metrics.update(torch.tensor([0, 1]), scores, 2, list("aabc"))
        found[name] = metrics.compute()
    assert [found[name]["sums/mean@2"] for name in found] == [0.25, 0.5]
    assert [found[name]["sums/maj@2"] for name in found] == [pytest.approx(0.25, abs=0.02), 0.5]
    assert found[None]["sums/reward"] == found["right"]["sums/reward"] == 0.375


def test_a_lonely_failure_leaves_the_other_prompts_as_they_are() -> None:
    result = report([0, 1], [nan, nan, 1.0, 1.0], 2, list("abcc"))
    assert (result["reward"], result["best@2"], result["worst@2"], result["std@2"]) == (1.0, 1.0, 1.0, 0.0)
    assert (result["mean@2"], result["pass@2"], result["maj@2"]) == (0.5, 0.5, 0.5)


def test_any_number_of_responses_ends_in_that_number() -> None:
    assert {name for name in report([0], [1.0] * 6, 6, "aaaaaa") if "pass" in name} == {
        f"pass@{k}" for k in (1, 2, 4, 6)
    }
    assert report([0, 1], [1.0, 0.0], 1).keys() == {"reward", "mean@1", "pass@1"}


def test_the_majority_may_be_wrong() -> None:
    """Two of five are right and agree with nobody else; three agree on a wrong answer."""
    values = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])
    won = majority(values, ["4", "5", "5", "4", "5"], 5)
    drawn = values[draws(5, 5)].sum(1)
    assert won.tolist() == (drawn >= 3).float().tolist()


def test_responses_vote_with_the_answer_that_a_reward_logs_or_their_final_one() -> None:
    texts = ["so it is \\boxed{ 4 }", "Answer: 4.", "five"]
    assert answers_of(Scores(torch.zeros(3)), texts) == ["4", "4", "five"]
    logged: dict[str, list[Any]] = {}
    assert first_number([*texts[:2], "no"], logged.__setitem__, answer=["4", "5", "6"]) == [1.0, 0.0, 0.0]
    assert answers_of(Scores(torch.zeros(3), columns={"other": [1, 2, 3], **logged}), texts) == ["4", "4", "None"]
    verl = {"compute_score/acc": [1, 0, 1], "compute_score/pred": [7, 8, None]}
    assert answers_of(Scores(torch.zeros(3), columns=verl), texts) == ["7", "8", "None"]


# -- ranks -------------------------------------------------------------------------------------------------------------

BATCHES: list[
    list[list[int]]
] = [  # of each rank: uneven, or without prompts, the last filled up with prompts of before
    [[0, 1, 2], [], [4, 0]],
    [[3], [], [1, 3]],
]


def totals_of(prompts: list[int]) -> torch.Tensor:
    return torch.tensor([float((p * 7 + i * 3) % 4 == 0) for p in prompts for i in range(4)])


def answers_to(prompts: list[int]) -> list[int]:
    return [(p + i) % 3 for p in prompts for i in range(4)]


def shared(rank: int) -> dict[str, float]:
    metrics = ValidationMetrics("sums", 1.0)
    for prompts in BATCHES[rank]:
        totals = totals_of(prompts)
        scores = Scores(totals, {"twice": totals * 2})
        metrics.update(torch.tensor(prompts, dtype=torch.int64), scores, 4, answers_to(prompts))
    return metrics.compute()


def test_every_prompt_counts_once_over_uneven_empty_and_repeating_ranks() -> None:
    everything = list(range(5))
    totals = totals_of(everything)
    expected = report(everything, totals, 4, answers_to(everything), twice=2 * totals)
    for result in spawn(shared, 2):
        assert result == {f"sums/{name}": pytest.approx(value, abs=1e-6) for name, value in expected.items()}


# -- runs --------------------------------------------------------------------------------------------------------------


def small_words() -> list[dict[str, str]]:
    return [{"prompt": f"write {word} "} for word in ("yes", "no", "a")]


def small_numbers() -> list[dict[str, str]]:
    return [{"prompt": f"{i} "} for i in range(5)]


def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [mean(t % 2 == 0 for t in ids) for ids in completion_ids]


SETS = {"words": f"{__name__}.small_words", "numbers": f"{__name__}.small_numbers"}
N4 = Sampling(num_generations=4, max_completion_length=6)


def trained(
    folder: Path,
    *,
    validate: bool = True,
    steps: int = 4,
    callbacks: tuple[pl.Callback, ...] = (),
    ckpt_path: Path | None = None,
    verb: str = "fit",
    **options: Any,
) -> list[dict[str, float]]:
    """Rows of metrics.csv; with ``validate`` before training and every 2 iterations, four draws for two sets."""
    torch.set_num_threads(1)
    pl.seed_everything(3, verbose=False)
    module = GRPOLightningModule(
        **TINY_MODULE, reward=[even_share], val_before_train=validate, val_success=0.5, mini_batches=2
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=FSDPUlyssesStrategy(),
        max_steps=steps,
        precision="32-true",
        logger=CSVLogger(str(folder), name="", version=""),
        log_every_n_steps=1,
        enable_checkpointing=any(isinstance(c, IterationCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        inference_mode=False,
        val_check_interval=2 if validate else None,
        check_val_every_n_epoch=None if validate else 1,
        callbacks=[
            RolloutCallback(sampling=Sampling(num_generations=4, max_completion_length=6), val_sampling=N4),
            *callbacks,
        ],
        **options,
    )
    data = PromptDataModule(path="toys.prompts", batch_size=8, val=SETS if validate else None, val_batch_size=4)
    keywords = {} if ckpt_path is None else {"ckpt_path": ckpt_path, "weights_only": False}
    getattr(trainer, verb)(module, datamodule=data, **keywords)
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def training(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Without ``rollout/checksum_ok``: a resumed run verifies its first sync."""
    return [{n: v for n, v in row.items() if n != "rollout/checksum_ok"} for row in rows if "actor/pg_loss" in row]


def validation(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [row for row in rows if "val/words/reward" in row]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("validated")
    save = IterationCheckpoint(dirpath=str(folder / "ck"), every_n_train_steps=1, save_top_k=-1)
    return folder, trained(folder, callbacks=(save, Samples(rows=1)))


def test_training_is_the_same_to_the_bit_without_validation(run: Any, tmp_path: Path) -> None:
    assert training(run[1]) == training(trained(tmp_path, validate=False))


def test_every_set_is_validated_before_training_and_every_n_iterations(run: Any) -> None:
    folder, rows = run
    found = validation(rows)
    assert [row["step"] for row in found] == [0, 1, 3]
    names = {"reward", "even_share", "mean@4", "std@4", "pass@1", "pass@2", "pass@4"}
    names |= {f"{name}@{k}" for name in ("best", "worst", "maj") for k in (2, 4)}
    for row in found:
        assert {name for name in row if name.startswith("val/")} == {f"val/{s}/{n}" for s in SETS for n in names}
        for one in SETS:
            assert row[f"val/{one}/reward"] == row[f"val/{one}/even_share"]
            assert row[f"val/{one}/mean@4"] == pytest.approx(row[f"val/{one}/pass@1"])
            assert row[f"val/{one}/worst@4"] <= row[f"val/{one}/reward"] <= row[f"val/{one}/best@4"]
    assert found[0] != found[1]
    table = read_table(folder / "samples" / "validation_000000.parquet").to_pydict()
    assert [table["set"].count(one) for one in SETS] == [12, 20]
    expected = mean(r for r, one in zip(table["reward"], table["set"], strict=True) if one == "numbers")
    assert found[0]["val/numbers/reward"] == pytest.approx(expected)


@pytest.mark.parametrize("iteration", [1, 2, 3])
def test_a_run_resumes_across_a_validation_to_the_bit(run: Any, iteration: int, tmp_path: Path) -> None:
    folder, rows = run
    rest = trained(tmp_path, ckpt_path=folder / "ck" / f"iteration-{iteration:06d}.ckpt")
    assert training(rest) == training(rows)[iteration:]
    assert validation(rest) == [row for row in validation(rows)[1:] if row["step"] >= iteration]


def test_a_checkpoint_is_validated_under_its_own_iteration(run: Any, tmp_path: Path) -> None:
    folder, rows = run
    again = trained(
        tmp_path,
        steps=-1,
        verb="validate",
        ckpt_path=folder / "ck" / "iteration-000002.ckpt",
        callbacks=(Samples(rows=0),),
    )
    (row,) = validation(again)
    assert row["step"] == 2
    assert {n: v for n, v in row.items() if "val/" in n} == {
        n: v for n, v in validation(rows)[1].items() if "val/" in n
    }
    assert [file.name for file in (tmp_path / "samples").iterdir()] == ["validation_000002.parquet"]
