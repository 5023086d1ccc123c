"""LoRA against stock peft models, one unpadded sequence at a time; what engines, checkpoints and exports get."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean

import lightning.pytorch as pl
import peft
import pytest
import torch
from peft import PeftModel, get_peft_model
from test_policy import CONFIGS, PROMPTS, save, sequences, strategy_of
from test_runs import QUIET, assert_equal_runs, run
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import distribute_tensor
from toys import TINY_MODULE, even_tokens, fit, spawn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lightning_rlhf import KL, GRPOLightningModule, HFExport, LoRA, PPOLightningModule, Sampling
from lightning_rlhf.modules.critic import build_critic
from lightning_rlhf.modules.policy import Policy, build_policy
from lightning_rlhf.modules.settings import ModelSettings
from lightning_rlhf.packing import Packed, pack
from lightning_rlhf.precision import FSDP2Precision
from lightning_rlhf.rollout import TransformersEngine
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.weights import checksum, gather
from lightning_rlhf.strategy import FSDPUlyssesStrategy
from lightning_rlhf.tiny import tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:more than half of the responses were cut"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),  # of transformers 5.24
]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES = {
    "tied": LoRA(r=4, alpha=8),
    "untied": LoRA(r=3, alpha=12, rslora=True, modules_to_save=["lm_head", "embed_tokens"]),
    "mixture": LoRA(r=4, alpha=8, target_modules=ATTENTION),
    "dropout": LoRA(r=4, alpha=8),  # GPT-2, whose matrices are transposed
}
SPLITS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "sp2": (2, {"sequence_parallel_size": 2}),
    "replicas": (2, {"data_parallel_replicate": 2}),
}
COMMON = TINY_MODULE | {"reward": [even_tokens], "lr": 3e-2}


def noise(name: str, shape: torch.Size) -> torch.Tensor:
    return 0.2 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


@torch.no_grad()
def disturb(root: torch.nn.Module) -> None:
    """As if it had been trained."""
    for name, p in root.adapter.named_parameters():
        local = distribute_tensor(noise(name, p.shape).to(p.dtype), p.device_mesh, p.placements, src_data_rank=None)
        p.add_(local)


def full(named) -> dict[str, torch.Tensor]:
    return {n: p.detach().full_tensor().clone() for n, p in named}  # of one shard it is the shard itself


def packed_of(strategy: FSDPUlyssesStrategy) -> tuple[list[int], Packed]:
    mine = list(range(strategy.dp_rank, 4, strategy.dp_size))
    split = strategy.sequence_parallel_size, strategy.sp_rank
    return mine, pack([sequences()[i] for i in mine], [PROMPTS[i] for i in mine], *split)


def study(rank: int, root: str, names: list[str], splits: list[str]) -> dict[str, dict[str, dict]]:
    """All that the tests below look at, of each model in each split on this rank."""
    found = {}
    for split in splits:
        ranks, sizes = SPLITS[split]
        strategy = strategy_of(ranks, **sizes)
        found[split] = {name: study_one(f"{root}/{name}", CASES[name], strategy, ranks) for name in names}
    return found


def study_one(folder: str, lora: LoRA, strategy: FSDPUlyssesStrategy, ranks: int) -> dict:
    settings = ModelSettings(folder, lora=lora)
    actor, critic = build_policy(settings, strategy, seed=3), build_critic(settings, strategy, seed=3)
    found = {"start": full(actor.adapter.named_parameters())}
    mine, packed = packed_of(strategy)
    with torch.no_grad():
        base = actor(packed, 0.7)[0]
        for parameter in critic.value_head.parameters():
            parameter.fill_(0.1)
        strategy.reshard(actor)
    disturb(actor)
    disturb(critic)
    log_probs, entropy = actor(packed, 0.7, True)
    values = critic(packed)
    ((log_probs.sin() + 0.3 * entropy).sum() * ranks).backward()
    (values.square().sum() * ranks).backward()
    found["outputs"] = {i: (log_probs[k].detach(), entropy[k].detach(), values[k].detach()) for k, i in enumerate(mine)}
    found["gradients"] = {n: p.grad.full_tensor() for n, p in actor.named_parameters() if p.grad is not None}
    found["critic"] = {n: p.grad.full_tensor() for n, p in critic.named_parameters() if p.grad is not None}
    with torch.no_grad(), actor.adapter.disabled():
        found["reference"] = torch.equal(actor(packed, 0.7)[0], base)
    strategy.reshard(actor)
    written = Path(f"{folder}-{strategy.sequence_parallel_size}-{strategy.data_parallel_replicate}-adapter")
    tensors = full(actor.adapter.named_parameters())
    if strategy.is_global_zero:
        actor.adapter.save(written, tensors)
    strategy.barrier()
    again = build_policy(ModelSettings(folder, lora=replace(lora, adapter=str(written))), strategy)
    held = dict(actor.named_parameters())
    found["reloaded"] = all(torch.equal(p.to_local(), held[n].to_local()) for n, p in again.named_parameters())
    found["trained"] = sorted(n for n, p in actor.named_parameters() if p.requires_grad)
    before = {n: p.detach().to_local().clone() for n, p in actor.named_parameters()}
    found["merged"] = {n: t.clone() for n, t in gather(actor.hf_named_parameters(), None, bucket_bytes=2048)}
    found["unchanged"] = all(torch.equal(p.to_local(), before[n]) for n, p in actor.named_parameters())
    found["sums"] = {checksum(gather(actor.hf_named_parameters(), None, bucket_bytes=b)) for b in (1, 2048, 1 << 29)}
    return found


@contextmanager
def process_group_of_its_own() -> Iterator[None]:
    """For fixtures that outlive a test: what a launcher leaves behind would reach the processes of later tests."""
    environment = dict(os.environ)
    yield
    torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="module")
def studies(tmp_path_factory) -> tuple[Path, dict[str, list[dict]]]:
    root = tmp_path_factory.mktemp("models")
    for name in CASES:
        save(name, root / name)
    with process_group_of_its_own():
        alone = [study(0, str(root), list(CASES), ["one"])]
    two = spawn(study, 2, str(root), ["tied", "untied"], ["dp2", "sp2", "replicas"])
    return root, {split: [rank[split] for rank in (alone if split == "one" else two)] for split in SPLITS}


@pytest.fixture(params=SPLITS)
def studied(request, studies) -> tuple[Path, list[dict]]:
    """Where the models are, and for each rank what was found of each of them."""
    return studies[0], studies[1][request.param]


def stock(folder: Path, lora: LoRA) -> tuple[PeftModel, PeftModel]:
    """peft's own models with the adapters of `disturb`."""
    models = []
    for backbone in (False, True):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        model = model.base_model if backbone else model
        config = (
            LoRA(lora.r, lora.alpha, lora.target_modules, None, rslora=lora.rslora) if backbone else lora
        ).config()
        if backbone and lora.modules_to_save:
            config.modules_to_save = ["embed_tokens"]
        config.fan_in_fan_out = "transformer" in dict(model.named_modules()) or hasattr(model, "wte")
        config.task_type = None if backbone else config.task_type
        models.append(get_peft_model(model, config))
    return models[0], models[1]


def fill(model: PeftModel, start: dict[str, torch.Tensor]) -> None:
    """The start of our model, and the disturbance."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                own = name.removeprefix("base_model.model.")
                parameter.copy_(start[own] + noise(own, parameter.shape))


def test_packed_and_sharded_adapters_equal_stock_peft_in_value_and_gradient(studied):
    root, results = studied
    for name in results[0]:
        policy, critic = stock(root / name, CASES[name])
        start = results[0][name]["start"]
        fill(policy, start)
        prefix = policy.base_model.model.base_model_prefix
        # both start from the same draws, in the order of the layers
        fill(critic, {n.removeprefix(f"{prefix}."): t for n, t in start.items()})
        outputs = {}
        for i, (ids, prompt) in enumerate(zip(sequences(), PROMPTS, strict=True)):
            log_p = (policy(input_ids=ids[None], use_cache=False).logits[0, prompt - 1 : -1] / 0.7).log_softmax(-1)
            log_probs = log_p.gather(-1, ids[prompt:, None])[:, 0]
            entropy = -(log_p.exp() * log_p).sum(-1)
            hidden = critic(input_ids=ids[None], use_cache=False).last_hidden_state[0, prompt - 1 : -1]
            values = 0.1 * hidden.sum(-1) + 0.1
            ((log_probs.sin() + 0.3 * entropy).sum() + values.square().sum()).backward()
            outputs[i] = (log_probs.detach(), entropy.detach(), values.detach())
        seen = set()
        for own in (r[name] for r in results):
            for i, got_all in own["outputs"].items():
                seen.add(i)
                for got, want in zip(got_all, outputs[i], strict=True):
                    torch.testing.assert_close(got[: len(want)], want, rtol=1e-4, atol=1e-5)
            for model, gradients in ((policy, own["gradients"]), (critic, own["critic"])):
                wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
                assert wanted.keys() == {
                    n.replace("model.", "base_model.model.", 1) for n in gradients if "value_head" not in n
                }
                for n, want in wanted.items():
                    got = gradients[n.replace("base_model.model.", "model.", 1)]
                    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item() + 1e-6)
            assert own["critic"]["value_head.weight"].any()
        assert seen == {0, 1, 2, 3}


def test_an_adapter_starts_at_the_base_and_equal_on_any_number_of_ranks(studied):
    root, results = studied
    for name in results[0]:
        alone = build_policy(ModelSettings(str(root / name), lora=CASES[name]), strategy_of(1), seed=3)
        want = full(alone.adapter.named_parameters())
        for result in results:
            start = result[name]["start"]
            assert start.keys() == want.keys()
            assert all(torch.equal(start[n], want[n]) for n in want)
        for n, tensor in want.items():
            assert tensor.any() != (".lora_B." in n)
            if ".lora_A." in n:  # peft's own: kaiming_uniform with a = sqrt(5)
                assert tensor.abs().max() <= tensor.shape[1] ** -0.5
                assert tensor.std() == pytest.approx((3 * tensor.shape[1]) ** -0.5, rel=0.3)
            if "modules_to_save" in n:
                original = alone.model.get_parameter(n.replace("modules_to_save.default", "original_module"))
                assert torch.equal(tensor, original.full_tensor())
        torch.distributed.destroy_process_group()


def test_adapters_of_another_seed_start_elsewhere(tmp_path):
    settings, strategy = ModelSettings(save("tied", tmp_path), lora=CASES["tied"]), strategy_of(1)
    one, again, other = (full(build_policy(settings, strategy, seed=n).adapter.named_parameters()) for n in (3, 3, 4))
    drawn = [name for name in one if ".lora_A." in name]
    assert drawn
    assert all(torch.equal(one[name], again[name]) for name in drawn)
    assert not any(torch.equal(one[name], other[name]) for name in drawn)


def test_without_the_adapter_the_actor_is_the_base_to_the_bit(studied):
    for result in studied[1]:
        for own in result.values():
            assert own["reference"]
            assert all("lora_" in n or "modules_to_save" in n for n in own["trained"])
            assert own["trained"] == sorted(own["gradients"])


def test_engines_get_what_peft_merges_and_the_trainer_keeps_what_it_has(studied):
    root, results = studied
    for name in results[0]:
        policy, _ = stock(root / name, CASES[name])
        fill(policy, results[0][name]["start"])
        merged = dict(policy.merge_and_unload().named_parameters(remove_duplicate=False))
        for own in (r[name] for r in results):
            assert own["unchanged"]
            assert own["merged"].keys() == merged.keys()
            for n, tensor in own["merged"].items():
                torch.testing.assert_close(tensor, merged[n].detach(), rtol=1e-5, atol=1e-6)
            assert len(own["sums"]) == 1  # tied names stay together however small the buckets are


def test_an_adapter_that_was_written_starts_again_on_any_number_of_ranks(studied):
    assert all(own["reloaded"] for rank in studied[1] for own in rank.values())


def bf16_actor(folder: str, lora: LoRA, precision: str = "bf16-mixed") -> tuple[Policy, FSDPUlyssesStrategy]:
    strategy = strategy_of(1)
    strategy.precision_plugin = FSDP2Precision(precision)
    return build_policy(ModelSettings(folder, lora=lora), strategy), strategy


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_under_bf16_the_base_is_bf16_and_the_adapter_float32_whatever_pass_comes_first(name, tmp_path):
    """FSDP2 settles the dtype of gradients in the first forward pass: a reference pass must not decide it."""
    folder, gradients = save(name, tmp_path), []
    for reference_first in (False, True):
        actor, strategy = bf16_actor(folder, CASES[name])
        disturb(actor)
        dtypes = {p.requires_grad: p.dtype for p in actor.parameters()}
        assert dtypes == {True: torch.float32, False: torch.bfloat16}
        _, packed = packed_of(strategy)
        if reference_first:
            with torch.no_grad(), actor.adapter.disabled():
                actor(packed, 1.0)
        for temperature in (1.0, 0.7):  # two micro-batches: they add up in float32
            actor(packed, temperature)[0].sum().backward()
        gradients.append({n: p.grad.full_tensor() for n, p in actor.named_parameters() if p.requires_grad})
        torch.distributed.destroy_process_group()
    for n, gradient in gradients[0].items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, gradients[1][n]), n
    assert any((g != g.to(torch.bfloat16)).any() for g in gradients[0].values())


def test_recomputed_layers_have_the_same_gradients(tmp_path):
    folder, gradients = save("tied", tmp_path), []
    for recompute in (False, True):
        strategy = strategy_of(1)
        actor = build_policy(ModelSettings(folder, gradient_checkpointing=recompute, lora=CASES["tied"]), strategy)
        disturb(actor)
        actor(packed_of(strategy)[1], 1.0)[0].sum().backward()
        gradients.append({n: p.grad.full_tensor() for n, p in actor.adapter.named_parameters()})
        torch.distributed.destroy_process_group()
    for n, gradient in gradients[0].items():
        assert gradient.any()
        torch.testing.assert_close(gradients[1][n], gradient)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16_weights_are_merged_in_float32_and_rounded_once(precision, tmp_path):
    actor, _ = bf16_actor(save("tied", tmp_path), CASES["tied"], precision)
    disturb(actor)
    parameters = full(actor.model.named_parameters())
    for name, tensor in gather(actor.hf_named_parameters(), torch.bfloat16):
        stem = name.removesuffix(".weight")
        if f"{stem}.base_layer.weight" in parameters:
            a, b = (parameters[f"{stem}.lora_{m}.default.weight"].float() for m in "AB")
            want = (parameters[f"{stem}.base_layer.weight"].float() + 2.0 * b @ a).to(torch.bfloat16)
            assert torch.equal(tensor, want)


def test_the_engine_says_greedily_what_the_merged_model_says(tmp_path):
    folder = str(tiny_model())
    actor = build_policy(ModelSettings(folder, lora=LoRA(r=4)), strategy_of(1))
    disturb(actor)
    engine = TransformersEngine()
    engine.setup(EngineSetup(folder, torch.device("cpu"), torch.float32, (1,), 0, 64, 4))
    engine.load_weights(gather(actor.hf_named_parameters(), torch.float32), 1)
    prompts = [[5, 9, 20], [7, 8, 9, 11, 30]]
    sampling = Sampling(temperature=0.0, max_completion_length=8, ignore_eos=True)
    answers = engine.generate(prompts, sampling, seeds=[0, 0], log_probs=True)
    whole = [torch.tensor(p + a.token_ids) for p, a in zip(prompts, answers, strict=True)]
    with torch.no_grad():
        log_probs, _ = actor(pack(whole, [len(p) for p in prompts], 1, 0), 1.0)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        policy = get_peft_model(base, LoRA(r=4).config())
        start = {n: t - noise(n, t.shape) for n, t in full(actor.adapter.named_parameters()).items()}
        fill(policy, start)
        for prompt, answer, own in zip(prompts, answers, log_probs, strict=True):
            torch.testing.assert_close(torch.tensor(answer.log_probs), own, rtol=1e-4, atol=1e-4)
            logits = policy(input_ids=torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == answer.token_ids


# -- runs ----------------------------------------------------------------------------------------------------------------


def test_it_learns_with_engine_and_trainer_in_step(tmp_path):
    folder = (
        tmp_path / "model"
    )  # the head of random:tiny is frozen here and so small that no hidden state is sure of a token
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tiny_model(), tie_word_embeddings=False, initializer_range=0.1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model()).save_pretrained(folder)
    module = GRPOLightningModule(**COMMON | {"model": str(folder)}, lora=LoRA(r=8), kl=KL(coef=0.001))
    engine = {"log_probs_every": 1, "verify_sync_every": 1}
    rows = fit(module, tmp_path / "run", 20, engine, num_generations=8)
    assert module.reference is None
    assert all(row["rollout/checksum_ok"] == 1.0 for row in rows)
    assert max(row["rollout/logprob_diff_max"] for row in rows) < 1e-4
    rewards = [row["reward/mean"] for row in rows]
    assert mean(rewards[:3]) < 0.62
    assert mean(rewards[-3:]) > 0.8


def test_the_reference_of_a_trained_policy_is_the_base_model(tmp_path):
    module = GRPOLightningModule(**COMMON, lora=LoRA(r=8), kl=KL(coef=0.001))
    rows = fit(module, tmp_path, 3, num_generations=2)
    assert rows[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-7)
    assert rows[-1]["actor/kl_loss"] > 1e-3
    base, last = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32), module.last_experience
    for row, (ids, prompt) in enumerate(zip(last.sequences, last.prompt_lengths, strict=True)):
        with torch.no_grad():
            log_p = base(torch.as_tensor(ids)[None]).logits[0, prompt - 1 : -1].log_softmax(-1)
        want = log_p.gather(-1, torch.as_tensor(ids)[prompt:, None])[:, 0]
        torch.testing.assert_close(last.ref_log_probs[row, : len(want)], want, rtol=1e-4, atol=1e-5)


def ppo() -> PPOLightningModule:
    lora = LoRA(r=2, modules_to_save=["norm"])
    return PPOLightningModule(**COMMON, critic_lr=1e-2, lora=lora, kl=KL(coef=0.01), mini_batches=2)


class Save(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_checkpoint_holds_adapters_only_and_resumes_to_the_bit(precision, tmp_path):
    checkpoint, whole = tmp_path / "ck", ppo()
    rows = fit(whole, tmp_path / "whole", 4, callbacks=[Save(checkpoint)], precision=precision, num_generations=2)
    trained = {n for n, p in whole.named_parameters() if p.requires_grad}
    assert all("lora_" in n or "modules_to_save" in n or "value_head" in n for n in trained)
    keys = set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)
    assert {k.removeprefix("state_dict.") for k in keys if k.startswith("state_dict.")} == trained
    states = {k.removeprefix("optimizer_0.state.") for k in keys if k.startswith("optimizer_0.state.")}
    assert {k.rpartition(".")[0] for k in states} == trained
    weights = sum(p.numel() for n, p in whole.named_parameters() if n in trained)
    size = sum(f.stat().st_size for f in checkpoint.glob("*.distcp"))
    assert 12 * weights < size < 12 * weights + 2500 * len(keys)  # float32: weight and two moments; headers
    rest = ppo()
    again = fit(rest, tmp_path / "rest", 4, ckpt_path=str(checkpoint), precision=precision, num_generations=2)
    for a, b in zip(rows[2:], again, strict=True):
        assert {k: v for k, v in a.items() if k.startswith(("actor", "critic", "reward"))} == {
            k: v for k, v in b.items() if k.startswith(("actor", "critic", "reward"))
        }
    after, parameters = dict(rest.named_parameters()), dict(whole.named_parameters())
    assert all(torch.equal(p.full_tensor(), after[n].full_tensor()) for n, p in parameters.items())


IDS = torch.tensor([[5, 9, 20, 31, 7, 7, 200]])


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[dict, Path, Path]:
    """What a trained policy holds and computes, and the folders of both kinds of export."""
    folder = tmp_path_factory.mktemp("exported")
    module = GRPOLightningModule(**COMMON, lora=LoRA(r=4, rslora=True, modules_to_save=["norm"]))
    exports = [HFExport(dirpath=folder / "merged"), HFExport(dirpath=folder / "adapter", adapter=True)]
    with process_group_of_its_own():
        fit(module, folder, 2, callbacks=exports, num_generations=2)
        actor = module.actor
        held = {"adapter": full(actor.adapter.named_parameters())}
        with torch.no_grad():
            held["log_probs"] = actor(pack([IDS[0]], [1], 1, 0), 1.0)[0][0]
        module.strategy.reshard(actor)
        held["merged"] = {n: t.clone() for n, t in gather(actor.hf_named_parameters(), torch.bfloat16)}
    return held, folder / "merged/iteration_000002", folder / "adapter/iteration_000002"


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def test_an_exported_adapter_is_one_that_peft_loads(exported):
    held, _, adapter = exported
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {p.name for p in adapter.iterdir()}
    config = peft.PeftConfig.from_pretrained(adapter)
    assert (config.base_model_name_or_path, config.r, config.use_rslora) == (str(tiny_model()), 4, True)
    base = AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path, dtype=torch.float32)
    untrained = logits_of(base)
    model = PeftModel.from_pretrained(base, adapter)
    loaded = {n.removeprefix("base_model.model."): p for n, p in model.named_parameters()}
    assert all(torch.equal(loaded[n], tensor) for n, tensor in held["adapter"].items())
    logits = logits_of(model)
    assert not torch.allclose(logits, untrained, atol=1e-2)
    want = logits[0, :-1].log_softmax(-1).gather(-1, IDS[0, 1:, None])[:, 0]
    torch.testing.assert_close(held["log_probs"], want, rtol=1e-4, atol=1e-5)


def test_a_merged_export_is_the_whole_model(exported):
    held, merged, adapter = exported
    model, report = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in held["merged"].items():
        assert torch.equal(model.get_parameter(name), tensor)
    base = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    torch.testing.assert_close(
        logits_of(model.float()), logits_of(PeftModel.from_pretrained(base, adapter)), rtol=0.05, atol=0.05
    )


def test_a_run_starts_from_an_adapter(exported, tmp_path):
    held, _, adapter = exported
    lora = LoRA(r=4, rslora=True, modules_to_save=["norm"], adapter=str(adapter))
    after = GRPOLightningModule(**COMMON, lora=lora)
    started = {}

    class Look(pl.Callback):
        def on_train_start(self, trainer, module):
            started.update(full(module.actor.adapter.named_parameters()))

    fit(after, tmp_path, 1, callbacks=[Look()], num_generations=2)
    assert started.keys() == held["adapter"].keys()
    assert all(torch.equal(started[n], tensor) for n, tensor in held["adapter"].items())


@pytest.mark.slow
def test_a_run_does_not_depend_on_how_it_is_split(tmp_path):
    lora = ["--model.lora={r: 4}", "--rollout.log_probs_every=1", "--rollout.verify_sync_every=1", *QUIET]
    one = run(tmp_path / "one", "tiny_ppo.yaml", *lora)
    assert all(row["rollout/checksum_ok"] == 1.0 and row["rollout/logprob_diff_max"] < 1e-4 for row in one)
    for strategy in ("data_parallel_replicate=1", "sequence_parallel_size=2"):
        two = run(tmp_path / strategy, "tiny_ppo.yaml", *lora, "--trainer.devices=2", f"--trainer.strategy.{strategy}")
        assert_equal_runs(one, two)
        assert all(row["rollout/checksum_ok"] == 1.0 for row in two)


# -- refusals --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "untied",
            {"target_modules": ["lm_head"]},
            "lm_head cannot have an adapter, name it in model.lora.modules_to_",
        ),
        ("untied", {"target_modules": ["embed_tokens", "q_proj"]}, "embed_tokens cannot have an adapter, name it in"),
        ("untied", {"target_modules": ["q_proj", "c_attn"]}, "no module is called c_attn; linear layers: down_proj"),
        ("untied", {"modules_to_save": ["head"]}, "model.lora.modules_to_save: no module is called head"),
        ("tied", {"modules_to_save": ["lm_head"]}, "the model's head is tied to its embeddings.* leave both out"),
        ("tied", {"modules_to_save": ["embed_tokens"]}, "the model's head is tied to its embeddings.* leave both out"),
        ("mixture", {}, "gate is no linear layer .*: name linear layers only"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*_pattern keys did not match:RuntimeWarning")
def test_what_cannot_be_right_is_refused_by_name(name, options, message, tmp_path):
    folder = save(name, tmp_path)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        build_policy(ModelSettings(folder, lora=LoRA(**options)), strategy_of(1))


def test_the_critic_takes_whole_names_and_leaves_out_the_head(tmp_path):
    lora = LoRA(target_modules=["model.layers.1.mlp.up_proj"], modules_to_save=["lm_head", "model.norm"])
    settings, strategy = ModelSettings(save("untied", tmp_path), lora=lora), strategy_of(1)
    matrices = {"layers.1.mlp.up_proj.lora_A.default.weight", "layers.1.mlp.up_proj.lora_B.default.weight"}
    trained = {n for n, p in build_critic(settings, strategy).named_parameters() if p.requires_grad}
    own = {f"model.{n}" for n in {*matrices, "norm.modules_to_save.default.weight"}}
    assert trained == {*own, "value_head.weight", "value_head.bias"}
    trained = {n for n, _ in build_policy(settings, strategy).adapter.named_parameters()}
    assert trained == {*own, "lm_head.modules_to_save.default.weight"}


@pytest.mark.parametrize("saved", [["norm"], ["model.norm"], ["norm", "mlp.down_proj"], ["0.input_layernorm"]])
def test_modules_to_save_are_those_of_stock_peft(saved, tmp_path):
    """It takes every module whose name ends so, in the middle of a word, too: norm is input_layernorm."""
    folder, lora = save("untied", tmp_path), LoRA(r=2, target_modules=["q_proj"], modules_to_save=saved)
    policy, _ = stock(Path(folder), lora)
    wanted = {n.removeprefix("base_model.model.") for n, p in policy.named_parameters() if p.requires_grad}
    assert {
        n for n, _ in build_policy(ModelSettings(folder, lora=lora), strategy_of(1)).adapter.named_parameters()
    } == wanted
    norms = {n for n in wanted if "norm" in n}
    assert len(norms) == {"norm": 9, "model.norm": 1, "0.input_layernorm": 1}[saved[0]]


def test_a_rank_that_no_matrix_can_have_is_refused(tmp_path):
    folder, width = save("untied", tmp_path), CONFIGS["untied"].hidden_size
    for build in (build_policy, build_critic):
        build(ModelSettings(folder, lora=LoRA(r=width)), strategy_of(1))  # more than the keys' can be
        with pytest.raises(ValueError, match=rf"model\.lora\.r: {width + 1} is more .*, at most {width}: lower it"):
            build(ModelSettings(folder, lora=LoRA(r=width + 1)), strategy_of(1))


def test_quantised_weights_are_refused(tmp_path):
    folder = save("tied", tmp_path)
    config = CONFIGS["tied"].__class__.from_pretrained(folder)
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.save_pretrained(folder)
    with pytest.raises(NotImplementedError, match=r"are quantised.*use the same model in bfloat16"):
        build_policy(ModelSettings(folder, lora=LoRA()), strategy_of(1))


def test_wrong_options_are_refused_before_anything_is_built(exported, tmp_path):
    adapter = str(exported[2])
    with pytest.raises(ValueError, match=r"model.lora.dropout must be 0, got 0.1"):
        LoRA(dropout=0.1)
    for options in ({"r": 0}, {"r": -4}, {"alpha": 0}):
        with pytest.raises(ValueError, match=r"model\.lora\.r and model\.lora\.alpha must be at least 1, got"):
            LoRA(**options)
    with pytest.raises(ValueError, match="must name linear layers, or be all-linear"):
        LoRA(target_modules=[])
    with pytest.raises(FileNotFoundError, match=r"must be a local folder with an adapter_config.json"):
        LoRA(adapter=str(tmp_path))
    with pytest.raises(
        ValueError, match=r"trained with modules_to_save \['norm'\] \(here \[\]\), r 4 \(here 16\), use_rs"
    ):
        LoRA(adapter=adapter)
    fits = LoRA(r=4, rslora=True, modules_to_save=["norm"], target_modules=["q_proj"], adapter=adapter)
    with pytest.raises(
        ValueError, match=r"differ in 24 tensors, the first is .*mlp.down_proj.lora_A.weight: set target"
    ):
        build_policy(ModelSettings("random:tiny", lora=fits), strategy_of(1))


def test_an_adapter_in_the_home_folder_is_found(exported, monkeypatch):
    monkeypatch.setenv("HOME", str(exported[2].parent))
    adapter = f"~/{exported[2].name}"
    assert LoRA(r=4, rslora=True, modules_to_save=["norm"], adapter=adapter).adapter == str(exported[2])


def test_an_adapter_export_needs_an_adapter(tmp_path):
    with pytest.raises(ValueError, match=r"HFExport.adapter needs a run with LoRA: set model.lora"):
        fit(GRPOLightningModule(**COMMON), tmp_path, 1, callbacks=[HFExport(adapter=True)])
