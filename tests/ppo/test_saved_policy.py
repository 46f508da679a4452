"""Which policy is the final model, and where it is written: the one with the highest mean."""

import math
import shutil
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from align.eval.report.data import load_run
from align.eval.report.findings import first_and_kept_updates
from align.ppo import PPOTrainer
from align.ppo.evaluation import Candidate, is_better
from align.ppo.toy_rewards import share_of_e
from align.training.run import Run
from tests.files import metrics_of
from tests.ppo.rewards import fewer_es

PROMPTS = ["red", "green, blue", "one", "two"]


@pytest.fixture
def trainer(sharp_folders, make_config):
    """PPO whose reward rises in the first update and falls later: the best policy is that of update 1."""

    def made(name="tiny-gpt2", **settings):
        calls = []

        def falling(prompts, responses):
            calls.append(len(responses))  # of the initial policy; then training and evaluation of each update
            level = -1000 if len(calls) == 1 else -100 * len(calls)
            return [float(len(response)) + level for response in responses]

        given = {"total_updates": 3, "rollout_batch_size": 8, "learning_rate": 1e-2, "eval_steps": 1, "max_kl": 1e9}
        given["missing_eos_score"] = None
        return PPOTrainer(sharp_folders[name], [falling], PROMPTS, make_config(**(given | settings)), PROMPTS)

    return made


def policy_of(trainer):
    return {name: weight.clone() for name, weight in trainer.setup.policy.backbone.model.state_dict().items()}


def same(folder, expected, auto=AutoModelForCausalLM):
    found = auto.from_pretrained(folder, dtype=torch.float32).state_dict()
    return all(torch.equal(found[name], weight) for name, weight in expected.items())


@contextmanager
def killed_after(last):
    """Let a run fail once it has logged an update."""
    log = Run.log

    def log_and_fail(self, update, metrics):
        log(self, update, metrics)
        if update == last:
            raise RuntimeError("killed")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Run, "log", log_and_fail)
        with pytest.raises(RuntimeError, match="killed"):
            yield


@pytest.mark.parametrize("best", [True, False])
def test_the_final_model_is_the_best_policy_or_the_last(best, trainer):
    made = trainer(save_best_policy=best)
    folder = made.train()
    assert [row["update"] for row in metrics_of(made.run.folder) if row.get("validation/is_best")] == [0, 1] * best
    _, kept = first_and_kept_updates(load_run(made.run.folder))
    assert kept == (1 if best else 3)
    assert same(folder, policy_of(made)) != best
    card = (folder / "README.md").read_text()
    assert ("| update | 1 |" in card) == best
    assert ("| chosen by | none: the last policy |" in card) != best


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-t5"])
def test_a_policy_is_saved_into_a_folder_beside_other_files(name, trainer, tmp_path):
    made = trainer(name, total_updates=1)
    made.train()
    folder = tmp_path / "out"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "notes.txt").write_text("mine")
    stale = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_config.json")
    others = ("model_probabilities.safetensors", "model-old.safetensors", "adapter_notes.txt", "my.safetensors.index.json")
    for file in (*stale, *others):
        (folder / file).write_text("{}")
    for _ in range(2):  # a second time over its own files
        made.save_model(folder)
        auto = AutoModelForSeq2SeqLM if name == "tiny-t5" else AutoModelForCausalLM
        assert same(folder, policy_of(made), auto)
        assert AutoTokenizer.from_pretrained(folder)("red").input_ids
    assert (folder / "logs" / "notes.txt").read_text() == "mine"
    assert all((folder / file).read_text() == "{}" for file in others)
    assert not any((folder / file).exists() for file in (*stale, ".model"))


@pytest.mark.parametrize("first", ["has it", "replaced it", "lost it"])
def test_a_second_run_takes_over_the_best_policy_of_the_first(first, sharp_folders, make_config, tmp_path, capsys):
    """Its checkpoint names update 1 as the best; what the second run trains is always worse."""
    later = 10.0 if first == "replaced it" else -10.0
    given = {"learning_rate": 1e-2, "eval_steps": 1, "max_kl": 1e9, "save_steps": 1, "save_total_limit": 0}
    given |= {"num_ppo_epochs": 1, "missing_eos_score": None}

    def run(name, rewards, **settings):
        rewards = iter(rewards)  # evaluation, then training and evaluation of each update
        config = make_config(name, **given, **settings)

        def reward(prompts, responses):
            value = next(rewards)
            return [value + row for row in range(len(responses))]  # differences that move the policy

        made = PPOTrainer(sharp_folders["tiny-gpt2"], [reward], PROMPTS, config, PROMPTS)
        return made, made.train()

    _, model = run("a", [0.0, 2.0, 5.0, 2.0, later], total_updates=2)
    if first == "lost it":
        shutil.rmtree(model)
    best = AutoModelForCausalLM.from_pretrained(model).state_dict() if first == "has it" else None
    capsys.readouterr()
    checkpoint = tmp_path / "a" / "checkpoints" / "update-000001"
    made, folder = run("b", [2.0, 1.0] * 2, total_updates=3, resume_from_checkpoint=str(checkpoint))
    printed = " ".join(capsys.readouterr().err.split())
    assert "no evaluation chose" not in printed
    assert ("is not the best policy of" in printed) == (first != "has it")
    update = 1 if first == "has it" else 2  # of equal means the first stays
    assert f"| update | {update} |" in (folder / "README.md").read_text()
    assert not same(folder, policy_of(made))
    assert best is None or same(folder, best)


@pytest.mark.parametrize(
    ("later", "kept", "best"),
    [([1.0, 3.0, 2.0], [1, 4], 3.0), ([-1.0, -2.0, -3.0], [1, 4], -2.0), ([5.0, -2.0, -3.0], [1, 3], 5.0)],
    ids=["unchanged", "changed and worse", "changed and better"],
)
def test_a_policy_saved_after_the_checkpoint_is_kept_only_if_it_comes_back(later, kept, best, make_config):
    """A run is killed in update 5. Its checkpoint is that of update 2 with update 1 as the best, and update 4 is saved."""
    given = {"total_updates": 5, "eval_steps": 1, "save_steps": 2, "num_ppo_epochs": 1, "max_kl": 1e9}

    def run(evaluations, **settings):
        evaluations, calls = iter(evaluations), []

        def reward(prompts, responses):
            calls.append(prompts)
            is_evaluation = len(calls) % 2 == (1 if not settings else 0)  # a new run evaluates before its first update
            return [next(evaluations) if is_evaluation else 0.0] * len(responses)

        config = make_config(missing_eos_score=None, **given, **settings)
        return PPOTrainer("tiny-gpt2", [reward], PROMPTS, config, PROMPTS).train()

    with killed_after(4):
        run([0.0, 2.0, 1.0, 1.0, 3.0])
    folder = run(later, resume_from_checkpoint=True)
    assert [row["update"] for row in metrics_of(folder.parent) if row.get("validation/is_best")] == [0, *kept]
    card = (folder / "README.md").read_text()
    assert f"| update | {kept[-1]} |" in card
    assert f"| reward | {best:.4g} |" in card


def test_a_report_names_the_policy_in_the_folder_after_a_resume_that_lost_the_best_one(make_config):
    """Update 1 was the best. Update 3 replaced it and was killed before a checkpoint; with another `max_kl` none returns."""
    rewards = iter([0.0, 0.0, 2.0, 0.0, 1.0, 0.0, 3.0, *[9.0] * 4])  # of the start; then training, evaluation

    def reward(prompts, responses):
        value = next(rewards)
        return [value + row for row in range(len(responses))]  # differences that move the policy

    def run(**settings):
        settings |= {"eval_steps": 1, "save_steps": 2, "learning_rate": 1e-1, "missing_eos_score": None}
        return PPOTrainer("tiny-gpt2", [reward], PROMPTS, make_config(total_updates=4, **settings), PROMPTS).train()

    with killed_after(3):
        run(max_kl=1e9)
    folder = run(max_kl=1e-9, resume_from_checkpoint=True)
    assert [row["update"] for row in metrics_of(folder.parent) if row.get("validation/is_best")] == [0, 1]
    assert "| update | 4 |" in (folder / "README.md").read_text()
    assert first_and_kept_updates(load_run(folder.parent)) == (0, 4)


def test_the_initial_policy_is_kept_if_no_later_one_is_better(make_config, sharp_folders, capsys):
    settings = {"total_updates": 6, "eval_steps": 6, "rollout_batch_size": 32, "max_new_tokens": 12, "learning_rate": 1e-2}
    config = make_config(kl_coef=0.0, max_kl=1000.0, missing_eos_score=None, **settings)
    words = ["red", "green", "blue", "one", "two", "three", "dog", "cat"]
    start = sharp_folders["tiny-gpt2"]
    made = PPOTrainer(start, [share_of_e], words, config, words, selection_reward_model=fewer_es)
    folder = made.train()
    assert "| update | 0 |" in (folder / "README.md").read_text()
    assert same(folder, AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).state_dict())
    assert not same(folder, policy_of(made))
    printed = " ".join(capsys.readouterr().err.split())
    assert "higher selection reward than the initial policy (-0." in printed


def test_a_higher_mean_wins_and_of_equal_means_the_first() -> None:
    assert is_better(Candidate(1, [-9.0]), None)
    assert not is_better(Candidate(1, [math.nan, 1.0]), None)
    kept = Candidate(1, [2.0, 2.0])
    assert is_better(Candidate(2, [1.0, 3.1]), kept)
    assert not is_better(Candidate(2, [1.0, 3.0]), kept)  # of equal means the first stays
    assert not is_better(Candidate(2, [math.nan, 9.0]), kept)
