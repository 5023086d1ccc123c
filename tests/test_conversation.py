"""Responses of several turns: their tokens are those of the template, replies are in the context and in no loss."""

from __future__ import annotations

import math
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from test_runs import QUIET, assert_equal_runs, run
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from toys import TINY_MODULE, fit
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lightning_rlhf import Completion, Conversation, GRPOLightningModule, RolloutCallback, Sampling
from lightning_rlhf.callbacks.ahead import Ahead, keys
from lightning_rlhf.callbacks.samples import sample_columns
from lightning_rlhf.cli import main
from lightning_rlhf.modules.experience import gather_experience
from lightning_rlhf.modules.frozen_reward import FrozenRewardModel
from lightning_rlhf.rewards import LengthPenalty, RewardError
from lightning_rlhf.rollout.turns import Speaker
from lightning_rlhf.scoring import Scorer, reward_arguments
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


def test_log_probs_that_nobody_asked_for_are_none(tokenizer):
    def generate(prompts, seeds):
        return [Completion([EOS], "stop") for _ in prompts]

    (done,) = talk(tokenizer, generate, lambda turns: "r", max_turns=2)
    assert (len(done.turns), done.log_probs) == (2, None)


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


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{{ raise_exception('no role tool here') }}",
            "tool is refused by the chat template: TemplateError: no role tool here",
        ),
        (
            "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
            "tool: the chat template does not write such a message: take another role",
        ),
    ],
    ids=["refuses it", "leaves it out"],
)
def test_a_role_that_the_template_does_not_know_is_refused(template, said):
    own = AutoTokenizer.from_pretrained(tiny_model())
    own.chat_template = template
    with pytest.raises(ValueError, match=rf"^rollout\.conversation\.role={said}"):
        talk(own, Script(own, "a"), lambda turns: "r", role="tool")


def test_a_long_reply_is_cut_and_the_template_around_it_is_not(tokenizer):
    (done,) = talk(tokenizer, Script(tokenizer, "a", "b"), lambda turns: "ä" * 99, max_turns=2, max_reply_length=40)
    assert done.spans[1] <= 40
    (reply,) = done.replies
    assert 0 < len(reply) < 20
    assert tokenizer.decode(done.token_ids) == f"a<|im_end|>\nuser: {reply}\nassistant: b<|im_end|>"
    for limit in (8, 19):
        with pytest.raises(ValueError, match=rf"max_reply_length={limit} must be above 19, the tokens that"):
            talk(tokenizer, Script(tokenizer, "a"), lambda turns: "r", max_reply_length=limit)


def test_further_variables_of_the_template_reach_it(tokenizer):
    own = AutoTokenizer.from_pretrained(tiny_model())
    own.chat_template = "{% for m in messages %}{{ m.content }}{{ mark }}{% endfor %}"
    speaker = Speaker(Conversation(lambda turns: "r", max_turns=2), own, {"mark": "*"})
    (done,) = speaker(Script(own, "a", "b", end=()), [[5]], [{}], [0])
    assert own.decode(done.token_ids) == "a*r*b"


HEAD = "{% for m in messages %}{{ '<|start|>' + m.role + '<|end|>\\n\\n' }}"
TAIL = "<|im_end|>{% endfor %}{{ '<|start|>assistant<|end|>\\n\\n' }}"
TEMPLATES = {  # as those of Gemma and Llama 3 treat a message
    "trims": HEAD + "{{ m.content | trim }}" + TAIL,
    "quotes": HEAD + "{{ m.content | tojson if m.role == 'tool' else m.content }}" + TAIL,
}


@pytest.mark.parametrize(
    "said", ["plain", "  spaces \n", 'a "quote"\nand a line', "", " ", "naïve 😀", "ends<|im_end|>early"]
)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_reply_is_what_the_template_makes_of_it(tokenizer, name, said):
    own = AutoTokenizer.from_pretrained(tiny_model())
    own.chat_template = TEMPLATES[name]
    messages = [{"role": "user", "content": "hi"}]
    prompt = own.apply_chat_template(messages, tokenize=False)
    (done,) = talk(own, Script(own, "one", "two"), lambda turns: said, prompt=prompt, max_turns=2, role="tool")
    messages += [{"role": "assistant", "content": "one"}, {"role": "tool", "content": said}]
    whole = own.apply_chat_template(messages, tokenize=False) + "two<|im_end|>"
    assert encode(own, prompt) + done.token_ids == encode(own, whole)
    assert done.replies == (said,)


def sentencepiece(kind):
    """A tokenizer that puts a space before what begins a text, as those of Llama 2 (legacy or not) and Mistral do."""
    characters = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *map(chr, range(33, 127))]
    backend = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    if kind == "legacy":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(spaces)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


INSTRUCT = (
    "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content + '</s>' }}"
    "{% endfor %}"
)


@pytest.mark.parametrize(("template", "role", "end"), [(INSTRUCT, "user", "</s>"), (None, None, "")])
@pytest.mark.parametrize("kind", ["legacy", "first"])
def test_no_space_is_put_before_what_follows_a_turn(kind, template, role, end):
    own = sentencepiece(kind)
    own.chat_template = template
    begin, between = ("[INST] hi [/INST]", "[INST] 3; [/INST]") if template else ("x=", "3;")
    whole = encode(own, f"{begin}one{end}{between}two{end}")
    first, last = len(encode(own, f"{begin}one{end}")), len(encode(own, f"{begin}one{end}{between}"))
    script = Script(own, "", "", end=())
    script.turns = [whole[len(encode(own, begin)) : first], whole[last:]]
    (done,) = talk(own, script, lambda turns: "3;", prompt=begin, max_turns=2, role=role)
    assert encode(own, begin) + done.token_ids == whole


def test_a_token_that_begins_like_the_end_of_a_turn_is_none(tokenizer):
    own = AutoTokenizer.from_pretrained(tiny_model())
    own.chat_template = TEMPLATES["trims"]
    (done,) = talk(own, Script(own, "a<", "b", end=()), lambda turns: "r", max_turns=2)
    assert own.decode(done.token_ids).startswith("a<<|im_end|><|start|>user")


def test_a_reply_is_cut_between_characters(tokenizer):
    for limit in (40, 41):
        (done,) = talk(
            tokenizer, Script(tokenizer, "a", "b"), lambda turns: "ä" * 99, max_turns=2, max_reply_length=limit
        )
        assert set(done.replies[0]) == {"ä"}


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


def test_a_reply_that_fails_for_the_last_that_goes_on_does_not_end_the_run(tokenizer):
    def reply(turns, n):
        if len(turns) > 1:
            raise TimeoutError
        return "r" if n else None

    script = Script(tokenizer, "a", "b")
    done = talk(tokenizer, script, reply, rows=[{"n": 0}, {"n": 1}], seeds=(0, 1), max_turns=3)
    assert [c.finish_reason for c in done] == ["stop", "abort"]


class Tool:
    def __call__(self, turns, **columns):
        return f"{len(turns)}{sorted(columns)}"

    def method(self, said, n=0):
        return f"{len(said)}{n}"


def test_any_callable_may_answer_and_a_column_never_takes_the_place_of_the_turns(tokenizer):
    row = {"turns": 7, "said": 8, "n": 3}
    for reply, expected in (
        (Tool(), "1['n', 'said']"),
        (Tool().method, "13"),
        (partial(Tool().method, n=5), "13"),
        (lambda turns, n: str(n), "3"),
    ):
        (done,) = talk(tokenizer, Script(tokenizer, "a", "b"), reply, rows=[row], max_turns=2)
        assert done.replies == (expected,)

    with pytest.raises(ValueError, match=r"conversation\.reply asks for 'word', which is none of turns, said, n$"):
        talk(tokenizer, Script(tokenizer, "a"), lambda turns, word: word, rows=[row])

    async def slow(turns):
        return "r"

    class Slow:
        async def __call__(self, turns):
            return "r"

    for reply in (slow, Slow()):
        with pytest.raises(ValueError, match=r"conversation\.reply must be a plain function, not async"):
            talk(tokenizer, Script(tokenizer, "a"), reply)


def test_what_a_reply_does_to_its_columns_changes_nothing_else(tokenizer):
    row = {"board": [[0, 0]]}

    def move(turns, board):
        board[0][0] += 1
        turns.append("more")
        return str(board[0][0])

    done = talk(tokenizer, Script(tokenizer, "a", "b"), move, rows=[row] * 3, seeds=(0, 1, 2), max_turns=2)
    assert [c.replies for c in done] == [("1",)] * 3
    assert row == {"board": [[0, 0]]}


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


def test_a_reply_has_no_length_and_no_reward():
    def steps(completion_ids, **_):
        return [[1.0, 1.0, 50.0, 50.0, 1.0], 2.0]

    scores = Scorer([steps, LengthPenalty(max_length=4, buffer=2)])(rollout(), ["a", "b"])
    assert scores.parts["steps"].tolist() == [3.0, 2.0]
    assert scores.parts["LengthPenalty"].tolist() == [-0.5, 0.0]
    assert scores.tokens.tolist() == [[1, 1, 0, 0, 1], [0, 0, 0, 0, 0]]
    assert gather_experience(rollout(), scores, lambda share: [share]).rewards.sum(1).tolist() == [2.5, 2.0]
    with pytest.raises(RewardError, match=r"one number per token, 5, got 6"):
        Scorer([lambda **_: [[1.0] * 6, 2.0]])(rollout(), ["a", "b"])


def test_samples_count_what_was_sampled(tokenizer):
    assert sample_columns(rollout(), Scores(torch.tensor([1.0, 2.0])), tokenizer)["length"] == [3, 1]


def test_responses_ahead_are_not_those_of_another_conversation():
    prompts = rollout().prompts
    talks = [
        Conversation(answer),
        Conversation(answer, max_turns=2),
        Conversation(digits),
        Conversation(answer, role=None),
        Conversation(answer, max_reply_length=32),
    ]
    found = [RolloutCallback(conversation=one)._keys(prompts) for one in (None, *talks)]
    assert len(set(map(tuple, found))) == 6
    assert found[0] == keys(prompts, RolloutCallback().sampling)
    assert found[1] == RolloutCallback(conversation=Conversation(answer))._keys(prompts)


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
        pytest.param("tiny_ppo.yaml", [], marks=pytest.mark.slow),
        ("tiny_grpo.yaml", ["--rollout.async_level=1", "--model.init_args.correction={}"]),
        pytest.param("tiny_grpo.yaml", ["--rollout.filter_groups={}"], marks=pytest.mark.slow),
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
    from examples.guess import near, reply, rows, solved

    assert [reply([text], 50) for text in ("12", "I say 77!", "hm", "50")] == [
        "higher",
        "lower",
        "That is no number.",
        None,
    ]
    turns = [["50"], ["12", "higher", "49"], ["x"]]
    assert solved(turns, [50, 50, 50]) == [1.0, 0.0, 0.0]
    assert near(turns, [50, 50, 50]) == [1.0, 0.5, 0.0]
    said = [message["content"] for message in rows()[0]["prompt"]]
    assert said[1:6] == ["50", "lower", "25", "higher", "37"]
    assert said[6] == said[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reply": "my_tools.reply"}, "reply must be a function, in YAML its dotted path, got 'my_tools.reply'"),
        ({"max_turns": 0}, "max_turns must be at least 1, got 0"),
        ({"max_reply_length": -1}, "max_reply_length must be at least 1, got -1"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
    ],
)
def test_a_conversation_that_cannot_be_held_is_one_line(options, message):
    with pytest.raises(ValueError, match=rf"rollout\.conversation\.{message}"):
        Conversation(**{"reply": answer} | options)
