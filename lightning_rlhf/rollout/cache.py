"""A key-value cache for rows that come and go, written in place (transformers' own copies itself at every token).

columns   ┌── in use ──┐ room        Rows of different lengths end in the same column, so a step writes one column of each;
          ··prompt·resp│·····        what lies left of a row is masked. A row that ends is replaced by the last one, and a
          ······prompt·│·····        new one is added behind that. Columns that no row reaches any more are dropped from
          pro··mpt·resp│·····        the left; when the room is used up, those in use move into a new buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

ROOM = 64
"""Columns of a new buffer behind those in use: so rarely are they copied."""


class RowCache(Cache):
    """Keys and values of up to ``capacity`` rows.

    Every row has ``columns`` columns, its own beginning somewhere in them. Layers with a sliding window keep no more of them
    than it shows.
    """

    def __init__(self, config: Any, capacity: int) -> None:
        layers = DynamicCache(config=config).layers  # a layer that uses another's keys has a class of its own there
        super().__init__(layers=[_Layer(capacity, x) if isinstance(x, DynamicLayer) else x for x in layers])
        self._own = [layer for layer in self.layers if isinstance(layer, _Layer)]

    @property
    def columns(self) -> int:
        return self._own[0].columns

    def add(self, prefilled: DynamicCache, select: Int[Tensor, "k"]) -> None:
        """Copies of the rows ``select`` of ``prefilled`` become the last ones; they end where the others do."""
        columns = prefilled.get_seq_length()
        new = (layer for layer in prefilled.layers if isinstance(layer, DynamicLayer))
        for layer, read in zip(self._own, new, strict=True):
            layer.add(read, select, columns)

    def keep(self, rows: Sequence[int], columns: int) -> None:
        """Row i becomes what ``rows[i]`` was, the others are dropped; so are all but the last ``columns`` columns.

        A row only moves into the place of one that is dropped.
        """
        device = self._own[0].device
        moved = [(i, row) for i, row in enumerate(rows) if i != row]
        places = torch.tensor(moved, dtype=torch.long).view(-1, 2).T.to(device)
        for layer in self._own:
            layer.keep(places, len(rows), columns)


class _Layer(DynamicLayer):
    """One layer of a `RowCache`, in place of ``model``, the layer that transformers would take."""

    def __init__(self, capacity: int, model: DynamicLayer) -> None:
        super().__init__()
        window = getattr(model, "sliding_window", None)
        self.is_sliding = window is not None
        self.columns = 0
        self._most = window - 1 if window else None  # columns that the next token sees
        self._buffers = _Buffer(capacity), _Buffer(capacity)

    def add(self, read: Any, select: Int[Tensor, "k"], columns: int) -> None:
        self.device = read.device
        self.columns = max(self.columns, columns)
        for buffer, states in zip(self._buffers, (read.keys, read.values), strict=True):
            buffer.add(states[select])

    def keep(self, places: Int[Tensor, "2 m"], rows: int, columns: int) -> None:
        self.columns = columns
        for buffer in self._buffers:
            buffer.keep(places, rows)
            buffer.crop(columns)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.columns += key_states.shape[2]
        keys, values = (b.append(x) for b, x in zip(self._buffers, (key_states, value_states), strict=True))
        if self._most is not None:
            for buffer in self._buffers:
                buffer.crop(self._most)
        return keys, values

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        seen = self.columns if self._most is None else min(self.columns, self._most)
        return seen + query_length, self.columns - seen


class _Buffer:
    """A tensor (capacity, H, columns, D) of which some rows and columns are in use."""

    def __init__(self, capacity: int) -> None:
        self._memory = torch.empty(capacity, 0, 0, 0)
        self._rows = self._start = self._end = 0

    def _in_use(self) -> Tensor:
        return self._memory[: self._rows, :, self._start : self._end]

    def append(self, states: Float[Tensor, "n H q D"]) -> Float[Tensor, "n H C D"]:
        if self._end + states.shape[2] > self._memory.shape[2]:
            self._move(states, self._end - self._start)
        self._end += states.shape[2]
        in_use = self._in_use()
        in_use[:, :, -states.shape[2] :] = states
        return in_use

    def add(self, states: Float[Tensor, "k H L D"]) -> None:
        """Whatever becomes visible left of a row is zeroed: it is masked, but what is not a number would come through."""
        length, wider = states.shape[2], states.shape[2] - (self._end - self._start)
        if wider > 0:
            if length > self._end:
                self._move(states, length)
            self._start = self._end - length
            self._in_use()[:, :, :wider] = 0
        self._rows += len(states)
        new = self._in_use()[-len(states) :]
        new[:, :, :-length] = 0
        new[:, :, -length:] = states

    def keep(self, places: Int[Tensor, "2 m"], rows: int) -> None:
        if places.numel():
            in_use = self._in_use()
            in_use[places[0]] = in_use[places[1]]
        self._rows = rows

    def crop(self, columns: int) -> None:
        self._start = max(self._start, self._end - columns)

    def _move(self, like: Tensor, columns: int) -> None:
        """What is in use, into new memory: the last of ``columns`` columns with room behind them."""
        old, capacity = self._in_use(), len(self._memory)
        self._memory = like.new_empty(capacity, like.shape[1], columns + ROOM, like.shape[3])
        self._start, self._end = columns - old.shape[2], columns
        if self._rows:
            self._in_use().copy_(old)
