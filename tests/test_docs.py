"""The user's guide names what exists."""

from __future__ import annotations

import csv
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from toys import command

import lightning_rlhf
from lightning_rlhf import cli
from lightning_rlhf.callbacks import memory
from lightning_rlhf.modules import losses
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.rollout import VLLMEngine
from lightning_rlhf.trial import REFERENCES

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
OWNERS: dict[str, tuple[type, ...]] = {
    "trainer": (pl.Trainer,),
    "trainer.strategy": (lightning_rlhf.FSDPUlyssesStrategy,),
    "model": (
        *lightning_rlhf.PPOLightningModule.__mro__[:-1],
        lightning_rlhf.DPOLightningModule,
        lightning_rlhf.RewardModelLightningModule,
        ModelSettings,
    ),
    "model.reward_model": (lightning_rlhf.FrozenRewardModel,),
    "model.kl": (lightning_rlhf.KL,),
    "model.correction": (lightning_rlhf.Correction,),
    "model.lora": (lightning_rlhf.LoRA,),
    "rollout": (lightning_rlhf.RolloutCallback,),
    "rollout.sampling": (lightning_rlhf.Sampling,),
    "rollout.val_sampling": (lightning_rlhf.Sampling,),
    "rollout.engine": (VLLMEngine,),
    "rollout.filter_groups": (lightning_rlhf.FilterGroups,),
    "data": (
        lightning_rlhf.PromptDataModule,
        lightning_rlhf.SFTDataModule,
        *lightning_rlhf.PreferenceDataModule.__mro__[:2],
    ),
}
KEY = re.compile(r"`(?:--)?((?:trainer|model|rollout|data)\.[a-z_.]+)(?::[^`]*)?`")


def exists(key: str) -> bool:
    owner, _, name = key.rpartition(".")
    return name == "class_path" or any(name in inspect.signature(c).parameters for c in OWNERS[owner])


def tables(text: str) -> list[list[list[str]]]:
    """The Markdown tables of a text, as rows of cells, without the line under the head."""
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not all(set(cell) <= {"-"} for cell in cells if cell):
                found[-1].append(cells)
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def test_the_script_for_those_who_come_from_trl_runs(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "migrating.md").read_text(), re.DOTALL)
    rows = '[{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(64)]'
    for theirs, ours in (
        ("Qwen/Qwen2.5-0.5B-Instruct", "random:tiny"),
        ('load_dataset("my-team/sums", split="train")', rows),
        ("max_steps=200", "max_steps=2, accelerator='cpu'"),
        ("max_completion_length=256", "max_completion_length=8"),
    ):
        assert theirs in script
        script = script.replace(theirs, ours)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "val/heldout/exact_answer" in done.stdout
    assert any(tmp_path.rglob("iteration-000002.ckpt"))


def test_every_key_of_ours_in_the_migration_tables_exists() -> None:
    tabular = [table for table in tables((ROOT / "docs/migrating.md").read_text()) if table[0][1] == "here"]
    keys = {key for table in tabular for row in table[1:] for cell in row[1:] for key in KEY.findall(cell)}
    assert len(keys) > 50
    assert not sorted(key for key in keys if not exists(key))


@pytest.mark.parametrize("page", [p for p in DOCS if p.name != "migrating.md"], ids=lambda p: p.name)
def test_every_key_in_a_page_exists(page: Path) -> None:
    assert not sorted(key for key in KEY.findall(page.read_text()) if not exists(key))


@pytest.mark.parametrize("page", DOCS, ids=lambda p: p.name)
def test_yaml_in_a_page_uses_keys_that_exist(page: Path) -> None:
    def leaves(node: Any, path: str = "") -> list[str]:
        if isinstance(node, dict) and (not path or path in OWNERS):
            given = {k: v for k, v in node.items() if k != "init_args"} | node.get("init_args", {})
            return [leaf for k, v in given.items() for leaf in leaves(v, f"{path}.{k}".strip("."))]
        return [path]

    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
        keys = [key.removesuffix("+") for key in leaves(yaml.safe_load(block)) if "." in key]
        assert not [key for key in keys if not exists(key)]


def said(cell: str) -> list[Any]:
    """The values in a cell of defaults; what is put into words is Ellipsis."""
    values = [yaml.safe_load(part) for part in cell.replace("`", "").split(",")]
    return [None if v == "none" else ... if isinstance(v, str) and re.search(r"\W", v) else v for v in values]


def test_defaults_in_the_tables_are_those_of_the_code() -> None:
    seen = []
    homes = {"option": "rollout.sampling", "`rollout.engine.…`": "rollout.engine"}
    rows = [(t[0][0], row) for p in DOCS for t in tables(p.read_text()) if t[0][1] == "default" for row in t[1:]]
    for head, (names, default, *_) in rows:
        keys = [key if "." in key else f"{homes[head]}.{key}" for key in re.findall("`(.+?)`", names)]
        values = said(default)
        for key, value in zip(keys, values if len(values) > 1 else values * len(keys), strict=True):
            owner, _, name = key.rpartition(".")
            here = inspect.signature(OWNERS[owner][0]).parameters[name].default
            if value is not ...:
                seen.append(key)
                none = here in ((), inspect.Parameter.empty) or repr(here) == "<factory>"
                assert here == value or (none and value is None), key
    assert len(seen) > 20


def test_the_options_of_losses_are_those_of_the_code() -> None:
    (table,) = (t for t in tables((ROOT / "docs/algorithms.md").read_text()) if t[0][-1] == "YAML, with the defaults")
    for name, *_, options in table[1:]:
        if "," in name:  # the same loss with other options
            continue
        parameters = inspect.signature(getattr(losses, name.strip("`"))).parameters
        given = [yaml.safe_load(one) for one in re.findall("`(.+?)`", options)]
        for key, value in (
            item for one in given for item in (one.get("loss_args") or one).items() if item[0] != "loss"
        ):
            assert parameters[key].default == value, name


def test_the_columns_of_right_answers_are_named() -> None:
    for text in ((ROOT / "docs/rewards.md").read_text(), cli._Commands.rewards.__doc__ or ""):
        assert re.search(
            " ".join(REFERENCES).replace(" completion", " (and|or) completion"), re.sub(r"[`,\s]+", " ", text)
        )


ON_A_GPU = {"perf/memory_allocated_gb", "perf/memory_reserved_gb", "memory_gb/<phase>", "memory_device_gb/<phase>"}
"""Names that a run on the CPU does not log."""


def logs_a_metric(completions: list[str], log_metric: Callable[[str, float], None], **_: Any) -> list[float]:
    log_metric("of_its_own", 0.5)
    return [float(len(text)) for text in completions]


def above_greedy(*, rewards, values, baselines, mask, **_: Any) -> Any:
    return (rewards - baselines[:, None]) * mask, values


def goes_on(turns: list[str]) -> str:
    return "yes?"


def test_the_list_of_metrics_names_what_is_logged_and_nothing_else(tmp_path: Path) -> None:
    """Of runs with everything that logs: two iterations, so that what follows the first is seen, too."""
    observers = [
        {"class_path": "lightning_rlhf.Throughput", "init_args": {"peak_tflops": 1.0}},
        {"class_path": "lightning_rlhf.Memory"},
        {"class_path": "lightning_rlhf.IterationCheckpoint", "init_args": {"every_n_train_steps": 1}},
    ]
    options = {
        "trainer.logger.init_args.save_dir": str(tmp_path),
        "trainer.max_steps": 2,
        "trainer.val_check_interval": 1,
        "trainer.callbacks": json.dumps(observers),
        "rollout.sampling.max_completion_length": 4,
        "rollout.val_sampling": "{num_generations: 2, max_completion_length: 4}",
        "model.reward": "[test_docs.logs_a_metric]",
    }
    corrected = {"model.correction": "{reject: {token_k2: 10.0}}", "model.kl": "{coef: 0.01, target: 0.1}"}
    everything = {"filter_groups.max_num_gen_batches": 2, "sampling.num_generations": 2, "offload_optimizer": True}
    loss = {"positive_coef": 0.1, "target_kl": 1.0, "advantage": "test_docs.above_greedy"}
    first = {f"rollout.{key}": value for key, value in everything.items()} | {f"model.{k}": v for k, v in loss.items()}
    turns = "{reply: test_docs.goes_on, max_turns: 2, max_reply_length: 24}"
    second = {"rollout.async_level": 1, "rollout.conversation": turns, **corrected}
    logged = set()
    for more in (first, second):
        line = [f"--{key}={value}" for key, value in (options | more).items()]
        command("fit", "--config", str(ROOT / "configs/tiny_ppo.yaml"), *line)
        file = max(tmp_path.rglob("metrics.csv"), key=lambda p: p.stat().st_mtime_ns)
        with file.open(newline="") as opened:
            logged |= set(next(csv.reader(opened))) - {"step", "epoch"}
    names = set(re.findall(r"`([a-z_]+/[a-z0-9_@</>]+)`", (ROOT / "docs/logging.md").read_text()))
    seen = {
        name: [m for m in logged if re.fullmatch(re.sub(r"<[a-z]+>", "[^/]+", re.sub("@[nk]$", "@[0-9]+", name)), m)]
        for name in names
    }
    assert sorted(logged - {metric for metrics in seen.values() for metric in metrics}) == []
    assert {name for name, metrics in seen.items() if not metrics} == ON_A_GPU
    assert [metric for metric in seen["reward/<name>"] if metric not in names] == ["reward/of_its_own"]
    source = inspect.getsource(memory)
    assert all(name.partition("<")[0] in source for name in ON_A_GPU)
