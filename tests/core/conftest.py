"""Settings from the text of a YAML file."""

import pytest

from align.sft import SFTConfig
from tests.core.reading import read


@pytest.fixture
def from_yaml(tmp_path):
    """`from_yaml("seed: 1", "--lora_r", "4", stage=PPOConfig)`: settings of a file with this text, and of words after it."""

    def parsed(text, *words, stage=SFTConfig):
        path = tmp_path / "a.yaml"
        path.write_text(text)
        return read(stage, "--config", str(path), *words)

    return parsed
