"""Responses of several turns: their tokens are those of the template, replies are in the context and in no loss."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest
import torch
from test_runs import QUIET, assert_equal_runs, run
from toys import TINY_MODULE, fit
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rlhf import Completion, Conversation, GRPOLightningModule, Sampling
from lightning_rlhf.callbacks.ahead import Ahead
from lightning_rlhf.cli import main
from lightning_rlhf.modules.experience import gather_experience
from lightning_rlhf.modules.frozen_reward import FrozenRewardModel
from lightning_rlhf.rollout.turns import Speaker
from lightning_rlhf.scoring import reward_arguments
from lightning_rlhf.tiny import tiny_model
from lightning_rlhf.types import Prompts, Rollout, Scores

CONFIGS = Path(__file__).parent.parent / "configs"
EOS = 1


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny_model())


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class Script:
    """Says what it is given, turn by turn, and notes what it was asked."""

    def __init__(self, tokenizer, *turns, end=(EOS,), reasons=None):
        self.turns = [encode(tokenizer, turn) + list(end) for turn in turns]
        self.reasons = reasons or ["stop"] * len(turns)
        self.asked = []

    def __call__(self, prompts, seeds):
        number = len(self.asked)
        self.asked.append((prompts, seeds))
        ids = self.turns[number]
        return [Completion(ids, self.reasons[number], [-1.0] * len(ids)) for _ in prompts]


def talk(tokenizer, script, reply, prompt="user: hi\nassistant: ", rows=({},), seeds=(7,), **options):
    speaker = Speaker(Conversation(reply, **options), tokenizer)
    return speaker(script, [encode(tokenizer, prompt)] * len(rows), rows, seeds)


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_the_tokens_are_those_of_the_chat_template_and_only_turns_are_sampled(tokenizer):
    script = Script(tokenizer, "one", "two", "three")
    (done,) = talk(tokenizer, script, lambda turns: f"after {turns[-1]}", max_turns=3)
    messages = [
        {"role": role, "content": content}
        for role, content in (
            *(("user", "hi"), ("assistant", "one<|im_end|>"), ("user", "after one"), ("assistant", "two<|im_end|>")),
            *(("user", "after two"), ("assistant", "three<|im_end|>")),
        )
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n")
    assert tokenizer.decode(encode(tokenizer, "user: hi\nassistant: ") + done.token_ids) == whole
    assert [tokenizer.decode(turn) for turn in done.turns] == ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    sampled = [token for token, on in zip(done.token_ids, done.mask, strict=True) if on]
    assert sampled == [token for turn in script.turns for token in turn]
    assert done.replies == ("after one", "after two")
    assert [math.isnan(x) for x in done.log_probs] == [not on for on in done.mask]
    assert done.finish_reason == "stop"
    for number, ((asked,), _) in enumerate(script.asked):  # what was drawn is the beginning of the next prompt
        begin = sum(done.spans[: 2 * number])
        assert asked == encode(tokenizer, "user: hi\nassistant: ") + done.token_ids[:begin]


def test_a_template_that_ends_turns_ends_them_once(tokenizer):
    own = AutoTokenizer.from_pretrained(tiny_model())
    own.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for end, between in (([EOS], ""), (encode(own, "</tool>"), "<|im_end|>")):
        (done,) = talk(own, Script(own, "a", "b", end=end), lambda turns: "r", max_turns=2, role="tool")
        text = own.decode(done.token_ids)
        expected = (
            f"a{own.decode(end)}{between}\n<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\nb{own.decode(end)}"
        )
        assert text == expected


def test_without_a_role_a_reply_follows_as_it_is(tokenizer):
    own = AutoTokenizer.from_pretrained(tiny_model())
    own.chat_template = None
    with pytest.raises(ValueError, match=r"conversation\.role=user needs a chat template"):
        talk(own, Script(own, "a"), lambda turns: "r")
    (done,) = talk(own, Script(own, "a=", "b", end=()), lambda turns: "3;", max_turns=2, role=None)
    assert own.decode(done.token_ids) == "a=3;b"


def test_a_long_reply_is_cut_and_the_template_around_it_is_not(tokenizer):
    (done,) = talk(tokenizer, Script(tokenizer, "a", "b"), lambda turns: "ä" * 99, max_turns=2, max_reply_length=40)
    assert done.spans[1] <= 40
    (reply,) = done.replies
    assert 0 < len(reply) < 20
    assert tokenizer.decode(done.token_ids) == f"a<|im_end|>\nuser: {reply}\nassistant: b<|im_end|>"
    with pytest.raises(ValueError, match=r"max_reply_length=8 must be above 19, the tokens that"):
        talk(tokenizer, Script(tokenizer, "a"), lambda turns: "r", max_reply_length=8)


# -- who says what, and when it ends -----------------------------------------------------------------------------------


def test_a_conversation_ends_by_either_side_by_its_length_or_with_its_last_turn(tokenizer):
    told = []

    def reply(turns, limit):
        told.append((turns, limit))
        return None if len(turns) // 2 + 1 == limit else "more"

    script = Script(tokenizer, "a", "b", "c")
    done = talk(
        tokenizer, script, reply, rows=[{"limit": n, "other": 0} for n in (1, 2, 9)], seeds=(3, None, 5), max_turns=3
    )
    assert [len(c.turns) for c in done] == [1, 2, 3]
    assert [len(prompts) for prompts, _ in script.asked] == [3, 2, 1]
    assert sorted(told, key=str) == sorted(
        [(["a"], 1), (["a"], 2), (["a"], 9), (["a", "more", "b"], 2), (["a", "more", "b"], 9)], key=str
    )
    draws = [seeds for _, seeds in script.asked]
    assert draws[0] == [3, None, 5]
    assert draws[1][0] is None
    assert len({5, draws[1][1], draws[2][0]}) == 3
    cut = Script(tokenizer, "a", "b", reasons=["stop", "length"])
    (done,) = talk(tokenizer, cut, lambda turns, **columns: "r", max_turns=3)
    assert (done.finish_reason, len(done.turns)) == ("length", 2)


def test_a_reply_that_fails_leaves_its_response_out_and_if_all_do_the_run_ends(tokenizer, caplog):
    def reply(turns, n):
        if n == 1:
            raise KeyError("no such tool")
        return "r" if n else 5

    ok, bad, wrong = talk(
        tokenizer, Script(tokenizer, "a", "b"), reply, rows=[{"n": n} for n in (2, 1, 0)], seeds=(0, 1, 2), max_turns=2
    )
    assert [c.finish_reason for c in (ok, bad, wrong)] == ["stop", "abort", "abort"]
    assert "failed for 2 of 3 responses, first with KeyError: 'no such tool'; they are left out" in caplog.text
    with pytest.raises(
        RuntimeError, match=r"conversation\.reply failed for 1 of 1 .* TypeError: a reply is a text or None"
    ):
        talk(tokenizer, Script(tokenizer, "a"), reply, rows=[{"n": 0}])


def test_replies_are_computed_at_once(tokenizer):
    together = threading.Barrier(3, timeout=30)

    def reply(turns):
        together.wait()

    talk(tokenizer, Script(tokenizer, "a"), reply, rows=[{}] * 3, seeds=(0, 1, 2), threads=3)


# -- what becomes of it ------------------------------------------------------------------------------------------------


def completions() -> list[Completion]:
    return [
        Completion([5, 6, 7, 8, 9], "stop", [-1.0, -2.0, math.nan, math.nan, -3.0], (2, 2, 1), ("r",)),
        Completion([5], "stop", [-1.0], (1,)),
    ]


def rollout() -> Rollout:
    prompts = Prompts([[2, 3]], ["?"], {}, torch.tensor([4]))
    return Rollout.build(prompts, completions(), Sampling(num_generations=2, max_completion_length=9))


def test_replies_take_no_part_in_what_is_learned():
    gathered = gather_experience(rollout(), Scores(torch.tensor([1.0, 2.0])), lambda share: [share])
    assert gathered.mask.tolist() == [[1, 1, 0, 0, 1], [1, 0, 0, 0, 0]]
    assert gathered.rewards.tolist() == [[0, 0, 0, 0, 1], [2, 0, 0, 0, 0]]
    assert gathered.sampler_log_probs.nan_to_num(9.0).tolist() == [[-1, -2, 9, 9, -3], [-1, 0, 0, 0, 0]]
    tokens = torch.tensor([[1.0, 1.0, 50.0, 50.0, 1.0], [2.0, 0.0, 0.0, 0.0, 0.0]])
    scored = Scores(torch.tensor([3.0, 2.0]), tokens=tokens)
    rewards = gather_experience(rollout(), scored, lambda share: [share]).rewards
    assert rewards.tolist() == [[1, 1, 0, 0, 1], [2, 0, 0, 0, 0]]


def test_rewards_see_the_turns_and_the_replies():
    arguments = reward_arguments(rollout(), ["a", "b"], lambda ids: "-".join(map(str, ids)))
    assert arguments["turns"] == [["5-6", "r", "9"], ["5"]]
    assert arguments["completions"] == ["a", "b"]
    plain = Rollout.build(rollout().prompts, [Completion([5], "stop")] * 2, Sampling(num_generations=2))
    assert "turns" not in reward_arguments(plain, ["a", "b"], str)


def test_a_checkpoint_keeps_conversations_that_were_generated_ahead():
    first, second = Ahead(), Ahead()
    first.iteration, first._rows = 3, {11: completions()}
    second.load(first.state(lambda rows: [rows]))
    (row,) = second._rows.values()
    assert str(row) == str(completions())


def answer(turns, **columns):
    return f"{len(turns)} {columns.get('answer', '')}" if len(turns) < 4 else None


def digits(turns, completions, **_):
    assert all("assistant:" not in text for text in completions)
    return [sum(c.isdigit() for c in "".join(own[::2])) for own in turns]


ENDS = tuple(range(60))  # a quarter of what a random model says
SEVERAL = {"conversation": Conversation(answer, max_turns=3, max_reply_length=32)}


def test_log_probs_of_turns_are_those_of_the_whole_conversation(tmp_path):
    module = GRPOLightningModule(**TINY_MODULE, reward=[digits], mini_batches=2)
    (row,) = fit(module, tmp_path, 1, SEVERAL, num_generations=2, stop_token_ids=ENDS)
    experience = module.last_experience
    assert 1.0 < row["completions/mean_turns"] < 3.0
    assert row["completions/mean_reply_length"] > 5
    assert experience.max_length == 3 * 6 + 2 * 32
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    several = 0
    for i, (ids, begin) in enumerate(zip(experience.sequences, experience.prompt_lengths, strict=True)):
        with torch.no_grad():
            stock = model(ids[None]).logits[0, begin - 1 : -1].log_softmax(-1).gather(-1, ids[begin:, None])[:, 0]
        on = experience.mask[i, : len(stock)] > 0
        torch.testing.assert_close(experience.old_log_probs[i, : len(stock)][on], stock[on], atol=2e-5, rtol=0)
        torch.testing.assert_close(experience.sampler_log_probs[i, : len(stock)][on], stock[on], atol=2e-5, rtol=0)
        several += not on.all()
        assert "".join(map(chr, ids[begin:][~on].tolist())).count("?") == 0
    assert several > 8


def share_of_digits(turns, **_):
    said = ["".join(own[::2]) for own in turns]
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in said]


def test_turns_are_learned(tmp_path):
    module = GRPOLightningModule(**TINY_MODULE | {"lr": 1e-2}, reward=[share_of_digits])
    rows = fit(module, tmp_path, 14, SEVERAL, num_generations=4, stop_token_ids=ENDS)
    rewards = [row["reward/mean"] for row in rows]
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.7
    assert rows[-1]["completions/mean_turns"] > 2.5  # digits end a turn here


LINE = [
    "--rollout.conversation={reply: test_conversation.answer, max_turns: 3, max_reply_length: 32}",
    f"--rollout.sampling.stop_token_ids={list(ENDS)}",
    "--rollout.sampling.max_completion_length=6",
]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("tiny_grpo.yaml", []),
        ("tiny_ppo.yaml", []),
        ("tiny_grpo.yaml", ["--rollout.async_level=1", "--model.init_args.correction={}"]),
        ("tiny_grpo.yaml", ["--rollout.filter_groups={}"]),
    ],
    ids=["in turn", "critic", "ahead", "filtered"],
)
def test_conversations_do_not_depend_on_how_the_work_is_split(config, options, tmp_path):
    line = [*QUIET, *LINE, *options, "--trainer.max_steps=2"]
    one = run(tmp_path / "one", config, *line)
    assert one[0]["completions/mean_turns"] > 1.0
    two = [*line, "--trainer.devices=2"]
    assert_equal_runs(one, run(tmp_path / "dp", config, *two))
    if not options:
        assert_equal_runs(one, run(tmp_path / "sp", config, *two, "--trainer.strategy.sequence_parallel_size=2"))


def test_the_plan_counts_all_turns_and_refuses_what_cannot_work(capsys, tmp_path):
    config = ["plan", "--config", str(CONFIGS / "tiny_grpo.yaml"), *LINE]
    main(config)
    assert "64 + 82 = up to 146 per sequence" in " ".join(capsys.readouterr().out.split())
    sharing = "--rollout.engine={class_path: lightning_rlhf.rollout.VLLMEngine, init_args: {tensor_parallel_size: 2}}"
    with pytest.raises(SystemExit):
        main([*config, "--devices=2", sharing])
    assert "rollout.conversation cannot have engines of several ranks" in " ".join(capsys.readouterr().out.split())
    scored = GRPOLightningModule(**TINY_MODULE, reward_model=FrozenRewardModel("random:tiny"))
    with pytest.raises(ValueError, match=r"reward_model scores one answer"):
        fit(scored, tmp_path, 1, SEVERAL)


def test_the_example_says_higher_and_lower():
    from examples.guess import reply, solved

    assert [reply([text], 50) for text in ("12", "I say 77!", "hm", "50")] == [
        "higher",
        "lower",
        "That is no number.",
        None,
    ]
    assert solved([["50"], ["12", "higher", "49"], ["x"]], [50, 50, 50]) == [1.0, 0.25, 0.0]
