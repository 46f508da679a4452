"""The state of an engine on disk: one file, or one file per process with its parts.

A part is a contiguous run of a flattened tensor; the file's header names the run. Any number of processes, under any ZeRO
stage or none, reads only the ranges that it needs. A part of `torch.distributed.checkpoint` is a box of its tensor, which
ZeRO's parts are not.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from align.core.errors import UserError

STATE_FILE = "state.safetensors"
"""The file of a state that is not sharded."""
AVERAGE = "average"
"""Name of the averaged weights in a checkpoint, next to the names of the optimizer's state."""
SHARDS = "shards"
"""The key in a file's header: JSON of each tensor's name to its shard's start and the full shape."""


class FlatTensorSlice(NamedTuple):
    """One process's part of a flattened tensor with a `shape`: `values` [n] from index `start`."""

    values: Tensor
    start: int
    shape: tuple[int, ...]


class _Place(NamedTuple):
    file: Path
    start: int
    length: int


def shard_file(process: int, processes: int) -> str:
    """Return the name of a process's file."""
    return f"state-{process:05d}-of-{processes:05d}.safetensors"


def tensors_of_shards(shards: Mapping[str, FlatTensorSlice]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a process's file, and the file's header."""
    places = {name: [shard.start, list(shard.shape)] for name, shard in shards.items()}
    return {name: shard.values.detach().cpu() for name, shard in shards.items()}, {SHARDS: json.dumps(places)}


class StoredState(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, read on access, completely or in part.

    Raise a UserError if a part is missing, or two parts overlap.
    """

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, list[_Place]] = {}
        self._open: dict[Path, Any] = {}
        for path in sorted([*folder.glob(STATE_FILE), *folder.glob("state-*-of-*.safetensors")]):
            stored: Any = safe_open(path, framework="pt")
            self._open[path] = stored
            shards = json.loads((stored.metadata() or {}).get(SHARDS, "{}"))
            for name in stored.keys():  # noqa: SIM118 - not a dict
                length = stored.get_slice(name).get_shape()
                start, shape = shards.get(name, (0, length))
                self.shapes[name] = tuple(shape)
                place = _Place(path, start, math.prod(length))
                self._places.setdefault(name, []).append(place)
        for name, places in self._places.items():
            places.sort(key=lambda place: (place.start, place.length))
            end = 0
            for place in (place for place in places if place.length):
                if place.start < end:
                    raise UserError(f"two parts of '{name}' overlap ({place.file.name} and another file)")
                if place.start > end:
                    break
                end += place.length
            if end != math.prod(self.shapes[name]):
                raise UserError(f"a part of '{name}' is missing")

    def __getitem__(self, name: str) -> Tensor:
        return self.part(name, 0, math.prod(self.shapes[name])).reshape(self.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def part(self, name: str, start: int, count: int) -> Tensor:
        """Return `count` elements of a flattened tensor from `start`."""
        parts = []
        for place in self._places[name]:
            first = max(start, place.start) - place.start
            last = min(start + count, place.start + place.length) - place.start
            if first < last:
                parts.append(self._read(name, place, first, last))
        return torch.cat(parts) if parts else torch.empty(0)

    def _read(self, name: str, place: _Place, first: int, last: int) -> Tensor:
        """Return elements `first` to `last` of a flattened tensor in one file."""
        stored: Any = self._open[place.file].get_slice(name)
        shape: Sequence[int] = stored.get_shape()
        if not shape:
            number: Tensor = stored[...]
            return number.reshape(1)
        width = math.prod(shape[1:])
        begin = first // width
        rows: Tensor = stored[begin : -(-last // width)]
        return rows.flatten()[first - begin * width : last - begin * width]


def require_same_weights(shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a UserError if the names or shapes of stored masters differ from a module's weights."""
    stored = {name.removeprefix("master/"): shape for name, shape in shapes.items() if name.startswith("master/")}
    different = [name for name in sorted(stored.keys() | expected.keys()) if stored.get(name) != expected.get(name)]
    if different:
        raise UserError(f"the checkpoint belongs to another model or other settings ('{different[0]}' does not match)")
