"""The process state that a run changes, restored at its end."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.state import AcceleratorState

from align.runtime.distributed import deepspeed_was_launched
from align.tokenization import set_template_date, template_date


@contextmanager
def preserved_process_state(accelerate_state: dict[str, Any] | None = None) -> Iterator[None]:
    """Restore torch's random state, accelerate's state and the chat template date on exit, also after an error.

    Under DeepSpeed, accelerate's state is kept because the engine reads it until the process exits.

    Args:
        accelerate_state: accelerate's state inside the context. Default: a new state.
    """
    day, shared, is_kept = template_date(), AcceleratorState._shared_state, deepspeed_was_launched()
    if not is_kept:
        AcceleratorState._shared_state = {} if accelerate_state is None else accelerate_state
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        set_template_date(day)
        if not is_kept:
            AcceleratorState._shared_state = shared


@contextmanager
def making_trainer() -> Iterator[None]:
    """Decorate the constructor of a trainer to restore the process state, even if the trainer is never used."""
    environment = dict(os.environ)
    with preserved_process_state():
        try:
            yield
        finally:
            if not deepspeed_was_launched():  # which compiles operators later, with the programs that were found here
                for name in os.environ.keys() - environment.keys():
                    del os.environ[name]
                os.environ.update(environment)
