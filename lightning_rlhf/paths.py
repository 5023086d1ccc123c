"""Where a model's files are: a local folder, the hub, any file system of fsspec, or the built-in random one.

    Qwen/Qwen2.5-0.5B      the hub's own cache
    /models/qwen           as it is
    s3://bucket/qwen       copied to ``$LIGHTNING_RLHF_CACHE/models`` (default ~/.cache/lightning_rlhf)
    random:tiny            see `tiny`

A URL is copied once per machine: a lock keeps the other processes waiting, and the folder appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from lightning_rlhf.tiny import TINY, cache_folder, tiny_model

_SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
"""Configuration and tokenizer."""


def is_remote(model: str) -> bool:
    """Whether a name is a URL of some file system."""
    return "://" in model


def is_hub_id(model: str) -> bool:
    """Whether a name is one of the hub: none of the others, and of the form name or owner/name."""
    other = model.startswith(("random:", ".", "/", "~")) or is_remote(model) or model.count("/") > 1
    return not (other or Path(model).is_dir())


def local_path(model: str, trust_remote_code: bool = False, *, weights: bool = True, key: str = "model.model") -> str:
    """The folder of ``model``: a local path as it is, `random:tiny` from the cache, a hub id or URL downloaded.

    Args:
        weights: False fetches configuration and tokenizer only.
        key: of the configuration, for errors.

    Raises:
        FileNotFoundError: a path that does not exist, or a hub id or URL that cannot be fetched.
    """
    if model == TINY:
        return str(tiny_model())
    if model.startswith("random:"):
        raise FileNotFoundError(f"{key}: {model!r} is unknown, the only built-in model is {TINY!r}")
    if (folder := Path(model).expanduser()).is_dir():
        return str(folder)
    patterns = [*_SMALL, *(["*.py"] if trust_remote_code else [])]
    try:
        if is_remote(model):
            return str(_copied(model, patterns, weights))
        if is_hub_id(model):
            return _downloaded(model, patterns, weights)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"{key}: {model!r} is neither a local folder nor a model that can be downloaded ({reason})"
        ) from error
    raise FileNotFoundError(f"{key}: there is no folder {model!r}")


def _downloaded(model: str, patterns: list[str], weights: bool) -> str:
    from huggingface_hub import snapshot_download

    if not weights:
        return snapshot_download(model, allow_patterns=patterns)
    folder = snapshot_download(model, allow_patterns=[*patterns, "*.safetensors"])
    if not any(Path(folder).glob("*.safetensors")):
        folder = snapshot_download(model, allow_patterns=[*patterns, "*.bin", "*.bin.index.json"])
    return folder


def _copied(url: str, patterns: list[str], weights: bool) -> Path:
    from filelock import FileLock
    from fsspec.core import url_to_fs

    url = url.rstrip("/")
    kind = "-".join(["model" if weights else "config", *(["code"] if "*.py" in patterns else [])])
    name = f"{url.rpartition('/')[2]}-{hashlib.blake2b(url.encode(), digest_size=8).hexdigest()}-{kind}"
    target = cache_folder() / "models" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if target.is_dir():
            return target
        fs, root = url_to_fs(url)
        files = {path.rpartition("/")[2]: path for path in fs.ls(root, detail=False)}
        if "config.json" not in files:
            raise FileNotFoundError("it holds no config.json")
        if weights:
            patterns = [*patterns, "*.safetensors" if any(n.endswith(".safetensors") for n in files) else "*.bin"]
        draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{name}-"))
        try:
            for file, path in files.items():
                if any(Path(file).match(pattern) for pattern in patterns):
                    fs.get_file(path, str(draft / file))
            draft.rename(target)  # whole or not at all
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return target
