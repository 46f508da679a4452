import json
import os
import shutil
import time
from pathlib import Path

from align.eval.report.data import RunData, Sample, StageRun, load_run
from align.eval.report.findings import (
    SamplePair,
    Summary,
    _add_ppo_changes,
    add_evaluation_findings,
    alarms,
    alternate_gains_and_losses,
    first_and_kept_updates,
    pair_samples,
    summarize_run,
)
from align.eval.report.page import total_seconds, write_report
from align.eval.results import Evaluation, Measurement, save_evaluations
from tests.eval.report.example_run import Page, ppo_run, truthfulness, write_lines


def sample(reward: float, prompt: str = "p", response: str = "r") -> Sample:
    return Sample((("user", prompt),), response, reward, True)


def test_the_kept_policy_is_the_last_that_the_trainer_kept() -> None:
    points = {0: (9.0, 0.0), 2: (1.0, 3.0), 4: (2.0, 5.0), 6: (2.0, 6.0), 8: (3.0, 25.1)}
    run = ppo_run(points)
    assert first_and_kept_updates(RunData(Path(), {"ppo": run})) == (0, 8)  # none was kept: the last
    for update in (2, 4):
        run.metrics[update]["validation/is_best"] = 1.0
    assert first_and_kept_updates(RunData(Path(), {"ppo": run})) == (0, 4)
    for saved, kept in ((4, 4), (8, 8), (9, 8), (2, 2)):  # as the card of the model in the folder states it
        run.saved_update = saved
        assert first_and_kept_updates(RunData(Path(), {"ppo": run})) == (0, kept)
    assert first_and_kept_updates(RunData(Path(), {"ppo": ppo_run({0: (1.0, 0.0)})})) == (0, None)
    assert first_and_kept_updates(RunData(Path())) == (None, None)


def test_no_policy_is_chosen_where_the_last_is_saved() -> None:
    run = ppo_run({0: (1.0, 0.0), 2: (3.0, 30.0), 4: (2.0, 30.0)})
    run.config.update(save_best_policy=False, max_kl=25.0)
    text = str(summarize_run(RunData(Path(), {"ppo": run})).findings)
    assert not [words for words in ("chosen", "selected", "No policy stayed") if words in text]
    run.config["save_best_policy"] = True
    text = str(summarize_run(RunData(Path(), {"ppo": run})).findings)
    assert "was selected as the best" in text
    assert "No policy stayed" in text


def test_samples_are_paired_by_prompt_and_gains_and_losses_come_in_turn() -> None:
    before = [sample(1.0, "a"), sample(2.0, "b"), sample(3.0, "a")]
    after = [sample(1.5, "b"), sample(1.5, "a"), sample(1.5, "a"), sample(0.0, "new")]
    pairs = pair_samples(before, after)
    assert [pair.before and pair.before.reward for pair in pairs] == [2.0, 1.0, 3.0, None]
    assert [pair.change for pair in pairs] == [-0.5, 0.5, -1.5, 0.0]
    pairs = [SamplePair(sample(0.0), sample(reward)) for reward in (1.0, 0.0, -2.0, 3.0, -1.0, 2.0)]
    assert [pair.change for pair in alternate_gains_and_losses(pairs)] == [3.0, -2.0, 2.0, -1.0, 1.0, 0.0]


def test_the_table_has_the_numbers_of_every_stage(run: Path) -> None:
    summary = summarize_run(load_run(run))
    rows = {row.name: row for row in summary.rows}
    sft = rows["SFT: validation loss"]
    assert (sft.before, sft.after, sft.change, sft.rating) == ("3.5", "1.25", "−2.25", "good")
    # Six pairs, one of them (ranks 2 and 3 of the second ranking) the wrong way round: 5 / 6.
    assert rows["Reward model: pairwise accuracy"].after == "83.3 %"
    assert rows["PPO: response length, tokens"].change == "+10"
    reward = rows["PPO: reward on held-out prompts"]
    assert (reward.before, reward.after, reward.change) == ("0.5", "1.25", "+0.75")
    # Changes 1, 1, -0.25, 1.25: the mean of four draws lies between the least and the greatest.
    low, high = (float(word.replace("−", "-")) for word in reward.interval.split(" to "))
    assert -0.25 <= low < 0.75 < high <= 1.25
    bad = " ".join(summary.findings["bad"])
    assert "Response length changed from 10 to 20 tokens" in bad
    assert "entropy fell from 4 to 1 nats per token" in bad


def test_a_run_that_kept_its_initial_policy_says_so_and_compares_the_last_one() -> None:
    run = ppo_run({0: (3.0, 0.0), 2: (1.0, 2.0), 4: (2.0, 3.0)})
    run.metrics[0]["validation/is_best"] = 1.0
    assert first_and_kept_updates(RunData(Path(), {"ppo": run})) == (0, None)
    summary = summarize_run(RunData(Path(), {"ppo": run}))
    assert "initial policy was kept" in " ".join(summary.findings["bad"])
    (reward,) = [row for row in summary.rows if row.name == "PPO: reward on held-out prompts"]
    assert (reward.before, reward.after) == ("3", "2")


def test_a_critic_that_adds_noise_is_among_the_losses() -> None:
    """Means over the first and the last third: 0.5 and -0.25."""
    explained = [0.5, 0.5, 0.0, 0.0, -0.5, 0.0]
    run = ppo_run({0: (1.0, 0.0), 6: (2.0, 1.0)})
    for update, value in enumerate(explained, 1):
        run.metrics.setdefault(update, {})["value/explained_variance"] = value
    summary = summarize_run(RunData(Path(), {"ppo": run}))
    (row,) = [row for row in summary.rows if "explained variance" in row.name]
    assert (row.before, row.after, row.rating) == ("0.5", "−0.25", "bad")
    assert "0.5 to −0.25" in " ".join(summary.findings["bad"])


def test_every_rule_is_a_line() -> None:
    stage = StageRun("ppo", Path("x"), {}, {})
    shares = {0: (0.5, 0.1, 0.30), 10: (0.6, 0.2, 0.05), 20: (0.9, 0.9, 0.9)}
    for update, (preference, insults, digits) in shares.items():
        rules = {"validation/rule/no-insults": insults, "validation/rule/no-digits": digits}
        stage.metrics[update] = rules | {"validation/preference": preference}
    summary = Summary()
    _add_ppo_changes(summary, stage, 0, 10)
    shown = [(row.name, row.before, row.after, row.change, row.rating) for row in summary.rows]
    assert shown == [
        ("PPO: preference reward on held-out prompts", "0.5", "0.6", "+0.1", "good"),
        ("PPO: violations of no-digits", "30.0 %", "5.0 %", "−25.0 points", "good"),
        ("PPO: violations of no-insults", "10.0 %", "20.0 %", "+10.0 points", "bad"),
    ]
    assert summary.findings["bad"] == ["Violations of rule no-insults increased from 10.0 % to 20.0 %."]
    summary = Summary()
    stage.metrics = {0: {"validation/reward": 1.0}, 1: {"validation/reward": 1.0}}
    _add_ppo_changes(summary, stage, 0, 1)
    assert summary.rows == []


def test_a_run_of_dpo_is_a_section_and_its_absence_is_no_problem(run: Path, tmp_path: Path) -> None:
    assert not any("dpo" in problem for problem in load_run(run).problems)
    row = {"update": 1, "loss": 0.7, "accuracy": 0.5, "rewards/chosen": -0.1, "rewards/rejected": -0.3}
    row |= {"rewards/margin": 0.2, "logps/chosen": -50.0, "logps/rejected": -60.0, "validation/loss": 0.6}
    write_lines(tmp_path / "dpo/metrics.jsonl", [row | {"update": n} for n in (1, 2)])
    (tmp_path / "dpo/config.yaml").write_text("model: tiny-llama\nlabel_smoothing: 0.0\nloss: dpo\n")
    scored = [{"ranks": [1, 2, 3], "rewards": [0.3, 0.1, 0.2], "lengths": [5, 9, 7]}]
    (tmp_path / "dpo/validation.json").write_text(json.dumps(scored))
    found = load_run(tmp_path)
    assert list(found.stages) == list(load_run(tmp_path / "dpo").stages) == ["dpo"]
    row = next(row for row in summarize_run(found).rows if row.name == "DPO: pairwise accuracy")
    assert row.after == "66.7 %"  # responses 2 and 3 are the wrong way round
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert sum(tag == "svg" for tag, _ in page.elements) == 3  # loss, accuracy, rewards
    assert "Implicit rewards" in page.text


def test_what_differs_beyond_its_interval_is_told_by_its_direction(run: Path) -> None:
    summary = summarize_run(load_run(run))
    assert "Truthfulness: mc2 rose from 0.400 (0.350 to 0.450) (start) to 0.600" in " ".join(summary.findings["good"])
    assert "Toxicity: mean toxicity rose from 0.100" in " ".join(summary.findings["bad"])
    assert not any("mc1" in text for text in [*summary.findings["good"], *summary.findings["bad"]])


def test_each_figure_has_its_own_direction() -> None:
    """In the task `rules`, fewer violations and more agreement are better; others have no direction and are not rated."""
    measurements = {
        "overall violation rate": ((0.4, 0.3, 0.5), (0.1, 0.05, 0.2), "lower"),
        "agreement: accuracy": ((0.5, 0.4, 0.6), (0.9, 0.8, 0.95), "higher"),
        "undirected": ((0.5, 0.4, 0.6), (0.9, 0.8, 0.95), ""),
    }
    models = [
        Evaluation(
            "rules", model, {}, [Measurement(name, *ends[i], 40, "s", "", ends[2]) for name, ends in measurements.items()]
        )
        for i, model in enumerate(("start", "end"))
    ]
    summary = Summary()
    add_evaluation_findings(summary, models)
    assert len(summary.findings["good"]) == 2
    assert "agreement: accuracy rose" in " ".join(summary.findings["good"])
    assert not summary.findings["bad"]


def test_nothing_beyond_intervals_is_said_too(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    equal = [Evaluation("truthfulness", name, {}, truthfulness(0.4)) for name in ("a", "b")]
    save_evaluations(tmp_path / "run/eval", equal)
    (tmp_path / "run/eval/toxicity.json").write_text("{")
    save_evaluations(tmp_path / "run/eval/more", equal)
    runs = load_run(tmp_path / "run")
    assert "Truthfulness: a and b do not differ" in " ".join(summarize_run(runs).findings["note"])
    assert any("toxicity.json" in problem for problem in runs.problems)
    assert any("eval/more/truthfulness.json: not shown" in problem for problem in runs.problems)


def write_run(folder: Path, stage: str, seconds: int, **settings: object) -> None:
    """A run whose files were last written so many seconds ago."""
    identity = {"sft": "prompt_loss_weight", "reward": "centering_weight", "ppo": "rollout_batch_size"}[stage]
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps({identity: 1, **settings}))
    write_lines(folder / "metrics.jsonl", [{"update": 1, "seconds": 5.0, "loss": 1.0}])
    for path in folder.iterdir():
        os.utime(path, (time.time() - seconds,) * 2)


def test_runs_belong_together_by_their_settings_not_by_the_names_of_their_folders(tmp_path: Path) -> None:
    write_run(tmp_path / "sft", "sft", 10)
    write_run(tmp_path / "tuned", "sft", 50)
    write_run(tmp_path / "reward", "reward", 20)
    write_run(tmp_path / "reward2", "reward", 40)
    write_run(tmp_path / "ppo", "ppo", 9, model="elsewhere/sft/model", reward_model=["elsewhere/reward/model"])
    newest = {"model": f"{tmp_path}/tuned/model", "reward_model": [f"{tmp_path}/reward2/model"]}
    write_run(tmp_path / "my-policy", "ppo", 5, **newest)
    run = load_run(tmp_path)
    shown = {stage: each.folder.name for stage, each in run.stages.items()}
    assert shown == {"sft": "tuned", "reward": "reward2", "ppo": "my-policy"}
    for stage, name in (("sft", "sft"), ("reward", "reward"), ("ppo", "ppo")):
        told = f"{tmp_path}/{name}: another {stage} run, not shown. To report it, run: align report {tmp_path}/{name}"
        assert told in run.problems
    os.utime(tmp_path / "ppo" / "metrics.jsonl")  # the policy of the moved folders is the newest now
    assert {stage: each.folder.name for stage, each in load_run(tmp_path).stages.items()} == {
        "sft": "sft",
        "reward": "reward",
        "ppo": "ppo",
    }


def test_the_time_of_a_run_is_that_of_all_its_parts() -> None:
    rows = {1: 10.0, 2: 20.0, 3: 4.0, 4: 8.0}  # resumed after update 2, by a version that counted anew
    stage = StageRun("sft", Path(), metrics={update: {"seconds": seconds} for update, seconds in rows.items()})
    assert total_seconds(stage) == 28.0
    stage.metrics |= {3: {"seconds": 24.0}, 4: {"seconds": 28.0}}
    assert total_seconds(stage) == 28.0


def test_a_reward_model_worse_than_chance_comes_first(tmp_path: Path) -> None:
    def first(loss: float, **config: object) -> str:
        stage = StageRun("reward", tmp_path, config, metrics={1: {"validation/loss": loss}})
        run = RunData(tmp_path, {"reward": stage, "ppo": ppo_run({0: (2.0, 0.0), 1: (1.0, 1.0)})}, rankings={"reward": []})
        return next(iter(summarize_run(run).findings["bad"]), "")

    assert "The reward model is worse than chance: its lowest validation loss is 2.4 (chance is 0.693)" in first(2.4)
    assert "worse than chance" not in first(0.69)


def test_fine_tuning_that_makes_the_model_worse_comes_first(tmp_path: Path) -> None:
    sft = StageRun("sft", tmp_path, metrics={0: {"validation/loss": 1.0}, 9: {"validation/loss": 2.0}})
    assert "loss rose from 1 to 2" in alarms(RunData(tmp_path, {"sft": sft}))[0]
    sft.metrics[5] = {"validation/loss": 0.9}  # the best model, which is kept
    assert alarms(RunData(tmp_path, {"sft": sft})) == []
    sft.metrics[6] = {"loss": float("nan")}
    assert "a loss was NaN or infinite" in alarms(RunData(tmp_path, {"sft": sft}))[0]
