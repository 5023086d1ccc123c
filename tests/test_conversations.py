"""Demonstrations and pairs: which tokens are learned, in every format, and what is wrong with a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lightning_rlhf import PreferenceDataModule, SFTDataModule
from lightning_rlhf.conversations import Labelled, demonstration, preference, tokenise
from lightning_rlhf.conversations import answer as pieces_of
from lightning_rlhf.prompts import PromptEncoder
from lightning_rlhf.tiny import EOS, tiny_model

TALK = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "22"},
    {"role": "user", "content": "bye"},
]
FORGETFUL = (  # as templates of reasoning models: what was thought is written for the last answer only
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model())


def learned(one: Labelled, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [tokenizer.decode(one.ids[start:end]) for start, end in one.spans]


def label(row: dict[str, Any], encoder: PromptEncoder, *args: Any) -> Labelled:
    return tokenise([demonstration(row, encoder, *args)], encoder)[0]


@pytest.mark.parametrize(
    ("row", "how", "spans"),
    [
        ({"prompt": "1+1=", "completion": "2"}, "completions", [f"2{EOS}"]),
        ({"prompt": "1+1=", "completion": "2"}, "all", ["+1=", f"2{EOS}"]),
        ({"text": "abc"}, "completions", [f"bc{EOS}"]),
        ({"messages": TALK}, "completions", ["1\n", "22\n"]),
        ({"prompt": "1+1=", "completion": f"2{EOS}"}, "completions", [f"2{EOS}"]),
        ({"text": f"abc{EOS}"}, "completions", [f"bc{EOS}"]),
        ({"messages": TALK[:4]}, "last", ["22\n"]),
        ({"messages": TALK}, "last", ["22\n"]),
        ({"messages": TALK[:2]}, "all", ["ser: one?\nassistant: 1\n"]),
        ({"prompt": TALK[:3], "completion": TALK[3:4]}, "completions", ["22\n"]),
        ({"prompt": TALK[:3], "completion": "22"}, "completions", ["22\n"]),
        ({"messages": None, "text": None, "prompt": "a", "completion": "b"}, "completions", [f"b{EOS}"]),
    ],
)
def test_what_is_learned_of_a_demonstration(row, how, spans, tokenizer):
    """The very first token is predicted by nothing."""
    assert learned(label(row, PromptEncoder(tokenizer), how), tokenizer) == spans


def test_an_answer_continues_the_ids_of_a_prompt_for_rollouts(tokenizer):
    for prompt, wraps in (("7+8=", False), ("7+8=", True), (TALK[:3], False)):
        encoder = PromptEncoder(tokenizer, wraps, system_prompt="Be brief." if wraps else None)
        one = tokenise([pieces_of(prompt, "15", encoder)], encoder)[0]
        asked = encoder([encoder.render(prompt)])[0]
        assert one.ids[: one.spans[0][0]].tolist() == asked


def test_a_bos_comes_once_and_never_between_pieces(tokenizer):
    tokenizer.add_tokens(["<bos>"], special_tokens=True)
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.convert_tokens_to_ids("<bos>")
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    one = label({"prompt": "a", "completion": "b"}, PromptEncoder(tokenizer))
    assert one.ids.tolist().count(bos) == 1
    assert one.ids[0] == bos


def test_every_format_of_a_pair_is_the_same_pair(tokenizer):
    encoder, asked = PromptEncoder(tokenizer), TALK[:1]
    good, bad = {"role": "assistant", "content": "1"}, {"role": "assistant", "content": "9"}
    rows = [
        {"prompt": asked, "chosen": [good], "rejected": [bad]},
        {"prompt": asked, "chosen": "1", "rejected": "9"},
        {"chosen": [*asked, good], "rejected": [*asked, bad]},
        {"prompt": "one?", "chosen": [*asked, good], "rejected": [*asked, bad]},
    ]
    found = []
    for row in rows:
        prompt, *sides = preference(row)
        found.append(
            [learned(one, tokenizer) for one in tokenise([pieces_of(prompt, s, encoder) for s in sides], encoder)]
        )
    assert found == [[["1\n"], ["9\n"]]] * 4


def test_texts_without_a_prompt_begin_with_it():
    asked = "\n\nHuman: 2 + 2?\n\nAssistant:"
    pair = preference({"chosen": f"{asked} four", "rejected": f"{asked} five"})
    assert pair == (asked, " four", " five")
    assert preference({"chosen": f"{asked} 4", "rejected": f"{asked} 5"}) == (asked, " 4", " 5")
    for chosen, rejected in (("a", "b"), (asked, f"{asked} 5")):
        with pytest.raises(ValueError, match="needs a prompt"):
            preference({"chosen": chosen, "rejected": rejected})


def test_a_template_that_rewrites_earlier_turns_is_refused_unless_the_last_one_is_learned(tokenizer):
    tokenizer.chat_template = FORGETFUL
    encoder = PromptEncoder(tokenizer)
    with pytest.raises(
        ValueError, match=r"writes earlier messages in another way .* set data\.train_on to last or all"
    ):
        label({"messages": TALK}, encoder)
    assert learned(label({"messages": TALK[:4]}, encoder, "last"), tokenizer) == ["<think></think>22\n"]


BAD = {
    "needs messages, prompt and completion, or text, it has question": ("sft", {"question": "a"}),
    "has no assistant message to learn from": ("sft", {"messages": TALK[:1]}),
    "must not begin with an assistant message": ("sft", {"messages": TALK[1:2]}),
    "has a wrong messages: it must be a list of messages with role and content, got text": (
        "sft",
        {"messages": "hello"},
    ),
    "has a wrong prompt: it is empty": ("sft", {"prompt": " ", "completion": "b"}),
    "needs chosen and rejected, and a prompt unless they are conversations; it has prompt, chosen": (
        "pairs",
        {"prompt": "a", "chosen": "b"},
    ),
    "has the same chosen and rejected: drop it": ("pairs", {"prompt": "a", "chosen": "b", "rejected": "b"}),
    "needs a prompt, or a chosen and a rejected that begin with it or are whole conversations": (
        "pairs",
        {"chosen": "b", "rejected": "c"},
    ),
    "must have a chosen and a rejected that differ in their last message only": (
        "pairs",
        {"chosen": TALK[:2], "rejected": TALK[2:4]},
    ),
    "needs chosen and rejected, and a prompt unless they are conversations; it has prompt, rejected": (
        "pairs",
        {"prompt": "a", "chosen": "", "rejected": "b"},
    ),
    "has a wrong answer: it must end in an assistant message, got one of the user": (
        "pairs",
        {"chosen": TALK[:3], "rejected": [*TALK[:2], TALK[4]]},
    ),
    "has a margin of nan: give a number, or leave it out": (
        "pairs",
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": float("nan")},
    ),
    "could not convert string to float: 'much'": (
        "pairs",
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"},
    ),
    "has images: only rollouts take them": ("sft", {"text": "a", "images": [{"bytes": b"", "path": None}]}),
}
GOOD = {"sft": {"text": "ab"}, "pairs": {"prompt": "a", "chosen": "b", "rejected": "c"}}
rows: list[dict[str, Any]] = []


def from_memory() -> list[dict[str, Any]]:
    return rows


def data_of(kind: str, *own: dict[str, Any], **options: Any) -> SFTDataModule | PreferenceDataModule:
    rows[:] = own
    module = SFTDataModule if kind == "sft" else PreferenceDataModule
    return module("test_conversations.from_memory", **{"tokenizer": "random:tiny", "batch_size": 1, **options})


@pytest.mark.parametrize("message", BAD)
def test_a_wrong_row_is_one_error_that_names_it(message):
    kind, row = BAD[message]
    with pytest.raises(ValueError, match=r"^data: row 1 ") as caught:
        data_of(kind, GOOD[kind], row).setup("fit")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_row_of_the_validation_data_is_told_from_one_of_the_training_data(tmp_path):
    (tmp_path / "held.jsonl").write_text(json.dumps({"question": "a"}))
    with pytest.raises(ValueError, match=r"^data\.val_path: row 0 needs messages"):
        data_of("sft", GOOD["sft"], val_path=str(tmp_path / "held.jsonl")).setup("fit")


def test_margins_are_there_for_all_pairs_or_for_none():
    pair = GOOD["pairs"]
    data = data_of("pairs", pair | {"margin": 1}, pair | {"margin": "2.5"})
    data.setup("fit")
    assert data.train_table.take([1, 0]).margins.tolist() == [2.5, 1.0]
    with pytest.raises(ValueError, match="data: row 1 has no margin and others have: give all rows one, or none"):
        data_of("pairs", pair | {"margin": 1}, pair).setup("fit")


def test_long_sequences_are_dropped_or_refused_and_never_cut():
    own = [{"text": "abcdefgh"}, {"text": "ab"}, {"text": "abc"}]
    data = data_of("sft", *own, max_length=4, shuffle=False)
    data.setup("fit")
    assert [len(batch["examples"].sequences[0]) for batch in data.train_dataloader()] == [3, 4]
    assert (data.longest_sequence, data.longest_example) == (4, 4)
    with pytest.raises(ValueError, match=r"data: row 0 has a sequence of 9 tokens, more than data\.max_length=4"):
        data_of("sft", *own, max_length=4, overlong="error").setup("fit")
    with pytest.raises(ValueError, match=r"data\.max_length=2 leaves none of the 3 training rows: raise it"):
        data_of("sft", *own, max_length=2).setup("fit")
    with pytest.raises(
        ValueError, match=r"data\.batch_size=1 is more than the 0 training rows|must be smaller than the data"
    ):
        data_of("sft", *own, val_size=3).setup("fit")
    with pytest.raises(ValueError, match=r"data\.batch_size=4 is more than the 3 training rows there are: lower it"):
        data_of("sft", *own, batch_size=4).setup("fit")


def test_rows_to_validate_on_come_from_one_place():
    with pytest.raises(ValueError, match=r"data\.val_size holds out training rows: leave it out beside val_path"):
        data_of("sft", {"text": "a"}, val_size=1, val_path="other.jsonl")
    with pytest.raises(ValueError, match=r"data has no validation rows: set val_path, val_split or val_size"):
        data_of("sft", {"text": "a"}).setup("validate")


def test_files_of_all_kinds_hold_the_same_rows(tmp_path: Path):
    from datasets import Dataset

    own = [{"prompt": f"{i}+{i}=", "completion": f"is {2 * i}"} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    Dataset.from_list(own).to_csv(tmp_path / "rows.csv")
    Dataset.from_list(own).to_parquet(tmp_path / "rows.parquet")
    prints = set()
    for kind in ("jsonl", "csv", "parquet"):
        data = SFTDataModule(str(tmp_path / f"rows.{kind}"), tokenizer="random:tiny", batch_size=5)
        data.setup("fit")
        prints.add(data.fingerprint["fingerprint"])
    assert len(prints) == 1


def test_what_is_learned_is_part_of_the_fingerprint():
    prints = []
    for how in ("completions", "all"):
        data = data_of("sft", {"prompt": "ab", "completion": "c"}, train_on=how)
        data.setup("fit")
        prints.append(data.fingerprint["fingerprint"])
    assert prints[0] != prints[1]
