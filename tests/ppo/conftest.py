"""Reward functions as a user writes them."""

import sys

import pytest


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module in the working directory, as a user would write it."""

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return write
