"""Exports of checkpoints against what `HFExport` writes in the run itself, to the byte."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import peft
import pytest
import torch
import yaml
from safetensors import safe_open
from test_lora import process_group_of_its_own
from test_policy import save as save_model
from test_runs import QUIET, run
from torch.distributed.checkpoint import FileSystemReader
from toys import TINY_MODULE, even_tokens, fit
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MixtralConfig, PreTrainedConfig

import lightning_rlhf.export as export_module
from lightning_rlhf import (
    KL,
    GRPOLightningModule,
    HFExport,
    IterationCheckpoint,
    LoRA,
    PPOLightningModule,
    RLHFLightningModule,
)
from lightning_rlhf.callbacks.hf_export import gather_on_host
from lightning_rlhf.cli import main
from lightning_rlhf.export import export_checkpoint
from lightning_rlhf.packing import pack
from lightning_rlhf.tiny import tiny_model, write_byte_tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:more than half of the responses were cut"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),  # of transformers 5.24
]
COMMON = TINY_MODULE | {"reward": [even_tokens]}
IDS = torch.tensor([[5, 9, 20, 31, 7, 7, 60]])


def written(kind: type[PreTrainedConfig], folder: Path, **options: Any) -> str:
    """A model with a head of its own and float32 weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"vocab_size": len(write_byte_tokenizer(folder)), "eos_token_id": 1, "bos_token_id": None}
    config = kind(**sizes, **special, tie_word_embeddings=False, **options)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def module_of(name: str, folder: Path) -> RLHFLightningModule:
    if name == "tied":  # with a critic, whose tensors are in the checkpoint too
        return PPOLightningModule(**COMMON, critic_lr=1e-2, kl=KL(coef=0.01))
    if name == "untied":
        overrides = {"rope_parameters": {"rope_theta": 5000.0}}
        return GRPOLightningModule(**COMMON | {"model": written(LlamaConfig, folder)}, config_overrides=overrides)
    if name == "mixture":  # its experts have other names in the folder than in the model
        model = written(MixtralConfig, folder, num_key_value_heads=1, num_local_experts=4)
        return GRPOLightningModule(
            **COMMON | {"model": model, "lr": 3e-2}, lora=LoRA(target_modules=["q_proj", "o_proj"])
        )
    lora = LoRA(r=4, alpha=12, rslora=True, modules_to_save=["norm"])
    return PPOLightningModule(**COMMON | {"lr": 3e-2}, critic_lr=1e-2, lora=lora)


class Made:
    """A run with its checkpoint and the exports that it made itself."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.root = name, root
        module = module_of(name, root / "model")
        callbacks: list[Any] = [IterationCheckpoint(root / "ck"), HFExport(dirpath=root / "hf")]
        if name == "lora":
            callbacks.append(HFExport(dirpath=root / "adapter", adapter=True))
        fit(module, root / "run", 2, callbacks=callbacks, num_generations=2, precision="bf16-mixed")
        self.checkpoint = str(root / "ck/iteration-000002.ckpt")
        with torch.no_grad():
            self.log_probs = module.actor(pack([IDS[0]], [1], 1, 0), 1.0)[0][0]
        module.strategy.reshard(module.actor)
        self.exact = gather_on_host(module.actor.hf_named_parameters(), torch.float32)

    def own(self, kind: str = "hf") -> Path:
        return self.root / kind / "iteration_000002"


@pytest.fixture(scope="module", params=["tied", "untied", "mixture", "lora"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp(request.param)
    (root / "model").mkdir()
    with process_group_of_its_own():
        return Made(request.param, root)


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Made:
    with process_group_of_its_own():
        return Made("lora", tmp_path_factory.mktemp("lora"))


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def tensors(folder: Path, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    with safe_open(folder / name, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


# -- equal to the export of the run ------------------------------------------------------------------------------------


def test_an_export_is_what_the_run_writes_itself_to_the_byte(made: Made, tmp_path: Path) -> None:
    said = export_checkpoint(made.checkpoint, str(tmp_path / "out"))
    assert files(tmp_path / "out") == files(made.own())
    assert said.endswith(f"of iteration 2 in {tmp_path / 'out'}")
    assert not any("value_head" in name or "critic" in name for name in tensors(tmp_path / "out"))
    assert ("lm_head.weight" in tensors(tmp_path / "out")) == (made.name in ("untied", "mixture"))


def test_an_export_in_float32_is_the_policy_itself(made: Made, tmp_path: Path) -> None:
    export_checkpoint(made.checkpoint, str(tmp_path / "out"), dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32
    for name, tensor in made.exact.items():
        assert torch.equal(model.get_parameter(name), tensor), name
    with torch.no_grad():
        log_p = model.to(torch.bfloat16).eval()(IDS).logits[0, :-1].float().log_softmax(-1)
    want = log_p.gather(-1, IDS[0, 1:, None])[:, 0]
    torch.testing.assert_close(made.log_probs, want, atol=0.05, rtol=0.02)
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("2+2=")["input_ids"]
    assert ids == AutoTokenizer.from_pretrained(tiny_model())("2+2=")["input_ids"]


def test_an_adapter_is_what_the_run_writes_itself_to_the_byte(lora: Made, tmp_path: Path) -> None:
    export_checkpoint(lora.checkpoint, str(tmp_path / "out"), adapter=True)
    assert files(tmp_path / "out") == files(lora.own("adapter"))
    base = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "out").merge_and_unload()
    for name, tensor in lora.exact.items():  # the base is bfloat16 in the run
        torch.testing.assert_close(merged.get_parameter(name).data, tensor, atol=2e-3, rtol=4e-3)


@pytest.mark.parametrize("bytes_at_once", [1, 6000])
def test_tensors_come_in_any_number_of_pieces(made: Made, bytes_at_once: int, tmp_path: Path, monkeypatch: Any) -> None:
    loaded = []
    load = export_module._Reader.load

    def counted(reader: Any, entries: Any) -> Any:
        loaded.append(list(entries))
        return load(reader, entries)

    monkeypatch.setattr(export_module, "_BUCKET", bytes_at_once)
    monkeypatch.setattr(export_module._Reader, "load", counted)
    export_checkpoint(made.checkpoint, str(tmp_path / "out"))
    assert files(tmp_path / "out") == files(made.own())
    names = [name for bucket in loaded for name in bucket]
    assert len(names) == len(set(names)) > 7
    assert len(loaded) == len(names) if bytes_at_once == 1 else 1 < len(loaded) < len(names)


@pytest.mark.slow
def test_a_checkpoint_of_any_mesh_is_exported_alike(tmp_path: Path) -> None:
    """Of two ranks that share each sequence, two that share the model, and two replicas of it."""
    splits = {
        "sp": ["--trainer.strategy.sequence_parallel_size=2"],
        "dp": [],
        "hsdp": ["--trainer.strategy.data_parallel_replicate=2"],
    }
    for name, split in splits.items():
        exported_from(tmp_path / name, "--trainer.devices=2", *split)


def test_a_checkpoint_of_two_ranks_that_share_each_sequence_is_exported_alike(tmp_path: Path) -> None:
    exported_from(tmp_path, "--trainer.devices=2", "--trainer.strategy.sequence_parallel_size=2", "--model.lora.r=3")


def exported_from(folder: Path, *arguments: str) -> None:
    callbacks = [
        {"class_path": "lightning_rlhf.IterationCheckpoint", "init_args": {"dirpath": f"{folder}/ck"}},
        {"class_path": "lightning_rlhf.HFExport", "init_args": {"dirpath": f"{folder}/hf"}},
    ]
    steps = [f"--trainer.callbacks={json.dumps(callbacks)}", "--trainer.max_steps=1"]
    run(folder, "tiny_ppo.yaml", *QUIET, *arguments, *steps)
    checkpoint = folder / "ck/iteration-000001.ckpt"
    assert len(list(checkpoint.glob("*.distcp"))) == 2
    main(["export", str(checkpoint), str(folder / "out")])
    assert files(folder / "out") == files(folder / "hf/iteration_000001")


# -- where from --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_on_another_file_system(lora: Made, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    try:
        memory.put(lora.checkpoint, "/runs/a.ckpt", recursive=True)
        export_checkpoint("memory://runs/a.ckpt", str(tmp_path / "out"))
        assert files(tmp_path / "out") == files(lora.own())
        with pytest.raises(
            FileNotFoundError, match="is a folder of checkpoints: give one of them, the latest is memory"
        ):
            export_checkpoint("memory://runs", str(tmp_path / "more"))
    finally:
        memory.rm("/runs", recursive=True)


def without_description(checkpoint: str, folder: Path) -> str:
    """As it was written before checkpoints said what their run was."""
    shutil.copytree(checkpoint, folder)
    metadata = torch.load(folder / "meta.pt", weights_only=True)
    del metadata["run"]
    torch.save(metadata, folder / "meta.pt")
    return str(folder)


@pytest.mark.parametrize("form", ["flat", "class_path"])
def test_an_old_checkpoint_is_exported_with_the_yaml_of_its_run(lora: Made, form: str, tmp_path: Path) -> None:
    old = without_description(lora.checkpoint, tmp_path / "old.ckpt")
    with pytest.raises(ValueError, match="does not say what run it is of: give the run's YAML with --config"):
        export_checkpoint(old, str(tmp_path / "out"))
    arguments = {
        "model": "random:tiny",
        "lora": {"r": 4, "alpha": 12, "rslora": True, "modules_to_save": ["norm"]},
    }
    model = arguments if form == "flat" else {"class_path": "lightning_rlhf.PPOLightningModule", "init_args": arguments}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": model, "trainer": {"precision": "bf16-mixed"}}))
    export_checkpoint(old, str(tmp_path / "out"), config=str(tmp_path / "run.yaml"))
    assert files(tmp_path / "out") == files(lora.own())


def test_a_model_that_was_moved_is_found_where_one_says(tmp_path: Path, monkeypatch: Any) -> None:
    """The checkpoint knows the folder from any working directory, and a new one is given by hand."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    written(LlamaConfig, tmp_path / "base")
    module = GRPOLightningModule(**COMMON | {"model": "base", "lr": 1e-2}, lora=LoRA(r=2))
    fit(
        module,
        tmp_path / "run",
        1,
        callbacks=[IterationCheckpoint(tmp_path / "ck"), HFExport(dirpath=tmp_path / "hf")],
        num_generations=2,
    )
    checkpoint, want = str(tmp_path / "ck/iteration-000001.ckpt"), files(tmp_path / "hf/iteration_000001")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    export_checkpoint(checkpoint, "out")
    assert files(Path("out")) == want
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=r"there is no folder '.*/base': say with --model where it is"):
        export_checkpoint(checkpoint, "again")
    export_checkpoint(checkpoint, "again", model=str(tmp_path / "moved"))
    assert files(Path("again")) == want


def test_a_checkpoint_without_optimizer_is_exported(tmp_path: Path) -> None:
    module = GRPOLightningModule(**COMMON)
    saved = IterationCheckpoint(tmp_path / "ck", save_weights_only=True)
    fit(module, tmp_path / "run", 1, callbacks=[saved, HFExport(dirpath=tmp_path / "hf")], num_generations=2)
    checkpoint = tmp_path / "ck/iteration-000001.ckpt"
    assert not any("optimizer" in key for key in FileSystemReader(checkpoint).read_metadata().state_dict_metadata)
    export_checkpoint(str(checkpoint), str(tmp_path / "out"))
    assert files(tmp_path / "out") == files(tmp_path / "hf/iteration_000001")


# -- the command line --------------------------------------------------------------------------------------------------


def test_the_command_line_exports(lora: Made, tmp_path: Path, capfd: Any) -> None:
    main(["export", lora.checkpoint, str(tmp_path / "merged")])
    main(["export", lora.checkpoint, str(tmp_path / "adapter"), "--adapter"])
    main(["export", "--dtype=float32", lora.checkpoint, str(tmp_path / "exact")])
    assert files(tmp_path / "merged") == files(lora.own())
    assert files(tmp_path / "adapter") == files(lora.own("adapter"))
    assert all(tensor.dtype == torch.float32 for tensor in tensors(tmp_path / "exact").values())
    assert capfd.readouterr().out.splitlines() == [
        f"Qwen2ForCausalLM with its adapter merged of iteration 2 in {tmp_path}/merged",
        f"LoRA adapter (r=4) of iteration 2 in {tmp_path}/adapter",
        f"Qwen2ForCausalLM with its adapter merged of iteration 2 in {tmp_path}/exact",
    ]


MISTAKES = {
    "nowhere": "there is no checkpoint '{root}/nowhere'",
    "ck": "'{root}/ck' is a folder of checkpoints: give one of them, the latest is {root}/ck/iteration-000002.ckpt",
    "hf": "'{root}/hf' is no checkpoint of this package: those are folders with a meta.pt",
    "file": "'{root}/file' is no checkpoint of this package",
    "unmarked": "'{root}/unmarked' is not a complete checkpoint: it has no meta.pt",
    "no-index": "'{root}/no-index' is damaged, its .metadata cannot be read (FileNotFoundError: .metadata): take another",
    "no-shard": "'{root}/no-shard' is damaged, its shards cannot be read (FileNotFoundError: __0_0.distcp): take another",
    "cut": "'{root}/cut' is damaged, its shards cannot be read (EOFError: __0_0.distcp has 1000 of at least ",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_no_checkpoint_ends_in_one_line(mistake: str, lora: Made, tmp_path: Path, capfd: Any) -> None:
    shutil.copytree(lora.root / "ck", tmp_path / "ck")
    shutil.copytree(lora.own(), tmp_path / "hf")
    (tmp_path / "file").touch()
    for name, lost in {"unmarked": "meta.pt", "no-index": ".metadata", "no-shard": "__0_0.distcp"}.items():
        shutil.copytree(lora.checkpoint, tmp_path / name)
        (tmp_path / name / lost).unlink()
    shutil.copytree(lora.checkpoint, tmp_path / "cut")
    os.truncate(tmp_path / "cut/__0_0.distcp", 1000)
    assert error(capfd, str(tmp_path / mistake), str(tmp_path / "out")).startswith(
        MISTAKES[mistake].format(root=tmp_path)
    )
    assert not (tmp_path / "out").exists()


def error(capfd: Any, *arguments: str) -> str:
    capfd.readouterr()  # of what the test did before
    with pytest.raises(SystemExit) as ended:
        main(["export", *arguments])
    lines = capfd.readouterr().err.splitlines()
    assert ended.value.code not in (0, None)
    assert len(lines) == 1, lines
    return lines[0].removeprefix("lightning-rlhf: error: ")


def test_what_cannot_be_written_ends_in_one_line(made: Made, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    for taken in (tmp_path / "taken", tmp_path / "taken/file"):
        said = error(capfd, made.checkpoint, str(taken))
        assert said == f"'{taken}' exists and is not an empty folder: give another one"
    assert os.listdir(tmp_path / "taken") == ["file"]
    assert "an export goes to a local folder, got 's3://b/x'" in error(capfd, made.checkpoint, "s3://b/x")
    if made.name in ("tied", "untied"):
        said = error(capfd, made.checkpoint, str(tmp_path / "out"), "--adapter")
        assert said.endswith("has no adapter, it was trained without LoRA: leave --adapter out")
    roles = "actor and critic" if made.name in ("tied", "lora") else "actor"
    said = error(capfd, made.checkpoint, str(tmp_path / "out"), "--role=reward_model")
    assert said == f"--role: '{made.checkpoint}' has no reward_model, it has {roles}"
    if "critic" in roles:
        for option in ("adapter", "average"):
            said = error(capfd, made.checkpoint, str(tmp_path / "out"), "--role=critic", f"--{option}")
            assert said.startswith(f"--{option} is ")
            assert said.endswith(f": leave --{option} out")
    said = error(capfd, made.checkpoint, str(tmp_path / "out"), "--model=/no/such")
    assert said.endswith("there is no folder '/no/such': say with --model where it is")
    assert "dtype" in error(capfd, made.checkpoint, str(tmp_path / "out"), "--dtype=int8")
    (tmp_path / "empty").mkdir()
    main(["export", made.checkpoint, str(tmp_path / "empty")])
    assert files(tmp_path / "empty") == files(made.own())


def test_a_checkpoint_of_another_model_is_refused(made: Made, tmp_path: Path, capfd: Any) -> None:
    other = save_model("untied", tmp_path)
    write_byte_tokenizer(tmp_path)
    said = error(capfd, made.checkpoint, str(tmp_path / "out"), f"--model={other}")
    assert "is of another model: " in said


def test_an_error_while_writing_leaves_nothing(made: Made, tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", full)
    with pytest.raises(OSError, match="disk full"):
        export_checkpoint(made.checkpoint, str(tmp_path / "out"))
    assert os.listdir(tmp_path) == []
