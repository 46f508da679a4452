"""The setting `sequence_parallel`: which models it takes, and the check that nothing but rounding changes."""

import torch

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.models.backbone import Backbone
from align.models.backbone.attention import SDPA
from align.runtime.distributed import zero_stage
from align.runtime.sequence import share_rows
from align.training.run import Run

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""By how much states may differ, as a share of their largest: what another order of sums changes in a few layers."""


def share_sequences(run: Run, backbone: Backbone, size: int) -> None:
    """Let each `size` processes read the same rows, each a part of them; 1: none do.

    Raises:
        UserError: if the model or the number of processes does not allow it.
    """
    if size == 1:
        return
    config, processes = backbone.model.config, run.accelerator.num_processes
    heads = getattr(config, "num_attention_heads", 0)
    shared = getattr(config, "num_key_value_heads", None) or heads
    problem = ""
    if not backbone.reads_in_parts:
        problem = f"only decoders share rows, and {config.model_type} is none"
    elif zero_stage(run.accelerator) == 3:
        problem = "under ZeRO-3 no process has a whole model to check it with; use ZeRO-1 or 2, or none"
    elif processes % size:
        problem = f"it must divide the number of processes, {processes}"
    elif heads % size or shared % size:
        problem = f"it must divide the model's {heads} heads of queries and {shared} of keys"
    elif config._attn_implementation != SDPA:
        problem = f"the attention of {config.model_type} is its own, and exchanges nothing"
    elif getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None):
        problem = f"{config.model_type} looks back over a window, which parts of a row do not know"
    if problem:
        raise UserError(f"sequence_parallel is {size}: {problem}; set it to 1")
    ids = torch.arange(2 * size + 1, device=backbone.device) % int(config.vocab_size)
    prompt, response = Padded.from_lists([ids[:2].tolist()]), Padded.from_lists([ids[2:].tolist()])
    prompt, response = prompt.to(backbone.device), response.to(backbone.device)
    with torch.no_grad():
        expected = backbone.hidden(prompt, response)
        # Each response has a row of its own: a shared one would need a mask.
        backbone.sequence, backbone.shares_prompts = share_rows(run.accelerator, size), False
        found = backbone.hidden(prompt, response)
    limit = TOLERANCE[backbone.model.dtype] * float(expected.abs().max())
    if not torch.allclose(found, expected, rtol=0, atol=limit):
        raise UserError(
            f"sequence_parallel is {size}: {config.model_type} computes something else from parts of a row; set it to 1"
        )
