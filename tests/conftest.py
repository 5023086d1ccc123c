"""A test leaves nothing in the process: no process group, no environment variables of a launcher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from clean import restored

from lightning_rlhf.modules import settings


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def clean_module() -> Iterator[None]:
    """Of what a module's own fixtures leave; it begins before them."""
    with restored():
        yield


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    with restored():
        yield


@pytest.fixture
def looked_for(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models, each time that their folder was looked for: on the hub that is a request."""
    found: list[str] = []
    local_path = settings.local_path

    def noted(model: str, *args: Any, **kwargs: Any) -> str:
        found.append(model)
        return local_path(model, *args, **kwargs)

    monkeypatch.setattr(settings, "local_path", noted)
    return found
