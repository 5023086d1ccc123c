"""What a run says of itself, and what a run that goes on from a checkpoint is told."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from test_policy import save as save_model
from test_runs import QUIET, run
from toys import TINY_MODULE, even_tokens, fit
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_rlhf import GRPOLightningModule, IterationCheckpoint, LoRA, PPOLightningModule
from lightning_rlhf.callbacks.manifest import write_manifest
from lightning_rlhf.manifest import check_resumed, git_state, versions
from lightning_rlhf.tiny import tiny_model, write_byte_tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:more than half of the responses were cut"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),  # of transformers 5.24
]
COMMON = TINY_MODULE | {"reward": [even_tokens]}


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


# -- what is written ---------------------------------------------------------------------------------------------------


def test_a_run_of_the_command_line_says_what_it_is(tmp_path: Path) -> None:
    saver = f"{{class_path: lightning_rlhf.IterationCheckpoint, init_args: {{dirpath: {tmp_path}/ck}}}}"
    split = ["--trainer.devices=2", "--trainer.strategy.sequence_parallel_size=2", "--trainer.max_steps=1"]
    run(tmp_path, "tiny_ppo.yaml", *QUIET, f"--trainer.callbacks+={saver}", *split)
    said = read(tmp_path / "ck")
    assert said == read(next((tmp_path / "run").glob("version_*")))
    assert said["config"]["model"]["init_args"]["model"] == "random:tiny"
    assert said["config"]["trainer"]["max_steps"] == 1
    assert said["config"]["rollout"]["sleep_level"] == "auto"
    assert said["class"] == "lightning_rlhf.modules.ppo.PPOLightningModule"
    assert said["roles"].keys() == {"actor", "critic"}
    assert said["roles"]["actor"]["shape"]["vocab_size"] == 258
    assert said["versions"]["torch"] == torch.__version__
    assert {"lightning-rlhf", "lightning", "transformers", "peft"} <= said["versions"].keys()
    assert said["git"] == git_state(Path(__file__).parent)
    assert said["data"]["prompts"] > 0
    assert len(said["data"]["fingerprint"]) == 16
    assert said["mesh"] == {
        "processes": 2,
        "nodes": 1,
        "data_parallel": 1,
        "sequence_parallel": 2,
        "replicas": 1,
        "device": "cpu",
    }
    (checkpoint,) = (tmp_path / "ck").glob("*.ckpt")
    inside = torch.load(checkpoint / "meta.pt", weights_only=True)["run"]
    assert inside == {name: said[name] for name in inside}


def test_a_resumed_run_keeps_the_manifest_of_the_one_before_on_any_file_system(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    checkpoints = "memory://manifests/ck"
    try:
        for i, steps in enumerate((1, 2, 3)):
            path = f"{checkpoints}/iteration-{i:06d}.ckpt" if i else None
            saver = IterationCheckpoint(checkpoints, save_top_k=-1)
            module, folder = GRPOLightningModule(**COMMON), tmp_path / str(i)
            fit(module, folder, steps, callbacks=[saver], ckpt_path=path, num_generations=2)
        names = sorted(p.rpartition("/")[2] for p in memory.ls("/manifests/ck", detail=False) if p.endswith(".json"))
        assert names == ["manifest.json", "manifest_1.json", "manifest_2.json"]
        resumed = [json.loads(memory.cat(f"/manifests/ck/{name}"))["resumed_from"] for name in (*names[1:], names[0])]
        assert resumed == [None, f"{checkpoints}/iteration-000001.ckpt", f"{checkpoints}/iteration-000002.ckpt"]
        assert [read(tmp_path / str(i))["resumed_from"] for i in range(3)] == resumed
        assert read(tmp_path / "0")["config"] is None  # a run out of Python
    finally:
        memory.rm("/manifests", recursive=True)


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    class Checkpoint(IterationCheckpoint):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            with pytest.warns(UserWarning, match="file/x/manifest.json could not be written"):
                write_manifest(trainer, pl_module, [str(tmp_path / "file/x"), str(tmp_path / "other")])

    fit(GRPOLightningModule(**COMMON), tmp_path / "run", 1, callbacks=[Checkpoint(tmp_path / "ck")], num_generations=2)
    assert read(tmp_path / "other")["class"].endswith("GRPOLightningModule")


def test_the_state_of_a_working_copy(tmp_path: Path, monkeypatch: Any) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) is None
    git("init")
    assert git_state(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-m", "a")
    (tmp_path / "untracked").touch()
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "file").write_text("b")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": True}
    monkeypatch.setenv("PATH", "/nowhere")
    assert git_state(tmp_path) is None


# -- going on ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """Of GRPO with LoRA."""
    saver = IterationCheckpoint(tmp_path / "ck")
    fit(GRPOLightningModule(**COMMON, lora=LoRA(r=4)), tmp_path, 1, callbacks=[saver], num_generations=2)
    return str(tmp_path / "ck/iteration-000001.ckpt")


def go_on(module: GRPOLightningModule | PPOLightningModule, checkpoint: str, folder: Path) -> list[dict[str, float]]:
    """One more iteration."""
    saver = IterationCheckpoint(folder / "ck")
    return fit(module, folder, 2, callbacks=[saver], ckpt_path=checkpoint, num_generations=2)


def test_a_run_of_another_kind_does_not_go_on(checkpoint: str, tmp_path: Path) -> None:
    other = save_model("untied", tmp_path)
    write_byte_tokenizer(tmp_path)
    lora = LoRA(r=4)
    mistakes = {
        "was written by lightning_rlhf.modules.grpo.GRPOLightningModule, which trains actor, not by"
        r" lightning_rlhf.modules.ppo.PPOLightningModule with actor and critic: set model.class_path as it was": (
            PPOLightningModule(**COMMON, lora=lora)
        ),
        "was trained with LoRA: set model.lora as it was, or start anew": GRPOLightningModule(**COMMON),
        r"was trained with model.lora: alpha 32 \(here 64\): set it as it was": (
            GRPOLightningModule(**COMMON, lora=LoRA(r=4, alpha=64))
        ),
        r"is of 'random:tiny' with model_type qwen2 \(here qwen3\), hidden_size 64 \(here 32\), .*: set model.model as it": (
            GRPOLightningModule(**COMMON | {"model": other}, lora=lora)
        ),
    }
    for message, module in mistakes.items():
        with pytest.raises(ValueError, match=message) as raised:
            go_on(module, checkpoint, tmp_path / "again")
        assert "\n" not in str(raised.value)
        torch.distributed.destroy_process_group()


class Renamed(GRPOLightningModule):
    """The same run under another name."""


def test_what_may_change_the_numbers_is_said_once_and_the_run_goes_on(checkpoint: str, tmp_path: Path) -> None:
    marker = Path(checkpoint) / "meta.pt"
    metadata = torch.load(marker, weights_only=True)
    metadata["run"]["versions"]["torch"] = "1.0"
    torch.save(metadata, marker)
    module = Renamed(**COMMON, lora=LoRA(r=4), config_overrides={"attention_dropout": 0.0})
    with pytest.warns(UserWarning, match="this run goes on, its numbers may not be the same") as warned:
        rows = go_on(module, checkpoint, tmp_path / "again")
    (message,) = [str(w.message) for w in warned if "this run goes on" in str(w.message)]
    assert f"torch 1.0 (here {torch.__version__})" in message
    assert "actor config_overrides None (here {'attention_dropout': 0.0})" in message
    assert "class lightning_rlhf.modules.grpo.GRPOLightningModule (here test_manifest.Renamed)" in message
    assert len(rows) == 1


def test_another_seed_is_said_in_training_only(checkpoint: str, tmp_path: Path, monkeypatch: Any) -> None:
    seeded = pl.seed_everything
    monkeypatch.setattr(pl, "seed_everything", lambda seed, **options: seeded(seed + 6, **options))
    module = GRPOLightningModule(**COMMON, lora=LoRA(r=4))
    with pytest.warns(UserWarning, match=r"was written with seed_everything 1 \(here 7\): this run goes on"):
        go_on(module, checkpoint, tmp_path / "again")
    then, now = described() | {"seed_everything": 1}, described() | {"seed_everything": 7}
    check_resumed("path", then, now, training=False)
    check_resumed("path", described(), now, training=True)  # a checkpoint of before it said


def test_other_data_is_said_and_the_run_goes_on(checkpoint: str, tmp_path: Path, monkeypatch: Any) -> None:
    import toys

    rows = toys.prompts()
    rows[5]["prompt"] = "say maybe "
    monkeypatch.setattr(toys, "prompts", lambda: rows)
    module = GRPOLightningModule(**COMMON, lora=LoRA(r=4))
    with pytest.warns(UserWarning, match="data: the checkpoint was written with fingerprint") as warned:
        go_on(module, checkpoint, tmp_path / "again")
    (message,) = [str(w.message) for w in warned if "data:" in str(w.message)]
    assert "prompts 32" not in message  # as many as before
    assert "batch_size 16" not in message


def test_an_old_checkpoint_goes_on_in_silence(checkpoint: str, tmp_path: Path) -> None:
    marker = Path(checkpoint) / "meta.pt"
    metadata = torch.load(marker, weights_only=True)
    del metadata["run"]
    torch.save(metadata, marker)
    module = GRPOLightningModule(**COMMON, lora=LoRA(r=4))
    assert len(go_on(module, checkpoint, tmp_path / "again")) == 1


def described(roles: str = "actor", **changes: Any) -> dict[str, Any]:
    one = {"model": "m", "shape": {"hidden_size": 8}, "lora": None, "config_overrides": None} | changes
    return {
        "class": "C",
        "precision": "32-true",
        "versions": versions(),
        "roles": dict.fromkeys(roles.split(), one),
    }


def test_an_evaluation_needs_its_own_roles_only() -> None:
    both = described("actor critic")
    check_resumed("path", both, described(), training=False)
    with pytest.raises(ValueError, match="which trains actor and critic, not by C with actor"):
        check_resumed("path", both, described(), training=True)
    with pytest.raises(ValueError, match="which trains actor, not by C with actor and critic"):
        check_resumed("path", described(), both, training=False)


def test_an_adapter_is_the_same_whatever_it_started_from() -> None:
    lora = {"r": 4, "target_modules": ["a", "b"], "adapter": None}
    then = described(lora=lora)
    check_resumed(
        "path", then, described(lora=lora | {"adapter": "/there", "target_modules": ["b", "a"]}), training=True
    )
    with pytest.raises(ValueError, match="target_modules"):
        check_resumed("path", then, described(lora=lora | {"target_modules": ["a"]}), training=True)
    with pytest.raises(ValueError, match=r"was trained without LoRA: leave model\.lora out"):
        check_resumed("path", described(), then, training=True)


class FrozenEmbedding(GRPOLightningModule):
    def configure_model(self) -> None:
        super().configure_model()
        self.actor.model.get_input_embeddings().weight.requires_grad_(False)


@pytest.mark.filterwarnings("ignore:.*was written with:UserWarning")
@pytest.mark.parametrize("mistake", ["less is trained", "another width"])
def test_what_only_the_tensors_show_ends_in_one_line(mistake: str, tmp_path: Path) -> None:
    fit(GRPOLightningModule(**COMMON), tmp_path / "a", 1, callbacks=[IterationCheckpoint(tmp_path / "ck")])
    kind, model, said = FrozenEmbedding, "random:tiny", r"trained 'actor\.model\.model\.embed_tokens\.weight'"
    if mistake == "another width":
        kind, model, said = (
            GRPOLightningModule,
            str(tmp_path / "model"),
            r"does not fit this run \(Size mismatch .*gate_proj",
        )
        shutil.copytree(tiny_model(), model)
        config = AutoConfig.from_pretrained(model, intermediate_size=96)
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
    with pytest.raises(ValueError, match=rf"{said}.*: resume with the model options it was written with$"):
        fit(kind(**COMMON | {"model": model}), tmp_path / "b", 2, ckpt_path=str(tmp_path / "ck/iteration-000001.ckpt"))
