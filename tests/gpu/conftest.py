"""Each test here runs on a device: on the processor as a normal test, on a GPU with `-m gpu` (`make gpu-test`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.files import ROOT

if TYPE_CHECKING:
    import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The processor and, with `-m gpu`, a GPU; a test that does not name it runs on neither in particular."""
    import torch

    if request.param == "cuda":
        assert torch.cuda.is_available(), "these tests were asked for, but torch sees no GPU"
        torch.cuda.empty_cache()
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _in_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths like data/rankings_heldout.jsonl are those of the tree."""
    monkeypatch.chdir(ROOT)
