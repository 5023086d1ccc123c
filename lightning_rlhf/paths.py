"""Where a model's files are: a local folder, the hub, a remote file system, or the built-in random one."""

from __future__ import annotations

from pathlib import Path

from lightning_rlhf.tiny import TINY, tiny_model


def is_hub_id(model: str) -> bool:
    """Whether a name is one of the hub: none of the others, and of the form name or owner/name."""
    return not (
        model.startswith(("random:", ".", "/", "~")) or "://" in model or model.count("/") > 1 or Path(model).is_dir()
    )


def local_path(model: str, trust_remote_code: bool = False) -> str:
    """The folder of ``model``: a local path as it is, `random:tiny` from the cache, a hub id downloaded.

    Raises:
        FileNotFoundError: a path that does not exist, or a hub id that cannot be fetched.
    """
    if model == TINY:
        return str(tiny_model())
    if model.startswith("random:"):
        raise FileNotFoundError(f"model.model: {model!r} is unknown, the only built-in model is {TINY!r}")
    if Path(model).is_dir():
        return model
    if not is_hub_id(model):
        raise FileNotFoundError(f"model.model: there is no folder {model!r}")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
    try:
        patterns += ["*.py"] if trust_remote_code else []
        folder = snapshot_download(model, allow_patterns=patterns)
        if not any(Path(folder).glob("*.safetensors")):
            folder = snapshot_download(model, allow_patterns=[*patterns, "*.bin", "*.bin.index.json"])
        return folder
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"model.model: {model!r} is neither a local folder nor a model that can be downloaded ({reason})"
        ) from error
