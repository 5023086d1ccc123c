"""From rows to token ids."""

from __future__ import annotations

import itertools
import json

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from lightning_rlhf.prompts import PromptEncoder, PromptTable
from lightning_rlhf.tiny import tiny_model

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]

some_rows = [{"prompt": f"row {i}", "answer": i} for i in range(3)]


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny_model())


@pytest.fixture
def bos_tokenizer(tokenizer):
    """Puts a BOS before every text, as Llama's does."""
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    return tokenizer


# -- token ids ---------------------------------------------------------------------------------------------------------
def encode(tokenizer, prompt, **settings):
    encoder = PromptEncoder(tokenizer, **settings)
    (ids,) = encoder([encoder.render(prompt)])
    return ids


def test_text_is_taken_as_it_is(tokenizer):
    for text in ("2 + 2 =", " spaces \n", "user: no template"):
        assert tokenizer.decode(encode(tokenizer, text)) == text


def test_a_conversation_gets_the_chat_template_once_with_the_generation_prompt(tokenizer):
    expected = "system: be brief\nuser: hi\nassistant: "
    assert tokenizer.decode(encode(tokenizer, CHAT)) == expected
    assert encode(tokenizer, CHAT) == tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, tokenize=True, return_dict=False
    )


def test_text_can_be_wrapped_and_a_system_prompt_added_where_there_is_none(tokenizer):
    assert tokenizer.decode(encode(tokenizer, "hi", chat_template=True)) == "user: hi\nassistant: "
    wrapped = encode(tokenizer, "hi", chat_template=True, system_prompt="sums")
    assert tokenizer.decode(wrapped) == "system: sums\nuser: hi\nassistant: "
    assert encode(tokenizer, CHAT[1:], system_prompt="sums") == wrapped
    assert encode(tokenizer, CHAT, system_prompt="sums") == encode(tokenizer, CHAT)
    with pytest.raises(ValueError, match=r"set data\.chat_template: true"):
        encode(tokenizer, "hi", system_prompt="sums")


def test_a_conversation_that_ends_in_an_assistant_message_is_continued(tokenizer):
    begun = [*CHAT, {"role": "assistant", "content": "<think>"}]
    assert tokenizer.decode(encode(tokenizer, begun)) == "system: be brief\nuser: hi\nassistant: <think>"


def test_the_template_gets_its_variables(tokenizer):
    tokenizer.chat_template = "{% if thinking %}think{% else %}do not think{% endif %}"
    assert tokenizer.decode(encode(tokenizer, CHAT, template_args={"thinking": True})) == "think"


BOS_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize("template", [None, BOS_TEMPLATE])
@pytest.mark.parametrize("prompt", ["text", "<bos>text", CHAT])
def test_there_is_exactly_one_bos_where_the_tokenizer_adds_one(bos_tokenizer, prompt, template):
    bos_tokenizer.chat_template = template or bos_tokenizer.chat_template
    for wrap in (False, True):
        if wrap and prompt == "<bos>text":
            continue  # a BOS inside a message is the user's
        ids = encode(bos_tokenizer, prompt, chat_template=wrap)
        assert ids[0] == bos_tokenizer.bos_token_id
        assert ids.count(bos_tokenizer.bos_token_id) == 1


def test_there_is_no_bos_where_the_tokenizer_adds_none(tokenizer):
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    assert tokenizer.bos_token_id not in encode(tokenizer, "text") + encode(tokenizer, CHAT)


def test_an_eos_that_the_tokenizer_would_add_is_not_in_a_prompt(tokenizer):
    eos = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {eos[0]}", special_tokens=[eos])
    assert tokenizer("a").input_ids[-1] == eos[1]
    assert eos[1] not in encode(tokenizer, "text")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ([], "is empty"),
        ([{"role": "user", "content": ""}], "is empty"),
        (None, "must be text or a list of messages with role and content, got nothing"),
        (3, "got int '3'"),
        ([{"content": "no role"}], "got list"),
        (["text"], "got list"),
        ({"role": "user", "content": "x"}, "got dict"),
        ([{"role": "alien", "content": "x"}], "is refused by the chat template: only users"),
    ],
)
def test_a_prompt_that_is_none_is_an_error_that_names_its_row(tokenizer, prompt, message):
    tokenizer.chat_template = "{{ raise_exception('only users') }}"
    rows = [{"prompt": "fine"}, {"prompt": prompt}]
    with pytest.raises(ValueError, match=f"data: the prompt of row 1 .*{message}") as caught:
        PromptTable.build(rows, range(2), PromptEncoder(tokenizer))
    assert "\n" not in str(caught.value)


def test_a_text_that_was_cut_inside_a_character_is_shown(tokenizer):
    rows = [{"prompt": "fine"}, {"prompt": json.loads(r'"cut \ud83d"')}]
    with pytest.raises(
        ValueError, match=r"data: 'cut \\ud83d' is no Unicode text \(surrogates not allowed\): mend or drop"
    ):
        PromptTable.build(rows, range(2), PromptEncoder(tokenizer))


def test_conversations_need_a_template_and_rows_the_column(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="row 0 needs a chat template, but the tokenizer has none"):
        PromptTable.build([{"prompt": CHAT}], range(1), PromptEncoder(tokenizer))
    with pytest.raises(ValueError, match="row 0 has no column 'prompt', only question, answer"):
        PromptTable.build([{"question": "a", "answer": "b"}], range(1), PromptEncoder(tokenizer))


# -- the table ---------------------------------------------------------------------------------------------------------
def test_the_table_gives_ids_raw_prompts_columns_and_row_numbers(tokenizer):
    rows = [{"prompt": "a", "answer": 1}, {"prompt": CHAT, "level": "hard"}, {"prompt": "ccc", "answer": 3}]
    table = PromptTable.build(rows, range(3), PromptEncoder(tokenizer), first_index=10)
    batch = table.take([2, 1])
    assert [tokenizer.decode(ids) for ids in batch.ids] == ["ccc", "system: be brief\nuser: hi\nassistant: "]
    assert batch.raw == ["ccc", CHAT]
    assert batch.columns == {"answer": [3, None], "level": [None, "hard"]}
    assert batch.index.tolist() == [12, 11]
    assert table.longest == len(batch.ids[1])
    short = table.where(lambda ids: len(ids) < 5)
    assert short.take([0, 1]).index.tolist() == [10, 12]


def test_an_empty_piece_has_the_same_columns(tokenizer):
    empty = PromptTable.build(some_rows, range(3), PromptEncoder(tokenizer)).take([])
    assert len(empty) == 0
    assert empty.columns == {"answer": []}
    assert empty.index.shape == (0,)


def test_keys_that_only_other_messages_have_are_not_in_a_conversation(tmp_path, tokenizer):
    from datasets import Dataset

    named = [{"role": "user", "content": "x", "name": "bob"}]
    rows = Dataset.from_list([{"prompt": CHAT}, {"prompt": named}])
    assert "name" in rows[0]["prompt"][0]  # Arrow fills it up
    table = PromptTable.build(rows, range(2), PromptEncoder(tokenizer))
    assert table.take([0, 1]).raw == [CHAT, named]


def test_rows_beyond_one_chunk_are_tokenised_in_order(tokenizer):
    rows = [{"prompt": f"{i}"} for i in range(2500)]
    table = PromptTable.build(rows, range(100, 2400), PromptEncoder(tokenizer))
    assert [tokenizer.decode(ids.tolist()) for ids in itertools.islice(table.ids, 0, None, 97)] == [
        f"{i}" for i in range(100, 2400, 97)
    ]
