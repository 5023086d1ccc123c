"""Whole runs from the command line: every YAML that needs nothing, any split over ranks, resume, validation."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import yaml
from toys import command as run_command

ROOT = Path(__file__).parent.parent
OWN = ("actor/", "critic/", "reward/", "completions/", "val/")


def run(folder: Path, config: str, *arguments: str, command: str = "fit") -> list[dict[str, float]]:
    """Metrics per iteration of ``lightning-rlhf COMMAND --config configs/CONFIG``."""
    logger = ["--trainer.logger.init_args.save_dir", str(folder), "--trainer.logger.init_args.name=run"]
    devices = [
        value.removeprefix("--trainer.devices=") for value in arguments if value.startswith("--trainer.devices=")
    ]
    line = [command, "--config", str(ROOT / "configs" / config), *logger, *arguments]
    printed = run_command(*line, ranks=int(devices[-1]) if devices else 1)
    assert not re.search("litlogger|Loading weights", printed)
    return metrics_of(folder / "run")


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """Rows of the latest version of a CSVLogger."""
    latest = max(folder.iterdir(), key=lambda p: int(p.name.rpartition("_")[2]))
    with (latest / "metrics.csv").open(newline="") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def assert_equal_runs(a: list[dict[str, float]], b: list[dict[str, float]], tolerance: float = 2e-5) -> None:
    assert len(a) == len(b) > 0
    for left, right in zip(a, b, strict=True):
        names = [n for n in left if n.startswith(OWN)]
        assert names == [n for n in right if n.startswith(OWN)]
        for name in names:
            assert left[name] == pytest.approx(right[name], rel=tolerance, abs=tolerance), name


def per_token(completion_ids, **_):
    """Of tokens; no opinion on responses that begin with an odd id."""
    return [[0.01 * (t % 7) for t in ids] if ids and ids[0] % 2 == 0 else None for ids in completion_ids]


QUIET = ["--trainer.enable_progress_bar=false", "--trainer.callbacks=[lightning_rlhf.Throughput]"]


@pytest.mark.parametrize("config", ["tiny_ppo.yaml", pytest.param("tiny_grpo.yaml", marks=pytest.mark.slow)])
def test_results_do_not_depend_on_how_the_work_is_split(config, tmp_path):
    """One process, two data ranks, two ranks that share each sequence, small micro-batches: the same metrics."""
    one = run(tmp_path / "one", config, *QUIET)
    two = ["--trainer.devices=2"]
    small = "--model.micro_batch_tokens=100" if "ppo" in config else "--model.init_args.micro_batch_tokens=100"
    assert_equal_runs(one, run(tmp_path / "dp", config, *QUIET, *two))
    assert_equal_runs(one, run(tmp_path / "sp", config, *QUIET, *two, "--trainer.strategy.sequence_parallel_size=2"))
    assert_equal_runs(one, run(tmp_path / "small", config, *QUIET, small))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "estimator"), [("tiny_grpo.yaml", ["--model.init_args.advantage=gdpo"]), ("tiny_ppo.yaml", [])]
)
def test_single_functions_abstentions_and_values_of_tokens_do_not_depend_on_the_split(config, estimator, tmp_path):
    key = "--model.init_args." if "grpo" in config else "--model."
    options = [*QUIET, f"{key}reward=[test_runs.per_token,lightning_rlhf.tiny.share_of_digits]", *estimator]
    options += [] if estimator else [f"{key}reward_clip=[0.02,0.5]"]
    alone = [*options, f"{key}reward=[test_runs.per_token]"]
    for name, line in (("both", options), ("alone", alone)):
        one = run(tmp_path / name / "one", config, *line)
        assert 0.1 < one[0]["reward/abstained"] < 0.9 or name == "both"
        assert_equal_runs(one, run(tmp_path / name / "two", config, *line, "--trainer.devices=2"))


@pytest.mark.parametrize(
    "split",
    [[], pytest.param(["--trainer.strategy.sequence_parallel_size=2"], marks=pytest.mark.slow)],
    ids=["dp", "sp"],
)
def test_what_is_chosen_weighed_and_rejected_over_the_iteration_does_not_depend_on_the_split(split, tmp_path):
    """Tokens by covariance, a mean weight and rejected tokens, of responses that are one update old; where an iteration ends, and
    the likelihood of right responses."""
    correction = "{level: geometric, normalize: true, reject: {token_k1: [0.97, 1.03]}}"
    options = [
        *QUIET,
        "--model.init_args.loss=kl_cov",
        "--model.init_args.loss_args={share: 0.1}",
        "--trainer.max_steps=2",
    ]
    options += ["--rollout.async_level=1", f"--model.init_args.correction={correction}"]
    options += ["--model.init_args.kl={coef: 0.01, target: 0.001}", "--model.init_args.target_kl=0.0003"]
    options += ["--model.init_args.positive_coef=0.1", "--model.init_args.val_success=0.05"]
    one = run(tmp_path / "one", "tiny_grpo.yaml", *options)
    assert 0.05 < one[1]["rollout/rejected_ratio"] < 0.95
    assert one[1]["actor/kl_coef"] != 0.01
    assert 0 < one[1]["actor/kl_skipped_steps"] < 4
    assert one[1]["actor/positive_loss"] > 0
    two = ["--trainer.devices=2", "--model.init_args.micro_batch_tokens=100", *split]
    assert_equal_runs(one, run(tmp_path / "two", "tiny_grpo.yaml", *options, *two))


def test_a_run_ends_where_the_policy_has_moved_beyond_a_bound(tmp_path):
    """As docs/algorithms.md says."""
    own = "{monitor: actor/ppo_kl, divergence_threshold: 1.0e-9, patience: 1000, check_on_train_epoch_end: false}"
    stop = f"--trainer.callbacks+={{class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {own}}}"
    rows = run(tmp_path, "tiny_grpo.yaml", *QUIET, stop, "--trainer.val_check_interval=1", "--trainer.max_steps=5")
    moved = [row["actor/ppo_kl"] for row in rows if "actor/ppo_kl" in row]
    assert len(moved) < 5
    assert all(distance <= 1e-9 for distance in moved[:-1])
    assert moved[-1] > 1e-9


def test_replicas_of_the_shards_give_the_same_results(tmp_path):
    one = run(tmp_path / "one", "tiny_ppo.yaml", *QUIET)
    replicas = ["--trainer.devices=2", "--trainer.strategy.data_parallel_replicate=2"]
    assert_equal_runs(one, run(tmp_path / "hsdp", "tiny_ppo.yaml", *QUIET, *replicas))


def test_the_metrics_have_the_names_that_are_documented(tmp_path):
    rows = run(tmp_path, "tiny_ppo.yaml", "--trainer.max_steps=2", "--trainer.val_check_interval=2")
    names = set().union(*rows)
    assert {
        *("actor/pg_loss", "actor/ppo_kl", "actor/clip_fraction", "actor/entropy", "actor/kl_loss"),
        *("actor/grad_norm", "actor/lr"),
        *("critic/vf_loss", "critic/clip_fraction", "critic/explained_variance", "critic/grad_norm", "critic/lr"),
        *("reward/mean", "reward/std", "reward/share_of_digits/mean", "reward/frac_zero_std"),
        *("completions/mean_length", "completions/max_length", "completions/clipped_ratio"),
        *("completions/aborted_ratio", "rollout/logprob_nonfinite_ratio"),
        *("rollout/logprob_diff_mean", "rollout/logprob_diff_max", "rollout/checksum_ok"),
        *("perf/throughput", "perf/padding_efficiency", "perf/cpu_memory_gb"),
        *("timing_s/generate", "timing_s/sync", "timing_s/reward", "timing_s/log_prob", "timing_s/reference"),
        *("timing_s/values", "timing_s/update", "timing_s/step"),
        *("val/heldout/reward", "val/heldout/mean@1", "val/heldout/pass@1"),
    } <= names
    assert rows[0]["rollout/checksum_ok"] == 1.0
    assert rows[0]["rollout/logprob_diff_mean"] < 1e-5


def test_a_run_resumes_where_its_checkpoint_was_written(tmp_path):
    whole = run(tmp_path / "whole", "tiny_ppo.yaml", *QUIET)
    save = f"--trainer.callbacks+={{class_path: lightning_rlhf.IterationCheckpoint, init_args: {{dirpath: {tmp_path}/ck}}}}"
    run(tmp_path / "first", "tiny_ppo.yaml", *QUIET, save, "--trainer.max_steps=2")
    (checkpoint,) = [p for p in (tmp_path / "ck").iterdir() if "iteration" in p.name]
    rest = run(tmp_path / "rest", "tiny_ppo.yaml", *QUIET, "--ckpt_path", str(checkpoint))
    assert_equal_runs(whole[2:], rest, 1e-7)


@pytest.mark.slow
def test_responses_generated_ahead_do_not_depend_on_the_split_and_resume_on_another(tmp_path):
    ahead = [*QUIET, "--rollout.async_level=1", "--model.correction={}", "--trainer.max_steps=4"]
    options = f"{{dirpath: {tmp_path}/ck, every_n_train_steps: 2, save_top_k: -1}}"
    save = f"--trainer.callbacks+={{class_path: lightning_rlhf.IterationCheckpoint, init_args: {options}}}"
    one = run(tmp_path / "one", "tiny_ppo.yaml", *ahead, save)
    assert [row.get("rollout/staleness") for row in one] == [None, 1.0, 1.0, 1.0]
    sp = [*ahead, "--trainer.devices=2", "--trainer.strategy.sequence_parallel_size=2"]
    assert_equal_runs(one, run(tmp_path / "sp", "tiny_ppo.yaml", *sp))
    checkpoint = min(p for p in (tmp_path / "ck").iterdir() if "iteration" in p.name)
    dp = [*ahead, "--trainer.devices=2", "--trainer.val_check_interval=1", "--ckpt_path", str(checkpoint)]
    rest = [row for row in run(tmp_path / "dp", "tiny_ppo.yaml", *dp) if "actor/pg_loss" in row]
    assert_equal_runs(one[2:], [{n: v for n, v in row.items() if not n.startswith("val/")} for row in rest])


def test_validate_scores_the_held_out_prompts_of_a_model_as_it_is_on_any_number_of_ranks(tmp_path):
    sampling = "--rollout.val_sampling={num_generations: 4, max_completion_length: 8}"
    options = ["--trainer.callbacks=[]", "--data.val_batch_size=3", "--model.init_args.val_success=0.1", sampling]
    two = ["--trainer.devices=2"]
    one, dp, sp = (
        run(tmp_path / name, "tiny_grpo.yaml", *options, *split, command="validate")
        for name, split in {
            "one": [],
            "dp": two,
            "sp": [*two, "--trainer.strategy.sequence_parallel_size=2"],
        }.items()
    )
    assert {"val/heldout/reward", "val/heldout/mean@4", "val/heldout/pass@4", "val/heldout/maj@4"} <= one[0].keys()
    assert 0 < one[0]["val/heldout/mean@4"] < 1
    assert_equal_runs(one, dp, 1e-6)  # batches of 3, 3 and 2 prompts
    assert_equal_runs(one, sp, 1e-6)


def test_the_saved_config_runs_again(tmp_path):
    first = run(tmp_path / "a", "tiny_grpo.yaml", *QUIET, "--trainer.max_steps=1")
    saved = next((tmp_path / "a/run").glob("version_*/config.yaml"))
    assert yaml.safe_load(saved.read_text())["model"]["init_args"]["reward"] == ["lightning_rlhf.tiny.share_of_digits"]
    second = run(tmp_path / "b", str(saved), *QUIET)
    assert_equal_runs(first, second, 1e-9)


def test_a_checkpoint_of_the_critic_warm_up_resumes(tmp_path):
    """The actor has no optimizer state yet; the resumed run is the one that was not stopped."""
    warm_up = ["--model.critic_warmup=2", "--trainer.max_steps=4"]
    whole = run(tmp_path / "whole", "tiny_ppo.yaml", *QUIET, *warm_up)
    assert whole[0]["actor/grad_norm"] == 0.0 < whole[2]["actor/grad_norm"]
    saver = f"{{class_path: lightning_rlhf.IterationCheckpoint, init_args: {{dirpath: {tmp_path}/ck}}}}"
    save = [f"--trainer.callbacks+={saver}", "--trainer.max_steps=2"]
    run(tmp_path / "first", "tiny_ppo.yaml", *QUIET, *warm_up, *save)
    (checkpoint,) = [p for p in (tmp_path / "ck").iterdir() if "iteration" in p.name]
    rest = run(tmp_path / "rest", "tiny_ppo.yaml", *QUIET, *warm_up, "--ckpt_path", str(checkpoint))
    assert_equal_runs(whole[2:], rest, 1e-7)
