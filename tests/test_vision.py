"""Vision-language models: packed and sharded against stock transformers, and whole runs from rows to a resumed checkpoint."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from test_lora import disturb, fill
from test_policy import strategy_of
from test_runs import assert_equal_runs
from torch.distributed.fsdp import FSDPModule
from toy_vlm import answered, inputs_of, write_vlm
from toys import Results, assert_equal_to_stock, even_tokens, packed_results, spawn, stock_results
from transformers import AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM

from lightning_rlhf import (
    FSDPUlyssesStrategy,
    GRPOLightningModule,
    HFExport,
    IterationCheckpoint,
    PPOLightningModule,
    PromptDataModule,
    RolloutCallback,
    Sampling,
)
from lightning_rlhf.cli import main
from lightning_rlhf.export import export_checkpoint
from lightning_rlhf.images import ImageEncoder
from lightning_rlhf.modules.critic import build_critic, check_model
from lightning_rlhf.modules.kl import KL
from lightning_rlhf.modules.policy import build_policy
from lightning_rlhf.modules.settings import LoRA, ModelSettings
from lightning_rlhf.modules.startup import check_isolation
from lightning_rlhf.packing import pack
from lightning_rlhf.plan import shape_of
from lightning_rlhf.rollout import RolloutEngine

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.*:FutureWarning"
)  # of transformers 5.24 to peft
ADAPTERS = LoRA(r=4, alpha=8)
TWO = {"dp2": {}, "sp2": {"sequence_parallel_size": 2}}


def gradients_of(rank: int, folder: str, ranks: int, sizes: dict[str, int], frozen: bool, **options: Any) -> Results:
    strategy = strategy_of(ranks, **sizes)
    settings = ModelSettings(folder, freeze_vision=frozen, **options)
    actor, critic = build_policy(settings, strategy), build_critic(settings, strategy)
    ids, lengths, images = zip(*answered(folder), strict=True)
    mine = (
        [[0, 1, 3], [2]][strategy.dp_rank] if strategy.dp_size > 1 else [0, 1, 2, 3]
    )  # one data rank without pictures
    packed = pack(
        [ids[i] for i in mine],
        [lengths[i] for i in mine],
        strategy.sequence_parallel_size,
        strategy.sp_rank,
        [images[i] for i in mine],
    )
    if actor.adapter is not None:
        disturb(actor)
        disturb(critic)
    return packed_results(actor, critic, packed, mine, ranks)


def assert_stock(results: list[Results], folder: str, frozen: bool) -> None:
    model, copy = (AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2))
    examples = ((ids, prompt, inputs_of(ids, images)) for ids, prompt, images in answered(folder))
    stock = stock_results(model, copy.model, examples)
    assert any("visual" in name for name in stock[1])
    assert_equal_to_stock(results, stock, *["visual"] * frozen)


def assert_stock_peft(results: list[Results], folder: str) -> None:
    """peft's own models with adapters that start and are disturbed as ours."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    copy = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval().model
    own = build_policy(ModelSettings(folder, lora=ADAPTERS), strategy_of(1)).adapter
    start = {name: p.detach().to_local() for name, p in own.named_parameters()}
    models = []
    for part, prefix in ((model, ""), (copy, "model.")):
        linear = [name for name, _ in part.named_modules() if f"{prefix}{name}" in {n.rsplit(".", 3)[0] for n in start}]
        models.append(get_peft_model(part, LoraConfig(r=ADAPTERS.r, lora_alpha=ADAPTERS.alpha, target_modules=linear)))
        fill(models[-1], {name.removeprefix(prefix): tensor for name, tensor in start.items()})
    examples = ((ids, prompt, inputs_of(ids, images)) for ids, prompt, images in answered(folder))
    outputs, *stock = stock_results(*models, examples)
    stock = [{n.replace("base_model.model.", "", 1): grad for n, grad in grads.items()} for grads in stock]
    assert len(stock[0]) == 2 * 2 * 7  # in each of two layers, of each of seven matrices
    assert not any("visual" in name for name in stock[0])
    assert_equal_to_stock(results, (outputs, *stock))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at its inputs
@pytest.mark.parametrize("family", [pytest.param("qwen2_vl", marks=pytest.mark.slow), "qwen2_5_vl"])
def test_compiled_decoder_layers_equal_the_stock_model(family, tmp_path, monkeypatch):
    """Traced and differentiated by torch.compile, run by eager kernels."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    folder = write_vlm(tmp_path, family)
    assert_stock([gradients_of(0, folder, 1, {}, False, compile=True)], folder, False)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_a_packed_model_equals_the_stock_model_in_value_and_gradient(family, frozen, tmp_path):
    folder = write_vlm(tmp_path, family)
    assert_stock([gradients_of(0, folder, 1, {}, frozen)], folder, frozen)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_adapters_of_a_packed_model_equal_stock_peft_in_value_and_gradient(family, tmp_path):
    folder = write_vlm(tmp_path, family)
    assert_stock_peft([gradients_of(0, folder, 1, {}, True, lora=ADAPTERS)], folder)


# -- whole runs ----------------------------------------------------------------------------------------------------------


class Metrics(pl.Callback):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.rows.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def train(
    folder: str,
    ranks: int = 1,
    sizes: dict[str, int] | None = None,
    kind: type = PPOLightningModule,
    steps: int = 2,
    callbacks: tuple[pl.Callback, ...] = (),
    resume: Path | None = None,
    engine: RolloutEngine | None = None,
    accelerator: str = "cpu",
    precision: Any = "32-true",
    **options: Any,
) -> list[dict[str, float]]:
    """Metrics of a run on `toy_vlm.rows`, four prompts and twelve responses an iteration."""
    pl.seed_everything(3, verbose=False)
    torch.set_num_threads(1)
    metrics = Metrics()
    sampling = Sampling(num_generations=3, max_completion_length=6)
    trainer = pl.Trainer(
        accelerator=accelerator,
        precision=precision,
        devices=ranks,
        strategy=FSDPUlyssesStrategy(**sizes or {}),
        max_steps=steps,
        logger=False,
        log_every_n_steps=1,
        enable_checkpointing=any(isinstance(c, IterationCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[RolloutCallback(engine, sampling=sampling, log_probs_every=1), metrics, *callbacks],
    )
    settings: dict[str, Any] = {"lr": 1e-3, "micro_batch_tokens": 300, "mini_batches": 2, "kl": KL(0.01)}
    module = kind(folder, reward=[even_tokens], **settings | options)
    data = PromptDataModule(path="toy_vlm.rows", batch_size=4)
    trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=None if resume is None else False)
    return metrics.rows


def on_two_ranks(rank: int, folder: str) -> dict[str, tuple]:
    """One start of two processes for all that is compared with one."""
    gradients = {name: gradients_of(rank, folder, 2, sizes, False) for name, sizes in TWO.items()}
    adapters = {name: gradients_of(rank, folder, 2, sizes, True, lora=ADAPTERS) for name, sizes in TWO.items()}
    runs = {name: train(folder, 2, sizes, freeze_vision=False) for name, sizes in TWO.items()}
    return {name: (gradients[name], runs[name], adapters[name]) for name in TWO}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_vlm(tmp_path_factory.mktemp("vlm"), "qwen2_5_vl", tied=False)


@pytest.fixture(scope="module")
def two_ranks(folder: str) -> list[dict[str, tuple]]:
    return spawn(on_two_ranks, 2, folder)


@pytest.mark.parametrize("name", TWO)
def test_sharded_models_equal_the_stock_model_in_value_and_gradient(name, folder, two_ranks):
    """With a head of its own, a trained tower, and on two data ranks one without any picture."""
    assert_stock([own[name][0] for own in two_ranks], folder, False)
    assert_stock_peft([own[name][2] for own in two_ranks], folder)


def test_results_depend_neither_on_the_split_nor_on_switches(folder, two_ranks):
    one = train(folder, freeze_vision=False)
    assert len(one) == 2
    assert all(row["rollout/logprob_diff_mean"] < 1e-5 and row["rollout/logprob_diff_max"] < 1e-4 for row in one)
    assert one[0]["rollout/checksum_ok"] == 1.0
    for name in TWO:
        for own in two_ranks:
            assert_equal_runs(one, own[name][1])
    switches = {"gradient_checkpointing": "selective", "tiled_mlp": 40, "offload_activations": True}
    switches |= {"offload_reference": True, "micro_batch_tokens": 5000}
    assert_equal_runs(one, train(folder, freeze_vision=False, **switches))


@pytest.mark.parametrize("trained", ["decoder", "all", "adapters"])
def test_a_run_resumes_where_its_checkpoint_was_written_and_exports_a_model(trained, folder, tmp_path):
    options: dict[str, Any] = {"kind": GRPOLightningModule, "freeze_vision": trained != "all"}
    options |= {"lora": ADAPTERS, "lr": 3e-2} if trained == "adapters" else {}
    save = IterationCheckpoint(tmp_path / "ck", every_n_train_steps=1, save_top_k=-1)
    whole = train(folder, callbacks=(save, HFExport(dirpath=tmp_path / "hf")), **options)
    again = IterationCheckpoint(tmp_path / "ck", every_n_train_steps=1, save_top_k=-1)
    rest = train(folder, callbacks=(again,), resume=tmp_path / "ck/iteration-000001.ckpt", **options)
    assert_equal_runs(whole[1:], rest, 1e-7)
    assert max(row["rollout/logprob_diff_mean"] for row in whole) < 1e-5
    (exported,) = (tmp_path / "hf").iterdir()
    before, after = (
        AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16) for path in (folder, exported)
    )
    moved = {n for n, p in after.named_parameters() if not torch.equal(p, before.get_parameter(n))}
    assert any("language_model" in n for n in moved)
    assert any("visual" in n for n in moved) == (trained == "all")
    assert ImageEncoder.load(str(exported)) is not None
    export_checkpoint(str(tmp_path / "ck/iteration-000002.ckpt"), str(tmp_path / "out"))
    assert {p.name: p.read_bytes() for p in exported.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()
    }
    if trained == "adapters":
        export_checkpoint(str(tmp_path / "ck/iteration-000002.ckpt"), str(tmp_path / "adapter"), adapter=True)
        base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        merged = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
        for name, parameter in after.named_parameters():
            torch.testing.assert_close(merged.get_parameter(name).to(torch.bfloat16), parameter)


def test_a_text_critic_beside_a_vision_language_policy_is_refused(folder, tmp_path):
    config = LlamaConfig(
        vocab_size=262, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the prompts have images, LlamaModel is a text model"):
        train(folder, critic=str(tmp_path))


def test_a_text_model_has_no_tower_to_train():
    with pytest.raises(ValueError, match=r"freeze_vision: false needs a vision-language model, qwen2 takes text only"):
        build_policy(ModelSettings("random:tiny", freeze_vision=False), strategy_of(1))


REFUSED = {
    "lora": ({"lora": ADAPTERS, "freeze_vision": False}, r"model\.freeze_vision must be true with model\.lora"),
    "liger": ({"liger": True}, r"model\.liger is for text models, qwen2_5_vl is a vision-language model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_for_text_models_is_refused_before_weights_are_loaded(name, folder):
    options, message = REFUSED[name]
    settings = ModelSettings(folder, **options)
    with pytest.raises(NotImplementedError, match=message):
        check_model(settings, strategy_of(1))
    with pytest.raises(NotImplementedError, match=message):
        train(folder, **options)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ("visual", "no module is called visual"),
        ("merger", "no module is called merger"),
        (
            "mlp",
            r"mlp is in the vision tower, too \(model\.visual\.blocks\.0\.mlp\), .* such as model\.language_model\.",
        ),
        ("down_proj", r"down_proj is in the vision tower, too"),
    ],
)
def test_nothing_of_the_tower_is_saved_with_an_adapter(saved, message, folder):
    settings = ModelSettings(folder, lora=LoRA(target_modules=["q_proj"], modules_to_save=[saved]))
    with pytest.raises(ValueError, match=rf"model\.lora\.modules_to_save: {message}"):
        build_policy(settings, strategy_of(1))
    with pytest.raises(ValueError, match=rf"model\.lora\.modules_to_save: {message}"):
        build_critic(settings, strategy_of(1))


def test_a_module_of_the_language_model_is_saved_by_its_full_name(folder):
    saved = "model.language_model.layers.1.mlp.down_proj"
    lora = LoRA(target_modules=["q_proj"], modules_to_save=[saved, "lm_head"])
    actor = build_policy(ModelSettings(folder, lora=lora), strategy_of(1))
    trained = {n for n, _ in actor.adapter.named_parameters() if "lora_" not in n}
    assert trained == {f"{saved}.modules_to_save.default.weight", "lm_head.modules_to_save.default.weight"}


def test_a_decoder_that_mixes_packed_neighbours_is_found_at_the_start(folder):
    strategy = strategy_of(1)
    actor = build_policy(ModelSettings(folder), strategy)
    assert check_isolation(actor, strategy, lambda packed: actor(packed, 1.0), "actor") < 1e-5
    actor.layers[0].register_forward_hook(lambda _, args, output: output + 0.5 * output.roll(1, dims=1))
    with pytest.raises(NotImplementedError, match="Qwen2_5_VLForConditionalGeneration cannot be packed"):
        check_isolation(actor, strategy, lambda packed: actor(packed, 1.0), "actor")


# -- the plan ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [True, False], ids=["policy", "critic"])
@pytest.mark.parametrize("trained", ["decoder", "all", "adapters"])
@pytest.mark.parametrize("small", [0, 10**9], ids=["layers", "whole"])
def test_the_plan_counts_what_is_built(head, trained, small, folder):
    options: dict[str, Any] = {"freeze_vision": trained != "all", "lora": ADAPTERS if trained == "adapters" else None}
    settings, strategy = ModelSettings(folder, **options), strategy_of(1, min_num_params=small)
    root: Any = build_policy(settings, strategy) if head else build_critic(settings, strategy)
    shape = shape_of(settings.config, torch.float32, head=head, min_num_params=small, **options)
    assert shape.parameters == sum(p.numel() for p in root.parameters())
    assert shape.trained_shard(1) == sum(p.numel() for p in root.parameters() if p.requires_grad)
    assert shape.layers == len(root.layers)
    groups = [own for m in root.modules() if isinstance(m, FSDPModule) and (own := _own_elements(m))]
    assert sorted(groups) == sorted([*shape.units, shape.root])


def _own_elements(unit: FSDPModule) -> int:
    group = unit._get_fsdp_state()._fsdp_param_group
    return sum(p.sharded_param.numel() for p in group.fsdp_params) if group else 0


def test_a_run_with_pictures_is_planned(folder, capsys):
    config = str(Path(__file__).parent.parent / "configs" / "ppo.yaml")
    main(["plan", "--config", config, f"--model.model={folder}", "--devices=2", "--data.max_prompt_length=512"])
    out = " ".join(capsys.readouterr().out.split())
    assert "0.1 M parameters; trains actor + critic" in out
    assert "error" not in out


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of vLLM's packages
@pytest.mark.parametrize("engine", ["TransformersEngine", "VLLMEngine"])
def test_engine_and_trainer_agree_on_pictures_on_a_gpu(engine, tmp_path):
    folder = write_vlm(tmp_path, "qwen2_5_vl", tied=False, noise=0.02)
    little = {"kv_cache_memory_bytes": 1 << 28} if engine == "VLLMEngine" else {}  # tests beside it have the GPU, too
    one: RolloutEngine = getattr(importlib.import_module("lightning_rlhf.rollout"), engine)(**little)
    try:
        for frozen in (True, False):  # a process has room for one engine, which serves both runs
            rows = train(
                folder,
                accelerator="cuda",
                precision="bf16-mixed",
                engine=one,
                freeze_vision=frozen,
                offload_reference=not frozen,
            )
            assert all(0.0 < row["rollout/logprob_diff_mean"] < 0.05 for row in rows)
    finally:
        one.close()
