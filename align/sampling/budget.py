"""How many tokens are sampled at once: as many as a GPU has memory for, since a step takes about the same time for any."""

from align.models.backbone import Backbone
from align.sampling.generation import Sampling
from align.training.memory import Memory, cache_bytes

SHARE_OF_FREE_MEMORY = 0.5
"""Of the memory that weights and optimizer leave, the share that sampling uses. While a token is appended to the cache or a
row leaves it, one layer is there twice, and torch keeps freed blocks of sizes that no longer fit."""


def sampling_tokens(memory: Memory, backbone: Backbone, width: int) -> int:
    """`Sampling.batch_tokens` for a run's device: on a processor the default, on a GPU what half of the free memory holds.

    Rounded down to a power of two: a run that goes on another day, with a little more or less memory free, then cuts the
    same batches and samples the same bits.

    Args:
        memory: of a run whose estimate has been made.
        backbone: the policy's.
        width: tokens of the longest prompt and response together.
    """
    if memory.device.type == "cpu":
        return Sampling.batch_tokens
    room = SHARE_OF_FREE_MEMORY * (memory.free() - memory.resident_bytes)
    per_token = cache_bytes(backbone, 1, 0) + cache_bytes(backbone, 0, 1) / width
    fitting = max(width, int(room / per_token))  # a single row is sampled whatever it takes
    return 1 << (fitting.bit_length() - 1)
