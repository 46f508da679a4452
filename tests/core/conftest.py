"""Settings from the text of a YAML file, for the tests of this folder."""

import pytest

from align.sft.train import SFTConfig
from tests.core.reading import read


@pytest.fixture
def from_yaml(tmp_path):
    """Parse the text of a YAML file."""

    def run(text, *words, stage=SFTConfig):
        path = tmp_path / "a.yaml"
        path.write_text(text)
        return read(stage, "--config", str(path), *words)

    return run
