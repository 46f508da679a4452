"""Saving of models as transformers or PEFT folders that other libraries load, with a model card; uploads to the hub.

A push is one commit of safetensors, tokenizer, configs and model card. It contains no local paths: a base model
that is a local folder is left out of the card and of the adapter's config.
"""

import copy
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, constants
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from align.core.errors import UserError, first_line, reason
from align.core.files import new_folder, read_json, write_json, write_text
from align.model_registry.registry import published_name, registered_name, resolve_model
from align.models.backbone import Backbone, has_separate_matrix, is_prefix_lm
from align.models.folders import BASE_QUANTIZATION, BUILT_IN_BASE, base_of, load_config, saved_generation_config
from align.models.loading import LoadedModel, load_whole
from align.models.quantization import quantization_of
from align.models.saved_parts import adapter_weights, copy_tokenizer_files, separate_untied
from align.runtime.sharding import is_sharded

UPDATE_ROW = "update"
EMISSIONS = "cost/co2e_kg"
"""Metric of a run's emissions. The hub's metadata is in grams."""
"""Row of a card with the update after which the model was saved."""
WriteModel = Callable[..., object]
"""`save_model` or `save_model_into`."""

MODEL_FILES = (
    "config.json",
    "model.safetensors",
    "model-?????-of-?????.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
)
"""Patterns of the weights and the configs of a saved model."""
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.model", "*.txt", "README.md")
"""The files that are pushed."""
MARKERS = ("config.json", "adapter_config.json")
BASE = "base_model_name_or_path"


def save_model(
    folder: Path,
    loaded: LoadedModel,
    state: Mapping[str, Tensor],
    card: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
    stop_ids: frozenset[int] = frozenset(),
) -> None:
    """Save the policy: all weights as a transformers folder, or only the adapter as a PEFT folder.

    The files are read back and compared before the folder is renamed to its target.

    Args:
        folder: target folder, replaced atomically.
        state: full weights by their names in `loaded.backbone.model`.
        card: `title`, `stage`, and further rows of the card's table.
        extra: further JSON files by name.
        stop_ids: token ids that end a response in addition to the model's end tokens.
    """
    with new_folder(folder) as temporary:
        if loaded.adapter is None:
            model, state = loaded.backbone.model, separate_untied(loaded.backbone.model, state)
            model.save_pretrained(temporary, state_dict=dict(state))
            # Use the names of published folders: Mixtral's experts are one tensor in memory and many on disk.
            left_out = set(model._keys_to_ignore_on_save or ())  # recomputed on loading: Marian's positions
            kept = {name: weight for name, weight in state.items() if name not in left_out}
            require_equal_on_disk(temporary, revert_weight_conversion(model, kept))
        else:
            save_adapter(temporary, loaded, loaded.adapter, state)
        for name, value in (extra or {}).items():
            write_json(temporary / name, value)
        finish_folder(temporary, loaded, card, stop_ids=stop_ids)


def merge_model(name: str, folder: Path) -> None:
    """Write the model of an adapter as a transformers folder without an adapter, in the dtype of its base.

    A base that was quantized in training is dequantized.

    Raises:
        UserError: if the model is not the adapter of a language model, or cannot be merged.
    """
    source = str(resolve_model(name))
    base, is_adapter = base_of(source)
    if not is_adapter:
        raise UserError(f"model '{name}' has no adapter; it is complete as it is")
    config = load_config(base)
    dtype = config.dtype if config.dtype in (torch.float32, torch.bfloat16) else torch.float32
    loaded = load_whole(name, dtype, merges=True)
    card = {"title": "Merged model", "stage": "merge", "adapter": name}
    save_model(folder, loaded, weights_of(loaded.backbone), card)


def save_model_into(
    folder: Path,
    loaded: LoadedModel,
    state: Mapping[str, Tensor],
    card: Mapping[str, Any],
    stop_ids: frozenset[int] = frozenset(),
) -> set[str]:
    """Save the policy as `save_model` does, into a folder whose other files stay; return the names of the written files.

    Weights and configs of an earlier model in the folder are removed, by the file names that this package writes. A missing
    folder is created atomically.
    """
    if not folder.exists():
        save_model(folder, loaded, state, card, stop_ids=stop_ids)
        return {path.name for path in folder.iterdir()}
    complete = folder / ".model"
    save_model(complete, loaded, state, card, stop_ids=stop_ids)
    written = {path.name for path in complete.iterdir()}
    for path in complete.iterdir():
        target = folder / path.name
        if target.is_dir():  # further chat templates
            shutil.rmtree(target)
        path.replace(target)
    complete.rmdir()
    for pattern in MODEL_FILES:
        for path in folder.glob(pattern):
            if path.name not in written:
                path.unlink()
    return written


def finish_folder(
    temporary: Path,
    loaded: LoadedModel,
    card: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_ids: frozenset[int] = frozenset(),
) -> None:
    """Write the tokenizer (default: the model's), chat template, generation settings with `stop_ids`, and model card."""
    tokenization, model = loaded.tokenization, loaded.backbone.model
    (tokenizer or tokenization.tokenizer).save_pretrained(temporary)
    copy_tokenizer_files(loaded.base, temporary)
    config = temporary / "config.json"
    if config.exists() and has_separate_matrix(model):
        # transformers 4 ties the output matrix of a T5 v1.1 to the embedding unless the config disables it.
        write_json(config, read_json(config) | {"tie_word_embeddings": False})
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation = saved_generation_config(generation)
        generation.eos_token_id = sorted(tokenization.end_ids | stop_ids)
        changed = tokenizer is not None and tokenizer is not tokenization.tokenizer
        generation.pad_token_id = tokenizer.pad_token_id if tokenizer and changed else tokenization.pad_id
        generation.save_pretrained(temporary)
    write_text(temporary / "README.md", model_card(card, loaded))


def require_savable(loaded: LoadedModel, write: Callable[[Path], None] | None = None) -> None:
    """Write a model's files, by default a policy's, to a temporary folder to check them. Large weights are left out.

    transformers and safetensors validate more on saving than on loading: without this check, a run would fail at its end.
    """
    model = loaded.backbone.model
    state = {} if any(map(is_sharded, model.parameters())) else weights_of(loaded.backbone)
    try:
        if loaded.adapter is not None and state:
            adapter_weights(loaded, loaded.adapter, state)
        elif state:
            remove_tied_weights_from_state_dict(dict(separate_untied(model, state)), model)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if write is not None:
                write(folder)
                return
            if loaded.adapter is None:
                loaded.backbone.model.config.save_pretrained(folder)
            else:
                _save_adapter_config(folder, loaded, loaded.adapter)
            finish_folder(folder, loaded, {"title": "A model", "stage": "probe"})
    except Exception as error:  # configs and tokenizers from elsewhere fail in every way
        raise UserError(f"model '{loaded.base}': it could not be saved after training ({reason(error)})") from error


def save_adapter(
    folder: Path,
    loaded: LoadedModel,
    name: str,
    state: Mapping[str, Tensor],
    changes: Mapping[str, Any] | None = None,
    more: Mapping[str, Tensor] | None = None,
) -> None:
    """Save one adapter under PEFT's file names.

    Args:
        changes: fields of the adapter's config to change in the file.
        more: further tensors for the file, under PEFT's full names.
    """
    weights = {**adapter_weights(loaded, name, state), **(more or {})}
    weights = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
    metadata = {"format": "pt"}
    if built_in := registered_name(loaded.base):
        metadata[BUILT_IN_BASE] = built_in
    if quantization := quantization_of(loaded.backbone.model.config):
        metadata[BASE_QUANTIZATION] = quantization
    (folder / "adapter_model.safetensors").write_bytes(_with_sorted_metadata(save(weights, metadata)))
    _save_adapter_config(folder, loaded, name, changes)
    require_equal_on_disk(folder, weights)


def _with_sorted_metadata(data: bytes) -> bytes:
    """Sort the metadata of a safetensors file, which safetensors writes in random order: equal models are equal files."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    return data[:8] + json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size) + data[8 + size :]


def _save_adapter_config(folder: Path, loaded: LoadedModel, name: str, changes: Mapping[str, Any] | None = None) -> None:
    peft_model = loaded.backbone.peft
    assert peft_model is not None
    config = copy.copy(peft_model.peft_config[name])
    config.inference_mode = True
    local = os.path.abspath(loaded.base) if Path(loaded.base).is_dir() else None  # None for a model in memory
    config.base_model_name_or_path = published_name(loaded.base) or registered_name(loaded.base) or local
    for key, value in (changes or {}).items():
        setattr(config, key, value)
    config.save_pretrained(str(folder))
    if is_prefix_lm(loaded.backbone.model.config):  # the base may be none
        loaded.backbone.model.config.save_pretrained(folder)


def require_equal_on_disk(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Raise a UserError if a tensor in memory is missing in the folder or differs from it in any bit."""
    seen = set[str]().union(*(require_equal_file(path, state) for path in sorted(folder.glob("*.safetensors"))))
    for key in state.keys() - seen:  # tied weights are written once, under one of their names
        if not any(state[key].shape == state[other].shape and torch.equal(state[key], state[other]) for other in seen):
            raise UserError(f"{folder.name}: '{key}' was not written")


def require_equal_file(path: Path, state: Mapping[str, Tensor]) -> set[str]:
    """Return the names of a file's tensors. Raise a UserError if one differs from memory in any bit."""
    with safe_open(path, framework="pt") as stored:
        names = set(stored.keys())
        for key in sorted(names):
            if key not in state or not torch.equal(stored.get_tensor(key), state[key].detach().cpu()):
                raise UserError(f"{path.name}: '{key}' was not written as it is in memory; is the disk sound?")
    return names


def model_card(card: Mapping[str, Any], loaded: LoadedModel) -> str:
    """Return the text of README.md: hub metadata, table of metrics."""
    head: dict[str, Any] = {
        "library_name": "peft" if loaded.adapter else "transformers",
        "tags": ["rlhf", card["stage"]],
    }
    base, built_in = published_name(loaded.base), registered_name(loaded.base)
    if base:  # the hub refuses a folder
        head["base_model"] = base
    if EMISSIONS in card:
        grams = round(1000 * float(card[EMISSIONS]), 3)
        head["co2_eq_emissions"] = {
            "emissions": grams,
            "source": "power and time of the run",
            "training_type": "fine-tuning",
        }
    origin = f" from `{base or built_in}`" if base or built_in else ""
    if base and built_in:
        origin += f", in the form of the built-in model `{built_in}`"
    rows = "\n".join(f"| {key} | {without_paths(str(value))} |" for key, value in card.items() if key != "title")
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {card['title']}\n\n"
        f"Made by align-rlhf{origin}. The run's full settings and metrics are in its run folder.\n\n"
        f"| | |\n| --- | --- |\n{rows}\n"
    )


def update_in_card(folder: Path) -> int:
    """Return the update in the card of a saved model; 0 without a card or update."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    found = re.search(rf"^\| {UPDATE_ROW} \| (\d+) \|$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def without_paths(sources: str) -> str:
    """Return comma-separated names of data and models without local folders.

    A file keeps its name. A run's model is named after the folder of its run.
    """
    parts = [part.strip() for part in sources.split(",")]
    local = {part: Path(part) for part in parts if part and (Path(part).is_absolute() or Path(part).exists())}
    names = {
        part: registered_name(part) or (path.parent.name if path.name == "model" else path.name)
        for part, path in local.items()
    }
    return ", ".join(names.get(part, part) for part in parts) if names else sources


def weights_of(backbone: Backbone, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the weights by their names in `backbone.model`, from it or from the state of the module around it."""
    if state is None:
        return dict(backbone.model.state_dict())
    prefix = "backbone.model."
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


# ------------------------------------------------------------------------------------------------------ uploads to the hub


def make_repo(repo: str, token: str | None = None) -> str:
    """Create a private model repository on the hub, unless it exists; return its full name. A run calls it before training.

    Raises:
        UserError: if the hub cannot be reached or rejects the request, for example without a token.
    """
    try:
        return HfApi(token=token).create_repo(repo, private=True, exist_ok=True).repo_id
    except Exception as error:  # the hub client raises its own errors and its HTTP library's
        raise UserError(
            f"hub: cannot create '{repo}' ({_reason(error)}); check the network, or log in with `hf auth login`"
        ) from error


def push_model(
    folder: Path,
    repo: str,
    message: str = "",
    token: str | None = None,
    revision: str | None = None,
    names: Collection[str] | None = None,
) -> str:
    """Push a saved model in one commit; return the address of the repository.

    Args:
        folder: folder of a model, or of a run, whose `model` folder is pushed.
        repo: name on the hub, as user/name; created as private if missing. Without a user, the token's owner.
        token: access token. Default: the token of `hf auth login`.
        revision: branch. Default: main.
        names: names of the files to push, among the files that match `PATTERNS`. Default: all.

    Raises:
        UserError: if the folder contains no model, or the hub cannot be reached or rejects the request.
    """
    folder = _model_folder(folder)
    operations = [entry for entry in _operations(folder) if names is None or entry.path_in_repo in names]
    repo = make_repo(repo, token)
    try:
        api = HfApi(token=token)
        api.create_commit(repo, operations, commit_message=message or f"Upload {_title(folder)}", revision=revision)
    except Exception as error:  # as above
        raise UserError(f"hub: '{repo}' was not updated ({_reason(error)})") from error
    return f"{constants.ENDPOINT}/{repo}"


def _model_folder(folder: Path) -> Path:
    for place in (folder, folder / "model"):
        if any((place / name).is_file() for name in MARKERS):
            return place
    raise UserError(f"{folder}: holds neither config.json nor adapter_config.json; give the folder of a saved model")


def _operations(folder: Path) -> Iterator[CommitOperationAdd]:
    """Yield the files of a commit. The card and the adapter's config are uploaded without local paths."""
    for path in sorted({path for pattern in PATTERNS for path in folder.glob(pattern)}):
        content: bytes | str = str(path)
        if path.name == "README.md":
            content = _public_card(path).encode()
        elif path.name == "adapter_config.json":
            content = _public_adapter_config(path).encode()
        yield CommitOperationAdd(path.relative_to(folder).as_posix(), content)


def _public_card(path: Path) -> str:
    try:
        card = ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=False)
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: its metadata cannot be read ({first_line(error)}); repair the block at its top") from error
    data: Any = card.data
    bases = data.get("base_model")
    named = [bases] if isinstance(bases, str) else list(bases or [])
    public = [name for name in map(published_name, named) if name]
    if public != named:
        data.base_model = public or None
    return str(card)


def _public_adapter_config(path: Path) -> str:
    """Return the adapter's config with the hub name of its base, or without a name for a local base."""
    config = json.loads(path.read_text(encoding="utf-8"))
    base = config.get(BASE)
    config[BASE] = published_name(base) if base else None
    if base and not config[BASE]:
        print(f"hub: the adapter's base {base} is not on the hub; a user of the adapter needs it too", file=sys.stderr)
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def _title(folder: Path) -> str:
    card = folder / "README.md"
    found = re.search(r"^# (.+)$", card.read_text(encoding="utf-8"), re.M) if card.exists() else None
    return found.group(1) if found else "model"


def _reason(error: Exception) -> str:
    return re.sub(r" *\(Request ID: [^)]*\)", "", first_line(error))
