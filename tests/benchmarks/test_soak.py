import json
import subprocess
import sys

import pytest

from align.cli import stage_configs
from align.core.settings_parser import parse
from benchmarks.kill_resume import COMMON, LAUNCHED, PREPARED, VARIANTS
from tests.files import ROOT

NAMED = dict.fromkeys(PREPARED, "model")


@pytest.mark.parametrize("name", VARIANTS)
def test_settings_are_those_of_a_stage(name):
    stage, options = VARIANTS[name]
    config = parse(stage_configs()[stage], [*COMMON.split(), *options.format_map(NAMED).split(), "--output_dir", "run"])
    assert config.save_steps == 2


def test_a_launched_variant_is_one_of_the_others():
    assert {settled for settled, _ in LAUNCHED.values()} <= set(VARIANTS)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("variant", ["ppo-rules", "sft-two"])
def test_runs_are_killed_and_end_alike(variant, tmp_path):
    """The one needs a model that is trained before, the other a launcher. What forks has to be a program of its own."""
    words = ["--kills", "2", "--count", "0", "--only", variant, "--folder", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "benchmarks.soak", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"| `{variant}` | 2 |" in (tmp_path / "tallies.md").read_text()
    (tally,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert (tally["variant"], tally["kills"], tally["different"]) == (variant, 2, [])
    assert tally["same"] == tally["runs"] >= 2
