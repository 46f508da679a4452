"""Every architecture under ZeRO-3 on two processes: it says what one process says, and an update ends at its weights."""

import pytest
from safetensors.torch import load_file

from tests.launch.launcher import launch_in_turn
from tests.launch.programs import one_step
from tests.models.architectures import ARCHITECTURES, make_model
from tests.models.encoders import CONFIGS, make_classifier

NAMES = (*ARCHITECTURES, *CONFIGS)


def written(folder, name, processes):
    """What all processes wrote of an architecture."""
    return {
        key: value for rank in range(processes) for key, value in load_file(folder / f"{name}.{rank}.safetensors").items()
    }


@pytest.mark.slow
def test_two_processes_under_zero3_train_every_architecture_as_one_does(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    launch_in_turn([[one_step.__file__, str(two)]], tmp_path, "zero3")
    one_step.main(one, list(NAMES))
    failed = {path.stem: path.read_text()[-1500:] for folder in (one, two) for path in folder.glob("*.txt")}
    assert not failed, failed
    for name in NAMES:
        alone, sharded = written(one, name, 1), written(two, name, 2)
        assert alone.keys() == sharded.keys()
        apart = {key: float((alone[key] - sharded[key]).abs().max()) for key in alone}
        assert max(apart.values()) < 1e-5, (name, apart)
        model = make_classifier(name) if name in CONFIGS else make_model(name)
        start = {f"backbone.model.{key}": weight for key, weight in model.named_parameters()}
        moved = [float((alone[key] - start[key].float()).abs().max()) > 1e-5 for key in alone if key in start]
        assert sum(moved) > 0.25 * len(moved), name
