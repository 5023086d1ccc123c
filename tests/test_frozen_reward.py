"""A frozen reward model beside the policy, and a critic that starts from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_policy import strategy_of
from test_runs import QUIET, assert_equal_runs, run
from toys import TINY_MODULE, even_tokens, fit, spawn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer, LlamaConfig

from lightning_rlhf import (
    FilterGroups,
    GRPOLightningModule,
    IterationCheckpoint,
    LoRA,
    ModelSettings,
    PPOLightningModule,
    RolloutCallback,
)
from lightning_rlhf.export import export_checkpoint
from lightning_rlhf.modules.batching import Split
from lightning_rlhf.modules.critic import build_critic, check_model
from lightning_rlhf.modules.frozen_reward import FrozenRewardModel, build_reward_model, scores_of_all
from lightning_rlhf.modules.score_head import check_same_vocabulary
from lightning_rlhf.packing import pack, pack_ends
from lightning_rlhf.tiny import write_byte_tokenizer

pytestmark = pytest.mark.filterwarnings(
    "ignore:more than half of the responses were cut", "ignore:It is recommended to use `self.log"
)
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
PROMPTS = [[{"role": "user", "content": "1+1"}], [{"role": "user", "content": "What is 31 + 50?"}], "plain"]
TEXTS = ["2", "That would be 81.", ""]


def reward_model(folder: Path, labels: int = 1, shift: int = 0, padding: int = 0) -> str:
    """A random one with a chat template of its own; of another vocabulary with ``shift``."""
    size = len(write_byte_tokenizer(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(shift)])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=size + shift,
        num_key_value_heads=2,
        **sizes,
        num_labels=labels,
        pad_token_id=padding,
        max_position_embeddings=64,
    )
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)


def stock_scores(folder: str, texts: list[str], dtype: torch.dtype) -> torch.Tensor:
    """Of transformers' own forward, one unpadded sequence at a time."""
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype),
        AutoTokenizer.from_pretrained(folder),
    )
    with torch.no_grad():
        return torch.tensor([model(torch.tensor([tokenizer.encode(text)])).logits.item() for text in texts])


def own_scores(
    rank: int, folder: str, ranks: int, tokens: int, sizes: dict[str, int], precision: str = "32-true"
) -> torch.Tensor:
    """Of the responses that this data rank has, 0 elsewhere."""
    strategy, model = strategy_of(ranks, precision=precision, **sizes), FrozenRewardModel(folder)
    mine = [i for i in range(3) if i % strategy.dp_size == strategy.dp_rank]
    ids = model.token_ids([PROMPTS[i] for i in mine], [TEXTS[i] for i in mine], mine)
    places = strategy.dp_size, strategy.dp_rank, strategy.sequence_parallel_size, strategy.sp_rank
    root = build_reward_model(model.settings(ModelSettings("random:tiny")), strategy)
    scores = scores_of_all(root, ids, strategy, Split(*places, tokens, float, strategy.root_device), 64)
    return torch.zeros(3).index_copy(0, torch.tensor(mine), scores)


def on_meshes(rank: int, folder: str) -> list[torch.Tensor]:
    return [own_scores(rank, folder, 2, 40, sizes) for sizes in ({}, {"sequence_parallel_size": 2})]


def test_scores_are_those_of_transformers_in_its_own_template_on_any_mesh(tmp_path):
    """In streams of several sequences, and with one that is longer than the budget."""
    folder = reward_model(tmp_path)
    eos = AutoTokenizer.from_pretrained(folder).eos_token
    texts = [
        "[user]1+1</s>[assistant]2</s>",
        "[user]What is 31 + 50?</s>[assistant]That would be 81.</s>",
        f"plain{eos}",
    ]
    exact, rounded = (stock_scores(folder, texts, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert exact.unique().numel() == 3
    shared = spawn(on_meshes, 2, folder)
    for scores in (own_scores(0, folder, 1, 4096, {}), shared[0][0] + shared[1][0], shared[0][1], shared[1][1]):
        torch.testing.assert_close(scores, exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own_scores(0, folder, 1, 40, {}, "bf16-mixed"), rounded, rtol=0.05, atol=0.02)


def test_scores_are_those_of_transformers_when_the_eos_is_the_padding_token(tmp_path):
    """Transformers then reads the score before it, or of nothing but padding at the first token."""
    folder = reward_model(tmp_path, padding=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == 1
    texts = ["[user]1+1</s>[assistant]2</s>", f"plain{tokenizer.eos_token}", tokenizer.eos_token * 3]
    model, strategy = FrozenRewardModel(folder), strategy_of(1)
    root = build_reward_model(model.settings(ModelSettings("random:tiny")), strategy)
    split = Split(1, 0, 1, 0, 4096, float, strategy.root_device)
    ids = [torch.tensor(tokenizer.encode(text)) for text in texts]
    found = scores_of_all(root, ids, strategy, split, 64)
    torch.testing.assert_close(found, stock_scores(folder, texts, torch.float32), rtol=1e-4, atol=1e-5)


class Watched(GRPOLightningModule):
    """Notes for each scoring how many parameters of the reward model are on the host, and how many others."""

    def score(self, rollout):
        callback = next(c for c in self.trainer.callbacks if isinstance(c, RolloutCallback))
        own = {id(parameter) for parameter in self.reward_model.parameters()}
        away = [key for key, _ in callback._steps.host._away]
        self.found = [*getattr(self, "found", []), (self.trainer.training, sum(k in own for k in away), len(away))]
        return super().score(rollout)


def test_the_model_stays_where_it_is_while_it_scores_between_generations(tmp_path):
    module = Watched(**TINY_MODULE, reward_model=FrozenRewardModel(reward_model(tmp_path)))
    rollout = {"offload_parameters": True, "filter_groups": FilterGroups(max_num_gen_batches=1)}
    fit(module, tmp_path / "run", 1, rollout=rollout, num_generations=2)
    assert [(training, own) for training, own, _ in module.found] == [(True, 0)]
    assert module.found[0][2] > 10


def test_its_folder_is_looked_for_once_for_the_weights_and_once_for_the_tokenizer(tmp_path, looked_for):
    folder = reward_model(tmp_path)
    module = GRPOLightningModule(**TINY_MODULE, reward_model=FrozenRewardModel(folder))
    fit(module, tmp_path / "run", 1, num_generations=2)
    assert sorted(looked_for) == sorted(["random:tiny", folder, folder])


def test_a_sequence_that_the_model_cannot_take_has_no_score(tmp_path):
    strategy, model = strategy_of(1), FrozenRewardModel(reward_model(tmp_path))
    root = build_reward_model(model.settings(ModelSettings("random:tiny")), strategy)
    split = Split(1, 0, 1, 0, 4096, float, strategy.root_device)
    scores = scores_of_all(root, [torch.arange(10), torch.arange(65)], strategy, split, 64)
    assert scores.isnan().tolist() == [False, True]


def test_the_ends_of_sequences_are_packed_on_any_piece():
    sequences = [torch.arange(n) for n in (5, 3, 4)]
    whole = pack_ends(sequences)
    assert whole.response_index[:, 0].tolist() == whole.rows.tolist() == [4, 7, 11]
    first, second = (pack_ends(sequences, 2, rank) for rank in range(2))
    assert (first.rows.tolist(), second.rows.tolist()) == ([4], [1, 5])
    sequences.append(torch.arange(2))
    halves = [pack_ends(sequences, 2, rank).rows.tolist() for rank in range(2)]
    assert halves == [[4], [0, 4, 6]], "one that ends with the first token of a piece"
    assert pack_ends([], 2).response_mask.shape == (0, 1)


def test_it_is_summed_with_the_functions_by_weight_and_the_policy_follows_it(tmp_path):
    model = FrozenRewardModel(reward_model(tmp_path / "rm"), weight=0.5)
    module = GRPOLightningModule(
        **TINY_MODULE | {"lr": 1e-2}, reward=[even_tokens], reward_weights=[2.0], reward_model=model
    )
    rows = fit(module, tmp_path / "both", 2, num_generations=4)
    for row in rows:
        total = 2 * row["reward/even_tokens/mean"] + 0.5 * row["reward/reward_model/mean"]
        assert row["reward/mean"] == pytest.approx(total, abs=1e-4)
    assert module.part_weights == [2.0, model.weight]
    assert module.last_experience.parts.shape[1] == 2
    alone = GRPOLightningModule(**TINY_MODULE | {"lr": 1e-2}, reward_model=model, advantage="gdpo")
    rows = fit(alone, tmp_path / "alone", 25, num_generations=8)
    assert rows[0]["reward/mean"] == pytest.approx(0.5 * rows[0]["reward/reward_model/mean"])
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 2 * rows[0]["reward/std"]
    assert not any(p.requires_grad for p in alone.reward_model.parameters())
    assert alone.description["roles"].keys() == {"actor"}  # what is frozen is in no checkpoint


@pytest.mark.slow
def test_a_run_with_one_does_not_depend_on_the_split(tmp_path):
    """Two data ranks, and two ranks that share each sequence, with validation."""
    options = [
        *QUIET,
        f"--model.reward_model.model={reward_model(tmp_path / 'rm')}",
        f"--model.critic={tmp_path / 'rm'}",
    ]
    options += ["--data.max_prompt_length=40", "--trainer.max_steps=2", "--trainer.val_check_interval=2"]
    options += ["--model.reward_model.chat_template=true"]
    one = run(tmp_path / "one", "tiny_ppo.yaml", *options)
    assert "val/heldout/reward_model" in one[-1]
    two = ["--trainer.devices=2"]
    assert_equal_runs(one, run(tmp_path / "dp", "tiny_ppo.yaml", *options, *two), 1e-4)
    sp = "--trainer.strategy.sequence_parallel_size=2"
    assert_equal_runs(one, run(tmp_path / "sp", "tiny_ppo.yaml", *options, *two, sp), 1e-4)


def test_offloaded_shards_give_the_same_scores(tmp_path):
    folder = reward_model(tmp_path)
    found = []
    for offload in (False, True):
        strategy, model = strategy_of(1), FrozenRewardModel(folder)
        root = build_reward_model(model.settings(ModelSettings("random:tiny", offload_reference=offload)), strategy)
        split = Split(1, 0, 1, 0, 4096, float, strategy.root_device)
        found.append(scores_of_all(root, model.token_ids(PROMPTS, TEXTS, range(3)), strategy, split, 64))
    assert found[0].tolist() == found[1].tolist()


def test_a_prompt_that_goes_on_in_the_response_is_one_turn_of_its_template(tmp_path):
    model = FrozenRewardModel(reward_model(tmp_path), chat_template=True)
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "be"}]
    ids = model.token_ids([asked, "text"], ["gun", "yes"], range(2))
    texts = [model.encoder.tokenizer.decode(one) for one in ids]
    assert texts == ["[user]q</s>[assistant]begun</s>", "[user]text</s>[assistant]yes</s>"]


def asked_in_vain() -> list[dict[str, Any]]:
    """Of which the sixth has a system message."""
    rows = [[{"role": "user", "content": f"{i}+{i}"}] for i in range(16)]
    rows[5].insert(0, {"role": "system", "content": "b"})
    return [{"prompt": row} for row in rows]


def test_a_prompt_that_its_template_refuses_is_named_by_its_row(tmp_path, monkeypatch):
    """The policy's own template takes it; several responses to each prompt."""
    folder = reward_model(tmp_path / "rm")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    module = GRPOLightningModule(**TINY_MODULE, reward_model=FrozenRewardModel(folder))
    monkeypatch.setattr("toys.prompts", asked_in_vain)
    message = r"^model\.reward_model: the prompt of row 5 is refused by the chat template: no system role$"
    with pytest.raises(ValueError, match=message):
        fit(module, tmp_path / "run", 1, num_generations=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda folder: "random:tiny",
            "is a Qwen2ForCausalLM, it must be a sequence-classification model with one label",
        ),
        (lambda folder: reward_model(folder, labels=2), "has 2 labels, it must have one: take another model"),
        (lambda folder: "/no/such", r"model\.reward_model\.model: there is no folder '/no/such'"),
    ],
)
def test_what_is_no_reward_model_is_refused(make, message, tmp_path):
    """Before the policy is loaded."""
    module = GRPOLightningModule(**TINY_MODULE, reward_model=FrozenRewardModel(make(tmp_path / "rm")))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        fit(module, tmp_path / "run", 1)
    assert module.actor is None


def reward_model_of_mine(completions, **_):
    return [1.0] * len(completions)


def test_a_function_of_its_name_is_refused_beside_it(monkeypatch):
    """One of the two would be left out, and the other have both weights."""
    monkeypatch.setattr(reward_model_of_mine, "__name__", "reward_model")
    with pytest.raises(
        ValueError, match=r"model\.reward: a function called reward_model has no name of its own beside"
    ):
        GRPOLightningModule(**TINY_MODULE, reward=[reward_model_of_mine], reward_model=FrozenRewardModel("any"))


def test_a_policy_does_not_start_from_a_reward_model(tmp_path):
    module = GRPOLightningModule(**TINY_MODULE | {"model": reward_model(tmp_path / "rm")}, reward=[even_tokens])
    with pytest.raises(
        ValueError, match=r"model\.model: .* is a LlamaForSequenceClassification, its language-model head would"
    ):
        fit(module, tmp_path / "run", 1)


def test_a_critic_of_several_labels_is_refused_before_the_policy_is_loaded(tmp_path):
    module = PPOLightningModule(**TINY_MODULE, critic=reward_model(tmp_path / "rm", labels=2), reward=[even_tokens])
    with pytest.raises(ValueError, match=r"model\.critic: .* has 2 labels, it must have one"):
        fit(module, tmp_path / "run", 1)
    assert module.actor is None


# -- a critic that starts from one ---------------------------------------------------------------------------------------------


def test_a_critic_takes_over_backbone_and_head(tmp_path):
    folder = reward_model(tmp_path)
    critic = build_critic(ModelSettings(folder), strategy_of(1))
    ids = [torch.arange(3, 12), torch.arange(20, 24)]
    values = critic(pack([torch.cat([one, one[:1]]) for one in ids], [len(one) for one in ids]))[:, 0]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    wanted = torch.stack([model(one[None]).logits[0, 0] for one in ids])
    torch.testing.assert_close(values, wanted, rtol=1e-4, atol=1e-5)


def test_ppo_starts_from_a_reward_model_and_its_critic_is_exported(tmp_path):
    """As a token-classification model, whose values are the critic's; an adapter is merged."""
    for lora in (None, LoRA(r=4)):
        here = tmp_path / str(lora is None)
        folder = reward_model(here / "rm")
        module = PPOLightningModule(**TINY_MODULE, critic=folder, critic_lr=1e-3, reward=[even_tokens], lora=lora)
        saver = IterationCheckpoint(dirpath=str(here / "ck"))
        fit(module, here / "run", 2, callbacks=[saver])
        (checkpoint,) = (here / "ck").glob("*.ckpt")
        export_checkpoint(str(checkpoint), str(here / "out"), dtype="float32", role="critic")
        model: Any = AutoModelForTokenClassification.from_pretrained(here / "out").eval()
        ids = torch.arange(3, 14)
        with torch.no_grad():
            values = module.critic(pack([ids], [1]))[0]
            torch.testing.assert_close(values, model(ids[None]).logits[0, :-1, 0], rtol=1e-4, atol=1e-5)
        assert model.score.bias.item() != 0.0
    with pytest.raises(ValueError, match=r"--role: .* has no reward_model, it has actor and critic"):
        export_checkpoint(str(checkpoint), str(tmp_path / "other"), role="reward_model")
    with pytest.raises(ValueError, match="is a critic, its head has a bias: take a sequence-classification model"):
        build_reward_model(ModelSettings(str(here / "out")), strategy_of(1))
    again = build_critic(ModelSettings(str(here / "out")), strategy_of(1))
    torch.testing.assert_close(again(pack([ids], [1]))[0], values, rtol=1e-4, atol=1e-5)


def test_a_critic_of_another_vocabulary_is_refused(tmp_path):
    folder = reward_model(tmp_path / "rm", shift=2)
    module = PPOLightningModule(**TINY_MODULE, critic=folder, reward=[even_tokens])
    message = r"model\.critic: .* has another vocabulary than the policy's .*: token '<extra_0>' has id 258 there and None here"
    with pytest.raises(ValueError, match=message):
        fit(module, tmp_path / "run", 1)
    for file in Path(folder).glob("token*"):  # then all that is known is how many ids there are
        file.unlink()
    with pytest.raises(ValueError, match="has 260 token ids, the policy's 'random:tiny' has 258"):
        check_same_vocabulary(module.roles["critic"], module.settings)
    assert check_model(ModelSettings(folder), strategy_of(1), critic=True) == 64
