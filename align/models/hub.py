"""Uploads of saved models to the Hugging Face Hub.

A push is one commit of safetensors, tokenizer, configs and model card. Paths of this machine are not part of it: a base
model that is a local folder is left out of the card and of the adapter's config.
"""

import json
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, constants

from align.core.errors import UserError, first_line
from align.model_registry.registry import published_name

PATTERNS = ("*.safetensors", "*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.model", "*.txt", "README.md")
"""The files that are pushed."""
MARKERS = ("config.json", "adapter_config.json")
BASE = "base_model_name_or_path"


def make_repo(repo: str, token: str | None = None) -> str:
    """Create a private model repository on the hub, unless it exists; return its full name. A run calls it before training.

    Raises:
        UserError: if the hub cannot be reached or refuses, without a token for example.
    """
    try:
        return HfApi(token=token).create_repo(repo, private=True, exist_ok=True).repo_id
    except Exception as error:  # the hub's client raises its own errors, and those of the network's library
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
        folder: of a model, or of a run, whose `model` folder is meant.
        repo: name on the hub, as user/name; it is created as private if missing. A name alone is one of the token's owner.
        token: None: that of `hf auth login`.
        revision: the branch; None: main.
        names: of the files to push, of those that match `PATTERNS`; None: all.

    Raises:
        UserError: if the folder holds no model, or the hub cannot be reached or refuses.
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
    """The files of a commit. The card and the adapter's config are uploaded without local paths."""
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
    """The adapter's config, with the hub's name of its base; none for a base that is only on this machine."""
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
