"""What is exported from a checkpoint, loaded by vLLM as any other model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_runs import QUIET, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rlhf.cli import main
from lightning_rlhf.tiny import tiny_model

pytestmark = [pytest.mark.vllm]

PROMPTS = ["2+2=", "7+1=", "say yes ", "user: 3+5=\nassistant: "]
LENGTH = 12


GENERATE = """
import json, sys
from vllm import LLM, SamplingParams

folder, prompts, length = json.loads(sys.argv[1])
llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=32 << 20, max_num_seqs=4)
greedy = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
print(json.dumps([list(output.outputs[0].token_ids) for output in llm.generate(prompts, greedy)]))
"""


def generated(folder: Path) -> list[list[int]]:
    """By vLLM alone, in a process that knows nothing of this package."""
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-c", GENERATE, json.dumps([str(folder), PROMPTS, LENGTH])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def greedily(folder: Path) -> list[list[int]]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompts = [torch.tensor([tokenizer(text)["input_ids"]]) for text in PROMPTS]
    options = {"do_sample": False, "max_new_tokens": LENGTH, "min_new_tokens": LENGTH, "eos_token_id": None}
    return [model.generate(ids, **options)[0, ids.shape[1] :].tolist() for ids in prompts]


def test_an_exported_checkpoint_says_in_vllm_what_it_says_in_transformers(tmp_path: Path) -> None:
    saver = f"{{class_path: lightning_rlhf.IterationCheckpoint, init_args: {{dirpath: {tmp_path}/ck}}}}"
    run(tmp_path, "tiny_grpo.yaml", *QUIET, f"--trainer.callbacks+={saver}", "--trainer.max_steps=2", "--model.lr=1e-2")
    (checkpoint,) = (tmp_path / "ck").glob("*.ckpt")
    main(["export", str(checkpoint), str(tmp_path / "out"), "--dtype=float32"])
    want = greedily(tmp_path / "out")
    assert want != greedily(tiny_model())  # it was trained
    assert generated(tmp_path / "out") == want
