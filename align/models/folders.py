"""The folder or hub name of a model: its configs, read before its weights, and its weights, read from safetensors."""

import copy
import hashlib
import os
import re
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import cast

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from align.core.errors import UserError, first_line, reason
from align.core.files import read_json
from align.core.hub import require_hub
from align.model_registry.registry import published_name, resolve_model
from align.models.backbone import is_classifier, is_prefix_lm
from align.models.backbone.determinism import is_dropout_rate
from align.models.backbone.kinds import attention_kernel, model_class, new_modules, prepare_model
from align.models.quantization import (
    prepare_quantized,
    quantization_of,
    quantization_settings,
    quantize_on_meta,
    require_quantizable,
)
from align.runtime.progress import console
from align.runtime.sharding import Sharder, is_sharded, loading_accelerator, local_shard, min_while_loading

BUILT_IN_BASE = "built_in_base"
"""Metadata key of an adapter's file for its built-in base. PEFT's config names the published one."""
BASE_QUANTIZATION = "base_quantization"
"""Metadata key of an adapter's file for the format of the quantized base in training."""
MOST_LAYERS = 10_000
"""Maximum for a valid config. Building more layers would take minutes."""


def base_of(source: str) -> tuple[str, bool]:
    """Return the folder or name of the base weights, and whether `source` is an adapter on them."""
    if not (Path(source) / "adapter_config.json").exists():
        return source, False
    settings = read_json(Path(source) / "adapter_config.json")
    base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    if not base or not isinstance(base, str):
        raise UserError(
            f"{source}/adapter_config.json: base_model_name_or_path is empty or no text; name the model under the adapter"
        )
    built_in: str | None = None
    # A missing or broken file is reported when the weights are loaded.
    with suppress(OSError, SafetensorError), safe_open(Path(source) / "adapter_model.safetensors", framework="pt") as stored:
        built_in = (stored.metadata() or {}).get(BUILT_IN_BASE)
    if built_in and base == published_name(built_in):  # its weights may differ from the published ones
        return str(resolve_model(built_in)), True
    if Path(base).exists():
        return str(resolve_model(base)), True
    # The adapter may have been trained in another working directory or moved, with its base next to it: runs/sft,
    # runs/reward. Of an absolute path, the last parts count, two at least.
    parts = Path(base).parts
    tails = [Path(*parts[start:]) for start in range(1, len(parts) - 1)] if Path(base).is_absolute() else [Path(base)]
    own = Path(source).resolve()
    candidates = (parent / tail for tail in tails for parent in own.parents if parent / tail != own)
    existing = next((folder for folder in candidates if (folder / "config.json").exists()), None)
    return str(existing or resolve_model(base)), True


def adapter_quantization(source: str) -> str:
    """Return the format of the base that an adapter was trained on, or "" if not quantized or unknown."""
    with suppress(OSError, SafetensorError), safe_open(Path(source) / "adapter_model.safetensors", framework="pt") as stored:
        return str((stored.metadata() or {}).get(BASE_QUANTIZATION, ""))
    return ""


def reads_prompts_whole(source: str) -> bool:
    """Return whether a checkpoint, or the base of an adapter without config.json, is a prefix language model."""
    has_config = (Path(source) / "config.json").exists()
    return is_prefix_lm(load_config(source if has_config else base_of(source)[0]))


def load_config(source: str) -> PreTrainedConfig:
    """Load a model's config and set all dropout rates to 0."""
    require_hub(source, "model")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source)
    except Exception as error:  # a config from elsewhere can be wrong in any way
        if (Path(source) / "config.json").exists():
            raise UserError(f"{source}/config.json: it cannot be read ({reason(error)})") from error
        raise UserError(
            f"model '{source}': no such folder, and it cannot be loaded from the hub ({first_line(error)})"
        ) from error
    for key in ("num_hidden_layers", "num_layers", "num_decoder_layers"):
        if isinstance(count := getattr(config, key, 1), int) and not 0 < count <= MOST_LAYERS:
            raise UserError(f"model '{source}': its config says {key} {count}, but a model has 1 to {MOST_LAYERS}")
    for key, value in config.to_dict().items():
        if is_dropout_rate(key, value):
            setattr(config, key, 0.0)
    return config


_INVALID = re.compile(r"^- `(\w+)`:", re.MULTILINE)
"""Pattern of settings that `GenerationConfig.validate` reports as having no effect."""


def stored_generation_config(source: str) -> GenerationConfig | None:
    """Load the generation config of a folder or hub name, or None if there is none."""
    try:
        return GenerationConfig.from_pretrained(source)
    except Exception as error:  # a file from elsewhere can be wrong in any way
        path = Path(source) / GENERATION_CONFIG_NAME
        if isinstance(error, OSError) and not path.is_file():
            return None
        raise UserError(f"{path}: it cannot be read ({reason(error)})") from error


def end_ids(
    generation: GenerationConfig | None, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Return the ids at which transformers' `generate` stops.

    Ids that transformers derives from a model's config may be defaults of its class, which are other tokens in this
    vocabulary. They count only if they are special tokens.
    """
    given = config.get_text_config(decoder=True).eos_token_id if generation is None else generation.eos_token_id
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(isinstance(id, int) for id in ids):
        raise UserError(f"{GENERATION_CONFIG_NAME}: eos_token_id must be an id or a list of ids, not {given!r}")
    if generation is None or generation._from_model_config:
        added = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        ids = [id for id in ids if id in added or id in tokenizer.all_special_ids]
    return tuple(ids)


def valid_generation_config(generation: GenerationConfig) -> GenerationConfig:
    """Return a copy without settings that have no effect, such as a temperature without `do_sample`.

    `generate` ignores such settings, and transformers refuses to save them after any change.
    """
    generation = copy.deepcopy(generation)
    try:
        generation.validate(strict=True)
    except ValueError as error:
        for name in _INVALID.findall(str(error)):
            setattr(generation, name, None)
    try:
        generation.validate(strict=True)
    except ValueError as error:
        raise UserError(f"{GENERATION_CONFIG_NAME}: it is invalid ({first_line(error)}); correct it") from error
    return generation


SAVED_GENERATION_SETTINGS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("do_sample", "temperature", "top_k", "top_p", "max_length", "max_new_tokens"),
)
"""Fields of a base's generation config that a saved model keeps. Sampling in this package uses no others."""
_NOT_OF_TEXT = re.compile(r"_|output_|return_dict|use_cache|cache_|transformers_version|compile|disable_compile")
"""Fields that do not affect the output of `generate`."""


def saved_generation_config(generation: GenerationConfig) -> GenerationConfig:
    """Return a generation config with only the settings in `SAVED_GENERATION_SETTINGS`.

    With others, such as `num_beams`, `generate` would write different text than in training and evaluation.

    Raises:
        UserError: if the config is invalid.
    """
    valid = valid_generation_config(generation)
    return GenerationConfig(**{name: getattr(valid, name) for name in SAVED_GENERATION_SETTINGS})


def unsaved_generation_settings(generation: GenerationConfig) -> list[str]:
    """Return the names of settings that affect the output of `generate` and that a saved model does not keep."""
    neutral = GenerationConfig._get_default_generation_params()
    return [
        name
        for name, value in valid_generation_config(generation).to_diff_dict().items()
        if value is not None and value != neutral.get(name)
        if name not in SAVED_GENERATION_SETTINGS and not _NOT_OF_TEXT.match(name)
    ]


# ----------------------------------------------------------------------------------------------------------------- weights


def load_weights(source: str, dtype: torch.dtype, quantization: str = "") -> PreTrainedModel:
    """Load a transformers model from safetensors. Raise a UserError if they are missing, broken, or only a pickle.

    `quantization` is a format of `align.models.quantization`; "" keeps the stored format.
    """
    config = load_config(source)
    accelerator = loading_accelerator()
    stored = quantization_of(config)
    require_quantizable(quantization, source, stored, sharded=accelerator is not None)
    quantized = {"quantization_config": quantization_settings(quantization, dtype)} if quantization and not stored else {}
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
                **quantized,
            )
    except Exception as error:  # an external config or index can be wrong in any way
        if type(error).__name__ == "SafetensorError":  # a custom type for a broken file
            raise UserError(f"model '{source}': its weights are broken ({first_line(error)})") from error
        raise UserError(f"model '{source}': its weights cannot be loaded ({reason(error)})") from error
    if sharder:
        sharder.finish(model)
    prepare_model(model)
    prepare_quantized(model, dtype)
    # transformers initializes missing weights at random, which is correct only for a task head on a pretrained encoder.
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


def make_on_meta(source: str, dtype: torch.dtype, quantization: str = "") -> PreTrainedModel:
    """Return a model as `load_weights` would, with shapes but no data. Raise a UserError if the config is invalid."""
    config = load_config(source)
    quantization = quantization or quantization_of(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        with torch.device("meta"):
            model = model_class(config).from_config(config, dtype=dtype, attn_implementation=attention_kernel(config))
            if not getattr(config, "scale_decoder_outputs", True) and (head := model.get_output_embeddings()):
                # T5 v1.1 has a separate output matrix, which transformers ties in a new model.
                head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
    except Exception as error:  # a config from elsewhere can be wrong in any way
        raise UserError(f"model '{source}': its config cannot be used ({reason(error)})") from error
    if quantization:
        quantize_on_meta(model, quantization, dtype)
    prepare_model(model)
    return cast(PreTrainedModel, model)


@torch.no_grad()
def require_finite(weights: Iterable[tuple[str, Tensor]], owner: str) -> None:
    """Raise a UserError that names the `owner` if named weights contain a number that is not finite."""
    listed = list(weights)
    shards = (local_shard(weight) for _, weight in listed)  # NaN passes through aminmax
    bad = (n for n, part in enumerate(shards) if part.numel() and not all(map(torch.isfinite, torch.aminmax(part))))
    first = min_while_loading(next(bad, len(listed)))  # each process checked only its part of a sharded weight
    if first < len(listed):
        name = listed[first][0]
        raise UserError(f"{owner}: its weight '{name}' holds NaN or infinite numbers; take an earlier checkpoint of it")


def stored_file(source: str, name: str) -> Path | None:
    """Return the path of a file of a folder, or of a hub name in the hub's cache; None if it is not on this machine."""
    with suppress(ValueError):  # neither a folder nor a hub name
        found = os.path.join(source, name) if os.path.isdir(source) else try_to_load_from_cache(source, name)
        return Path(found) if isinstance(found, str) and os.path.isfile(found) else None
    return None


VOCABULARIES = (
    *("tokenizer.json", "vocab.json", "vocab.txt", "vocab.bpe", "tekken.json"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm", "spm.model", "prophetnet.tokenizer"),
)
"""Files with the tokens of a tokenizer."""


def has_vocabulary(source: str) -> bool:
    """Return whether a folder, or a hub name in the hub's cache, holds the tokens of a tokenizer.

    Without them, transformers creates an empty tokenizer of the model's class.
    """
    return any(stored_file(source, name) for name in VOCABULARIES)


def tokenizer_source(source: str, base: str) -> str:
    """Return the folder or hub name of a model's tokenizer. An adapter without one uses the base's.

    Raises:
        UserError: if a folder contains no tokenizer.
    """
    has_config = stored_file(source, "tokenizer_config.json") is not None  # sufficient for a byte tokenizer
    if (
        base != source
        and not has_vocabulary(source)
        and not (has_config and os.path.isdir(base) and not has_vocabulary(base))
    ):
        return tokenizer_source(base, base)
    if os.path.isdir(source) and not has_vocabulary(source) and not has_config:
        raise UserError(f"{source}: it holds no tokenizer; save it there by tokenizer.save_pretrained")
    return source


def weight_files(source: str) -> list[Path]:
    """Return the safetensors files of a folder, or of a hub name in the hub's cache; none if it is not on this machine."""
    marker = stored_file(source, "config.json") or stored_file(source, "adapter_config.json")
    return sorted(marker.parent.glob("*.safetensors")) if marker else []


def weights_digest(name: str) -> str:
    """Return a digest of the stored weights of a model, including an adapter's base; "" if none are on this machine."""
    with suppress(UserError, OSError, ValueError):  # the name of a model in memory is not a folder
        source = str(resolve_model(name))
        paths = [path for folder in dict.fromkeys((source, base_of(source)[0])) for path in weight_files(folder)]
        digest = hashlib.sha256()
        for path in paths:
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest() if paths else ""
    return ""


def changed_weights(model: PreTrainedModel) -> list[str]:
    """Return the names of weights in memory whose first row differs from the one stored in the model's folder.

    The config names the folder, or a model in the hub's cache. Adapters and weights that are not stored there are skipped.
    """
    weights = {re.sub(r"(base_layer|original_module)\.", "", name): each for name, each in model.named_parameters()}
    source, changed = model.config.name_or_path or "", list[str]()
    with suppress(OSError, ValueError, SafetensorError):  # neither folder nor hub name, or a broken file
        for path in weight_files(source):
            with safe_open(path, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118
                    weight = weights.get(name, weights.get(f"{model.base_model_prefix}.{name}"))
                    if weight is None or not weight.dim() or is_sharded(weight):
                        continue
                    if stored.get_slice(name).get_shape()[1:] != [*weight.shape[1:]]:
                        continue
                    row = stored.get_slice(name)[:1]
                    if not weight.is_floating_point():  # quantized
                        continue
                    if row.dtype.itemsize > 1 and not torch.equal(row.to(weight.dtype), weight[:1].detach().cpu()):
                        changed.append(name)
    return changed
