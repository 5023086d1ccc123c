"""From the responses of every data rank to one experience."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_rlhf.modules.experience import gather_experience, last_token_rewards
from lightning_rlhf.types import Completion, Prompts, Rollout, Sampling, Scores

SAMPLING = Sampling(num_generations=2, temperature=0.7, max_completion_length=3)


def rollout(rows: list[int], responses: list[Completion]) -> Rollout:
    prompts = Prompts([[100 + r, 200 + r] for r in rows], [str(r) for r in rows], {}, torch.tensor(rows))
    return Rollout.build(prompts, responses, SAMPLING)


def of(*responses: tuple[list[int], str]) -> list[Completion]:
    return [Completion(ids, reason, [-0.5 * t for t in ids]) for ids, reason in responses]


HERE = rollout([7], of(([1, 2, 3], "length"), ([4], "stop")))
THERE = rollout([3], of(([], "abort"), ([5, 6], "stop")))


def gather(**options) -> object:
    """What both of two data ranks get, the second rank's share prepared by hand."""
    shares = []
    for part, scores in ((HERE, [1.0, 0.0]), (THERE, [float("nan"), 2.0])):
        gather_experience(part, Scores(torch.tensor(scores)), lambda share: shares.append(share) or [share], **options)
    return gather_experience(HERE, Scores(torch.tensor([1.0, 0.0])), lambda share: shares, **options)


def test_groups_of_all_ranks_come_in_the_order_of_the_data_set():
    experience = gather()
    assert experience.group.tolist() == [3, 3, 7, 7]
    assert [s.tolist() for s in experience.sequences] == [
        [103, 203],
        [103, 203, 5, 6],
        [107, 207, 1, 2, 3],
        [107, 207, 4],
    ]
    assert experience.prompt_lengths == [2, 2, 2, 2]
    assert (experience.temperature, experience.max_length) == (0.7, 3)
    assert experience.mask.tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert experience.rewards.tolist() == [[0, 0, 0], [0, 2, 0], [0, 0, 1], [0, 0, 0]]
    assert experience.sampler_log_probs.tolist() == [[0, 0, 0], [-2.5, -3, 0], [-0.5, -1, -1.5], [-2, 0, 0]]


def test_baselines_go_with_the_responses_of_their_prompt_and_one_that_is_missing_leaves_these_out():
    shares, scores = [], Scores(torch.ones(2))
    parts = [(HERE, torch.tensor([0.25])), (replace(THERE, completions=HERE.completions), torch.tensor([torch.nan]))]
    for part, baselines in parts:
        gather_experience(part, scores, lambda share: shares.append(share) or [share], baselines=baselines)
    experience = gather_experience(HERE, scores, lambda share: shares, baselines=parts[0][1])
    assert experience.group.tolist() == [3, 3, 7, 7]
    assert experience.baselines[2:].tolist() == [0.25, 0.25]
    assert experience.mask.any(1).tolist() == [False, False, True, True]


def test_a_data_rank_without_responses_adds_none():
    shares = []
    nothing = rollout([], [])
    for part, scores in ((HERE, [1.0, 0.0]), (nothing, [])):
        gather_experience(part, Scores(torch.tensor(scores)), lambda share: shares.append(share) or shares)
    experience = gather_experience(nothing, Scores(torch.tensor([])), lambda share: shares, data_rank=1)
    assert experience.group.tolist() == [7, 7]
    assert experience.sequences[0].tolist() == [107, 207, 1, 2, 3]
    assert experience.sampler_log_probs.shape == (2, 3)


def test_pictures_stay_on_the_data_rank_of_their_prompt():
    shown = object()
    prompts = replace(HERE.prompts, images=[shown])
    parts = [(replace(HERE, prompts=prompts), [1.0, 0.0]), (THERE, [0.0, 2.0])]
    shares, scores = [], [Scores(torch.tensor(s)) for _, s in parts]
    for (part, _), score in zip(parts, scores, strict=True):
        gather_experience(part, score, lambda share: shares.append(share) or [share])
    for rank, own in enumerate([{2: shown, 3: shown}, {}]):
        experience = gather_experience(parts[rank][0], scores[rank], lambda share: shares, data_rank=rank)
        assert experience.home == [1, 1, 0, 0], "rows are ordered by group"
        assert experience.images == own
    assert gather().home is None


def test_truncated_responses_are_left_out_when_asked_for():
    assert gather(mask_truncated=True).mask.tolist() == [[0, 0, 0], [1, 1, 0], [0, 0, 0], [1, 0, 0]]


def test_a_response_without_a_score_takes_part_in_nothing():
    part = gather_experience(HERE, Scores(torch.tensor([float("nan"), 1.0])), lambda share: [share])
    assert part.mask.tolist() == [[0, 0, 0], [1, 0, 0]]
    assert part.rewards.tolist() == [[0, 0, 0], [1, 0, 0]]


def test_parts_come_in_the_same_order_and_scores_are_clipped() -> None:
    shares = []
    for part, scores in ((HERE, [1.0, -9.0]), (THERE, [float("nan"), 7.0])):
        total = torch.tensor(scores)
        own = Scores(total, {"a": total + 1, "b": -total})
        gather_experience(part, own, lambda share: shares.append(share) or [share])
    experience = gather_experience(HERE, own, lambda share: shares, reward_clip=(-2.0, 3.0))
    assert experience.parts[1:].tolist() == [[8, -7], [2, -1], [-8, 9]]
    assert experience.rewards.sum(1).tolist() == [0, 3, 1, -2]


def test_a_score_is_the_reward_of_the_last_token():
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    rewards = last_token_rewards(torch.tensor([2.0, 3.0, float("nan")]), mask)
    assert rewards.tolist() == [[0, 2, 0], [0, 0, 3], [0, 0, 0]]
