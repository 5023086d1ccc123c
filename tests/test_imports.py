"""The import graph points down: what DESIGN calls layers, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_rlhf

ROOT = Path(lightning_rlhf.__file__).parent

ALLOWED = {
    "types": set(),
    "phases": set(),
    "flops": set(),
    "kernels": set(),
    "ulysses": {"kernels", "images"},
    "tiny": set(),
    "images": {"types"},
    "paths": {"tiny"},
    "hf_config": {"images", "options"},
    "packing": {"types", "images"},
    "runners": {"rewards"},
    "calls": {"process_rewards", "rewards"},
    "process_rewards": {"rewards", "types"},
    "options": set(),
    "sampler": set(),
    "sources": set(),
    "prompts": {"types", "sources", "images"},
    "conversations": {"types", "prompts", "sources"},
    "example_table": {"types", "conversations", "images", "prompts", "sources"},
    "supervised": {"conversations", "data", "example_table", "prompts", "sampler", "sources"},
    "data": {"meeting", "types", "prompts", "sampler", "sources", "tiny"},
    "rewards": {"types", "tiny"},
    "sandbox": set(),
    "code_tests": {"rewards", "sandbox"},
    "scoring": {"types", "calls", "process_rewards", "rewards", "runners"},
    "storage": set(),
    "restricted": {"storage"},
    "host_memory": set(),
    "background": {"host_memory"},
    "meeting": set(),
    "last_words": set(),
    "run_folders": set(),
    "precision": set(),
    "checkpointing": {"background", "restricted", "storage"},
    "strategy": {"background", "checkpointing", "host_memory", "meeting", "precision", "run_folders", "ulysses"},
    "manifest": set(),
    "modules": {
        "host_memory",
        "types",
        "images",
        "kernels",
        "phases",
        "packing",
        "prompts",
        "conversations",
        "ulysses",
        "flops",
        "hf_config",
        "manifest",
        "options",
        "paths",
        "rewards",
        "scoring",
        "tiny",
    },
    "rollout": {"types", "images", "hf_config"},
    "plan": {
        "flops",
        "hf_config",
        "images",
        "kernels",
        "modules",
        "paths",
        "rollout",
        "precision",
        "sampler",
        "strategy",
        "ulysses",
    },
    "callbacks": {
        "host_memory",
        "meeting",
        "rollout",
        "runners",
        "restricted",
        "run_folders",
        "storage",
        "types",
        "images",
        "phases",
        "flops",
        "hf_config",
        "manifest",
        "options",
        "plan",
    },
    "export": {
        "callbacks",
        "hf_config",
        "manifest",
        "modules",
        "paths",
        "plan",
        "precision",
        "restricted",
        "storage",
        "strategy",
        "tiny",
    },
    "trial": {"paths", "prompts", "scoring", "types"},
    "cli_errors": {"callbacks", "data", "meeting", "modules", "options", "rollout", "supervised", "types"},
    "cli": {
        "callbacks",
        "cli_errors",
        "export",
        "last_words",
        "meeting",
        "modules",
        "options",
        "plan",
        "precision",
        "rewards",
        "storage",
        "strategy",
        "trial",
    },
    "__main__": {"cli"},
    "__init__": {"callbacks", "data", "modules", "packing", "strategy", "supervised", "types", "rollout"},
}


def layer(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(file: Path, *, lazy: bool = True) -> set[str]:
    """Dotted names that a file imports; type-checking imports do not count."""
    tree = ast.parse(file.read_text())
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    if not lazy:
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        skipped |= {id(node) for function in functions for node in ast.walk(function)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(ROOT.rglob("*.py"))


def test_every_layer_imports_only_what_is_below_it():
    assert len(FILES) > 20
    for file in FILES:
        own = layer(file)
        parts = [name.split(".") for name in imports(file) if name.split(".")[0] == "lightning_rlhf"]
        used = {
            p[1] if (len(p) > 1 and (ROOT / p[1]).exists()) or (ROOT / f"{p[1]}.py").exists() else "__init__"
            for p in parts
            if len(p) > 1
        }
        assert used - {own} <= ALLOWED[own], f"{file.relative_to(ROOT)} imports {sorted(used - {own} - ALLOWED[own])}"


def test_modules_import_each_other_without_cycles():
    graph = {}
    for file in FILES:
        name = ".".join(("lightning_rlhf", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        graph[name] = imports(file, lazy=False)
    known = set(graph)

    def targets(name: str) -> set[str]:
        return {
            t
            for i in graph[name]
            for t in (i, i.rpartition(".")[0])
            if t in known and t not in (name, "lightning_rlhf")
        }

    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for target in targets(name):
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_a_reward_worker_loads_neither_lightning_nor_transformers():
    code = "import sys, lightning_rlhf.runners; print(sorted({'lightning', 'transformers', 'peft'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_lazy_names_are_those_that_type_checkers_see():
    block = next(n for n in ast.parse((ROOT / "__init__.py").read_text()).body if isinstance(n, ast.If))
    seen = {f"{n.module}.{a.name}" for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert seen == {f"lightning_rlhf.{home}.{name}" for name, home in lightning_rlhf._HOME_OF.items()}
    for name in lightning_rlhf.__all__:
        assert getattr(lightning_rlhf, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'PPO'"):
        lightning_rlhf.PPO  # noqa: B018


def test_vllm_is_imported_by_its_engine_only_and_only_inside_functions():
    users = {f.relative_to(ROOT).as_posix() for f in FILES if any(n.split(".")[0] == "vllm" for n in imports(f))}
    assert users == {"rollout/vllm.py", "rollout/vllm_process.py", "rollout/vllm_requests.py"}
    assert not any(n.split(".")[0] == "vllm" for user in users for n in imports(ROOT / user, lazy=False))
