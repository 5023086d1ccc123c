"""Values of tokens and of steps: where they land, and what estimators get."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_scoring import rollout
from transformers import AutoTokenizer

from lightning_rlhf import GRPOLightningModule, PPOLightningModule
from lightning_rlhf.modules.experience import gather_experience
from lightning_rlhf.modules.report import constant_groups
from lightning_rlhf.process_rewards import on_tokens, read_steps
from lightning_rlhf.rewards import RewardError
from lightning_rlhf.scoring import Scorer
from lightning_rlhf.tiny import tiny_model
from lightning_rlhf.types import Completion, Prompts, Rollout, Sampling

nan = math.nan


def letters(ids: list[int]) -> str:
    return "".join(chr(i) for i in ids)


def test_a_step_lands_on_the_token_that_ends_it() -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    text = "First é step.\nSecond 😀 one.\nEnd"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    ends = [text.index("\n") + 1, text.rindex("\n") + 1, len(text)]
    values = on_tokens(read_steps([(end, 1.0 + i) for i, end in enumerate(ends)]), ids, tokenizer.decode)
    assert len(values) == len(ids)
    for i, end in enumerate(ends):
        place = values.index(1.0 + i)
        assert len(tokenizer.decode(ids[:place])) < end <= len(tokenizer.decode(ids[: place + 1]))
    assert sum(map(bool, values)) == 3


def test_tokens_have_their_values_and_steps_of_one_token_add_up() -> None:
    assert on_tokens(read_steps([0.5, None, nan, 1]), [1] * 4, letters) == [0.5, 0.0, 0.0, 1.0]
    assert on_tokens(read_steps([1.0, 2.0, 0.0]), [1, 1], letters) == [1.0, 2.0]
    assert on_tokens(read_steps([(1, 1.0), (1, 2.0), (2, None)]), [97, 98], letters) == [3.0, 0.0]
    assert on_tokens(read_steps([]), [], letters) == []
    assert on_tokens(read_steps([]), [97], letters) == [0.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1.0], "must return one number per token, 2, got 1"),
        ([1.0, 2.0, 3.0], "must return one number per token, 2, got 3"),
        ([(3, 1.0)], "gives a step that ends at character 3 of a response of 2"),
        ([(0, 1.0)], "ends at character 0 of"),
    ],
)
def test_values_without_a_place_are_errors(given: list[Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        on_tokens(read_steps(given), [97, 98], letters)


def test_what_is_neither_is_refused() -> None:
    with pytest.raises(RewardError, match="numbers per token, or"):
        read_steps([1.0, (2, 1.0)])
    with pytest.raises(ValueError, match="returned inf"):
        read_steps([(1, float("inf"))])


def by_token(completion_ids: list[list[int]]) -> torch.Tensor:
    """Padded, as verl's reward tensors are."""
    return torch.tensor([[1.0] * len(ids) + [0.0] * (4 - len(ids)) for ids in completion_ids])


def short(completions: list[str], **_: Any) -> list[list[float]]:
    return [[1.0]] * len(completions)


def by_step(completions: list[str], **_: Any) -> list[Any]:
    return [[(1, 1.0), (len(c), 0.5)] if len(c) > 1 else None for c in completions]


def outcome(completions: list[str], **_: Any) -> list[float]:
    return [10.0] * len(completions)


def test_sums_are_the_responses_rewards_and_places_reach_the_estimators() -> None:
    batch, texts = rollout(), ["a", "bb", "ccc", "dddd"]  # one token per letter
    scorer = Scorer([by_token, by_step, outcome], weights=[2.0, 1.0, 1.0])
    scores = scorer(batch, texts, decode=lambda ids: "x" * len(ids))
    assert scores.total.tolist() == [12.0, 15.5, 17.5, 19.5]
    assert scores.parts["by_token"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert scores.parts["by_step"][1:].tolist() == [1.5] * 3
    assert scores.parts["by_step"][0].isnan()
    gathered = gather_experience(batch, scores, lambda share: [share])
    want = [[12, 0, 0, 0], [3, 12.5, 0, 0], [3, 2, 12.5, 0], [3, 2, 2, 12.5]]
    assert gathered.rewards.tolist() == want
    ppo = PPOLightningModule("random:tiny", gamma=0.5, lam=0.0, whiten_advantages=False)
    deltas = ppo.compute_advantages(replace(gathered, values=torch.zeros(4, 4)))[0]
    assert deltas.tolist() == want
    dr_grpo = GRPOLightningModule("random:tiny", advantage="dr_grpo").compute_advantages(gathered)[0]
    assert dr_grpo[:, 0].tolist() == [-1.75, 1.75, -1.0, 1.0]


def test_a_clip_comes_off_at_the_last_token() -> None:
    batch = rollout()
    scores = Scorer([by_token])(batch, list("abcd"))
    rewards = gather_experience(batch, scores, lambda share: [share], reward_clip=(1.5, 3.0)).rewards
    assert rewards.tolist() == [[1.5, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]


def tenths(completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
    """0.7 in all, of every response, in tenths that are no binary numbers; one of them is taken off again."""
    return [[0.1 * i for i in range(len(ids) - 1)] + [0.7 - 0.1 * sum(range(len(ids) - 1))] for ids in completion_ids]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "grpo_passk"])
def test_equal_scores_stay_equal_however_they_are_spread_over_tokens(name: str) -> None:
    lengths = range(3, 35)
    prompts = Prompts([[1]], ["a"], {}, torch.tensor([0]))
    completions = [Completion(list(range(n)), "stop") for n in lengths]
    batch = Rollout.build(prompts, completions, Sampling(num_generations=len(lengths)))
    scores = Scorer([tenths])(batch, [""] * len(lengths))
    assert len(scores.total.unique()) == 1
    gathered = gather_experience(batch, scores, lambda share: [share])
    torch.testing.assert_close(gathered.rewards.sum(1), scores.total, atol=0, rtol=1e-4)
    assert scores.tokens is not None
    torch.testing.assert_close(gathered.rewards, scores.tokens, atol=2e-5, rtol=0)  # they add up to 60, with both signs
    assert constant_groups(gathered) == 1.0
    assert not GRPOLightningModule("random:tiny", advantage=name).compute_advantages(gathered)[0].any()


def test_steps_need_the_text_of_tokens_and_errors_name_the_function() -> None:
    with pytest.raises(RewardError, match="reward by_step gives values of steps: hand `decode` to the Scorer"):
        Scorer([by_step])(rollout(), ["aa"] * 4)
    with pytest.raises(RewardError, match="reward short must return one number per token, 2, got 1"):
        Scorer([short])(rollout(), ["a"] * 4)


def test_a_rank_without_values_of_tokens_has_zeros() -> None:
    batch = rollout()
    shares: list[Any] = []
    for function in (by_token, outcome):
        gather_experience(batch, Scorer([function])(batch, list("abcd")), lambda share: shares.append(share) or [share])
    rewards = gather_experience(batch, Scorer([outcome])(batch, list("abcd")), lambda share: shares).rewards
    assert rewards.sum(1).tolist() == [1, 2, 10, 10, 3, 4, 10, 10]
    assert rewards[5].tolist() == [1, 1, 1, 1]
    assert rewards[7].tolist() == [0, 0, 0, 10]
