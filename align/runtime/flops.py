"""Model FLOPs of a stage, computed from the model's shape: the numerator of MFU.

FLOPs are counted as in appendix B of PaLM (Chowdhery et al. 2022, arXiv 2204.02311). A token costs 2 FLOPs per weight of the
matrices that it is multiplied with, and 4 L H Q T for its attention to T tokens. Training costs three times as much. Only
predicted tokens are multiplied with the vocabulary matrix, and a frozen matrix costs 4 FLOPs in training instead of 6. The
backward pass ends at the lowest layer with a trained weight, so lower layers only cost a forward pass. Embedding lookups,
norms, scalar heads, padding and recomputed activations are not counted.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from align.runtime.sharding import full_numel, full_shape

PEAKS = {
    "NVL": 835e12,  # H100 NVL and H200 NVL. NVIDIA's datasheets, half of the numbers "with sparsity"
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}
"""Dense bfloat16 FLOP/s of GPUs by substring of the device name. The first match applies."""

MEASURED_SIZE, MEASURED_SECONDS = {"cpu": 1024, "cuda": 8192}, 0.1
"""Size of the square matrices in `measure_peak`, and duration of the measurement in seconds."""


class Matrices(NamedTuple):
    """Number of matrix weights that are multiplied with a token."""

    trained: int = 0
    frozen: int = 0
    forward_only: int = 0
    """Frozen weights without a gradient through them."""


@dataclass(frozen=True)
class Stack:
    """Matrices of a stack of layers, and L H Q (layers x heads x head size) of its attention."""

    matrices: Matrices
    attention: int
    forward_only: int = 0
    """Part of `attention` without a gradient through it."""


@dataclass(frozen=True)
class FlopsProfile:
    """Quantities that determine the FLOPs of a model."""

    decoder: Stack
    """Layers that process responses and, in decoder-only models, also prompts."""
    vocabulary: Matrices
    encoder: Stack | None = None
    cross: Matrices = Matrices()
    """Key and value matrices applied to the encoder's output."""


class _Cost(NamedTuple):
    """FLOPs per token and matrix weight, and FLOPs per unit of L H Q T."""

    trained: int
    frozen: int
    attention: int

    def flops(self, matrices: Matrices, tokens: float) -> float:
        return tokens * (self.trained * matrices.trained + self.frozen * matrices.frozen + 2 * matrices.forward_only)

    def attention_flops(self, stack: Stack, pairs: float) -> float:
        return pairs * (self.attention * (stack.attention - stack.forward_only) + 4 * stack.forward_only)


FORWARD, TRAINING = _Cost(2, 2, 4), _Cost(6, 4, 12)


def _pass_flops(cost: _Cost, profile: FlopsProfile, prompt: int, responses: Sequence[int], predicted: int = 0) -> float:
    """Return the FLOPs of a pass over a shared prompt and its responses. `predicted` tokens have logits."""
    total = cost.flops(profile.vocabulary, predicted)
    if profile.encoder is None:
        longest = prompt + max(responses)
        pairs = prompt * longest + sum(length * (prompt + length) for length in responses)
        total += cost.flops(profile.decoder.matrices, prompt + sum(responses))
        return total + cost.attention_flops(profile.decoder, pairs)
    total += cost.flops(profile.encoder.matrices, prompt) + cost.attention_flops(profile.encoder, prompt**2)
    for length in (1 + length for length in responses):  # after the decoder's start token
        total += cost.flops(profile.decoder.matrices, length) + cost.flops(profile.cross, prompt)
        total += cost.attention_flops(profile.decoder, length * (length + prompt))
    return total


forward_flops, training_flops = partial(_pass_flops, FORWARD), partial(_pass_flops, TRAINING)


def sampling_flops(profile: FlopsProfile, prompt: int, responses: Sequence[int]) -> float:
    """Return the FLOPs of sampling with a KV cache. The shared prompt and each token except the last are processed once."""
    total = FORWARD.flops(profile.vocabulary, sum(responses))
    if profile.encoder is None:
        fed = [length - 1 for length in responses]
        read, pairs = prompt + sum(fed), prompt**2 + sum(length * prompt + length * (length + 1) // 2 for length in fed)
    else:
        total += FORWARD.flops(profile.encoder.matrices, prompt) + FORWARD.attention * profile.encoder.attention * prompt**2
        total += len(responses) * FORWARD.flops(profile.cross, prompt)
        read, pairs = sum(responses), sum(length * prompt + length * (length + 1) // 2 for length in responses)
    return total + FORWARD.flops(profile.decoder.matrices, read) + FORWARD.attention * profile.decoder.attention * pairs


def matrices_of(modules: Iterable[tuple[str, nn.Module]], adapter: str | None, expert_share: float = 1.0) -> Matrices:
    """Count the weights of all matrices in `modules` that are used with `adapter` active (None for no adapter).

    `expert_share` is the fraction of a layer's experts that a token passes through.
    """
    trained = frozen = 0
    for name, module in modules:
        if isinstance(module, nn.Embedding) or hasattr(
            module, "base_layer"
        ):  # PEFT wrapper; its base layer is counted separately
            continue
        if ".lora_" in name and name.rsplit(".", 1)[-1] != adapter:
            continue
        is_expert = "experts" in name.split(".")
        # Experts may be slices of a single parameter with a separate name.
        weights = module._parameters.values() if is_expert else [getattr(module, "weight", None)]
        for weight in weights:
            if not isinstance(weight, Tensor) or len(full_shape(weight)) < 2:
                continue
            count = round(full_numel(weight) * (expert_share if is_expert else 1.0))
            if weight.requires_grad:
                trained += count
            else:
                frozen += count
    return Matrices(trained, frozen)


_peaks: dict[tuple[torch.device, torch.dtype], float] = {}
"""Highest measured FLOP/s by device and dtype."""


def peak_flops(device: torch.device, dtype: torch.dtype, achieved: float = 0.0) -> float:
    """Return the peak FLOP/s of a device: from a table for GPUs in bfloat16, otherwise measured.

    Other work on the machine makes the measured peak too low. If a computation has `achieved` more, the measurement is
    repeated, and the result is at least `achieved`.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for part, peak in PEAKS.items():
            if part in name:
                return peak
    key = (device, dtype)
    if key not in _peaks or achieved > _peaks[key]:
        _peaks[key] = max(measure_peak(device, dtype), achieved, _peaks.get(key, 0.0))
    return _peaks[key]


def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the highest FLOP/s of square matrix products over a tenth of a second, after a warmup."""
    size = MEASURED_SIZE.get(device.type, MEASURED_SIZE["cpu"])
    left = torch.ones(size, size, device=device, dtype=dtype)
    _seconds_of_product(left)  # warmup; loads the library (0.5 s on a GPU)
    best, end = _seconds_of_product(left), time.perf_counter() + MEASURED_SECONDS
    while time.perf_counter() < end:
        best = min(best, _seconds_of_product(left))
    return 2 * size**3 / best


def _seconds_of_product(matrix: Tensor) -> float:
    started = time.perf_counter()
    matrix @ matrix
    if matrix.device.type == "cuda":
        torch.cuda.synchronize(matrix.device)
    return time.perf_counter() - started


class Clock:
    """Seconds spent in each part of an update. Synchronizes with the GPU."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.lap_start = time.monotonic()

    def lap(self, part: str) -> None:
        """End a part, attributing the time since the previous lap to it."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.monotonic()
        self.seconds[part], self.lap_start = now - self.lap_start, now

    def shares(self) -> dict[str, float]:
        """Return `time/<part>`, the fraction of each part, and `time/update`, the total seconds."""
        total = sum(self.seconds.values())
        return {f"time/{part}": seconds / total for part, seconds in self.seconds.items()} | {"time/update": total}
