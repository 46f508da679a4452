import pytest
import yaml

from align.core.errors import UserError
from align.core.settings_parser import parse
from align.eval import TASKS
from align.eval.all import AllConfig, run_all
from align.eval.reward import RewardEvalConfig
from tests.files import ROOT, write_rows


def test_what_all_tasks_share_reaches_each(tmp_path):
    (tmp_path / "r.yaml").write_text("reward_model: x\nsamples: 4\nlimit: 9\noutput: elsewhere\n")
    config = AllConfig(models=["a", "b"], reward_model="rm", output="out", seed=3, skip_bad_rows=True)
    found = parse(RewardEvalConfig, config.task_arguments("reward", str(tmp_path / "r.yaml")))
    assert (found.models, found.output, found.seed, found.skip_bad_rows) == (["a", "b"], "out", 3, True)
    assert (found.reward_model, found.samples, found.limit) == ("rm", 4, 9)
    few = AllConfig(models=["a"], reward_model="r", limit=2)
    assert parse(RewardEvalConfig, few.task_arguments("reward", "")[2:]).limit == 2


def test_nothing_to_do_and_no_model():
    with pytest.raises(UserError, match="models is"):
        AllConfig()
    with pytest.raises(UserError, match="truthfulness is ''"):
        AllConfig(models=["a"], truthfulness="", toxicity="")


@pytest.mark.parametrize("name", [path.stem for path in (ROOT / "configs" / "eval").iterdir()])
def test_ready_files_hold_settings_of_their_task(name):
    written = yaml.safe_load((ROOT / "configs" / "eval" / f"{name}.yaml").read_text())
    config_class, _ = TASKS[name].load()
    config = config_class(**written)
    assert all(getattr(config, key) == value for key, value in written.items())


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_a_script(name):
    script = ROOT / (TASKS[name].path.split(":")[0].replace(".", "/") + ".py")
    assert "run_stage(" in script.read_text()


def test_a_tiny_model_through_all_of_it(sharp_folders, reward_folders, tmp_path, capsys):
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{word} is"} for word in ("One", "Two", "Three")])
    (tmp_path / "reward.yaml").write_text(f"samples: 2\nmax_new_tokens: 4\nprompts: {prompts}\n")
    model = sharp_folders["tiny-llama"]
    shared = {"models": [model], "output": str(tmp_path / "out"), "dtype": "float32", "limit": 2}
    config = AllConfig(**shared, toxicity="", reward=str(tmp_path / "reward.yaml"), reward_model=reward_folders["tiny-gpt2"])
    found = run_all(config)
    assert [each.task for each in found] == ["truthfulness", "reward", "best-of-n"]
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| measurement | tiny-llama | n | scorer |" in table
    assert "truthfulness: mc1" in capsys.readouterr().out
