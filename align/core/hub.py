"""Hugging Face Hub ids. An unreachable Hub is reported immediately, before its client retries for half a minute."""

import os
import sys
from functools import cache
from pathlib import Path
from typing import Literal

from align.core.errors import UserError, first_line

TIMEOUT = 5.0
"""Seconds to wait for a response from the Hub."""


@cache
def require_hub(name: str, kind: Literal["model", "dataset"]) -> None:
    """Check that the Hub responds, unless the name is a path or cached. Print that the Hub is contacted.

    Raise a UserError if it does not.
    """
    if Path(name).exists():
        return
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    try:
        cached = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)
    except HFValidationError:  # a nonexistent path; the caller reports it
        return
    if constants.HF_HUB_OFFLINE or cached.exists():
        return
    if kind == "dataset":  # `datasets` has a separate cache
        from datasets import config
        from datasets.naming import camelcase_to_snakecase

        *owner, last = name.split("/")
        folder = "___".join([*owner, camelcase_to_snakecase(last)])
        if config.HF_HUB_OFFLINE or (Path(config.HF_DATASETS_CACHE) / folder).exists():
            return
    if os.environ.get("RANK", "0") == "0":
        print(f"'{name}' is not a local file or folder, trying {constants.ENDPOINT}", file=sys.stderr)
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception as error:  # from the HTTP library
        wrong = f"not a local file or folder, and {constants.ENDPOINT} cannot be reached ({first_line(error)})"
        raise UserError(f"{kind} '{name}': {wrong}; check the path or the network") from error
