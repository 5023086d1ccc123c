"""Where rows come from."""

from __future__ import annotations

import json

import pytest

from lightning_rlhf.sources import TaskRows, read_rows

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]

some_rows = [{"prompt": f"row {i}", "answer": i} for i in range(3)]


def make_rows():
    yield from some_rows


no_dicts = ["a", "b"]
no_rows: list = []


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_jsonl_parquet_folder_and_code_give_the_same_rows(tmp_path):
    from datasets import Dataset

    write(tmp_path / "rows.jsonl", some_rows)
    Dataset.from_list(some_rows).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(some_rows))
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl", some_rows)
    before = sorted(tmp_path.rglob("*"))
    for path in ("rows.jsonl", "rows.json", "rows.parquet", "folder"):
        assert list(read_rows(str(tmp_path / path))) == some_rows
    assert sorted(tmp_path.rglob("*")) == before  # nothing is written beside the user's files
    assert list(read_rows(f"{__name__}.some_rows")) == some_rows
    assert list(read_rows(f"{__name__}.make_rows")) == some_rows


def test_rows_may_be_given_themselves():
    from datasets import Dataset

    data = Dataset.from_list(some_rows)
    for rows in (some_rows, iter(some_rows), make_rows, data, data.to_iterable_dataset()):
        assert list(read_rows(rows)) == some_rows
    with pytest.raises(ValueError, match="'int' must give dicts, got int"):
        read_rows(3)
    with pytest.raises(ValueError, match="'list' holds no rows"):
        read_rows([])


def test_a_changed_file_is_read_anew(tmp_path):
    path = write(tmp_path / "rows.jsonl", some_rows)
    assert len(read_rows(path)) == 3
    write(tmp_path / "rows.jsonl", [*some_rows, {"prompt": "a new row", "answer": 4}])
    assert len(read_rows(path)) == 4


def test_json_is_taken_as_it_stands(tmp_path):
    rows = [
        {"prompt": "when?", "answer": "2020-01-31", "meta": {"at": ["2020-01-31T00:00:00"]}},
        {"prompt": CHAT, "answer": 1.0, "meta": {"other": None}},
        {"prompt": "\u00e9\u4e2d\u2028", "answer": [1, "a"]},
    ]
    assert list(read_rows(write(tmp_path / "rows.jsonl", rows))) == rows
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n\n".join(json.dumps(row).encode() for row in rows))
    assert list(read_rows(str(tmp_path / "bom.jsonl"))) == rows
    (tmp_path / "lines.json").write_text((tmp_path / "rows.jsonl").read_text())
    assert list(read_rows(str(tmp_path / "lines.json"))) == rows


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "rows.jsonl",
            '{"prompt": "a"}\n\n{"prompt": \n',
            r"line 3 of .*rows\.jsonl' is not valid JSON \(Expecting value",
        ),
        ("rows.jsonl", '{"prompt": "a"}\n3\n', r"line 2 of .*rows\.jsonl' is not a JSON object"),
        ("rows.json", '[{"prompt": "a"}', r"rows\.json' is not valid JSON"),
        ("rows.json", "[1]", r"rows\.json' must give dicts, row 0 is a int"),
        ("rows.jsonl", "", r"rows\.jsonl' holds no rows"),
        ("rows.json", "[]", r"rows\.json' holds no rows"),
        ("rows.parquet", "nonsense", r"rows\.parquet' cannot be read as a data set"),
        ("rows.txt", "prompt", r"rows\.txt' must end in \.jsonl, \.json, \.parquet or \.csv"),
    ],
)
def test_a_bad_file_is_one_line_that_says_where(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        list(read_rows(str(tmp_path / name)))
    assert "\n" not in str(caught.value)


def test_a_file_in_another_encoding_says_so(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes('{"prompt": "café"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"line 1 of .* is not UTF-8 \(.*\): save the file in that encoding"):
        list(read_rows(str(tmp_path / "rows.jsonl")))
    (tmp_path / "rows.json").write_bytes('[{"prompt": "café"}]'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"rows\.json' is not valid JSON \('utf-8' codec"):
        read_rows(str(tmp_path / "rows.json"))
    (tmp_path / "rows.csv").write_bytes("prompt\ncafé\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"rows\.csv' cannot be read as a data set: 'utf-8' codec can't decode"):
        read_rows(str(tmp_path / "rows.csv"))


def test_a_data_set_with_its_splits_is_not_rows():
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list(some_rows)
    with pytest.raises(ValueError, match=r"holds several sets, train, test: name one, as in data\['train'\]"):
        read_rows(DatasetDict(train=rows, test=rows))


def test_splits_are_for_data_sets_that_have_some(tmp_path):
    from datasets import Dataset

    Dataset.from_list(some_rows).to_parquet(tmp_path / "rows.parquet")
    assert list(read_rows(str(tmp_path / "rows.parquet"), split="train[1:]")) == some_rows[1:]
    with pytest.raises(ValueError, match=r"data\.split='test' needs a data set with splits"):
        read_rows(write(tmp_path / "rows.jsonl", some_rows), split="test")


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("missing.jsonl", FileNotFoundError, "there is no file 'missing.jsonl'"),
        ("./missing", FileNotFoundError, "there is no file './missing'"),
        ("no_package.prompts", FileNotFoundError, "neither a file nor a hub data set, and cannot be imported"),
        (f"{__name__}.nothing", FileNotFoundError, "cannot be imported .*nothing"),
        (f"{__name__}.no_dicts", ValueError, "must give dicts, row 0 is a str"),
        (f"{__name__}.no_rows", ValueError, "holds no rows"),
    ],
)
def test_what_cannot_be_read_is_one_line_that_says_why(path, error, message):
    with pytest.raises(error, match=message) as caught:
        read_rows(path)
    assert "\n" not in str(caught.value)


def test_a_hub_data_set_is_not_fetched_offline(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"data\.path: 'nobody/nothing' cannot be read") as caught:
        read_rows("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_task_rows_are_a_function_of_the_seed_and_know_what_their_verifier_needs():
    rows = TaskRows("chain_sum", 4, seed=1, args={"max_terms": 2})
    assert len(list(rows)) == 4
    assert list(rows) == list(TaskRows("chain_sum", 4, seed=1, args={"max_terms": 2}))
    assert rows[0] != TaskRows("chain_sum", 4, seed=2, args={"max_terms": 2})[0]
    row = rows[3]
    assert row["prompt"] == row["entry"]["question"]
    assert (row["answer"], row["task"], row["task_args"]) == (row["entry"]["answer"], "chain_sum", {"max_terms": 2})
    with pytest.raises(IndexError):
        rows[4]


@pytest.mark.parametrize(
    ("task", "args"), [("no_task", {}), ("chain_sum", {"no_such": 1}), ("chain_sum", {"min_terms": 0})]
)
def test_an_impossible_task_is_one_line(task, args):
    with pytest.raises(ValueError, match=f"data.task: '{task}' with .* cannot be made: .+") as caught:
        TaskRows(task, 4, seed=0, args=args)
    assert "\n" not in str(caught.value)
