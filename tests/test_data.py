"""The data module: what is trained on, what is validated on, and the errors that come before anything else."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser
from transformers import AutoTokenizer

from lightning_rlhf.data import PromptDataModule, ValidationSet
from lightning_rlhf.rewards import exact_answer, reasoning_gym
from lightning_rlhf.tiny import tiny_model

rows = [{"prompt": f"{i:>3}", "answer": str(i)} for i in range(20)]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny_model())


def ready(module_tokenizer, /, stage="fit", ranks=1, rank=0, **settings):
    """A data module as a trainer with ``ranks`` data ranks would have set it up."""
    settings = {"path": f"{__name__}.rows", "batch_size": 6} | settings
    data = PromptDataModule(**{name: value for name, value in settings.items() if value is not None})
    done = SimpleNamespace(completed=0)
    data.trainer = SimpleNamespace(
        lightning_module=SimpleNamespace(tokenizer=module_tokenizer),
        distributed_sampler_kwargs={"num_replicas": ranks, "rank": rank} if ranks > 1 else None,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(total=done))),
        num_training_batches=1,
        limit_val_batches=1.0,
    )
    data.prepare_data()
    data.setup(stage)
    return data


def indices(loader):
    return [batch["prompts"].index.tolist() for batch in loader]


# -- batches -----------------------------------------------------------------------------------------------------------
def test_a_batch_holds_this_ranks_prompts_with_their_columns(tokenizer):
    split = [ready(tokenizer, ranks=3, rank=r).train_dataloader() for r in range(3)]
    assert [len(loader) for loader in split] == [3, 3, 3]
    together = [list(chain(*batches)) for batches in zip(*map(indices, split), strict=True)]
    assert together == indices(ready(tokenizer).train_dataloader())
    batch = next(iter(split[1]))["prompts"]
    assert len(batch) == 2
    assert batch.columns == {"answer": [str(i) for i in batch.index.tolist()]}
    assert (
        [tokenizer.decode(ids) for ids in batch.ids] == batch.raw == [rows[i]["prompt"] for i in batch.index.tolist()]
    )


def test_order_follows_the_seed_or_the_data(tokenizer):
    first = [
        indices(ready(tokenizer, **s).train_dataloader())[0] for s in ({}, {"seed": 0}, {"seed": 1}, {"shuffle": False})
    ]
    assert first[0] == first[1] != first[2]
    assert first[3] == list(range(6))


def test_the_tokenizer_is_the_modules_or_the_one_that_is_named(tokenizer):
    named = ready(None, tokenizer="random:tiny").train_table
    assert named.ids == ready(tokenizer).train_table.ids
    with pytest.raises(ValueError, match=r"data\.tokenizer must be given"):
        ready(None)
    with pytest.raises(ValueError, match=r"data\.tokenizer: './nothing' cannot be loaded"):
        ready(None, tokenizer="./nothing")


def test_other_prompt_columns_and_chat_settings_reach_the_encoder(tokenizer, tmp_path):
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "hi", "prompt": "not this"}) + "\n")
    path = str(tmp_path / "q.jsonl")
    data = ready(
        tokenizer, path=path, batch_size=1, prompt_column="question", chat_template=True, system_prompt="be brief"
    )
    batch = next(iter(data.train_dataloader()))["prompts"]
    assert tokenizer.decode(batch.ids[0]) == "system: be brief\nuser: hi\nassistant: "
    assert batch.raw == ["hi"]
    assert batch.columns == {"prompt": ["not this"]}
    assert data.longest_prompt == len(batch.ids[0])


# -- validation --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_held_out_rows_are_validated_once_and_never_trained_on(tokenizer, ranks):
    split = [ready(tokenizer, ranks=ranks, rank=r, val_size=7, val_batch_size=5) for r in range(ranks)]
    validated = [indices(data.val_dataloader()[0]) for data in split]
    assert {len(batches) for batches in validated} == {2}
    assert sorted(row for batches in validated for batch in batches for row in batch) == list(range(13, 20))
    trained = {row for data in split for batch in indices(data.train_dataloader()) for row in batch}
    assert trained <= set(range(13))


def test_validation_data_of_their_own_continue_the_row_numbers(tokenizer, tmp_path):
    (tmp_path / "val.jsonl").write_text("".join(json.dumps({"prompt": f"v{i}"}) + "\n" for i in range(3)))
    data = ready(tokenizer, val_path=str(tmp_path / "val.jsonl"))
    assert indices(data.val_dataloader()[0]) == [[20, 21, 22]]
    assert len(data.train_table) == 20
    assert data.trainer.limit_val_batches == 1.0


def test_validation_can_be_another_split_of_the_same_data(tokenizer, tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"prompt": split}) + "\n")
    data = ready(tokenizer, path=str(tmp_path), batch_size=1, val_split="test")
    assert next(iter(data.train_dataloader()))["prompts"].raw == ["train"]
    assert next(iter(data.val_dataloader()[0]))["prompts"].raw == ["test"]


def test_several_validation_sets_have_names_and_rows_of_their_own(tokenizer, tmp_path):
    (tmp_path / "val.jsonl").write_text("".join(json.dumps({"prompt": f"v{i}"}) + "\n" for i in range(3)))
    sums = ValidationSet(task="chain_sum", task_args=SUMS, size=4)
    split = [
        ready(tokenizer, ranks=2, rank=r, val={"words": str(tmp_path / "val.jsonl"), "sums": sums}, val_batch_size=4)
        for r in range(2)
    ]
    assert split[0].val_names == ["words", "sums"]
    with pytest.raises(ValueError, match=r"data\.val needs one of path and task, got 'a' and 'b'"):
        ValidationSet("a", "b")
    words, sums = zip(*(map(indices, data.val_dataloader()) for data in split), strict=True)
    assert (words, sums) == (([[20, 21]], [[22]]), ([[23, 24]], [[25, 26]]))
    assert len(split[0].train_table) == 20


def test_validating_alone_does_not_need_a_training_batch(tokenizer):
    data = ready(tokenizer, stage="validate", val_size=4, batch_size=1000)
    assert indices(data.val_dataloader()[0]) == indices(data.test_dataloader()[0]) == [[16, 17, 18, 19]]


def test_without_validation_prompts_there_is_no_validation(tokenizer):
    assert ready(tokenizer).trainer.limit_val_batches == 0
    with pytest.raises(
        ValueError, match="data has no validation prompts: set val, val_path, val_split, val_task or val_size"
    ):
        ready(tokenizer, stage="validate")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"val_size": 3}, "heldout"),
        ({"val_path": "data/aime.test.jsonl"}, "aime.test"),
        ({"val_path": "openai/gsm8k"}, "gsm8k"),
        ({"val_path": "my_pkg.prompts"}, "prompts"),
        ({"val_split": "test[:100]"}, "test"),
        ({"val_task": "chain_sum", "val_size": 3}, "chain_sum"),
    ],
)
def test_the_validation_set_has_a_name_for_the_metrics(settings, name):
    assert PromptDataModule(path="p.jsonl", **settings).val_names == [name]


def test_a_second_setup_keeps_what_was_read(tokenizer):
    data = ready(tokenizer, val_size=2)
    tables = data.train_table, data.val_tables
    data.setup("fit")
    data.setup("validate")
    assert (data.train_table, data.val_tables) == tables
    assert data.train_table is tables[0]


def test_a_module_with_another_tokenizer_gets_prompts_of_its_own(tokenizer):
    data = ready(tokenizer, val_size=2)
    other = AutoTokenizer.from_pretrained(tiny_model())
    other.add_tokens([" 7"])
    data.trainer.lightning_module = SimpleNamespace(tokenizer=other)
    data.setup("fit")
    table, numbers = data.train_table, data.train_table.numbers
    assert len(table.ids[numbers.index(7)]) == 2
    assert table.ids[numbers.index(7)].tolist() == other("  7")["input_ids"]


def test_validation_sets_may_be_given_by_their_fields_or_rows(tokenizer):
    data = ready(tokenizer, val={"a": {"path": f"{__name__}.rows"}, "b": rows[:3]})
    assert {name: len(table) for name, table in data.val_tables.items()} == {"a": 20, "b": 3}
    assert ready(tokenizer, val_path=rows).val_names == ["heldout"]


# -- tasks -------------------------------------------------------------------------------------------------------------
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_a_task_gives_prompts_that_its_reward_can_score(tokenizer):
    data = ready(tokenizer, path=None, task="chain_sum", task_args=SUMS, task_size=50, prompt_column="ignored")
    batch = next(iter(data.train_dataloader()))["prompts"]
    assert all("+" in prompt or "-" in prompt for prompt in batch.raw)
    assert (
        reasoning_gym(batch.columns["answer"], *(batch.columns[c] for c in ("task", "task_args", "entry"))) == [1.0] * 6
    )
    assert exact_answer(batch.columns["answer"], **batch.columns) == [1.0] * 6


def test_a_question_of_the_validation_set_is_not_trained_on_either(tokenizer):
    data = ready(tokenizer, path=None, task="chain_sum", task_args=SUMS, task_size=400, val_size=60)
    tables = data.train_table, data.val_tables["heldout"]
    train, val = ({ids.tobytes() for ids in table.ids} for table in tables)
    assert len(tables[1]) == 60
    assert not train & val
    assert len(data.train_table) < 340  # there were some: one-digit sums repeat
    data = ready(
        tokenizer, path=None, task="chain_sum", task_args=SUMS, val_task="chain_sum", val_task_args=SUMS, val_size=60
    )
    (validation,) = data.val_tables.values()
    assert not {ids.tobytes() for ids in data.train_table.ids} & {ids.tobytes() for ids in validation.ids}
    assert validation.take([0]).index.tolist() == [5000]


def test_validation_can_be_a_task_beside_a_file(tokenizer):
    data = ready(tokenizer, val_task="chain_sum", val_size=4)
    (batch,) = data.val_dataloader()[0]
    assert batch["prompts"].index.tolist() == [20, 21, 22, 23]
    assert len(data.train_table) == 20


# -- limits and errors -------------------------------------------------------------------------------------------------
lengths = [{"prompt": "x" * n} for n in (3, 9, 4, 12, 5)]


def test_overlong_prompts_are_dropped_and_counted_or_refused(tokenizer, caplog):
    settings = {"path": f"{__name__}.lengths", "batch_size": 1, "val_size": 2, "max_prompt_length": 5}
    with caplog.at_level(logging.INFO):
        data = ready(tokenizer, **settings)
    assert data.train_table.numbers == [0, 2]
    assert data.val_tables["heldout"].numbers == [4]  # row 3 stays held out
    assert "dropped 1 of 3 training prompts, longer than 5 tokens" in caplog.text
    assert "dropped 1 of 2 validation prompts, longer than 5 tokens" in caplog.text
    with pytest.raises(ValueError, match=r"prompt of row 3 has 12 tokens, more than data\.max_prompt_length=5"):
        ready(tokenizer, overlong="error", **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": None}, "exactly one of path and task, got path=None and task=None"),
        ({"task": "chain_sum"}, "exactly one of path and task"),
        ({"val_path": "a", "val_task": "b"}, "one of val_path and val_task"),
        ({"val_task": "chain_sum"}, r"needs data\.val_size"),
        ({"val_path": "a", "val_size": 1}, r"data\.val_size holds out training rows"),
        ({"val": {"a": "b"}, "val_size": 1}, r"data\.val names all validation sets: leave out val_path"),
        ({"val": {"a": {"pth": "b"}}}, r"a set of data\.val has no pth: see ValidationSet"),
        ({"val_split": "test", "val_size": 1}, r"data\.val_size holds out training rows"),
        ({"path": None, "task": "chain_sum", "val_split": "test"}, r"data\.val_split needs data\.path"),
        ({"val_size": 20}, r"data\.val_size=20 must be smaller than the data, which has 20 rows"),
        ({"batch_size": 0}, "must be positive"),
        ({"batch_size": 21}, r"data\.batch_size=21 is more than the 20 training prompts there are"),
        ({"batch_size": 16, "val_size": 5}, "batch_size=16 is more than the 15 training prompts"),
        ({"ranks": 4}, r"data\.batch_size=6 must be a multiple of the 4 data ranks: take 4 or 8"),
        ({"ranks": 8}, r"data\.batch_size=6 must be a multiple of the 8 data ranks: take 8$"),
        ({"prompt_column": "question"}, "row 0 has no column 'question', only prompt, answer"),
    ],
)
def test_impossible_settings_are_one_line_that_says_what_to_change(tokenizer, settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        ready(tokenizer, **settings)
    assert "\n" not in str(caught.value)


def test_the_constructor_is_a_schema(tmp_path):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PromptDataModule, "data")
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "x"}) + "\n")
    given = parser.parse_object({"data": {"path": str(tmp_path / "p.jsonl"), "batch_size": 2, "max_prompt_length": 8}})
    data = PromptDataModule(**given.data.as_dict())
    assert (data.path, data.batch_size, data.max_prompt_length) == (str(tmp_path / "p.jsonl"), 2, 8)
    sets = {"a": "a.jsonl", "b": {"task": "chain_sum", "size": 3}}
    given = parser.parse_object({"data": {"path": "p.jsonl", "val": sets}})
    made = parser.instantiate_classes(given).data
    assert made.val_sets == {"a": ValidationSet("a.jsonl"), "b": ValidationSet(task="chain_sum", size=3)}
    for wrong in (
        {"batch_size": 0},
        {"val": {"a": {"task": "c", "size": 0}}},
        {"val_size": -1},
        {"overlong": "cut"},
        {"max_prompt_length": "long"},
        {"batchsize": 1},
    ):
        with pytest.raises(ArgumentError):
            parser.parse_object({"data": {"path": "p.jsonl"} | wrong})
    assert "prompts per iteration, over all data ranks" in parser.format_help()


# -- the example -------------------------------------------------------------------------------------------------------
GSM8K = [
    {"question": "Tom has 3 bags of 6 apples. How many?", "answer": "3 * 6 = <<3*6=18>>18 apples.\n#### 18"},
    {"question": " A car costs $1,000 and a tax of 20%. Total? ", "answer": "200 more.\n#### 1,200"},
    {"question": "It was 5 degrees and fell by 9. What is it?", "answer": "5 - 9 = -4\n####  -4"},
]


def test_the_gsm8k_example_makes_prompts_that_can_be_trained_on(tokenizer, tmp_path):
    example = Path(__file__).parents[1] / "examples" / "gsm8k.py"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GSM8K))
    command = [sys.executable, example, tmp_path / "out" / "p.jsonl", "--source", tmp_path / "rows.jsonl"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.endswith("p.jsonl: 3 prompts\n")
    data = ready(tokenizer, path=str(tmp_path / "out" / "p.jsonl"), batch_size=3, shuffle=False)
    batch = next(iter(data.train_dataloader()))["prompts"]
    assert batch.columns == {"answer": ["18", "1200", "-4"]}
    asked = tokenizer.decode(batch.ids[1])
    assert asked.endswith("user: A car costs $1,000 and a tax of 20%. Total?\nassistant: ")
    assert "\\boxed{}" in asked
    assert exact_answer([r"\boxed{18}", r"so \boxed{1200}", r"\boxed{4}"], **batch.columns) == [1.0, 1.0, 0.0]
    assert exact_answer([r"\boxed{18}"], answer=[GSM8K[0]["answer"]]) == [1.0]  # the raw solutions do as well


def test_prompts_move_to_a_device_without_their_lists_changing(tokenizer):
    batch = next(iter(ready(tokenizer).train_dataloader()))["prompts"]
    moved = batch.to(torch.device("meta"))
    assert moved.index.is_meta
    assert moved.ids is batch.ids
