"""The command line: defaults, flat YAML, saved configs, and one line for each mistake."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from clean import restored

from lightning_rlhf import GRPOLightningModule, restricted
from lightning_rlhf.cli import RLHFCLI, RLHFParser, main
from lightning_rlhf.rollout import TransformersEngine

CONFIGS = Path(__file__).parent.parent / "configs"
PPO = ["fit", "--config", str(CONFIGS / "tiny_ppo.yaml")]
GRPO = ["fit", "--config", str(CONFIGS / "tiny_grpo.yaml")]
QUIET = ["--trainer.logger=false", "--trainer.callbacks=[]", "--trainer.enable_progress_bar=false"]

MISTAKES = {
    "--model.lrr=1": "model: Option 'lrr' is not accepted, did you mean 'lr'?",
    "--model.lr=fast": "model.lr:",
    "--modle.lr=1": "unrecognized arguments: --modle.lr=1, did you mean 'model'?",
    "--model=3": "model: must be a class path, got 3",
    "--trainer.max_steps=many": "trainer.max_steps: must be an int, got many",
    "--trainer.logger=tensorboard": "trainer.logger: must be a class path or a bool, got tensorboard",
    "--model.lr=-1": "model.lr: got -1, must be >0",
    "--model.lr=0": "model.lr: got 0, must be >0",
    "--model.lr=inf": "model.lr: got inf, must be >0 and finite",
    "--model.lr=nan": "model.lr: got nan, must be >0 and finite",
    "--model.critic_lr=inf": "model.critic_lr: got inf, must be >0 and finite",
    "--model.critic_lr=nan": "model.critic_lr: got nan, must be >0 and finite",
    "--model.warmup_steps=-1": "model.warmup_steps: got -1, must be >=0",
    "--model.warmup_steps=inf": "model.warmup_steps:",
    "--model.min_lr_ratio=2": "model.min_lr_ratio: got 2, must be >=0 and <=1",
    "--model.max_grad_norm=inf": "model.max_grad_norm: got inf, must be >0 and finite",
    "--model.max_grad_norm=0": "model.max_grad_norm: got 0, must be >0 and finite",
    "--model.clip_low=nan": "model.clip_low: got nan, must be >=0 and finite",
    "--model.clip_high=inf": "model.clip_high: got inf, must be >=0 and finite",
    "--model.clip_dual=.nan": "model.clip_dual must be above 1 and finite, or null to switch it off, got nan",
    "--model.value_clip=inf": "model.value_clip: got inf, must be >0 and finite",
    "--model.entropy_coef=inf": "model.entropy_coef: got inf, must be >=0 and finite",
    "--model.kl={coef: .inf}": "model.kl.coef: got inf, must be >=0 and finite",
    "--model.gamma=nan": "model.gamma: got nan, must be >=0 and <=1",
    "--model.reward_weights=[.inf]": "model.reward_weights: got inf, must be finite",
    "--model.val_success=nan": "model.val_success: got nan, must be finite",
    "--model.advantage_args={length_alpha: .inf}": "model.advantage_args.length_alpha: got inf, must be >0 and finite",
    "--model.optimizer={class_path: torch.optim.AdamW, init_args: {betas: [0.9, 1.5]}}": "model.optimizer: Invalid beta",
    "--model.optimizer={class_path: torch.optim.AdamW, init_args: {betas: [.nan, 0.9]}}": "model.optimizer: Invalid beta",
    "--model.optimizer={class_path: torch.optim.AdamW, init_args: {weight_decay: .inf}}": "weight_decay must be finite, got inf",
    "--model.target_kl=-1": "model.target_kl: got -1, must be >0",
    "--model.ema_decay=1.0": "model.ema_decay: got 1.0, must be >0 and <1",
    "--model.kl={coef: 0, refresh_every: 2}": "model.kl.refresh_every renews the reference, which needs model.kl.coef",
    "--rollout.val_average=true": "rollout.val_average: true needs a moving average: set model.ema_decay",
    "--model.mini_batches=0": "model.mini_batches: got 0, must be >0",
    "--model.micro_batch_tokens=8": "a micro-batch holds 8: raise model.micro_batch_tokens",
    "--model.reward=[lightning_rlhf.rewards.nope]": "model.reward:",
    "--model.val_metric=right": "model.val_metric must be one of the reward functions share_of_digits, got 'right'",
    "--model.reward=[]": "error: there is no reward: set model.reward, or override score() in a subclass",
    "--model.reward=[no_such_package.reward]": "model.reward:",
    "--model.model=/no/such/folder": "model.model: there is no folder '/no/such/folder'",
    "--model.critic=/no/such/folder": "error: model.critic: there is no folder '/no/such/folder'",
    "--model.critic=random:huge": "error: model.critic: 'random:huge' is unknown",
    "--model.reward_model.model=/no/such/folder": "error: model.reward_model.model: there is no folder '/no/such/folder'",
    "--model.reward_model.model=random:tiny": "is a Qwen2ForCausalLM, it must be a sequence-classification model",
    "--model.reward_model.wait=2": "model.reward_model: Option 'wait' is not accepted, did you mean 'weight'?",
    "--model.model=random:huge": "the only built-in model is 'random:tiny'",
    "--model.kl.estimator=k9": "model.kl.estimator: must be one of",
    "--model.kl.estimator=k1": "has no useful gradient in the loss",
    "--model.loss=nope": "model.loss: there is no 'nope'; built in: ppo, gspo, gmpo, cispo, sapo, gpg, dro, dppo_tv, dppo_kl",
    "--model.loss_args={beta: 1}": "model.loss_args: ppo has no option 'beta'",
    "--model.advantage_args={length_alpha: 0}": "model.advantage_args.length_alpha: got 0, must be >0",
    "--model.advantage_args={lam_critic: much}": "model.advantage_args.lam_critic: got 'much', must be",
    "--model.kl={coef: 0, target: 0.1}": "model.kl.target steers model.kl.coef",
    "--model.correction={floor: 3}": "model.correction.floor must be below cap=2, got 3",
    "--model.correction={reject: {token_k4: 1}}": "model.correction.reject: 'token_k4' is none of token_k1",
    "--model.correction={level: null}": "model.correction.level null needs reject",
    "--model.advantage=nope.f": "model.advantage: there is no 'nope.f'; built in: gae, grpo, dr_grpo, rloo, opo, gpg",
    "--model.advantage=remax": "model.advantage: remax takes no values, the critic would be trained for nothing",
    "--model.advantage=grpo": "model.advantage: grpo takes no values, the critic would be trained for nothing",
    "--model.advantage=gdpo": "model.advantage: gdpo takes no values, the critic would be trained for nothing",
    "--model.reward_clip=[5, -5]": "model.reward_clip must be [lowest, highest], got [5.0, -5.0]",
    "--model.aggregation=mean": "model.aggregation: must be one of ['token-mean'",
    "--model.clip_dual=0.5": "model.clip_dual must be above 1",
    "--model.optimizer=Nope": "model.optimizer:",
    "--model.attention=nope": "model.attention must be auto, torch, padded, reference",
    "--model.attention=torch": "model.attention: torch runs on CUDA in half precision",
    "--model.attention=flash_attention_3": "this model computes in float32 on cpu: set auto",
    "--model.gradient_checkpointing=some": "'every_second'] or a bool, got some",
    "--model.tiled_mlp=0": "model.tiled_mlp",
    "--model.keep_logits=true": "model.keep_logits needs a CUDA device, got cpu: set it to false",
    "--model.liger=true": "model.liger needs a CUDA device, got cpu: set it to false",
    "--model=no_such_package.Module": "model: No module named 'no_such_package'",
    "--model.lora.r=0": "model.lora.r: got 0, must be >0",
    "--model.lora.alpha=0": "model.lora.alpha: got 0, must be >0",
    "--model.lora.r=65": "model.lora.r: 65 is more than the rank of any target can be, at most 64: lower it",
    "--model.lora.rank=8": "model.lora: Option 'rank' is not accepted",
    "--model.lora.dropout=0.1": "model.lora.dropout must be 0, got 0.1",
    "--model.lora.target_modules=q_proj": "must be one of ['all-linear'] or a list such as [q_proj], got q_proj",
    "--model.lora.modules_to_save=lm_head": "modules_to_save: must be a list such as [lm_head], got lm_head",
    "--model.lora.adapter=/no/such": "model.lora.adapter: /no/such must be a local folder with an adapter_config.json",
    "--model.config_overrides={intermediate_size: 256}": "layers.0.mlp.gate_proj.weight is (128, 64) and must be (256, 64)",
    "--model.lora.target_modules=[mlp]": "target_modules: model.layers.0.mlp is no linear layer (Qwen2MLP): name linear",
    "--model.config_overrides={rope_parameters: {rope_type: nope}}": "rope_type must be one of default, linear, dynamic, yarn",
    "--model.lora.target_modules=[c_attn]": "no module is called c_attn; linear layers: down_proj, gate_proj, k_proj, o_",
    "--data.task=chain_sum": "data needs exactly one of path and task",
    "--data.path=no.jsonl": "data.path: there is no file 'no.jsonl'",
    "--data.path=no_such_package.rows": "data.path",
    "--data.batch_size=0": "data.batch_size: got 0, must be >0",
    "--data.batch_size=1000000": "data.batch_size=1000000 is more than the",
    "--data.max_prompt_length=3": "data.max_prompt_length",
    "--trainer.max_step=3": "did you mean 'max_steps'?",
    "--data.batch=8": "data: Option 'batch' is not accepted, did you mean 'batch_size'?",
    "--trainer.precision=99": "trainer.precision: must be one of [64, 32, 16] or ['transformer-engine'",
    "--trainer.precision=16-mixed": "trainer.precision must be one of 32-true, bf16-mixed, bf16-true, got '16-mixed'",
    "--trainer.devices=0": "devices",
    "--trainer.strategy=nope": "strategy",
    "--trainer.strategy=ddp": "needs trainer.strategy: fsdp_ulysses",
    "--trainer.strategy.sequence_parallel_size=0": "trainer.strategy.sequence_parallel_size must be at least 1, got 0",
    "--trainer.strategy.prefetch=-1": "trainer.strategy.prefetch must be 0 (FSDP2's own) or positive, got -1",
    "--trainer.strategy.min_num_params=-1": "trainer.strategy.min_num_params must be at least 0, got -1",
    "--trainer.strategy.timeout_minutes=0": "trainer.strategy.timeout_minutes must be above 0, up to 1e6, got 0",
    "--trainer.strategy.timeout_minutes=.inf": "trainer.strategy.timeout_minutes must be above 0, up to 1e6, got inf",
    "--trainer.strategy.sequence_parallel_size=3": "1 processes are no multiple of",
    "--trainer.gradient_clip_val=1": "set model.max_grad_norm",
    "--trainer.accumulate_grad_batches=2": "set model.micro_batch_tokens",
    "--rollout.sampling.temperature=0": "rollout.sampling.temperature must be positive",
    "--rollout.sampling.top_p=2": "sampling.top_p must be in (0, 1], got 2",
    "--rollout.sampling.max_completion_length=-5": "max_completion_length must be at least 1, got -5",
    "--rollout.sampling.max_completion_length=1000000": "exceed the model's 2048 positions",
    "--rollout.sampling.extra={seed: 1}": "rollout.sampling.extra must be empty with the TransformersEngine, got seed: leave",
    "--rollout.engine.batch_size=0": "rollout.engine.batch_size must be at least 1, got 0",
    "--rollout.engine=no_such_package.Engine": "rollout.engine: No module named 'no_such_package'",
    "--rollout.filter_groups={max_rounds: 2}": "rollout.filter_groups: Option 'max_rounds' is not accepted",
    "--rollout.filter_groups.metric=right": "metric must be one of the reward functions share_of_digits, got 'right'",
    "--rollout.filter_groups.max_num_gen_batches=0": "rollout.filter_groups.max_num_gen_batches: got 0, must be >0",
    "--rollout.sleep_level=7": "rollout.sleep_level: must be one of ['auto', 0, 1, 2], got 7",
    "--rollout.samplin.n=2": "unrecognized arguments",
    "--config=no.yaml": "no.yaml",
    "--ckpt_path=/no/such/checkpoint": "/no/such/checkpoint",
    f"--ckpt_path={__file__}": "is no checkpoint of this package: those are folders with a meta.pt",
    "--lr=1": "unrecognized arguments: --lr=1, did you mean 'model.lr'?",
    "--learning_rate=1": "unrecognized arguments: --learning_rate=1, did you mean 'model.lr'?",
    "--rollout.num_generations=8": "did you mean 'rollout.sampling.num_generations'?",
    "--model.beta=0.1": "model: Option 'beta' is not accepted, did you mean 'model.kl.coef'?",
    "--model.kl=0.1": "model.kl: must be options such as {coef: …}, got 0.1",
    "--model.lora=true": "model.lora: must be options such as {r: …}, got True",
    "--rollout.filter_groups=true": "rollout.filter_groups: must be options such as {metric: …}, got True",
    "--model.reward=[test_cli.wants_a_solution]": "reward wants_a_solution asks for 'solution', which is none of answer,",
    "--model.reward=[test_cli.one_number]": "reward one_number must return a list with one number per response, 32, got float",
}


def wants_a_solution(completions, solution):
    return [1.0] * len(completions)


def one_number(completions, **columns):
    return 1.0


def never_works(completions, **columns):
    return re.match(completions)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_line_that_says_what_to_change(mistake, capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([*PPO, *QUIET, mistake])
    lines = [line for line in capfd.readouterr().err.splitlines() if "error" in line.lower()]
    assert ended.value.code not in (0, None)
    assert len(lines) == 1, lines
    assert lines[0].startswith("lightning-rlhf: error: ")
    assert MISTAKES[mistake] in lines[0]
    assert len(lines[0]) < 400


def test_an_option_of_another_class_is_told_by_its_class(capfd):
    with pytest.raises(SystemExit):
        main([*GRPO, "--model.critic_lr=1"])
    assert "model: Option 'critic_lr' is not accepted, it is one of PPOLightningModule" in capfd.readouterr().err


def test_a_missing_column_is_told_before_models_are_loaded(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main([*GRPO, *QUIET, "--model.reward=[test_cli.wants_a_solution]"])
    assert "packed neighbours" not in capfd.readouterr().err


def test_a_reward_that_never_works_ends_the_run_in_one_line(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="name 're' is not defined"), pytest.raises(SystemExit):
        main([*GRPO, *QUIET, "--model.reward=[test_cli.never_works]"])
    printed = capfd.readouterr().err
    assert printed.splitlines()[-1].startswith(
        "lightning-rlhf: error: no response of the first iteration could be scored"
    )
    assert "Traceback" not in printed


def test_a_disk_that_is_full_at_the_start_is_named(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RLHFParser, "save", lambda *_, **__: Path("/dev/full").write_text("x"))
    with pytest.raises(SystemExit):
        main([*GRPO, "--trainer.logger=false", "--trainer.callbacks=[]"])
    assert capfd.readouterr().err.splitlines()[-1] == (
        f"lightning-rlhf: error: {tmp_path}/config.yaml could not be written ([Errno 28] No space left on device): free space"
        " there, make it writable, or change trainer.default_root_dir, of a logger its save_dir"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modell: {lr: 1}", "does not accept option 'modell.lr', did you mean 'model'?"),
        ("trainer: {max_step: 3}", "does not accept option 'trainer.max_step', did you mean 'max_steps'?"),
        ("model: {kl: {coeff: 0.1}}", "Group 'kl' does not accept option 'coeff', did you mean 'coef'?"),
        (
            "trainer: {callbacks: [{class_path: lightning_rlhf.HFExport, init_args: {every: 3}}]}",
            "error: trainer.callbacks: Option 'every' is not accepted",
        ),
    ],
)
def test_a_mistake_in_a_file_is_one_line_too(text, said, capfd, tmp_path):
    (tmp_path / "more.yaml").write_text(text)
    with pytest.raises(SystemExit):
        main([*PPO, "--config", str(tmp_path / "more.yaml")])
    assert capfd.readouterr().err.strip().endswith(said)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Of a run of one iteration: complete ones with and without the optimizer, an interrupted one, one that was cut off."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, weights_only in (("run", False), ("weights", True)):
        saver = {"class_path": "lightning_rlhf.IterationCheckpoint"}
        saver["init_args"] = {"dirpath": str(folder), "filename": name, "save_weights_only": weights_only}
        with restored():
            main([*GRPO, *QUIET, "--trainer.max_steps=1", f"--trainer.callbacks=[{json.dumps(saver)}]"])
    for name, file in (("begun", "meta.pt"), ("cut", ".metadata")):
        shutil.copytree(folder / "run.ckpt", folder / f"{name}.ckpt")
        (folder / f"{name}.ckpt" / file).unlink()
    return folder


@pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
@pytest.mark.parametrize(
    ("command", "given", "more", "said"),
    [
        ("fit", "{folder}/none.ckpt", [], "there is no checkpoint '{folder}/none.ckpt'"),
        ("validate", "{folder}", [], "'{folder}' is a folder of checkpoints: give one of them, the latest is "),
        ("test", "{folder}/begun.ckpt", [], "begun.ckpt' is not a complete checkpoint: it has no meta.pt"),
        ("fit", "{folder}/cut.ckpt", [], "cut.ckpt' is damaged, its .metadata cannot be read"),
        ("validate", "memory://bucket/none.ckpt", [], "there is no checkpoint 'memory://bucket/none.ckpt'"),
        ("fit", "nowhere://bucket/a.ckpt", [], "nowhere"),
        (
            "fit",
            "{folder}/run.ckpt",
            ["--model.init_args.config_overrides={num_hidden_layers: 1, layer_types: [full_attention]}"],
            "run.ckpt' is of 'random:tiny' with num_hidden_layers",
        ),
        (
            "fit",
            "{folder}/weights.ckpt",
            [],
            "weights.ckpt' holds weights alone (save_weights_only), a fit cannot go on from it: take another checkpoint",
        ),
    ],
)
def test_a_checkpoint_that_cannot_be_taken_is_told_of_before_a_model_is_built(
    command, given, more, said, checkpoints, capfd, monkeypatch, tmp_path
):
    monkeypatch.setattr("lightning_rlhf.modules.roles.build_policy", None)
    monkeypatch.setattr("lightning_rlhf.rollout.TransformersEngine.setup", None)
    monkeypatch.chdir(tmp_path)
    path = given.format(folder=checkpoints)
    with pytest.raises(SystemExit):
        main([command, *GRPO[1:], *QUIET, *more, f"--ckpt_path={path}"])
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "error" in line.lower()]
    assert said.format(folder=checkpoints) in line


@pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize(
    ("command", "given"), [("fit", "last"), ("validate", "{folder}/run.ckpt"), ("test", "{folder}/run.ckpt/meta.pt")]
)
def test_a_checkpoint_is_taken_and_read_once(command, given, checkpoints, monkeypatch, tmp_path):
    read, shown = [], restricted.read
    monkeypatch.setattr(restricted, "read", lambda *args: read.append(args[0]) or shown(*args))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoints / "run.ckpt", tmp_path / "c/run.ckpt")
    saver = f"--trainer.callbacks=[{{class_path: lightning_rlhf.IterationCheckpoint, init_args: {{dirpath: {tmp_path}/c}}}}]"
    path = given.format(folder=tmp_path / "c")
    main([command, *GRPO[1:], *QUIET, saver, "--trainer.max_steps=2", "--data.val_size=8", f"--ckpt_path={path}"])
    assert read == [f"{tmp_path}/c/run.ckpt"]


@pytest.mark.filterwarnings("ignore:more than half of the responses were cut")
@pytest.mark.parametrize(
    ("command", "saver", "where", "begins"),
    [
        (
            "fit",
            "[lightning_rlhf.IterationCheckpoint]",
            "{}/run/version_*/checkpoints",
            "the run starts from the beginning",
        ),
        ("fit", "[]", "any folder, for want of an IterationCheckpoint", "the run starts from the beginning"),
        (
            "validate",
            "[lightning_rlhf.IterationCheckpoint]",
            "{}/run/version_*/checkpoints",
            "the model is taken as it is",
        ),
    ],
)
def test_that_there_is_no_last_checkpoint_is_said_in_one_line(command, saver, where, begins, tmp_path):
    logger = [f"--trainer.logger.init_args.save_dir={tmp_path}", "--trainer.logger.init_args.name=run"]
    options = [*QUIET[1:], f"--trainer.callbacks={saver}", "--trainer.max_steps=1", "--data.val_size=8"]
    with pytest.warns(UserWarning, match="ckpt_path: last") as told:
        main([command, *GRPO[1:], *logger, *options, "--ckpt_path=last"])
    (said,) = [str(one.message) for one in told if "last" in str(one.message)]
    place = where.format(tmp_path)
    assert (
        said
        == f"ckpt_path: last finds no complete checkpoint in {place}: {begins}; if there is one elsewhere, give its path"
    )


def test_a_mistake_in_a_process_of_its_own_prints_no_traceback(tmp_path):
    command = [sys.executable, "-m", "lightning_rlhf", *PPO, "--model.lr=-1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.strip().splitlines() == ["lightning-rlhf: error: model.lr: got -1, must be >0 and finite"]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_last_checkpoint_that_cannot_be_written_ends_all_ranks_in_one_line(devices, tmp_path):
    (tmp_path / "file").touch()
    saver = f"[{{class_path: lightning_rlhf.IterationCheckpoint, init_args: {{dirpath: {tmp_path}/file}}}}]"
    options = [*QUIET, f"--trainer.callbacks={saver}", "--trainer.max_steps=1", f"--trainer.devices={devices}"]
    command = [sys.executable, "-m", "lightning_rlhf", "fit", "--config", str(CONFIGS / "tiny_grpo.yaml"), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("lightning-rlhf: error")]
    assert len(errors) == 1, errors
    assert errors[0].startswith(
        f"lightning-rlhf: error: the checkpoint '{tmp_path}/file/iteration-000001.ckpt' could not"
    )


def parsed(*arguments: str):
    class Parsed(RLHFCLI):
        def instantiate_classes(self) -> None:
            pass

        def _run_subcommand(self, subcommand: str) -> None:
            pass

    return Parsed(list(arguments)).config.fit


@pytest.mark.parametrize("name", sorted(p.name for p in CONFIGS.glob("*.yaml")))
def test_every_config_parses(name):
    config = parsed("fit", "--config", str(CONFIGS / name))
    assert config.model.init_args.model


def test_defaults_are_ppo_with_observers_logging_every_iteration():
    config = parsed("fit", "--model.model=random:tiny", "--data.path=x.jsonl")
    assert config.model.class_path == "lightning_rlhf.PPOLightningModule"
    assert config.data.class_path == "lightning_rlhf.PromptDataModule"
    assert config.trainer.strategy.class_path == "lightning_rlhf.FSDPUlyssesStrategy"
    assert config.rollout.engine.class_path == "lightning_rlhf.rollout.TransformersEngine"
    assert config.trainer.log_every_n_steps == 1
    assert config.trainer.num_sanity_val_steps == 0
    assert [c.class_path.rpartition(".")[2] for c in config.trainer.callbacks] == [
        "Throughput",
        "Memory",
        "Samples",
        "IterationCheckpoint",
    ]


def test_options_of_the_default_engine_need_no_class_and_do_not_stay_with_another():
    common = ["fit", "--model.model=random:tiny", "--data.path=x.jsonl", "--rollout.engine.batch_size=8"]
    assert parsed(*common).rollout.engine.init_args.batch_size == 8
    other = parsed(*common[:3], "--rollout.engine=VLLMEngine", "--rollout.engine.gpu_memory_utilization=0.3")
    assert other.rollout.engine.init_args.gpu_memory_utilization == 0.3
    assert "batch_size" not in other.rollout.engine.init_args


def test_an_optimizer_of_torch_is_found_by_its_short_name():
    common = ["fit", "--model.model=random:tiny", "--data.path=x.jsonl"]
    config = parsed(*common, "--model.optimizer=AdamW", "--model.optimizer.weight_decay=0.1")
    assert config.model.init_args.optimizer.class_path == "torch.optim.AdamW"
    assert config.model.init_args.optimizer.init_args.weight_decay == 0.1
    usual = parsed(*common).model.init_args.optimizer
    assert usual.class_path == "lightning_rlhf.modules.adamw.ShardedAdamW"


def test_another_class_keeps_its_own_advantage_estimator():
    config = parsed(
        "fit", "--model=lightning_rlhf.GRPOLightningModule", "--model.model=random:tiny", "--data.path=x.jsonl"
    )
    assert config.model.init_args.advantage is None
    assert GRPOLightningModule("random:tiny").advantage_function.__name__ == "grpo"


def test_another_optimizer_is_not_given_what_only_ours_can(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    main([*PPO, *QUIET, "--trainer.max_steps=1", "--model.optimizer=torch.optim.SGD"])


@pytest.mark.parametrize("closes", [True, False])
def test_a_command_leaves_no_engine_and_no_process_group(closes, monkeypatch, tmp_path, caplog):
    closed = []

    def close(engine: TransformersEngine) -> None:
        closed.append(engine)
        if not closes:
            raise RuntimeError("a worker is gone")

    monkeypatch.setattr(TransformersEngine, "close", close)
    monkeypatch.chdir(tmp_path)
    main([*GRPO, *QUIET, "--trainer.max_steps=1"])
    assert len(closed) == 1
    assert not torch.distributed.is_initialized()  # NCCL would warn at the end of the process
    assert ("the engine could not be closed" in caplog.text) is not closes


def test_callbacks_can_be_appended():
    more = ["--trainer.callbacks+=lightning_rlhf.HFExport"]
    config = parsed("fit", "--model.model=random:tiny", "--data.path=x.jsonl", *more)
    assert len(config.trainer.callbacks) == 5


@pytest.mark.parametrize("wanted", [True, False])
def test_checkpoints_can_be_switched_off_in_one_word(wanted, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    line = [*PPO, "--trainer.logger=false", "--trainer.enable_progress_bar=false", "--trainer.max_steps=1"]
    main([*line, f"--trainer.enable_checkpointing={wanted}"])
    assert any(tmp_path.rglob("*.ckpt")) == wanted


@pytest.mark.parametrize("callbacks", ["lightning_rlhf.Throughput", "lightning_rlhf.IterationCheckpoint", "null"])
def test_checkpoints_can_be_switched_off_beside_one_callback_or_none(callbacks, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    line = [*PPO, *QUIET, "--trainer.max_steps=1", "--trainer.enable_checkpointing=false"]
    main([*line, f"--trainer.callbacks={callbacks}"])
    assert not any(tmp_path.rglob("*.ckpt"))


def test_keys_are_not_abbreviated(capfd):
    with pytest.raises(SystemExit):
        parsed("fit", "--model.model=random:tiny", "--data.path=x.jsonl", "--trainer.max_epoch=3")
    assert "did you mean 'max_epochs'?" in capfd.readouterr().err


def test_print_config_is_a_config_that_gives_itself_again(capfd, tmp_path):
    printed = []
    file = str(CONFIGS / "ppo.yaml")
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            parsed("fit", "--config", file, "--print_config")
        assert ended.value.code == 0
        printed.append(capfd.readouterr().out)
        file = str(tmp_path / "again.yaml")
        Path(file).write_text(printed[-1])
    assert printed[0] == printed[1]
    assert yaml.safe_load(printed[0])["model"]["init_args"]["reward"] == ["lightning_rlhf.rewards.numeric_answer"]


def test_the_traceback_of_a_wrong_configuration_is_there_for_who_asks(monkeypatch):
    monkeypatch.setenv("LIGHTNING_RLHF_TRACEBACK", "1")
    with pytest.raises(FileNotFoundError, match="there is no folder '/no/such'"):
        main(["fit", "--config", str(CONFIGS / "tiny_grpo.yaml"), "--model.model=/no/such"])
