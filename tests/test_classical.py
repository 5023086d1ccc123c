"""SFT, reward model and DPO: against plain transformers, on any mesh, resumed, and from the command line."""

from __future__ import annotations

import csv
import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from toys import command, spawn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GraniteConfig,
    LlamaConfig,
)

from lightning_rlhf import (
    DPOLightningModule,
    FSDPUlyssesStrategy,
    IterationCheckpoint,
    LoRA,
    PreferenceDataModule,
    RewardModelLightningModule,
    SFTDataModule,
    SFTLightningModule,
)
from lightning_rlhf.export import export_checkpoint
from lightning_rlhf.modules.policy import build_policy
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.tiny import write_byte_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
ROOT = Path(__file__).parent.parent
OPTIONS = {"lr": 3e-3, "micro_batch_tokens": 120}
KINDS = {
    "sft": (SFTLightningModule, SFTDataModule, "test_classical.demonstrations"),
    "reward": (RewardModelLightningModule, PreferenceDataModule, "test_classical.pairs"),
    "dpo": (DPOLightningModule, PreferenceDataModule, "test_classical.pairs"),
}


def demonstrations() -> list[dict[str, Any]]:
    """24 conversations of one or two turns."""
    asked = [f"{a}+{b}" for a in (2, 31, 7, 5) for b in (4, 50, 6, 9, 8, 13)]
    rows = [[{"role": "user", "content": q}, {"role": "assistant", "content": str(eval(q))}] for q in asked]
    return [{"messages": row if i % 3 else row + rows[i - 1]} for i, row in enumerate(rows)]


def pairs() -> list[dict[str, Any]]:
    """24 pairs of unlike lengths with margins."""
    asked = [f"{a}+{b}=" for a in (2, 31, 7, 5) for b in (4, 50, 6, 9, 8, 13)]
    return [
        {"prompt": q, "chosen": str(eval(q[:-1])), "rejected": "no" * (1 + i % 4), "margin": 0.1 * (i % 3)}
        for i, q in enumerate(asked)
    ]


def train(
    kind: str, folder: Path | str, steps: int, *, ckpt_path: str | None = None, save: bool = False, **options: Any
) -> tuple[Any, list[dict[str, float]]]:
    """The module and its logged rows; options are the trainer's, ``strategy``, ``data`` and ``model`` those of the others."""
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    module, data, rows = KINDS[kind]
    model = module(**{"model": "random:tiny", **OPTIONS, **options.pop("model", {})})
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=FSDPUlyssesStrategy(**options.pop("strategy", {})),
        max_steps=steps,
        num_sanity_val_steps=0,
        logger=CSVLogger(str(folder), name="", version=""),
        log_every_n_steps=1,
        enable_checkpointing=save,
        callbacks=[IterationCheckpoint(dirpath=f"{folder}/ck")] if save else [],
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"devices": 1, **{k: v for k, v in options.items() if k != "data"}},
    )
    data = data(**{"path": rows, "batch_size": 9, "val_size": 4, **options.get("data", {})})
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    if not trainer.is_global_zero:
        return model, []
    with Path(folder, "metrics.csv").open(newline="") as file:
        return model, [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def learned(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """What of the metrics depends on no clock."""
    return [
        {k: v for k, v in row.items() if k.startswith(("train/", "val/", "actor/", "reward_model/"))} for row in rows
    ]


# -- against plain transformers, one unpadded sequence at a time -------------------------------------------------------------


@cache
def folder_of(seed: int, root: str) -> str:
    """A random model with weights large enough to tell things apart."""
    folder = Path(root, f"model-{seed}")
    size = len(write_byte_tokenizer(folder))
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=size, num_key_value_heads=2, **sizes, pad_token_id=0)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)


def stock(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def answer_log_probs(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    ids = torch.tensor(prompt + answer)
    log_p = model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return log_p.gather(-1, ids[len(prompt) :, None])[:, 0]


def sft_by_hand(model: Any, tokenizer: Any) -> torch.Tensor:
    """The tiny template is ``role: content`` and a line break; a turn ends with it."""
    total, tokens = torch.zeros(()), 0
    for row in demonstrations():
        before = ""
        for message in row["messages"]:
            if message["role"] == "assistant":
                prompt, reply = tokenizer.encode(before + "assistant: "), tokenizer.encode(message["content"] + "\n")
                total, tokens = total - answer_log_probs(model, prompt, reply).sum(), tokens + len(reply)
            before += f"{message['role']}: {message['content']}\n"
    return total / tokens


def reward_by_hand(model: Any, tokenizer: Any, head: torch.Tensor, center: float) -> torch.Tensor:
    losses = []
    for row in pairs():
        texts = [tokenizer.encode(row["prompt"] + row[side] + tokenizer.eos_token) for side in ("chosen", "rejected")]
        hidden = [model.base_model(torch.tensor(ids)[None]).last_hidden_state[0, -1] for ids in texts]
        better, worse = (h @ head for h in hidden)
        losses.append(-F.logsigmoid(better - worse - row["margin"]) + center * (better + worse) ** 2)
    return torch.stack(losses).mean()


def dpo_by_hand(model: Any, tokenizer: Any, reference: Any, kind: str, beta: float, smoothing: float) -> torch.Tensor:
    losses = []
    for row in pairs():
        prompt, ratios = tokenizer.encode(row["prompt"]), []
        for side in ("chosen", "rejected"):
            reply = tokenizer.encode(row[side] + tokenizer.eos_token)
            with torch.no_grad():
                base = answer_log_probs(reference, prompt, reply)
            ratios.append(answer_log_probs(model, prompt, reply) - base)
        h = ratios[0].sum() - ratios[1].sum()
        losses.append(
            {
                "sigmoid": -(1 - smoothing) * F.logsigmoid(beta * h) - smoothing * F.logsigmoid(-beta * h),
                "hinge": (1 - beta * h).clamp(min=0),
                "ipo": (ratios[0].mean() - ratios[1].mean() - 1 / (2 * beta)) ** 2,
            }[kind]
        )
    return torch.stack(losses).mean()


class WithOtherReference(DPOLightningModule):
    """So that ratios are not 0 in the first step."""

    other = ""

    def configure_model(self) -> None:
        super().configure_model()
        self.reference = build_policy(ModelSettings(self.other), self.strategy)
        self.reference.requires_grad_(False)


CASES = {
    "sft": ("sft", {}),
    "reward": ("reward", {"center_rewards_coefficient": 0.1}),
    **{f"dpo-{kind}": ("dpo", {"loss_type": kind, "beta": 0.3}) for kind in ("sigmoid", "hinge", "ipo")},
    "dpo-smooth": ("dpo", {"beta": 0.3, "label_smoothing": 0.2}),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_plain_transformers(case, tmp_path, tmp_path_factory, monkeypatch):
    """One step of plain gradient descent at rate 1 over all rows, in several micro-batches, moves weights by the gradient."""
    kind, options = CASES[case]
    shared = str(tmp_path_factory.getbasetemp())
    own, other = folder_of(1, shared), folder_of(2, shared)
    monkeypatch.setattr(WithOtherReference, "other", other)
    monkeypatch.setitem(KINDS, "dpo", (WithOtherReference, *KINDS["dpo"][1:]))
    heads = []
    monkeypatch.setattr(
        RewardModelLightningModule, "on_train_start", lambda self: heads.append(head_of(self)), raising=False
    )
    plain = {"optimizer": lambda groups: torch.optim.SGD(groups), "lr": 1.0, "max_grad_norm": None}
    data = {"batch_size": 24, "val_size": 0, "shuffle": False}
    module, (row, *_) = train(kind, tmp_path, 1, model={"model": own, **plain, **options}, data=data)
    model, tokenizer = stock(own), AutoTokenizer.from_pretrained(own)
    if kind == "sft":
        loss = sft_by_hand(model, tokenizer)
    elif kind == "reward":
        head = heads[0].clone().requires_grad_()
        loss = reward_by_hand(model, tokenizer, head, 0.1)
    else:
        fixed = {
            "kind": options.get("loss_type", "sigmoid"),
            "beta": 0.3,
            "smoothing": options.get("label_smoothing", 0.0),
        }
        loss = dpo_by_hand(model, tokenizer, stock(other), **fixed)
    assert row["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    wanted = {n: (p.data, p.grad) for n, p in model.named_parameters() if p.grad is not None}
    if kind == "reward":
        wanted["score.weight"] = head.data[None], head.grad[None]
    after = {n: p.detach().full_tensor() for n, p in module.root.hf_named_parameters()}
    assert wanted.keys() == after.keys()
    for name, (before, gradient) in wanted.items():
        torch.testing.assert_close(before - after[name], gradient, rtol=1e-3, atol=2e-6, msg=name)


def head_of(module: Any) -> torch.Tensor:
    return module.reward_model.value_head.weight.detach().full_tensor()[0].clone()


# -- meshes, resume ------------------------------------------------------------------------------------------------------------


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
    lora = learned(train(kind, tmp_path / "lora", 12, model={"lora": LoRA(r=4), "lr": 2e-2})[1])
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


# -- metrics -------------------------------------------------------------------------------------------------------------------


def test_entropy_and_accuracy_of_tokens_are_those_of_the_logits(tmp_path, tmp_path_factory):
    own = folder_of(1, str(tmp_path_factory.getbasetemp()))
    data = {"batch_size": 24, "val_size": 0, "shuffle": False}
    _, (row, *_) = train("sft", tmp_path, 1, model={"model": own}, data=data)
    model, tokenizer, entropies, right = stock(own), AutoTokenizer.from_pretrained(own), [], []
    for one in demonstrations():
        before = ""
        for message in one["messages"]:
            if message["role"] == "assistant":
                prompt, reply = tokenizer.encode(before + "assistant: "), tokenizer.encode(message["content"] + "\n")
                log_p = model(torch.tensor(prompt + reply)[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                entropies += (-(log_p.exp() * log_p).sum(-1)).tolist()
                right += (log_p.argmax(-1) == torch.tensor(reply)).tolist()
            before += f"{message['role']}: {message['content']}\n"
    assert row["train/entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)
    assert row["train/mean_token_accuracy"] == pytest.approx(sum(right) / len(right))
    assert row["train/num_tokens"] == len(right)


def test_calibration_is_how_far_confidence_is_from_being_right(tmp_path):
    """Of the four held-out pairs by hand: bins of 1/15."""
    module, rows = train("reward", tmp_path, 2, model={"lr": 1e-3})
    (last,) = [row for row in rows if "val/heldout/calibration_error" in row][-1:]
    folder = export(tmp_path, module)
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    bins: dict[int, list[tuple[float, bool]]] = {}
    for row in pairs()[-4:]:
        better, worse = (score(model, tokenizer, row["prompt"] + row[side]) for side in ("chosen", "rejected"))
        sure = 1 / (1 + math.exp(-abs(better - worse)))
        bins.setdefault(int(sure * 15), []).append((sure, better > worse))
    error = sum(abs(sum(p - right for p, right in members)) for members in bins.values()) / 4
    assert last["val/heldout/calibration_error"] == pytest.approx(error, abs=1e-4)


def score(model: Any, tokenizer: Any, text: str) -> float:
    with torch.no_grad():
        return model(torch.tensor([tokenizer.encode(text + tokenizer.eos_token)])).logits.item()


# -- from the command line -----------------------------------------------------------------------------------------------------


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


def export(folder: Path, module: Any) -> str:
    """What the module trained, in float32."""
    path = folder / "state.ckpt"
    module.trainer.save_checkpoint(path)
    export_checkpoint(str(path), str(folder / "exported"), dtype="float32")
    return str(folder / "exported")


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


def test_a_plan_says_that_it_is_for_rollouts(capfd):
    from lightning_rlhf.cli import main

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


def test_a_reward_model_that_could_not_be_loaded_is_refused_before_its_weights_are(tmp_path):
    size = len(write_byte_tokenizer(tmp_path / "granite"))
    GraniteConfig(vocab_size=size, hidden_size=32, num_attention_heads=2).save_pretrained(tmp_path / "granite")
    with pytest.raises(
        NotImplementedError, match="has no sequence-classification model for a granite, the result could not"
    ):
        train("reward", tmp_path / "run", 1, model={"model": str(tmp_path / "granite")})
