"""The tests here share one engine, which owns the process group: nothing is cleaned up between them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def clean_process() -> None:
    pass


@pytest.fixture(autouse=True, scope="module")
def clean_module() -> None:
    pass
