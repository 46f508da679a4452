"""Every launch of the documentation and every file of configs/untested, with tiny models in two CPU processes."""

import re
from pathlib import Path

import pytest
import yaml

from align.reward import RewardConfig, run_reward
from tests.files import ROOT, metrics_of
from tests.launch.launcher import launch_in_turn

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "configs" / "cluster").iterdir())]
TWO_PROCESSES = {"two-nodes": "zero3", "ddp": "cpu2"}
"""The launcher file for two processes on one machine, where it is another one."""
SMALL = """
    --report_to none --max_prompt_tokens 64 --overlong truncate --save_steps 1 --push_to_hub= --micro_batch_tokens 2000
"""
SMALL_STAGE = {
    "sft": "--train_data data/demonstrations_heldout.jsonl --batch_size 10 --max_response_tokens 32 --num_train_epochs 1",
    "reward": "--train_data data/rankings_heldout.jsonl --batch_size 20 --max_response_tokens 32 --demonstrations=",
    "ppo": "--validation_prompts= --total_updates 2 --rollout_batch_size 8 --max_new_tokens 8 --num_mini_batches 2",
}


def documented() -> dict[str, set[str]]:
    """The words after the launcher's options, by launcher file. Launches with vLLM are tested in tests/sampling."""
    launches: dict[str, set[str]] = {}
    for page in PAGES:
        text = re.sub(r'[ \\\n"]*\n +(?:- )?|\s*\\\n\s*', " ", page.read_text(encoding="utf-8"))  # one line for each command
        for words in re.findall(r"(?:accelerate|align)[ -]+launch [^`\n#']*", text):
            settings = re.search(r"configs/accelerate/(\S+)\.yaml", words)
            script = re.search(r"align/(?:sft|reward|ppo)/train\.py .*?--config[= ]configs/\S+\.yaml.*", words)
            if settings and script and "vllm" not in words:
                arguments = script[0].replace("--config=", "--config ").split()[:3]
                launches.setdefault(TWO_PROCESSES.get(settings[1], settings[1]), set()).add(" ".join(arguments))
    return launches


def untested() -> set[str]:
    paths = (path.relative_to(ROOT) for path in (ROOT / "configs" / "untested").rglob("*.yaml"))
    return {f"align/{path.parent.name}/train.py --config {path}" for path in paths}


LAUNCHES = documented()


def test_the_pages_launch_what_is_tested_here():
    lines = [f"{settings} {words}" for settings, found in LAUNCHES.items() for words in found]
    for expected in (
        "zero3 align/ppo/train.py --config configs/untested/ppo/t5-3b.yaml",
        "zero3 align/ppo/train.py --config configs/untested/ppo/llama-7b-lora.yaml",
        "zero2 align/reward/train.py --config configs/untested/reward/llama-7b-lora.yaml",
    ):
        assert expected in lines
    assert {"one-process", "cpu2", "zero2", "zero3"} == set(LAUNCHES)


def tiny_model(words: str) -> str:
    """A built-in model of the kind that a config file names."""
    return "tiny-t5" if "t5" in words else "tiny-llama"


@pytest.fixture(scope="module")
def reward_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A reward model of each kind."""
    folder, models = tmp_path_factory.mktemp("rewards"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for model in ("tiny-llama", "tiny-t5"):
            config = RewardConfig(
                model=model,
                train_data="data/rankings_heldout.jsonl",
                demonstrations="",
                output_dir=str(folder / model),
                batch_size=60,
                max_prompt_tokens=64,
                max_response_tokens=32,
                overlong="truncate",
                report_to=["none"],
            )
            models[model] = run_reward(config)
    return models


def test_ppo_on_two_machines_trains_a_tiny_t5(reward_models, tmp_path):
    assert_trains(["align/ppo/train.py --config configs/untested/ppo/t5-3b.yaml"], "zero3", reward_models, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("settings", sorted(LAUNCHES))
def test_each_launch_trains_a_tiny_model(settings, reward_models, tmp_path):
    launches = sorted(LAUNCHES[settings] | (untested() if settings in ("zero2", "zero3") else set()))
    assert_trains(launches, settings, reward_models, tmp_path)


def assert_trains(launches: list[str], settings: str, reward_models: dict[str, Path], tmp_path: Path) -> None:
    """Run the launches one after another in the processes of one launcher, and check what they wrote."""
    scripts = []
    for number, words in enumerate(launches):
        script, _, config, *more = words.split()
        stage = Path(script).parent.name
        small = [*SMALL.split(), *SMALL_STAGE[stage].split(), "--output_dir", str(tmp_path / str(number))]
        small += ["--model", tiny_model(config)]
        if stage == "ppo":
            small += ["--reward_model", str(reward_models[tiny_model(config)])]
        elif "validation_data" in yaml.safe_load((ROOT / config).read_text(encoding="utf-8")):
            small += ["--validation_data="]
        scripts.append([script, "--config", config, *more, *small])
    alone = settings == "one-process"  # its launcher sets no rank, from which `in_turn.py` would fork
    launch_in_turn(scripts, tmp_path, settings, 1 if alone else 2, real=alone)
    for number, words in enumerate(launches):
        folder = tmp_path / str(number)
        updates = [row for row in metrics_of(folder) if row["update"]]
        assert len(updates) >= 2, words
        assert all("grad_norm" in row for row in updates), words
        assert (folder / "model").is_dir(), words
