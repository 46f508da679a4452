"""The weights of a model, read from safetensors and checked."""

import os
from collections.abc import Iterable
from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from align.core.errors import UserError, first_line, reason
from align.models.backbone import is_classifier
from align.models.backbone.kinds import attention_kernel, model_class, new_modules, prepare_model
from align.models.configs import load_config
from align.runtime.progress import console
from align.runtime.sharding import Sharder, loading_accelerator, local_shard, min_while_loading


def load_weights(source: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a transformers model from safetensors; a UserError if they are missing, broken, or only there as pickle."""
    config = load_config(source)
    accelerator = loading_accelerator()
    sharder = Sharder(accelerator, dtype) if accelerator else None
    try:
        with sharder.shard_on_load() if sharder else nullcontext():
            model, report = model_class(config).from_pretrained(
                source,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                attn_implementation=attention_kernel(config),
                output_loading_info=True,
            )
    except Exception as error:  # an external config or index can be wrong in any way
        if type(error).__name__ == "SafetensorError":  # a type of its own for a broken file
            raise UserError(f"model '{source}': its weights are broken ({first_line(error)})") from error
        raise UserError(f"model '{source}': its weights cannot be loaded ({reason(error)})") from error
    if sharder:
        sharder.finish(model)
    prepare_model(model)
    # transformers makes up at random what is missing; that is right only for what a task adds to a pretrained encoder.
    added = () if is_classifier(config) else new_modules(model)
    missing = [key for key in report["missing_keys"] if not key.startswith(added)]
    if missing:
        raise UserError(f"model '{source}': its weights lack '{min(missing)}'")
    unread = sorted(report["unexpected_keys"])  # such as TRL's value head (`v_head`)
    if unread and os.environ.get("RANK", "0") == "0":
        names = ", ".join(unread[:3]) + (f" and {len(unread) - 3} more" if len(unread) > 3 else "")
        console.print(f"model '{source}': weights that are not part of the model are not read: {names}")
    require_finite(model.named_parameters(), f"model '{source}'")
    return cast(PreTrainedModel, model)


def make_on_meta(source: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model as `load_weights` would, with shapes and no data; a UserError if its config cannot be used."""
    config = load_config(source)
    try:
        with torch.device("meta"):
            model = model_class(config).from_config(config, dtype=dtype, attn_implementation=attention_kernel(config))
            if not getattr(config, "scale_decoder_outputs", True) and (head := model.get_output_embeddings()):
                # T5 v1.1 has a separate output matrix, which transformers ties in a new model.
                head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
    except Exception as error:  # a config from elsewhere can be wrong in any way
        raise UserError(f"model '{source}': its config cannot be used ({reason(error)})") from error
    prepare_model(model)
    return cast(PreTrainedModel, model)


@torch.no_grad()
def require_finite(weights: Iterable[tuple[str, Tensor]], owner: str) -> None:
    """Raise a UserError that names their `owner` if a number of some weights, given by name, is not finite."""
    listed = list(weights)
    shards = (local_shard(weight) for _, weight in listed)  # NaN passes through aminmax
    bad = (n for n, part in enumerate(shards) if part.numel() and not all(map(torch.isfinite, torch.aminmax(part))))
    first = min_while_loading(next(bad, len(listed)))  # of a weight that is sharded, each process has seen its part
    if first < len(listed):
        name = listed[first][0]
        raise UserError(f"{owner}: its weight '{name}' holds NaN or infinite numbers; take an earlier checkpoint of it")
