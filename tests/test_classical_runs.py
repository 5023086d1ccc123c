"""Runs of SFT, reward model and DPO: on any mesh, resumed, exported, from the command line."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from classical import KINDS, demonstrations, head_of, learned, pairs, train
from test_classical import folder_of
from torch.utils.flop_counter import FlopCounterMode
from toys import command, quiet_trainer, spawn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, GraniteConfig

from lightning_rlhf import LoRA, PreferenceDataModule, PromptDataModule, SFTDataModule
from lightning_rlhf.cli import main
from lightning_rlhf.export import export_checkpoint
from lightning_rlhf.flops import update_flops
from lightning_rlhf.tiny import write_byte_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
ROOT = Path(__file__).parent.parent


def on_meshes(rank: int, folder: str) -> list[list[dict[str, float]]]:
    meshes: list[dict[str, int]] = [{}, {"sequence_parallel_size": 2}]
    return [
        learned(train(kind, f"{folder}/{kind}-{len(mesh)}", 3, devices=2, strategy=mesh)[1])
        for kind in KINDS
        for mesh in meshes
    ]


def test_results_do_not_depend_on_how_the_work_is_split(tmp_path):
    """Batches of 9 examples on two data ranks, or on two ranks that share each sequence."""
    alone = [learned(train(kind, tmp_path / kind, 3, model={"micro_batch_tokens": 4096})[1]) for kind in KINDS]
    assert all(len(rows) > 3 for rows in alone)
    shared = spawn(on_meshes, 2, str(tmp_path))[0]
    for rows, others in zip(alone, zip(shared[::2], shared[1::2], strict=True), strict=True):
        for other in others:
            assert [row.keys() for row in rows] == [row.keys() for row in other]
            for left, right in zip(rows, other, strict=True):
                assert right == pytest.approx(left, rel=2e-4, abs=2e-5)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_where_its_checkpoint_was_written(kind, tmp_path):
    """In the second epoch, in the middle: two steps to an epoch."""
    _, whole = train(kind, tmp_path / "whole", 5)
    train(kind, tmp_path / "first", 3, save=True)
    (checkpoint,) = (tmp_path / "first/ck").glob("iteration*.ckpt")
    _, rest = train(kind, tmp_path / "rest", 5, ckpt_path=str(checkpoint))
    steps = [row for row in learned(whole) if "train/loss" in row]
    assert [row for row in learned(rest) if "train/loss" in row] == [pytest.approx(row, rel=1e-6) for row in steps[3:]]


@pytest.mark.parametrize("kind", KINDS)
def test_each_learns_and_so_does_its_adapter(kind, tmp_path):
    plain = learned(train(kind, tmp_path / "plain", 12)[1])
    lora = learned(train(kind, tmp_path / "lora", 12, model={"lora": LoRA(r=4), "lr": 2e-3})[1])
    for rows in (plain, lora):
        losses = [row["train/loss"] for row in rows if "train/loss" in row]
        assert losses[-1] < 0.95 * losses[0]
        validated = [row for row in rows if "val/heldout/loss" in row]
        assert validated[-1]["val/heldout/loss"] < validated[0]["val/heldout/loss"]
    if kind == "dpo":
        first = next(row for row in lora if "train/loss" in row)
        assert first["train/loss"] == pytest.approx(
            math.log(2), abs=1e-6
        )  # the reference is the policy without its adapter


@pytest.mark.parametrize(
    "model", [{}, {"lora": LoRA(r=4)}, {"gradient_checkpointing": "full"}], ids=["full", "lora", "recomputed"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_worth_the_flops_that_torch_counts(kind, model, tmp_path, monkeypatch):
    """Torch counts no attention on the CPU, and the head at fewer tokens than the formula: where something is read off it."""
    counter, examples = FlopCounterMode(display=False), []

    class Counted(KINDS[kind][0]):
        def training_step(self, batch, batch_idx):
            examples.append(batch["examples"])
            embedding = self.root.model.get_input_embeddings()
            embedding.register_forward_hook(lambda *args: args[-1].requires_grad_())  # with LoRA, as in a deep model
            with counter:
                super().training_step(batch, batch_idx)

    monkeypatch.setitem(KINDS, kind, (Counted, *KINDS[kind][1:]))
    module, _ = train(kind, tmp_path, 1, model=model, data={"val_size": 0})
    tokens, text = sum(map(len, examples[0].sequences)), module.settings.config.get_text_config()
    value_head, hidden = kind == "reward", text.hidden_size
    head, read = (hidden, 2 * 9) if value_head else (hidden * text.vocab_size, examples[0].tokens)
    each = {"sft": 6, "reward": 6, "dpo": 8}[kind] - (2 if "lora" in model and not value_head else 0)
    linear = update_flops([one._replace(dims=replace(one.dims, heads=0)) for one in module.flops], module.lengths)
    made = linear - each * head * (tokens - read)
    made += 0 if value_head else 2 * head * read  # logits are made again in backward, which does not count
    if "gradient_checkpointing" in model:  # nor do layers, all but their last product
        layers = module.flops[0].dims.matmul_parameters - head
        made += 2 * tokens * (layers - text.num_hidden_layers * hidden * text.intermediate_size)
    assert counter.get_total_flops() == made


def test_tokens_that_a_reward_model_does_not_read_are_not_counted(tmp_path):
    """An EOS that doubles as padding, behind each answer."""
    module, _ = train("reward", tmp_path, 1, model={"config_overrides": {"pad_token_id": 1}}, data={"shuffle": False})
    texts = [row["prompt"] + row[side] for row in pairs()[:9] for side in ("chosen", "rejected")]
    assert module.lengths == [len(module.tokenizer.encode(text)) for text in texts]
    assert module.packing["real_tokens"] == module.packing["padded_tokens"]  # on one rank


def export(folder: Path, module: Any) -> str:
    """What the module trained, in float32."""
    path = folder / "state.ckpt"
    module.trainer.save_checkpoint(path)
    export_checkpoint(str(path), str(folder / "exported"), dtype="float32")
    return str(folder / "exported")


def score(model: Any, tokenizer: Any, text: str) -> float:
    with torch.no_grad():
        return model(torch.tensor([tokenizer.encode(text + tokenizer.eos_token)])).logits.item()


def test_calibration_is_how_far_confidence_is_from_being_right(tmp_path):
    """Of held-out pairs by hand, with a random head that is wrong about some; bins of 1/15."""
    module, rows = train("reward", tmp_path, 2, model={"lr": 1e-9}, data={"val_size": 12, "batch_size": 6})
    folder = export(tmp_path, module)
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    bins: dict[int, list[tuple[float, bool]]] = {}
    for row in pairs()[-12:]:
        better, worse = (score(model, tokenizer, row["prompt"] + row[side]) for side in ("chosen", "rejected"))
        sure = 1 / (1 + math.exp(-abs(better - worse)))
        bins.setdefault(int(sure * 15), []).append((sure, better > worse))
    assert {right for members in bins.values() for _, right in members} == {True, False}
    error = sum(abs(sum(p - right for p, right in members)) for members in bins.values()) / 12
    assert rows[-1]["val/heldout/calibration_error"] == pytest.approx(error, abs=1e-4)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("kind", KINDS)
def test_the_config_runs_from_the_command_line_and_logs_what_is_documented(kind, tmp_path):
    rows = demonstrations() if kind == "sft" else pairs()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "model.init_args.model": "random:tiny",
        "data.init_args.path": tmp_path / "rows.jsonl",
        "data.init_args.batch_size": 8,
        "data.init_args.val_size": 4,
        "trainer.max_steps": 1,
        "trainer.val_check_interval": 1,
        "trainer.accelerator": "cpu",
        "trainer.devices": 1,
        "trainer.precision": "32-true",
        "trainer.logger": "lightning.pytorch.loggers.CSVLogger",
        "trainer.logger.init_args.save_dir": tmp_path,
        "trainer.logger.init_args.name": "run",
    }
    command("fit", "--config", str(ROOT / f"configs/{kind}.yaml"), *(f"--{k}={v}" for k, v in options.items()))
    assert (tmp_path / "run/version_0/hf/iteration_000001/config.json").is_file()
    with (tmp_path / "run/version_0/metrics.csv").open(newline="") as file:
        logged = set(next(csv.reader(file)))
    section = re.split(r"^## ", (ROOT / "docs/classical.md").read_text(), flags=re.MULTILINE)
    (text,) = [
        part
        for part in section
        if f"configs/{kind}.yaml" in part.partition("\n\n")[0] + part[:400] and "| metric" in part
    ]
    named = set(re.findall(r"`((?:train|val|actor|reward_model)/[a-zA-Z_/<>]+)`", text))
    named = {name.replace("<set>", "heldout") for name in named}
    own = {name for name in logged if name.startswith(("train/", "val/"))}
    assert own == {name for name in named if name.startswith(("train/", "val/"))}


@pytest.mark.parametrize("kind", KINDS)
def test_a_test_measures_what_a_validation_does(kind, tmp_path):
    module, _ = train(kind, tmp_path, 1)
    trainer, data = module.trainer, module.trainer.datamodule
    (validated,), (tested,) = trainer.validate(module, data), trainer.test(module, data)
    assert len(validated) > 1
    assert tested == {f"test/{name.removeprefix('val/')}" if "/" in name else name: v for name, v in validated.items()}


@pytest.mark.parametrize("lora", [None, LoRA(r=4)], ids=["full", "lora"])
def test_an_exported_reward_model_scores_in_transformers_as_it_did_here(lora, tmp_path):
    module, rows = train("reward", tmp_path, 4, model={"lora": lora, "lr": 1e-2})  # validated after the last
    folder = export(tmp_path, module)
    model, report = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for side in ("chosen", "rejected"):
        mean = sum(score(model, tokenizer, row["prompt"] + row[side]) for row in pairs()[-4:]) / 4
        assert rows[-1][f"val/heldout/rewards/{side}"] == pytest.approx(mean, rel=1e-4, abs=1e-5)
    more, _ = train("reward", tmp_path / "more", 1, model={"model": folder, "lr": 1e-9})
    torch.testing.assert_close(head_of(more), model.score.weight[0].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding", ["eos", None])
def test_scores_are_those_of_transformers_when_the_eos_is_the_padding_token(padding, tmp_path):
    """Transformers then reads the score before it. Without a padding token the EOS is it, or no batch could be scored."""
    own = folder_of(1, str(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(own)
    tokenizer.pad_token = padding and tokenizer.eos_token
    tokenizer.save_pretrained(own)
    AutoConfig.from_pretrained(own, pad_token_id=None).save_pretrained(own)
    module, rows = train("reward", tmp_path / "run", 4, model={"model": own, "lr": 1e-4})
    model = AutoModelForSequenceClassification.from_pretrained(export(tmp_path, module))
    assert model.config.pad_token_id == tokenizer.eos_token_id
    for side in ("chosen", "rejected"):
        mean = sum(score(model, tokenizer, row["prompt"] + row[side]) for row in pairs()[-4:]) / 4
        assert rows[-1][f"val/heldout/rewards/{side}"] == pytest.approx(mean, rel=1e-4, abs=1e-5)


def test_data_that_a_reward_model_has_read_is_read_anew_for_dpo():
    data = PreferenceDataModule("classical.pairs", batch_size=24, shuffle=False)
    seen = []
    for module in (KINDS["reward"][0], KINDS["dpo"][0]):
        quiet_trainer(max_steps=1, enable_checkpointing=False).fit(module("random:tiny"), datamodule=data)
        seen.append(data.train_table.take([0]).prompt_lengths)
    assert seen == [[1, 1], [4, 4]]  # 2+4=


@pytest.mark.parametrize(
    ("kind", "other", "message"),
    [
        (
            "reward",
            SFTDataModule("classical.demonstrations", batch_size=2),
            "needs data.class_path: lightning_rlhf.PreferenceDataModule",
        ),
        (
            "sft",
            PreferenceDataModule("classical.pairs", batch_size=2),
            "needs data.class_path: lightning_rlhf.SFTDataModule, or one of",
        ),
        ("sft", PromptDataModule("toys.prompts", batch_size=2), "whose example_size is 1, got PromptDataModule"),
    ],
)
def test_data_of_another_kind_is_refused(kind, other, message):
    with pytest.raises(ValueError, match=message):
        quiet_trainer(max_steps=1, enable_checkpointing=False).fit(KINDS[kind][0]("random:tiny"), datamodule=other)


def test_options_of_rollouts_are_refused(capfd, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(demonstrations()[0]) + "\n")
    given = [f"--data.init_args.path={tmp_path / 'rows.jsonl'}", "--model.init_args.model=random:tiny"]
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(ROOT / "configs/sft.yaml"), *given, "--rollout.sampling.num_generations=4"])
    told = "rollout.sampling.num_generations: SFTLightningModule draws no responses: leave rollout out"
    assert told in capfd.readouterr().err


def test_a_plan_says_that_it_is_for_rollouts(capfd):
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(ROOT / "configs/sft.yaml")])
    assert "plan is for runs with rollouts, SFTLightningModule has none" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("sft", {"micro_batch_tokens": 8}, "tokens does not fit a micro-batch of 8: raise model.micro_batch_tokens"),
        ("dpo", {"label_smoothing": 0.1, "loss_type": "ipo"}, "is of the sigmoid loss, got 0.1 for ipo: set it to 0"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_is_loaded(kind, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(kind, tmp_path, 1, model=options)


def test_a_reward_model_starts_from_no_adapter(tmp_path):
    module, _ = train("sft", tmp_path, 1, model={"lora": LoRA(r=4)})
    module.trainer.save_checkpoint(tmp_path / "state.ckpt")
    export_checkpoint(str(tmp_path / "state.ckpt"), str(tmp_path / "adapter"), adapter=True)
    with pytest.raises(
        ValueError, match=r"model\.lora\.adapter is a policy's, that of a reward model starts anew: merge"
    ):
        KINDS["reward"][0]("random:tiny", lora=LoRA(r=4, adapter=str(tmp_path / "adapter")))


def test_a_reward_model_that_could_not_be_loaded_is_refused_before_its_weights_are(tmp_path):
    size = len(write_byte_tokenizer(tmp_path / "granite"))
    GraniteConfig(vocab_size=size, hidden_size=32, num_attention_heads=2).save_pretrained(tmp_path / "granite")
    with pytest.raises(
        NotImplementedError, match="has no sequence-classification model for a granite, the result could not"
    ):
        train("reward", tmp_path / "run", 1, model={"model": str(tmp_path / "granite")})
