"""Options that come from Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_docs import exists
from toys import TINY_MODULE, even_tokens, fit
from transformers import AutoModelForCausalLM

from lightning_rlhf import (
    KL,
    Conversation,
    Correction,
    FilterGroups,
    FrozenRewardModel,
    GRPOLightningModule,
    LoRA,
    PPOLightningModule,
    RolloutCallback,
    Sampling,
)
from lightning_rlhf.options import ELSEWHERE
from lightning_rlhf.tiny import tiny_model

COMMON = TINY_MODULE | {"reward": [even_tokens]}


def answers(turns: list[str]) -> str:
    return "yes?"


def test_dicts_are_what_yaml_says() -> None:
    module = GRPOLightningModule(
        **COMMON, kl={"coef": 0.1}, lora={"r": 4}, correction={}, reward_model={"model": "somewhere"}
    )
    assert (module.kl, module.settings.lora, module.correction) == (KL(coef=0.1), LoRA(r=4), Correction())
    assert module.frozen_reward == FrozenRewardModel("somewhere")
    drawn = {"num_generations": 2, "max_completion_length": 8}
    rollout = RolloutCallback(sampling=drawn, val_sampling=drawn, filter_groups={})
    assert rollout.sampling == rollout.val_sampling == Sampling(**drawn)
    assert rollout.filter_groups == FilterGroups()
    said = RolloutCallback(conversation={"reply": answers, "max_turns": 2}).conversation
    assert said == Conversation(answers, max_turns=2)


def test_a_module_of_dicts_trains(tmp_path: Path) -> None:
    (row,) = fit(GRPOLightningModule(**COMMON, kl={"coef": 0.1}, lora={"r": 4}), tmp_path, 1, num_generations=4)
    assert row["actor/kl_loss"] == 0.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kl": 0.1}, "model.kl must be a lightning_rlhf.KL or a dict of its options, got 0.1"),
        ({"kl": {"coeff": 0.1}}, "model.kl has no option 'coeff', did you mean 'coef'?; it has coef, "),
        ({"lora": {"rank": 4}}, "model.lora has no option 'rank'; it has r, alpha"),
        ({"lora": True}, "model.lora must be a lightning_rlhf.LoRA or a dict of its options, got True"),
        ({"correction": True}, "model.correction must be a lightning_rlhf.Correction or a dict"),
        ({"reward_model": "here"}, "model.reward_model must be a lightning_rlhf.FrozenRewardModel or a dict"),
        ({"reward_model": {}}, "model.reward_model needs 'model'"),
        ({"learning_rate": 1.0}, "GRPOLightningModule has no option 'learning_rate', did you mean 'model.lr'?"),
        ({"lora_rank": 1.0}, "GRPOLightningModule has no option 'lora_rank'"),
        ({"mini_batch": 2}, "GRPOLightningModule has no option 'mini_batch', did you mean 'mini_batches'?"),
    ],
)
def test_what_a_module_cannot_be_given_is_one_line(options: dict, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(said)}"):
        GRPOLightningModule(**COMMON, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampling": 4}, "rollout.sampling must be a lightning_rlhf.Sampling or a dict of its options, got 4"),
        (
            {"sampling": {"n": 4}},
            "rollout.sampling has no option 'n', did you mean 'num_generations'?; it has num_generations, ",
        ),
        (
            {"val_sampling": {"temperatur": 1}},
            "rollout.val_sampling has no option 'temperatur', did you mean 'temperature'?",
        ),
        (
            {"sampling": {"stop_token_ids": 5}},
            "sampling.stop_token_ids must be a tuple or list of ids, 0 or more, got 5",
        ),
        (
            {"sampling": {"stop_token_ids": [3, -1]}},
            "sampling.stop_token_ids must be a tuple or list of ids, 0 or more",
        ),
        ({"sampling": {"stop": "END"}}, "sampling.stop must be a tuple or list of texts, none of them empty, got END"),
        (
            {"val_sampling": {"stop": ["x", ""]}},
            "sampling.stop must be a tuple or list of texts, none of them empty, got",
        ),
        ({"conversation": {"max_turns": 2}}, "rollout.conversation needs 'reply'"),
        ({"filter_groups": True}, "rollout.filter_groups must be a lightning_rlhf.FilterGroups or a dict"),
        (
            {"engine": "vllm"},
            "rollout.engine must be an engine, such as lightning_rlhf.rollout.VLLMEngine(), got 'vllm'",
        ),
    ],
)
def test_what_a_rollout_cannot_be_given_is_one_line(options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        RolloutCallback(**options)


def test_a_model_is_named_not_given() -> None:
    loaded = AutoModelForCausalLM.from_pretrained(tiny_model())
    with pytest.raises(
        ValueError, match=r"^model\.model must be a folder or hub id, got a Qwen2ForCausalLM: save_pretr"
    ):
        GRPOLightningModule(loaded, reward=[even_tokens])
    assert GRPOLightningModule(Path("here"), reward=[even_tokens]).settings.model == "here"


def test_a_rate_that_yaml_took_for_text_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^model\.lr must be above 0 and finite, got '1e-5'$"):
        fit(GRPOLightningModule(**COMMON | {"lr": "1e-5"}), tmp_path, 1, num_generations=4)
    with pytest.raises(ValueError, match=r"^model\.critic_lr must be above 0 and finite, got '1e-5'$"):
        fit(PPOLightningModule(**COMMON, critic_lr="1e-5"), tmp_path, 1)


def test_names_of_other_libraries_lead_to_options_that_there_are() -> None:
    assert not [key for key in ELSEWHERE.values() if key != "seed_everything" and not exists(key)]
