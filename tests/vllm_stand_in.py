"""A stand-in for vLLM: its engine and its server, on the CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

if TYPE_CHECKING:
    from vllm.server import Server

STAND_IN = Path(__file__).parent / "sampling" / "stand_in"


@pytest.fixture(scope="module")
def stand_in_vllm() -> Iterator[None]:
    """For a module's tests, `import vllm` gives the stand-in, and TRL's own client and generation run over it."""
    with pytest.MonkeyPatch.context() as path, patch.dict(os.environ):  # TRL sets RANK and its like for vLLM
        path.syspath_prepend(STAND_IN)
        yield
    bound = [name for name in sys.modules if name.startswith(("vllm", "trl.generation", "align.sampling.vllm_"))]
    for name in bound:
        del sys.modules[name]


@pytest.fixture(scope="module")
def serve(stand_in_vllm) -> Iterator[Callable]:
    """`serve(folder)`: a stand-in server for a folder's model, stopped when the module's tests are over."""
    from vllm.server import Server

    made = []

    def start(folder: str) -> Server:
        made.append(Server(folder))
        return made[-1]

    yield start
    for server in made:
        server.stop()
