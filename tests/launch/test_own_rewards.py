"""Reward functions on two processes: the first one calls them, and both learn from its scores or stop with its error."""

import json
from pathlib import Path

from tests.launch.launcher import launch_in_turn

SCRIPT = Path(__file__).parent / "programs" / "own_rewards.py"


def test_the_first_process_calls_the_functions_for_both(tmp_path: Path) -> None:
    launch_in_turn([[str(SCRIPT), str(tmp_path)]], tmp_path, "cpu2", seconds=300)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["calls"] == {"noisy": 3 + 4, "judge": 4}, "once for each rollout of 3 updates and 4 evaluations"
    assert second["calls"] == {"noisy": 0, "judge": 0}
    for name in ("moments", "evaluation"):
        assert first[name] == second[name]
    assert first["moments"]["squares"] > 0
    assert first["failing"].startswith("reward function 'failing' failed: ValueError: the service is down (")
    assert first["hanging"].startswith("reward function 'hanging' returned nothing in 1 s for 4 responses")
    assert second["failing"] == first["failing"]
    assert second["hanging"] == first["hanging"]
