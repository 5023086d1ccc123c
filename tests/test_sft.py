"""A LightningModule of the user's own under the strategy: equal losses however the work is split."""

from __future__ import annotations

import pytest
import torch
from toys import spawn

from examples.sft import train

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*log_every_n_steps.*")


def _split(rank: int) -> list[list[float]]:
    torch.set_num_threads(1)
    return [train("random:tiny", 1e-2, 2, **sizes) for sizes in ({"sequence_parallel_size": 2}, {})]


def test_supervised_fine_tuning_learns_alike_on_any_split():
    alone = train("random:tiny", 1e-2, 1)
    assert len(alone) == 10
    assert alone[-1] < 0.7 * alone[0]
    for shared, different in spawn(_split, 2):
        assert shared == pytest.approx(alone, rel=1e-4)
        assert different == pytest.approx(alone, rel=1e-4)
