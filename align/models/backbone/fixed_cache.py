"""Decoding in buffers of a fixed size, so that a step can be recorded as a CUDA graph and replayed.

A step of a small model is hundreds of short kernels, and the time goes into launching them one by one. A recorded step is
launched at once. For that, nothing may be allocated or waited for in it: keys and values are written into columns that were
reserved in the beginning, and a mask of fixed size says which of them count.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticCache, StaticLayer

from align.errors import UserError
from align.models.backbone.decoding import DecodingState


class FixedState(DecodingState):
    """The state of a decoder, with room for a number of further tokens.

    Args:
        state: after the prompts were read; it is used up.
        config: the model's.
        room: tokens that may still be appended.

    Raises:
        UserError: if the model keeps something else than the keys and values of all tokens.
    """

    def __init__(self, state: DecodingState, config: PreTrainedConfig, room: int) -> None:
        super().__init__(state.cache, state.attention_mask, state.positions)
        require_plain_cache(state.cache)
        self.config, self.room = config, room
        self._reserve()

    def _reserve(self) -> None:
        """Move what is there into new buffers; `cache` is a growing one until then."""
        used, device = self.attention_mask.shape[1], self.attention_mask.device
        grown, self.cache = self.cache, StaticCache(config=self.config, max_cache_len=used + self.room)
        for old, new in zip(grown.layers, self.cache.layers, strict=True):
            _fill(new, old.keys, old.values)
        self.mask = torch.zeros(len(self.positions), 1, 1, used + self.room, dtype=torch.bool, device=device)
        self.mask[:, 0, 0, :used] = self.attention_mask.bool()
        self.column = torch.tensor([used], device=device)
        self.positions = self.positions.clone()
        self.tokens = torch.zeros_like(self.positions)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.states = torch.empty(0)

    def worth_selecting(self, left: int) -> bool:
        """When half of the rows have ended: a step costs a GPU little less without a few, and is recorded anew each time."""
        return 2 * left <= len(self.positions)

    def select(self, rows: Tensor) -> None:
        used = int(self.column)
        self.room -= used - self.attention_mask.shape[1]
        self.attention_mask = self.mask[rows, 0, 0, :used].long()
        self.positions = self.positions[rows]
        grown = DynamicCache()
        for number, layer in enumerate(self.cache.layers):
            grown.update(layer.keys[rows, :, :used], layer.values[rows, :, :used], number)
        self.cache = grown
        self._reserve()

    def step(self, body: nn.Module, tokens: Tensor) -> Tensor:
        """Append one token [B] to each row; the states [B, H] after them, which the next step overwrites."""
        self.tokens.copy_(tokens)
        if self.tokens.device.type != "cuda":
            self._compute(body)
            return self.states
        if self.graph is None:
            self._record(body)
        assert self.graph is not None
        self.graph.replay()
        return self.states

    def _compute(self, body: nn.Module) -> None:
        self.mask.index_fill_(3, self.column, True)
        found = body(
            input_ids=self.tokens[:, None],
            attention_mask=self.mask,
            position_ids=self.positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.states = found.last_hidden_state[:, -1]
        self.positions.add_(1)
        self.column.add_(1)

    def _record(self, body: nn.Module) -> None:
        """Record a step. What kernels set up at their first call must not be recorded: one step is computed and undone."""
        changed = [self.mask, self.positions, self.column, *(layer.cumulative_length for layer in self.cache.layers)]
        before = [value.clone() for value in changed]
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            self._compute(body)
        torch.cuda.current_stream().wait_stream(side_stream)
        for value, old in zip(changed, before, strict=True):
            value.copy_(old)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._compute(body)


def require_plain_cache(cache: object) -> None:
    """Refuse a cache that holds something else than the keys and values of all tokens: windows, states, an encoder's output.

    Raises:
        UserError: if it does.
    """
    layers = getattr(cache, "layers", None)
    if not isinstance(cache, DynamicCache) or not all(type(layer) is DynamicLayer for layer in layers or [None]):
        raise UserError(
            "cuda_graphs: this model keeps something else than the keys and values of all tokens (a window, a state, an "
            "encoder's output); set cuda_graphs to false"
        )


def _fill(layer: StaticLayer, keys: Tensor, values: Tensor) -> None:
    layer.lazy_initialization(keys, values)
    assert layer.keys is not None
    assert layer.values is not None
    used = keys.shape[2]
    layer.keys[:, :, :used].copy_(keys)
    layer.values[:, :, :used].copy_(values)
    layer.cumulative_length.fill_(used)
