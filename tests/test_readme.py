"""The README's commands and code run, and its file tree is true."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from toys import command

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_subclass_of_the_readme_trains(tmp_path):
    (source,) = blocks("python")
    assert len([line for line in source.splitlines() if line.strip() and not line.startswith("#")]) <= 5
    (tmp_path / "my_ppo.py").write_text(source)
    given = re.search(r"(lightning-rlhf fit .*)", source)[1].replace("configs/", f"{ROOT}/configs/")
    line = [sys.executable, "-m", "lightning_rlhf", *shlex.split(given)[1:], "--trainer.max_steps=1"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "line", re.findall(r"^lightning-rlhf (?:fit|validate|plan|rewards) .*$", "\n".join(blocks("bash")), re.MULTILINE)
)
def test_every_command_of_the_readme_parses(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(line, comments=True)[1:]
    printed = command(*words, *(() if "--print_config" in words else ("--print_config",)))
    assert yaml.safe_load(printed)["model"]["class_path"] == "lightning_rlhf.PPOLightningModule"


def test_the_yaml_of_the_readme_is_a_config(tmp_path):
    (text,) = blocks("yaml")
    (tmp_path / "readme.yaml").write_text(text)
    assert "class_path" in command("fit", "--config", str(tmp_path / "readme.yaml"), "--print_config")


def test_make_knows_the_two_commands():
    targets = re.findall(r"^make (\w+)", "\n".join(blocks("bash")), re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        assert subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True).returncode == 0


def test_the_file_tree_names_every_file_of_the_package_once():
    tree = re.search(r"## Where things are\n```\n(.*?)```", README, re.DOTALL)[1]
    for file in (ROOT / "lightning_rlhf").rglob("*.py"):
        if not file.name.startswith("__"):
            assert re.search(rf"(?<![\w.]){re.escape(file.name)}", tree), file
    folders = ("lightning_rlhf", "configs", "benchmarks", "examples", "tests", "docs")
    files = {file.name for folder in folders for file in (ROOT / folder).rglob("*")}
    for name in re.findall(r"[\w/]+\.(?:py|md)", tree):
        assert name.rpartition("/")[2] in files, name
