"""Data sets whose licenses do not allow a copy in this repository; tests that need an absent one are skipped."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ABSENT = "research data is not on this machine"
"""Begins the reason of such a skip, which is not a failure in continuous integration."""


def research_data(name: str) -> Path:
    """Return the folder of a data set below $ALIGN_RESEARCH_DATA (default: ../shared/data), or skip the test."""
    folder = Path(os.environ.get("ALIGN_RESEARCH_DATA") or ROOT.parent / "shared" / "data") / name
    if not folder.is_dir():
        pytest.skip(f"{ABSENT}: {folder}; set ALIGN_RESEARCH_DATA to the folder that contains {name}")
    return folder
