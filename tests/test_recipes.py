"""What an algorithm needs besides its formulas: responses, statistics and decisions of the loop, each against an oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toys import TINY_MODULE, even_tokens, fit
from transformers import AutoModelForCausalLM

from lightning_rlhf import GRPOLightningModule
from lightning_rlhf.modules.correction import Correction
from lightning_rlhf.rollout import TransformersEngine
from lightning_rlhf.tiny import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
COMMON = TINY_MODULE | {"reward": [even_tokens]}


def of_both(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Depends on the prompt, too: an untrained policy repeats the last token of any, if it is greedy."""
    return [
        sum(ids) / len(ids) + sum(map(ord, prompt)) % 97 for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


class Noting(TransformersEngine):
    """Notes the greedy response to each prompt, from a generation of its own."""

    greedy: dict[tuple[int, ...], list[int]]

    def generate(self, prompts, sampling, *, seeds, **arguments):
        unique = list(dict.fromkeys(map(tuple, prompts)))
        alone = super().generate(unique, sampling.greedy, seeds=[0] * len(unique))
        self.greedy = dict(zip(unique, [c.token_ids for c in alone], strict=True))
        self.requests = len(prompts)
        return super().generate(prompts, sampling, seeds=seeds, **arguments)


@pytest.mark.parametrize("async_level", [0, 1])
def test_the_baseline_of_remax_is_the_score_of_the_greedy_response_and_takes_part_in_nothing_else(
    tmp_path, async_level
):
    engine = Noting()
    options = {"correction": Correction()} if async_level else {}
    module = GRPOLightningModule(**COMMON | {"reward": [of_both]}, advantage="remax", **options)
    rollout = {"engine": engine, "async_level": async_level}
    (row,) = fit(module, tmp_path, 1, rollout=rollout, num_generations=2)
    experience = module.last_experience
    assert (engine.requests, len(experience)) == (48, 32)
    prompts = [tuple(s[:n].tolist()) for s, n in zip(experience.sequences, experience.prompt_lengths, strict=True)]
    texts = [module.tokenizer.decode(prompt) for prompt in prompts]
    expected = torch.tensor(of_both(texts, [engine.greedy[prompt] for prompt in prompts]))
    assert len(expected.unique()) > 3
    torch.testing.assert_close(experience.baselines, expected)
    scores = experience.rewards.sum(1)
    wanted = (scores - expected)[:, None] * experience.mask
    torch.testing.assert_close(experience.advantages, wanted, rtol=1e-4, atol=1e-4)
    assert row["reward/greedy_mean"] == pytest.approx(float(expected.mean()))
    assert row["reward/mean"] == pytest.approx(float(scores.mean()))
    assert module.last_scores.total.shape == (32,)
    assert row["actor/grad_norm"] > 0


def test_the_optimal_token_baseline_gets_the_squared_probabilities_of_the_old_policy(tmp_path):
    module = GRPOLightningModule(**COMMON | {"lr": 1e-30}, advantage="optimal_token_baseline", mini_batches=2)
    (row,) = fit(module, tmp_path, 1, num_generations=3, temperature=0.7)
    experience = module.last_experience
    stock = AutoModelForCausalLM.from_pretrained(tiny_model())
    for i, (ids, begin) in enumerate(zip(experience.sequences, experience.prompt_lengths, strict=True)):
        probs = (stock(ids[None]).logits[0, begin - 1 : -1] / 0.7).softmax(-1)
        length = len(ids) - begin
        squares, old = experience.sum_pi_squared[i, :length], experience.old_log_probs[i, :length]
        torch.testing.assert_close(squares, probs.square().sum(-1), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(old, probs.gather(-1, ids[begin:, None])[:, 0].log(), rtol=1e-4, atol=1e-5)
    assert row["actor/grad_norm"] > 0


def test_an_estimator_that_lists_importance_weights_gets_those_of_the_correction(tmp_path):
    seen = []

    def estimator(*, rewards, mask, importance=None, **_):
        seen.append(importance)
        return rewards, rewards

    for correction in (None, Correction()):
        module = GRPOLightningModule(**COMMON, advantage=estimator, correction=correction)
        fit(module, tmp_path / str(correction), 1, num_generations=2)
    assert seen[0] is None
    torch.testing.assert_close(seen[1], module.last_experience.mask, rtol=1e-3, atol=1e-3)
