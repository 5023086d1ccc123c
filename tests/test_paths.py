"""Where a model is found: folders, URLs copied once, and one line when it is not there."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from lightning_rlhf.paths import is_hub_id, local_path
from lightning_rlhf.tiny import tiny_model


@pytest.fixture
def remote(tmp_path, monkeypatch) -> str:
    """The tiny model in a file system that is none of this machine's, and an empty cache."""
    source = tiny_model()
    monkeypatch.setenv("LIGHTNING_RLHF_CACHE", str(tmp_path / "cache"))
    fs = fsspec.filesystem("memory")
    if fs.exists("/bucket"):
        fs.rm("/bucket", recursive=True)
    fs.put(str(source), "/bucket/tiny", recursive=True)
    fs.pipe("/bucket/tiny/notes.md", b"not part of the model")
    return "memory://bucket/tiny"


def names(folder: str) -> set[str]:
    return {file.name for file in Path(folder).iterdir()}


def test_a_url_is_copied_once(remote):
    folder = local_path(remote)
    assert names(folder) == names(str(tiny_model()))
    fsspec.filesystem("memory").rm("/bucket", recursive=True)
    assert local_path(remote + "/") == folder


def test_a_plan_copies_no_weights(remote):
    folder = local_path(remote, weights=False)
    assert "config.json" in names(folder)
    assert not [name for name in names(folder) if name.endswith(".safetensors")]
    assert local_path(remote) != folder


def test_code_comes_only_when_it_is_trusted(remote):
    fsspec.filesystem("memory").pipe("/bucket/tiny/modeling.py", b"")
    assert "modeling.py" not in names(local_path(remote))
    assert "modeling.py" in names(local_path(remote, trust_remote_code=True))


def _copy(source: str, results: str, cache: str) -> None:
    os.environ["LIGHTNING_RLHF_CACHE"] = cache
    Path(results, str(os.getpid())).write_text(local_path(source))


def test_processes_that_start_at_once_get_one_whole_copy(tmp_path):
    source = tmp_path / "bucket"
    shutil.copytree(tiny_model(), source)
    (tmp_path / "results").mkdir()
    context = multiprocessing.get_context("fork")
    arguments = (f"file://{source}", str(tmp_path / "results"), str(tmp_path / "cache"))
    processes = [context.Process(target=_copy, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    found = {file.read_text() for file in (tmp_path / "results").iterdir()}
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(found) == 1
    assert names(found.pop()) == names(str(source))
    assert len([path for path in (tmp_path / "cache/models").iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "memory://nowhere/model",
            "'memory://nowhere/model' is neither a local folder nor a model that can be downloaded",
        ),
        ("nosuchprotocol://bucket/model", "can be downloaded (Protocol not known: nosuchprotocol"),
        ("/no/such/folder", "there is no folder '/no/such/folder'"),
        ("random:huge", "the only built-in model is 'random:tiny'"),
    ],
)
def test_what_is_not_there_ends_in_one_line(model, message, monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_RLHF_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError) as error:
        local_path(model)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_folder_without_a_config_is_no_model(remote):
    fsspec.filesystem("memory").rm("/bucket/tiny/config.json")
    with pytest.raises(FileNotFoundError, match=r"it holds no config\.json"):
        local_path(remote)


def test_names_of_the_hub_are_told_from_paths(tmp_path):
    assert is_hub_id("Qwen/Qwen2.5-0.5B")
    assert is_hub_id("gpt2")
    assert not any(
        map(is_hub_id, ("random:tiny", "s3://bucket/model", "/models/qwen", "./qwen", "a/b/c", str(tmp_path)))
    )


def test_models_of_the_hub_are_what_its_cache_holds(tmp_path):
    """In a process of its own: the hub's client looks at its variables when it is imported."""
    for name, weights in (("safe", "model.safetensors"), ("old", "pytorch_model.bin")):
        folder = tmp_path / "hub" / f"models--me--{name}"
        (folder / "snapshots/abc").mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs/main").write_text("abc")
        for file in ("config.json", weights):
            (folder / "snapshots/abc" / file).write_text("{}")
    asked = (
        "print(local_path('me/safe'), local_path('me/old'), local_path('me/safe', weights=False)); local_path('me/no')"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"from lightning_rlhf.paths import local_path; {asked}"],
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    found = [Path(folder).relative_to(tmp_path / "hub").parts[0] for folder in done.stdout.split()]
    assert found == ["models--me--safe", "models--me--old", "models--me--safe"]
    assert "'me/no' is neither a local folder nor a model that can be downloaded (" in done.stderr.splitlines()[-1]
