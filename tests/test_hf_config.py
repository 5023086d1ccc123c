"""Overrides of a model's configuration, models of other kinds, and models that a user's package registers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_policy import strategy_of
from test_runs import QUIET, ROOT, metrics_of
from transformers import AutoConfig, Qwen2Config, T5Config

from lightning_rlhf import ModelSettings, build_policy
from lightning_rlhf.callbacks.hf_export import write_folder
from lightning_rlhf.cli import main
from lightning_rlhf.hf_config import check_class, load_config, override
from lightning_rlhf.plan import shape_of
from lightning_rlhf.rollout import EngineSetup, TransformersEngine
from lightning_rlhf.tiny import tiny_model

YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}


def test_overrides_reach_policy_engine_and_export(tmp_path):
    overrides = {"rms_norm_eps": 0.5, **YARN}
    settings = ModelSettings("random:tiny", config_overrides=overrides)
    policy = build_policy(settings, strategy_of(1))
    engine = TransformersEngine()
    engine.setup(
        EngineSetup(settings.path, torch.device("cpu"), torch.float32, (1,), 0, 64, 2, config_overrides=overrides)
    )
    write_folder(
        tmp_path / "out", dict(engine.model.state_dict()), settings.path, _Tokenizer(), config_overrides=overrides
    )
    exported = AutoConfig.from_pretrained(tmp_path / "out")
    for config in (policy.model.config, engine.model.config, exported):
        assert config.rms_norm_eps == 0.5
        assert config.rope_parameters["rope_type"] == "yarn"
        assert config.rope_parameters["rope_theta"] == 10000.0  # merged, not replaced
    assert AutoConfig.from_pretrained(settings.path).rms_norm_eps != 0.5


class _Tokenizer:
    def save_pretrained(self, folder: Path) -> None: ...


def test_a_nested_config_takes_its_own_options():
    config = AutoConfig.for_model("qwen2_5_vl")
    override(config, {"text_config": {"rms_norm_eps": 0.25}})
    assert config.get_text_config().rms_norm_eps == 0.25
    with pytest.raises(
        ValueError, match=r"config_overrides.text_config: 'rms_norm_ep' is no option of a .*'rms_norm_eps'"
    ):
        override(config, {"text_config": {"rms_norm_ep": 0.25}})


MISTAKES = {
    "unknown": ({"hiden_size": 8}, "'hiden_size' is no option of a Qwen2Config, did you mean 'hidden_size'?"),
    "type": ({"hidden_size": "large"}, "hidden_size: Field 'hidden_size' expected int, got str"),
    "inconsistent": (
        {"num_hidden_layers": 1},
        "`num_hidden_layers` (1) must be equal to the number of `layer_types` (2)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_override_is_one_line(name):
    changes, message = MISTAKES[name]
    with pytest.raises(ValueError, match=r"model\.config_overrides") as error:
        load_config(str(tiny_model()), changes)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_model_that_takes_images_or_is_no_decoder_is_refused():
    check_class(Qwen2Config())
    check_class(AutoConfig.for_model("qwen2_5_vl"))
    with pytest.raises(
        NotImplementedError, match="gemma3 is a vision-language model of a family that cannot be trained"
    ):
        shape_of(AutoConfig.for_model("gemma3"), torch.bfloat16)
    with pytest.raises(ValueError, match=r"model\.critic: a t5 is no causal language model"):
        check_class(T5Config(), "model.critic")


PACKAGE = """
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

class OwnConfig(Qwen2Config):
    model_type = "own_model"

class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig

AutoConfig.register("own_model", OwnConfig)
AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)
"""


def test_a_model_of_an_imported_package_trains(tmp_path):
    shutil.copytree(tiny_model(), tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text()) | {"model_type": "own_model"}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    (tmp_path / "own_models.py").write_text(PACKAGE)
    fit = [
        "fit",
        "--config",
        str(ROOT / "configs/tiny_grpo.yaml"),
        f"--model.model={tmp_path}/model",
        "--imports=[own_models]",
    ]
    line = [sys.executable, "-m", "lightning_rlhf", *fit, "--trainer.max_steps=1", *QUIET]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert metrics_of(tmp_path / "runs/tiny_grpo")[0]["rollout/checksum_ok"] == 1.0


def test_a_package_that_cannot_be_imported_ends_in_one_line(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(ROOT / "configs/tiny_grpo.yaml"), "--imports=[no_such_package]"])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "imports: 'no_such_package' cannot be imported: ModuleNotFoundError" in line


def test_overrides_of_the_command_line_are_checked_before_anything_is_built(capsys):
    wrong = "--model.config_overrides={hiden_size: 8}"
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(ROOT / "configs/tiny_grpo.yaml"), wrong])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "model.config_overrides: 'hiden_size' is no option of a Qwen2Config, did you mean 'hidden_size'?" in line
