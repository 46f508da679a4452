"""Model FLOPs of what a stage does, from the shape of its model: the numerator of MFU.

Counted as in appendix B of PaLM (Chowdhery et al. 2022, arXiv 2204.02311): a token costs 2 FLOPs for each weight of the
matrices that it passes, and 4 L H Q T for its attention to T tokens; training costs three times that. Not counted are
embedding look-ups, norms, scalar heads, padding, and activations that are computed a second time in the backward pass. Two
refinements: the vocabulary product is taken on predicted tokens alone, and a frozen matrix has no weight gradient, so it
costs 4 FLOPs a weight and trained token instead of 6.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

PEAKS = {
    "NVL": 835e12,  # H100 NVL and H200 NVL; NVIDIA's datasheets, half of what they give "with sparsity", as all that follow
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}
"""Dense bfloat16 FLOP/s of GPUs, by a part of their name; the first that fits holds."""

MEASURED_SIZE, MEASURED_SECONDS = 1024, 0.1
"""The matrices of `measured_peak`, and how long they are multiplied."""


class Matrices(NamedTuple):
    """Weights of matrices that a token is multiplied with."""

    trained: int = 0
    frozen: int = 0


@dataclass(frozen=True)
class Stack:
    """A stack of layers: its matrices, and L H Q (layers x heads x width of a head) of its attention."""

    matrices: Matrices
    attention: int


@dataclass(frozen=True)
class Shape:
    """All that the cost of a model depends on.

    Attributes:
        decoder: the layers that read responses; for a decoder alone, prompts too.
        vocabulary: the output matrix.
        encoder: the layers that read prompts, or None.
        cross: key and value matrices that the decoder multiplies the encoder's output with.
    """

    decoder: Stack
    vocabulary: Matrices
    encoder: Stack | None = None
    cross: Matrices = Matrices()


class _Price(NamedTuple):
    """FLOPs for each weight of a matrix, and for each unit of L H Q T."""

    trained: int
    frozen: int
    attention: int

    def of(self, matrices: Matrices, tokens: float) -> float:
        return tokens * (self.trained * matrices.trained + self.frozen * matrices.frozen)


READ, LEARN = _Price(2, 2, 4), _Price(6, 4, 12)


def reading(shape: Shape, prompt: int, responses: Sequence[int], predicted: int = 0) -> float:
    """FLOPs of one forward pass over a prompt and its responses.

    Args:
        prompt: tokens of the prompt, which is read once for all of its responses.
        responses: tokens of each response.
        predicted: tokens whose logits are taken.
    """
    return _pass(READ, shape, prompt, responses, predicted)


def learning(shape: Shape, prompt: int, responses: Sequence[int], predicted: int = 0) -> float:
    """FLOPs of a forward and backward pass; arguments as for `reading`."""
    return _pass(LEARN, shape, prompt, responses, predicted)


def _pass(price: _Price, shape: Shape, prompt: int, responses: Sequence[int], predicted: int) -> float:
    total = price.of(shape.vocabulary, predicted)
    if shape.encoder is None:
        longest = prompt + max(responses)
        pairs = prompt * longest + sum(length * (prompt + length) for length in responses)
        return (
            total
            + price.of(shape.decoder.matrices, prompt + sum(responses))
            + price.attention * shape.decoder.attention * pairs
        )
    total += price.of(shape.encoder.matrices, prompt) + price.attention * shape.encoder.attention * prompt**2
    for length in (1 + length for length in responses):  # behind the decoder's start token
        total += price.of(shape.decoder.matrices, length) + price.of(shape.cross, prompt)
        total += price.attention * shape.decoder.attention * length * (length + prompt)
    return total


def sampling(shape: Shape, prompt: int, responses: Sequence[int]) -> float:
    """FLOPs of sampling responses with a cache: every token is read once but the last, and sees what stands before it.

    The prompt is read once for all of its responses, by an encoder too; each response attends to it by itself.
    """
    total = READ.of(shape.vocabulary, sum(responses))
    if shape.encoder is None:
        fed = [length - 1 for length in responses]
        read, pairs = prompt + sum(fed), prompt**2 + sum(length * prompt + length * (length + 1) // 2 for length in fed)
    else:
        total += READ.of(shape.encoder.matrices, prompt) + READ.attention * shape.encoder.attention * prompt**2
        total += len(responses) * READ.of(shape.cross, prompt)
        read, pairs = sum(responses), sum(length * prompt + length * (length + 1) // 2 for length in responses)
    return total + READ.of(shape.decoder.matrices, read) + READ.attention * shape.decoder.attention * pairs


def matrices_of(modules: Iterable[tuple[str, nn.Module]], adapter: str | None) -> Matrices:
    """The weights of all matrices among `modules` that compute when `adapter` is in use (None: no adapter)."""
    trained = frozen = 0
    for name, module in modules:
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Embedding) or not isinstance(weight, Tensor):
            continue
        shape = getattr(weight, "ds_shape", weight.shape)  # ZeRO-3 leaves an empty tensor where a weight was
        if len(shape) < 2:
            continue
        if hasattr(module, "base_layer"):  # PEFT's wrapper; what it wraps is among the modules too
            continue
        if ".lora_" in name and name.rsplit(".", 1)[-1] != adapter:
            continue
        if weight.requires_grad:
            trained += math.prod(shape)
        else:
            frozen += math.prod(shape)
    return Matrices(trained, frozen)


def peak_flops(device: torch.device, dtype: torch.dtype, given: float = 0.0) -> float:
    """FLOP/s that one device could do at most: as given, as known for a GPU in bfloat16, else measured."""
    if given:
        return given
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for part, peak in PEAKS.items():
            if part in name:
                return peak
    return measured_peak(device, dtype)


@cache
def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """The highest rate, FLOP/s, of a product of two square matrices, tried for a tenth of a second."""
    left = torch.ones(MEASURED_SIZE, MEASURED_SIZE, device=device, dtype=dtype)
    best, end = 0.0, time.perf_counter() + MEASURED_SECONDS
    while best == 0.0 or time.perf_counter() < end:
        begun = time.perf_counter()
        left @ left
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * MEASURED_SIZE**3 / (time.perf_counter() - begun))
    return best
