"""Models that follow the actor: of any dtype, partly frozen, tied."""

from __future__ import annotations

import torch
from torch import nn

from lightning_rlhf.modules.copies import average_of, averages, copy_weights, update_average


class Net(nn.Module):
    """A frozen layer before a trained one; one weight under two names."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)
        self.frozen = nn.Linear(2, 2, dtype=dtype).requires_grad_(False)
        self.trained = nn.Linear(2, 3, bias=False, dtype=dtype)
        self.tied = self.trained.weight
        self.also = self.trained.weight


def test_an_average_is_float32_of_what_is_trained_and_takes_its_place():
    root = Net()
    average = average_of(root)
    begin = root.tied.detach().float()
    names = dict(average.named_parameters(remove_duplicate=False))
    assert names.keys() == {"trained.weight", "tied", "also"}
    assert len(set(map(id, names.values()))) == 1
    with torch.no_grad():
        root.tied.add_(1.0)
    update_average(average, root, 0.75)
    (kept,) = average.parameters()
    assert (kept.dtype, kept.requires_grad) == (torch.float32, False)
    torch.testing.assert_close(kept.detach(), 0.75 * begin + 0.25 * root.tied.float())
    taken = averages(average, root)
    assert taken(root.trained.weight) is kept
    assert all(taken(parameter) is parameter for parameter in (root.scale, *root.frozen.parameters()))


def test_weights_are_copied_in_the_dtype_of_the_copy():
    source, target = Net(torch.float32), Net()
    copy_weights(source, target)
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(source.parameters(), target.parameters(), strict=True))
