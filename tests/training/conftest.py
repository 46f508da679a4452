"""A run in a fresh folder, for the tests of this folder."""

import pytest

from align.sft import SFTConfig
from align.training.run import Run


@pytest.fixture
def toy_run(tmp_path):
    """A real run in a fresh folder; constant rate 0.1 without clipping, unless told otherwise."""

    def make(name="run", **changes):
        given = {
            "learning_rate": 0.1,
            "lr_scheduler_type": "constant",
            "warmup_ratio": 0.0,
            "max_grad_norm": 0.0,
            "dtype": "float32",
        }
        return Run(SFTConfig(output_dir=str(tmp_path / name), report_to=["none"], **(given | changes)), "sft")

    return make
