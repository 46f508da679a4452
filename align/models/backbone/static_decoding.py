"""Decoding in a cache of fixed size, so that a GPU records a decoding step once and replays it.

A step has hundreds of short kernels, which a GPU runs faster than a CPU launches them, and a growing cache is copied each
time. A CUDA graph launches all kernels at once. It must not allocate memory or synchronize: keys and values are written to
preallocated columns, and a mask of fixed size marks the valid ones.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticCache, StaticLayer

from align.models.backbone.contract import DecodingState
from align.models.backbone.determinism import routers_of
from align.runtime.sharding import is_sharded

DEVICES = {"cuda"}
"""Device types with static decoding. On a CPU, a growing cache costs less than unused columns."""
COLUMNS_MULTIPLE = 16
"""Mask columns are padded to this multiple: attention kernels copy masks with rows not aligned to 16 bytes."""


class StaticDecodingState(DecodingState):
    """The state of a decoder with room for a number of further tokens.

    Args:
        state: state after the prompts, which is consumed.
        model: model whose config gives the shapes of the cache.
        room: maximum number of tokens to append.
    """

    def __init__(self, state: DecodingState, model: PreTrainedModel, room: int) -> None:
        super().__init__(state.cache, state.attention_mask, state.positions)
        self.model, self.room = model, room
        self._reserve()

    def _reserve(self) -> None:
        used, device = self.attention_mask.shape[1], self.attention_mask.device
        columns = -(-(used + self.room) // COLUMNS_MULTIPLE) * COLUMNS_MULTIPLE
        grown, self.cache = self.cache, StaticCache(config=self.model.config, max_cache_len=columns)
        for old, new in zip(grown.layers, self.cache.layers, strict=True):
            _fill(new, old.keys, old.values)
            old.keys = old.values = None  # one layer at a time is in memory twice
        dtype = self.model.dtype
        self.mask = torch.full((len(self.positions), 1, 1, columns), torch.finfo(dtype).min, dtype=dtype, device=device)
        self.mask[:, 0, 0, :used].masked_fill_(self.attention_mask.bool(), 0)
        self.column = torch.tensor([used], device=device)
        self.positions = self.positions.clone()
        self.tokens = torch.zeros_like(self.positions)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.states = torch.empty(0)

    def is_worth_selecting(self, left: int) -> bool:
        """Return whether half of the rows are finished. Dropping fewer rows does not pay for recording a new graph."""
        return 2 * left <= len(self.positions)

    def select(self, rows: Tensor) -> None:
        used = int(self.column)
        self.room -= used - self.attention_mask.shape[1]
        self.attention_mask = (self.mask[rows, 0, 0, :used] == 0).long()
        self.positions, self.graph = self.positions[rows], None
        grown = DynamicCache()
        for number, layer in enumerate(self.cache.layers):
            grown.update(layer.keys[rows, :, :used], layer.values[rows, :, :used], number)
            layer.keys = layer.values = None
        self.cache = grown
        self._reserve()

    def step(self, body: nn.Module, tokens: Tensor) -> Tensor:
        """Append one token [B] to each row; return the states [B, H] after them, which the next step overwrites."""
        self.tokens.copy_(tokens)
        if self.tokens.device.type != "cuda":
            self._compute(body)
            return self.states
        if self.graph is None:
            self.graph = self._record(body)
        self.graph.replay()
        return self.states

    def _compute(self, body: nn.Module) -> None:
        self.mask.index_fill_(3, self.column, 0)
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

    def _record(self, body: nn.Module) -> torch.cuda.CUDAGraph:
        """Record a step. A first step, which sets up kernels and must not be recorded, is computed and undone."""
        changed = [self.mask, self.positions, self.column, *(layer.cumulative_length for layer in self.cache.layers)]
        before = [value.clone() for value in changed]
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(graph, capture_error_mode="thread_local")  # NCCL's thread may query the GPU meanwhile
        # All graphs are recorded on one stream. cuBLAS keeps a workspace of up to 32 MiB for each stream that was ever used.
        stream = recording.capture_stream
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._compute(body)
        torch.cuda.current_stream().wait_stream(stream)
        for value, old in zip(changed, before, strict=True):
            value.copy_(old)
        with recording:
            self._compute(body)
        return graph


def can_decode_statically(model: PreTrainedModel, state: DecodingState) -> bool:
    """Return whether steps of a model can be recorded.

    transformers marks the classes whose step has no data-dependent control flow. Dynamic RoPE depends on the longest
    position, and experts may receive their tokens one by one. A cache of windows or recurrent states has another shape,
    and ZeRO-3 gathers weights during a step.
    """
    decides = not model._can_compile_fullgraph or "dynamic" in str(getattr(model.config, "rope_parameters", None))
    plain = isinstance(state.cache, DynamicCache) and all(type(layer) is DynamicLayer for layer in state.cache.layers)
    here = model.device.type in DEVICES and not any(map(is_sharded, model.parameters()))
    return here and plain and not decides and not routers_of(model)


def _fill(layer: StaticLayer, keys: Tensor, values: Tensor) -> None:
    layer.lazy_initialization(keys, values)
    assert layer.keys is not None
    assert layer.values is not None
    used = keys.shape[2]
    layer.keys[:, :, :used].copy_(keys)
    layer.values[:, :, :used].copy_(values)
    layer.cumulative_length.fill_(used)
