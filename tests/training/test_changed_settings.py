"""Whatever changes between a run and its resume is refused, applied or announced: settings, and contents of files."""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align import cli
from align.core.errors import UserError
from align.core.setting_values import is_optional
from align.core.settings import block_paths, declarations, dump
from align.ppo.losses import KLController
from align.training.run_folder import (
    DIGEST_BLOCK,
    FREE_ON_RESUME,
    SAME_ON_RESUME,
    compare_inputs,
    compare_settings,
    input_digests,
)
from tests.bad_input.conftest import TINY, write_rows
from tests.files import read_rows

STAGES = cli.stage_configs()


def other_values(value: Any, hint: Any) -> st.SearchStrategy[Any]:
    """Values of a setting's type."""
    if is_optional(hint):
        return other_values(value, get_args(hint)[0])
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is list:
        return st.lists(other_values("", get_args(hint)[0]), max_size=3)
    simple = {bool: st.booleans(), int: st.integers(0, 5000), float: st.floats(0, 100)}
    return simple.get(hint, st.text("abc/.", min_size=1, max_size=8))


@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_changed_setting_is_refused_or_announced(stage, tmp_path_factory, data):
    config = STAGES[stage]()
    names = [item.name for item in fields(config) if item.name not in (*block_paths(type(config)), *FREE_ON_RESUME)]
    name = data.draw(st.sampled_from(names))
    value = data.draw(other_values(getattr(config, name), declarations(type(config))[name][0]))
    try:
        changed = replace(config, **{name: value})
    except UserError:
        return  # not a valid value beside the others
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.yaml").write_text(dump(config))
    if getattr(changed, name) == getattr(config, name):
        assert compare_settings(dump(changed), folder) == "" or replace(config) != changed
        return
    outcome = resume(dump(changed), folder)
    refusal = f"refused: {folder}/config.yaml: this run has {name} "
    assert outcome.startswith(refusal) if name in SAME_ON_RESUME else f" {name} " in outcome


def resume(changed: str, folder: Path) -> str:
    """The line that a resumed run prints about its settings, or its refusal."""
    try:
        return compare_settings(changed, folder)
    except UserError as error:
        return f"refused: {error}"


coefficients = st.floats(0.001, 10)


@given(old=coefficients, new=coefficients, kls=st.lists(st.floats(0, 20), max_size=5), target=st.sampled_from([0.0, 6.0]))
def test_a_changed_kl_coefficient_applies_and_an_unchanged_one_continues(old, new, kls, target):
    before = KLController(old, target, horizon=10)
    for kl in kls:
        before.update(kl, 10)
    resumed = KLController(new, target, horizon=10)
    resumed.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert resumed.coef == (before.coef if new == old else new)


@settings(deadline=None)
@given(
    size=st.integers(1, 4 * DIGEST_BLOCK), place=st.floats(0, 1, exclude_max=True), kind=st.sampled_from(["file", "folder"])
)
def test_a_changed_byte_of_an_input_is_announced(size, place, kind, tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    path = folder / "data.jsonl" if kind == "file" else folder / "data"
    file = path if kind == "file" else path / "part.parquet"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(bytes(size))
    named = {"rules": [str(path)], "ptx": {"data": f"{path}[prompt=x]=0.5,{path}"}, "output_dir": str(folder)}
    before = input_digests(named | {"model": "smollm2-135m"})
    assert set(before) == {f"rules {path}", f"ptx {path}"}
    assert compare_inputs(before, input_digests(named)) == ""
    content = bytearray(size)
    content[int(place * size)] = 1
    file.write_bytes(content)
    line = compare_inputs(before, input_digests(named))
    assert f"rules {path}" in line
    assert f"ptx {path}" in line


@pytest.fixture
def rows(tmp_path) -> Path:
    """Data of every stage."""
    questions = [f"Is {i} odd?" for i in range(6)]
    write_rows(tmp_path / "demos.jsonl", *({"prompt": text, "completion": "Yes."} for text in questions))
    write_rows(tmp_path / "pairs.jsonl", *({"prompt": text, "chosen": "Yes.", "rejected": "Hm."} for text in questions))
    write_rows(tmp_path / "prompts.jsonl", *({"prompt": text} for text in questions))
    for name in ("demos", "pairs", "prompts"):
        shutil.copy(tmp_path / f"{name}.jsonl", tmp_path / f"{name}_held.jsonl")
    return tmp_path


WORDS = {
    "sft": "--train_data {0}/demos.jsonl --validation_data {0}/demos_held.jsonl --batch_size 3 --eval_steps 1",
    "reward": "--train_data {0}/pairs.jsonl --validation_data {0}/pairs_held.jsonl --batch_size 3 --eval_steps 1",
    "dpo": "--train_data {0}/pairs.jsonl --validation_data {0}/pairs_held.jsonl --batch_size 3 --eval_steps 1",
    "ppo": "--prompts {0}/prompts.jsonl --validation_prompts {0}/prompts_held.jsonl --eval_steps 1 --num_ppo_epochs 1 "
    "--rollout_batch_size 4 --max_new_tokens 4 --reward_functions align.ppo.toy_rewards:share_of_e",
}
HELD = {"sft": "demos_held", "reward": "pairs_held", "dpo": "pairs_held", "ppo": "prompts_held"}
LENGTH = {"ppo": "total_updates"}


@pytest.mark.parametrize("stage", WORDS)
def test_other_validation_data_starts_the_choice_of_the_best_model_again(stage, rows, capsys):
    """With fewer examples, whose scores are then compared with none of the first run."""
    run = rows / "run"
    words = [stage, *TINY, *WORDS[stage].format(rows).split(), "--save_steps", "1", "--output_dir", str(run)]
    length = f"--{LENGTH.get(stage, 'num_train_epochs')}"
    cli.main([*words, length, "1"])
    checkpoint = max((run / "checkpoints").iterdir()) / "trainer.json"
    assert "measure" in json.loads(checkpoint.read_text())["states"]["best_policy" if stage == "ppo" else "best"]
    held = rows / f"{HELD[stage]}.jsonl"
    held.write_text("".join(held.read_text().splitlines(keepends=True)[:2]))
    capsys.readouterr()
    cli.main([*words, length, "2", "--resume_from_checkpoint", "auto"])
    printed = capsys.readouterr().err
    setting = "validation_prompts" if stage == "ppo" else "validation_data"
    assert f"{setting} changed since the last evaluation: the choice of the best model starts again" in printed
    assert f"contents that have changed since this run began: {setting} {held}" in printed
    resumed = [row for row in read_rows(run / "metrics.jsonl") if row["update"] > (1 if stage == "ppo" else 2)]
    score = "validation/reward" if stage == "ppo" else "validation/loss"
    best = (max if stage == "ppo" else min)(row[score] for row in resumed if score in row)
    assert f"{best:.4g} |" in (run / "model" / "README.md").read_text()


@pytest.mark.parametrize(
    "setting", ["--missing_eos_score -2", "--temperature 0.5", "--reward_functions align.ppo.toy_rewards:share_of_e=2"]
)
def test_another_reward_starts_the_choice_of_the_best_policy_again(setting, rows, capsys):
    run = rows / "run"
    words = ["ppo", *TINY, *WORDS["ppo"].format(rows).split(), "--save_steps", "1", "--output_dir", str(run)]
    cli.main([*words, "--total_updates", "1"])
    capsys.readouterr()
    cli.main([*words, "--total_updates", "2", "--resume_from_checkpoint", "auto", *setting.split()])
    name = setting.split()[0].removeprefix("--")
    assert f"{name} changed since the last evaluation: the choice" in capsys.readouterr().err
