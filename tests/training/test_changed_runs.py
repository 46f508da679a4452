import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from align import cli
from align.model_registry.registry import resolve_model
from align.model_registry.tiny import byte_tokenizer
from align.models.checkpoint import update_in_card
from align.training import run_folder
from align.training.checkpoint.files import write_checksums
from align.training.run_folder import read_metrics
from tests.bad_input.conftest import TINY, snapshot, write_rows
from tests.files import ROOT

WORDS = ("--overlong", "truncate", "--max_prompt_tokens", "64", "--learning_rate", "1e-3", "--save_steps", "1")
STAGES = {
    "sft": "--train_data data/demonstrations_heldout.jsonl --batch_size 10 --max_response_tokens 16",
    "reward": "--train_data data/rankings_heldout.jsonl --batch_size 30 --max_response_tokens 16",
    "dpo": "--train_data data/rankings_heldout.jsonl --batch_size 30 --max_response_tokens 16",
    "rules": "--train_data data/rule_judgments.jsonl --validation_split 0.9 --batch_size 10 --max_response_tokens 16 "
    "--rules forms/rules/plain-style.yaml forms/rules/sparrow-dialogue.yaml",
    "attributes": "--train_data data/attributes_heldout.jsonl --validation_split 0.5 --batch_size 30 "
    "--max_response_tokens 16",
    "distill": "--train_data data/demonstrations_heldout.jsonl --batch_size 10 --max_response_tokens 16",
}
FULL = ("rules", "attributes", "distill")


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> Path:
    """A fine-tuning run of one epoch over eight examples in four updates, and its data."""
    folder = tmp_path_factory.mktemp("started")
    rows = [{"prompt": f"Is {i} odd?", "completion": "Yes." if i % 2 else "Not at all."} for i in range(8)]
    write_rows(folder / "demos.jsonl", *rows)
    cli.main(sft(folder / "demos.jsonl", folder / "run"))
    return folder


def sft(data: Path, run: Path, *more: str) -> list[str]:
    words = ["--train_data", str(data), "--output_dir", str(run), "--save_steps", "1", "--batch_size", "2"]
    return ["sft", *TINY, *words, *more]


@pytest.fixture
def refuse(started, tmp_path, capsys):
    """Resume a copy of that run; gives the one line that refuses it, which changes nothing."""

    def run(*more: str, data: Path = started / "demos.jsonl") -> str:
        folder = Path(shutil.copytree(started / "run", tmp_path / "copy"))
        before = snapshot(folder)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(sft(data, folder, "--resume_from_checkpoint", *more))
        assert ended.value.code == 2
        assert snapshot(folder) == before
        return capsys.readouterr().err.splitlines()[-1]

    return run


@pytest.mark.parametrize(
    ("setting", "value", "before"),
    [
        *(("batch_size", "4", "2"), ("seed", "1", "0"), ("mixing_cap", "3", "0")),
        *(("model", "tiny-llama", "'tiny-gpt2'"), ("lora_r", "4", "0"), ("optimizer", "adafactor", "'adamw'")),
    ],
)
def test_settings_of_the_weights_and_of_the_order_of_examples_must_stay(setting, value, before, refuse):
    line = refuse(f"--{setting}", value)
    assert f"config.yaml: this run has {setting} {before}, not " in line
    assert "; resume it with that, or give another" in line


@pytest.mark.parametrize("change", ["fewer", "more", "reordered", "edited"])
def test_other_examples_are_refused(change, started, tmp_path, refuse):
    rows = (started / "demos.jsonl").read_text().splitlines()
    extra = json.dumps({"prompt": "Is 9 odd?", "completion": "Yes."})
    edited = [rows[0].replace("odd", "ood"), *rows[1:]]  # the same length in characters
    changed = {"fewer": rows[:-1], "more": [*rows, extra], "reordered": rows[::-1], "edited": edited}[change]
    (tmp_path / "other.jsonl").write_text("\n".join(changed) + "\n")
    how = {"fewer": "then 8, now 7", "more": "then 8, now 9"}.get(change, "others, other labels, or another order")
    line = refuse(data=tmp_path / "other.jsonl")
    assert f"update-000004: the training examples are not those that this run began with ({how}); resume it with" in line


def test_a_finished_run_is_left_as_it_is_and_trains_more_on_the_same_examples_at_another_place(started, tmp_path, capsys):
    folder, data = Path(shutil.copytree(started / "run", tmp_path / "run")), tmp_path / "moved.jsonl"
    shutil.copy(started / "demos.jsonl", data)
    before = snapshot(folder / "model")
    cli.main(sft(started / "demos.jsonl", folder, "--resume_from_checkpoint"))
    lines = capsys.readouterr().err
    assert "evaluating" not in lines
    assert "finished: 4 of 4 updates; raise num_train_epochs to continue, or choose another output_dir\n" in lines
    assert snapshot(folder / "model") == before
    cli.main(sft(data, folder, "--resume_from_checkpoint", "--num_train_epochs", "2"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == list(range(9))


def stop_before_the_end(run: Path, update: int) -> dict[str, torch.Tensor]:
    """What a run is that was killed after an update, before any evaluation; returns its trained weights."""
    shutil.rmtree(run / "model")
    for path in (run / "checkpoints").iterdir():
        if int(path.name.removeprefix("update-")) > update:
            shutil.rmtree(path)
    stored = load_file(run / "checkpoints" / f"update-{update:06d}" / "state.safetensors")
    prefix = "master/backbone.model."
    return {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}


@pytest.mark.parametrize("stage", [pytest.param(name, marks=[pytest.mark.slow] * (name in FULL)) for name in STAGES])
def test_with_no_update_left_the_last_model_is_saved(stage, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [stage, "--model", "tiny-llama", "--dtype", "float32", "--report_to", "none", *WORDS, *STAGES[stage].split()]
    words += ["--save_total_limit", "0", "--eval_steps", "100", "--output_dir", str(tmp_path / "run")]
    cli.main([*words, "--num_train_epochs", "2"])
    last = int(max(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()).removeprefix("update-"))
    assert last > 2
    trained = stop_before_the_end(tmp_path / "run", last - 1)
    cli.main([*words, "--num_train_epochs", "1", "--resume_from_checkpoint"])
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    common = [name for name in saved if name in trained]
    assert len(common) > 10
    assert all(torch.equal(saved[name], trained[name]) for name in common)


class Day(run_folder.date):
    number = 1

    @classmethod
    def today(cls):
        return cls(2026, 7, cls.number)


def test_a_run_keeps_the_date_of_its_chat_template_when_it_is_resumed_on_another_day(started, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "date", Day)
    run, template = tmp_path / "run", tmp_path / "dated.jinja"
    template.write_text("{{ 'Today: ' + strftime_now('%d %b %Y') + '\n' }}" + byte_tokenizer().chat_template)
    cli.main(sft(started / "demos.jsonl", run, "--chat_template", str(template)))
    assert json.loads((run / "environment.json").read_text())["template_date"] == "2026-07-01"
    monkeypatch.setattr(Day, "number", 2)
    more = ["--num_train_epochs", "2", "--resume_from_checkpoint", "true"]
    cli.main(sft(started / "demos.jsonl", run, "--chat_template", str(template), *more))
    assert json.loads((run / "environment.json").read_text())["template_date"] == "2026-07-01"
    turns = [{"role": "user", "content": "Hi"}]
    text = AutoTokenizer.from_pretrained(run / "model").apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    assert text == "Today: 01 Jul 2026\nUser: Hi\nAssistant: "


def test_a_model_saved_after_the_checkpoint_is_not_the_best_of_a_changed_run(started, tmp_path):
    """The first run learns; with no learning rate, the resumed one evaluates the model of its checkpoint again and again."""
    data, run = started / "demos.jsonl", tmp_path / "run"
    words = sft(data, run, "--validation_data", str(data), "--eval_steps", "1", "--save_total_limit", "0")
    cli.main([*words, "--learning_rate", "1e-2"])
    assert update_in_card(run / "model") == 4
    for update in (3, 4):
        shutil.rmtree(run / "checkpoints" / f"update-{update:06d}")
    cli.main([*words, "--learning_rate", "1e-12", "--resume_from_checkpoint"])
    losses = {row["update"]: row["validation/loss"] for row in read_metrics(run)}
    assert losses[4] == pytest.approx(losses[2], abs=1e-6)
    kept = update_in_card(run / "model")
    assert kept in (3, 4)
    assert f"| validation/loss | {losses[kept]:.4g} |" in (run / "model" / "README.md").read_text()


@pytest.fixture
def ppo(tmp_path) -> list[str]:
    """The words of a run of three updates, whose checkpoints are all kept."""
    prompts = write_rows(tmp_path / "prompts.jsonl", *({"prompt": f"Is {i} odd?"} for i in range(4)))
    words = "--reward_functions align.ppo.toy_rewards:share_of_e --total_updates 3 --rollout_batch_size 4 --max_new_tokens 4"
    words += f" --num_ppo_epochs 1 --save_steps 1 --save_total_limit 0 --prompts {prompts} --output_dir {tmp_path / 'run'}"
    return ["ppo", *TINY, *words.split()]


def test_ppo_with_other_prompts_or_another_size_is_refused_and_saves_where_nothing_is_left(ppo, tmp_path, capsys):
    cli.main(ppo)
    stop_before_the_end(tmp_path / "run", 3)
    for more, part in (
        (["--rollout_batch_size", "8"], "this run has rollout_batch_size 4, not 8"),
        (["--samples_per_prompt", "2"], "this run has samples_per_prompt 1, not 2"),
        (["--prompts", str(write_rows(tmp_path / "b.jsonl", {"prompt": "Hi."}))], "the prompts are not those that this run"),
    ):
        with pytest.raises(SystemExit):
            cli.main([*ppo, "--resume_from_checkpoint", *more])
        assert part in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(SystemExit):
        cli.main([*ppo, "--resume_from_checkpoint", "--save_best_policy", "false"])
    assert "this run has save_best_policy True, not False" in capsys.readouterr().err.splitlines()[-1]
    cli.main([*ppo, "--resume_from_checkpoint", "--total_updates", "2"])
    assert "finished: 3 of 2 updates; raise total_updates to continue, or choose" in capsys.readouterr().err
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_a_checkpoint_that_lacks_state_is_one_line(ppo, tmp_path, capsys):
    cli.main(ppo)
    checkpoint = tmp_path / "run" / "checkpoints" / "update-000003"
    stored = json.loads((checkpoint / "trainer.json").read_text())
    del stored["states"]["best_policy"]["best"]
    (checkpoint / "trainer.json").write_text(json.dumps(stored))
    (checkpoint / "checksums.json").unlink()
    write_checksums(checkpoint)
    before = snapshot(tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        cli.main([*ppo, "--resume_from_checkpoint", "--total_updates", "4"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2
    assert line.startswith(f"error: {checkpoint}: missing state that this version needs (KeyError: 'best')")
    assert snapshot(tmp_path / "run") == before


def replace_weights(folder: Path, how: str) -> None:
    """Change the stored weights of a model as another run or a download would."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = sorted(name for name, weight in weights.items() if weight.dim() > 1)[0]
    if how == "one number":
        weights[name].view(-1)[-1] += 0.125
    else:
        weights = {key: weight * 1.01 for key, weight in weights.items()}
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize("how", ["one number", "all"])
@pytest.mark.parametrize("role", ["base of an adapter", "reference", "reward model"])
def test_a_model_with_other_weights_is_recognized_by_a_resumed_run(role, how, tmp_path, capsys):
    rows = [{"prompt": f"Is {i} odd?", "completion": "Yes."} for i in range(4)]
    write_rows(tmp_path / "demos.jsonl", *rows)
    for name in ("model", "reward"):
        shutil.copytree(resolve_model("tiny-gpt2"), tmp_path / name)
    model, run = tmp_path / "model", tmp_path / "run"
    common = ["--output_dir", str(run), "--save_steps", "1", "--report_to", "none", "--dtype", "float32"]
    if role == "base of an adapter":
        data = ["--train_data", str(tmp_path / "demos.jsonl"), "--batch_size", "2", "--lora_r", "2"]
        words = ["sft", "--model", str(model), *data, *common, "--num_train_epochs"]
    else:
        words = ["ppo", "--model", str(model), "--prompts", str(tmp_path / "demos.jsonl"), "--rollout_batch_size", "4"]
        words += ["--max_new_tokens", "4", "--missing_eos_score", "none", *common]
        if role == "reward model":
            model = tmp_path / "judge" / "model"
            data = ["--train_data", "data/rankings_heldout.jsonl", "--batch_size", "30", "--max_response_tokens", "16"]
            judge = ["--model", str(tmp_path / "reward"), *data, "--overlong", "truncate", "--max_prompt_tokens", "64"]
            cli.main(["reward", *judge, "--output_dir", str(tmp_path / "judge"), "--report_to", "none"])
            words += ["--reward_model", str(model)]
        else:
            words += ["--reward_functions", "align.ppo.toy_rewards:share_of_e"]
        words.append("--total_updates")
    cli.main([*words, "1"])
    resumed = ["2", "--resume_from_checkpoint", "true"]
    copied = shutil.copytree(model, tmp_path / "before")
    replace_weights(model, how)
    with pytest.raises(SystemExit):
        cli.main([*words, *resumed])
    line = capsys.readouterr().err.splitlines()[-1]
    assert str(model) in line, "the line names the model"
    assert "other weights" in line
    shutil.rmtree(model)
    copied.rename(model)
    cli.main([*words, *resumed])
