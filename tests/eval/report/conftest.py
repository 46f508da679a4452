"""The example run, which tests only read."""

from pathlib import Path

import pytest

from tests.eval.report.example_run import make_runs


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("runs") / "demo")
