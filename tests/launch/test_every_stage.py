from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from align.core.files import read_json
from tests.launch.compared import compare
from tests.launch.launcher import ROOT, launch_in_turn
from tests.launch.programs import every_stage, one_step
from tests.launch.programs.every_stage import CASES, ENDED, SETTINGS, TOLERANCE, run_case
from tests.models.architectures import ARCHITECTURES, make_model
from tests.models.encoders import CONFIGS, make_classifier, write_encoder

UPDATES = 2
OF_TWO = {
    "cpu2": ("sft/tiny-llama/4", "reward/tiny-llama/0", "ppo/tiny-llama/0"),  # PPO learns from the reward model
    "zero3": ("reward/tiny-t5/4", "dpo/tiny-t5/0"),
}
"""Each stage once; the full run has all cases under all settings."""
OF_FOUR = (
    *("sft/tiny-t5/4", "reward/tiny-llama/0", "reward/encoder/4", "dpo/tiny-t5/0"),
    *("ppo/tiny-llama/0", "ppo/tiny-t5/4"),
)
"""For four processes, each kind once: they share what two have to themselves."""


@pytest.fixture(scope="module")
def train_alone(tmp_path_factory: pytest.TempPathFactory, sharpen) -> Callable[..., Path]:
    """Train cases in this process, each once; returns the folder that holds them all."""
    folder = tmp_path_factory.mktemp("alone")
    write_encoder("bert", folder / "encoder", sharpen)

    def train(cases: tuple[str, ...]) -> Path:
        for case in cases:
            if not (folder / case / ENDED).exists():
                with pytest.MonkeyPatch.context() as patch:
                    patch.chdir(ROOT)
                    run_case(case, folder, folder, UPDATES)
                (folder / case / ENDED).touch()
        return folder

    return train


@pytest.mark.parametrize(
    ("settings", "processes", "cases"),
    [
        *(pytest.param(settings, 2, cases, marks=pytest.mark.part) for settings, cases in OF_TWO.items()),
        *(pytest.param(settings, 2, tuple(CASES), marks=pytest.mark.slow) for settings in SETTINGS),
        *(pytest.param(settings, 4, OF_FOUR, marks=pytest.mark.slow) for settings in SETTINGS),
    ],
)
def test_several_processes_train_what_one_trains(settings, processes, cases, train_alone, tmp_path):
    alone = train_alone(cases)
    launch_in_turn([[every_stage.__file__, str(tmp_path), str(alone), str(UPDATES), *cases]], tmp_path, settings, processes)
    apart = {case: compare(alone / case, tmp_path / case) for case in cases}
    assert not {case: found for case, found in apart.items() if found.largest > TOLERANCE}
    for case in cases:
        if case.startswith("reward"):
            means = [read_json(folder / case / "model" / "reward.json")["mean"] for folder in (alone, tmp_path)]
            assert means[0] == pytest.approx(means[1], abs=TOLERANCE)


def written(folder, name, processes):
    """What all processes wrote of an architecture."""
    files = [load_file(folder / f"{name}.{rank}.safetensors") for rank in range(processes)]
    return {key: value for file in files for key, value in file.items()}


@pytest.mark.slow
def test_two_processes_under_zero3_train_every_architecture_as_one_does(tmp_path):
    one, two, names = tmp_path / "one", tmp_path / "two", [*ARCHITECTURES, *CONFIGS]
    one.mkdir()
    two.mkdir()
    launch_in_turn([[one_step.__file__, str(two)]], tmp_path, "zero3")
    one_step.main(one, names)
    failed = {path.stem: path.read_text()[-1500:] for folder in (one, two) for path in folder.glob("*.txt")}
    assert not failed, failed
    for name in names:
        alone, sharded = written(one, name, 1), written(two, name, 2)
        assert alone.keys() == sharded.keys()
        apart = {key: float((alone[key] - sharded[key]).abs().max()) for key in alone}
        assert max(apart.values()) < 1e-5, (name, apart)
        model = make_classifier(name) if name in CONFIGS else make_model(name)
        start = {f"backbone.model.{key}": weight for key, weight in model.named_parameters()}
        moved = [float((alone[key] - start[key].float()).abs().max()) > 1e-5 for key in alone if key in start]
        assert sum(moved) > 0.25 * len(moved), name
