import json
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy
import pytest
import torch
import yaml
from sqlalchemy import update

from align import cli
from align.core.errors import UserError
from align.core.settings_parser import parse
from align.core.tensor_ops import Padded
from align.data.records import Prompt
from align.eval.policy_comparison import PolicyComparison, PolicyResponses
from align.extras.loop import Loop, labeler_measurements, run_loop
from align.extras.loop_labels import (
    AnswerScorer,
    FileLabeler,
    LoopConfig,
    LoopState,
    SimulatedLabeler,
    batch_name,
    choose_prompts,
    make_labeler,
    merge_answers,
)
from align.models.checkpoint import weights_of
from align.ppo import PPOConfig
from align.reward import RewardConfig
from align.reward.checkpoint import load_reward_model, save_reward_model
from align.tokenization.encoded import SampledResponse
from annotation_ui.store.database import Database
from annotation_ui.store.judgments import Judgments
from annotation_ui.store.leases import Leases
from annotation_ui.store.schema import Batch
from tests.annotation_ui.running import add_users
from tests.files import read_rows, write_rows
from tests.forked import forked
from tests.settings import run_settings

E = "align.ppo.toy_rewards:share_of_e"


def answers(model, *texts):
    row = {"id": "7", "prompt": "Hi", "responses": list(texts), "model": [model] * len(texts)}
    return [{**row, "rewards": [0.0] * len(texts)}]


def test_answers_of_all_models_are_one_row_without_doubles_and_blanks():
    (row,) = merge_answers([answers("sft", "a", "b", " \n"), answers("ppo", "b", "c", "c")], "round-2/")
    assert row == {"id": "round-2/7", "prompt": "Hi", "responses": ["a", "b", "c"], "model": ["sft", "sft", "ppo"]}
    assert merge_answers([answers("sft", "a", "a"), answers("ppo", "a", "")], "") == []
    cut = [{**rows[0], "finish_reason": ["stop", "length"]} for rows in (answers("sft", "a", "b"), answers("ppo", "b", "c"))]
    (row,) = merge_answers([[part] for part in cut], "")
    assert (row["responses"], row["finish_reason"]) == (["a", "b", "c"], ["stop", "length", "length"])


def test_prompts_are_drawn_once(tmp_path):
    path = tmp_path / "prompts.jsonl"
    write_rows(path, [{"prompt": f"Prompt {n}", "id": f"p{n}"} for n in range(10)])
    first = choose_prompts(str(path), set(), 4, numpy.random.default_rng(0))
    second = choose_prompts(str(path), {row["id"] for row in first}, 9, numpy.random.default_rng(1))
    assert len(first) == 4
    assert sorted(row["id"] for row in first + second) == [f"p{n}" for n in range(10)]
    with pytest.raises(UserError, match="all 10 prompts have been labeled; add prompts or lower rounds"):
        choose_prompts(str(path), {f"p{n}" for n in range(10)}, 1, numpy.random.default_rng(0))
    write_rows(path, [{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}])
    with pytest.raises(UserError, match="duplicate prompt id 'x'"):
        choose_prompts(str(path), set(), 1, numpy.random.default_rng(0))


def test_a_simulated_labelers_figures_by_hand():
    texts = ["x", "e", "e", "e"], ["e", "x", "e", "ee"]
    before, after = (PolicyResponses([SampledResponse((), [], [], text) for text in side], []) for side in texts)
    prompts = [Prompt.from_row({"prompt": "Hi"})] * 2
    found = labeler_measurements(AnswerScorer(E), PolicyComparison(prompts, 2, before, after, 0, 0, 0, 0))
    # Shares of e: 0, 1, 1, 1 before and 1, 0, 1, 1 after: a win, a loss, two ties.
    assert found["labeler's gain"] == 0.0
    assert found["labeler's win rate"] == 0.5


def labeler_of(config):
    return make_labeler(config.labeler, config.database, config.labelers_per_item)


def state_of(config):
    return LoopState(Path(config.output_dir) / "loop.json", asdict(config))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"model": ""}, "model is ''"),
        ({"reward_config": "x.json"}, "reward_config is 'x.json', but must be a YAML file"),
        ({"samples": 3}, "samples is 3, but must be .* 2 to 9 answers per prompt; .* 6 to 12"),
        ({"samples": 1, "temperatures": [1.0]}, "there are 1 to 2"),
        ({"temperatures": [1.0, 1.0]}, "must be different numbers"),
        ({"validation_split": 1.0}, "at least 0 and below 1"),
        ({"labeler": "somebody"}, "labeler 'somebody': must be app, file, module:function or"),
    ],
)
def test_settings_that_cannot_be(wrong, why):
    usual = {"model": "tiny-llama", "reward_config": "r.yaml", "ppo_config": "p.yaml"}
    with pytest.raises(UserError, match=why):
        labeler_of(LoopConfig(**(usual | wrong)))


@pytest.mark.parametrize("name", ["tiny-llama", "smollm2-135m"])
def test_shipped_settings_are_whole(name):
    config = parse(LoopConfig, ["--config", f"configs/loop/{name}.yaml"])
    parse(RewardConfig, ["--config", config.reward_config])
    parse(PPOConfig, ["--config", config.ppo_config])


def test_a_folder_belongs_to_one_loop(tmp_path):
    config = LoopConfig(model="m", reward_config="r.yaml", ppo_config="p.yaml", output_dir=str(tmp_path))
    state_of(config).run_once("a step", lambda: {"found": 1})
    again = state_of(replace(config, rounds=5, poll_seconds=1.0))
    assert again.run_once("a step", lambda: pytest.fail("done twice"))["found"] == 1
    with pytest.raises(UserError, match=r"this loop was started with seed 0, not 1"):
        state_of(replace(config, seed=1))
    (tmp_path / "loop.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        state_of(config)


@pytest.fixture
def settings(tmp_path, sharp_folders):
    """Settings of a loop that takes seconds, as words of a command line."""
    common = run_settings(lora_r=2, overlong="truncate", max_prompt_tokens=64)
    reward = {**common, "batch_size": 4, "max_response_tokens": 16, "demonstrations": "data/demonstrations_heldout.jsonl"}
    ppo = {**common, "prompts": "data/prompts_heldout.jsonl", "total_updates": 2, "rollout_batch_size": 4}
    ppo |= {"max_new_tokens": 8, "save_steps": 1, "eval_steps": 2, "learning_rate": 1e-3}
    ppo["validation_prompts"] = str(tmp_path / "few.jsonl")
    for name, values in (("reward", reward), ("ppo", ppo)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(values))
    write_rows(tmp_path / "few.jsonl", [{"prompt": f"Say {word}.", "id": word} for word in ("one", "two")])
    return LoopConfig(
        model=sharp_folders["tiny-llama"],
        output_dir=str(tmp_path / "loop"),
        reward_config=str(tmp_path / "reward.yaml"),
        ppo_config=str(tmp_path / "ppo.yaml"),
        prompts=str(tmp_path / "few.jsonl"),
        evaluation_prompts=str(tmp_path / "few.jsonl"),
        prompts_per_round=1,
        temperatures=[1.0],
        max_new_tokens=8,
        labeler="tests.extras.running:code_points",
        validation_split=0.0,
    )


def more_prompts(config, count):
    write_rows(Path(config.prompts), [{"prompt": f"Count to {n}.", "id": str(n)} for n in range(count)])
    return replace(config, prompts_per_round=count // 4)


def contents(folder):
    """What a finished loop must have again after any kill: rankings, what was learned from, models and measurements."""
    names = ["samples.jsonl", "rankings.jsonl", "train.jsonl", "heldout.jsonl", "comparison.json"]
    found = {f"{n}/{name}": (folder / f"round-{n}" / name).read_bytes() for n in (1, 2) for name in names}
    for path in sorted(folder.rglob("model/*.safetensors")):
        found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def words_of_loop(config):
    given = {name: value if isinstance(value, list) else [value] for name, value in vars(config).items() if value != ""}
    return ["loop", *(word for name, values in given.items() for word in (f"--{name}", *map(str, values)))]


@pytest.mark.slow  # half a minute, and test_resume.py kills each stage
@pytest.mark.timeout(600)
def test_a_loop_that_is_killed_between_and_inside_steps_ends_as_if_it_had_not_been(settings, tmp_path):
    config = replace(more_prompts(settings, 24), reward_models=2, validation_split=0.34)
    whole = run_loop(config)
    steps = json.loads((whole / "loop.json").read_text())["steps"]
    parts = ("samples", "rankings", "split", "reward-0", "reward-1", "ppo", "comparison")
    assert list(steps) == [f"round-{n}/{part}" for n in (1, 2) for part in parts]
    rows = read_rows(whole / "round-2" / "rankings.jsonl")
    assert {row["id"].split("/")[0] for row in rows} == {"round-2"}
    assert any("round-1" in model for row in rows for model in row["model"])
    ids = [row["id"] for n in (1, 2) for row in read_rows(whole / f"round-{n}" / "prompts.jsonl")]
    assert len(set(ids)) == len(ids)
    killed = replace(config, output_dir=str(tmp_path / "killed"))
    folder = Path(killed.output_dir)
    for until in ("round-1/ppo/checkpoints/*", "round-2/reward-1/metrics.jsonl"):
        process = forked(cli.main, words_of_loop(killed))
        while process.is_alive() and not list(folder.glob(until)):
            time.sleep(0.02)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"the loop ended before {until} was there"
    cli.main(words_of_loop(killed))
    moved = {name: value.replace(b"/killed/", b"/loop/") for name, value in contents(folder).items()}
    assert moved == contents(whole)


def test_the_comparison_reads_prompts_in_the_template_and_the_number_format_of_ppo(settings, monkeypatch, tmp_path):
    ppo = yaml.safe_load(Path(settings.ppo_config).read_text())
    Path(settings.ppo_config).write_text(yaml.safe_dump(ppo | {"chat_template": "raw"}))
    loop, told = Loop(settings), {}

    def compare(before, after, reward, *_, **settings):
        told.update(settings, reward=reward)
        return PolicyComparison([], 1, PolicyResponses([], []), PolicyResponses([], []), 0.0, 0.0, 0.0, 0.0)

    monkeypatch.setattr("align.extras.loop.compare_policies", compare)
    monkeypatch.setattr("align.extras.loop.load_reward_model", lambda folder, dtype: dtype)
    monkeypatch.setattr("align.extras.loop.write_report", lambda folder: None)
    loop.labeler = FileLabeler()
    loop._compare(1, tmp_path)
    assert (told["chat_template"], told["dtype"], told["reward"]) == ("raw", "float32", "float32")


def test_a_round_waits_for_rankings_in_a_file(tmp_path):
    samples, target = tmp_path / "samples.jsonl", tmp_path / "rankings.jsonl"
    line = f"rank the answers in {samples} and write the rankings to {target}"
    assert FileLabeler().collect("round-1", samples, target) == line
    target.write_text("{}")
    assert FileLabeler().collect("round-1", samples, target) == ""


def test_rankings_in_a_file_may_have_any_layout_and_no_ids(settings, tmp_path):
    loop, target = Loop(replace(settings, validation_split=0.5)), tmp_path / "rankings.jsonl"
    write_rows(target, [{"prompt": word, "chosen": "a", "rejected": "b"} for word in ("one", "one", "two")])
    found = loop._split(1, tmp_path)
    assert sorted([found["train"], found["heldout"]]) == [1, 2]
    assert {row["prompt"] for row in read_rows(tmp_path / "train.jsonl")} in ({"one"}, {"two"})
    write_rows(target, [{"prompt": "one", "responses": ["a", "b"]}])
    with pytest.raises(UserError, match=r"rankings.jsonl:1: field 'ranks': is missing"):
        loop._split(1, tmp_path)


def test_a_round_in_which_nothing_is_preferred_ends_with_one_line(settings):
    with pytest.raises(UserError, match="round 1: all 3 rankings are fully tied"):
        run_loop(replace(more_prompts(settings, 12), labeler=E))


def test_a_simulated_labeler_ties_equal_scores(tmp_path):
    write_rows(tmp_path / "samples.jsonl", answers("m", "xe", "ee", "ex", "xx"))
    SimulatedLabeler(AnswerScorer(E)).collect("round-1", tmp_path / "samples.jsonl", tmp_path / "rankings.jsonl")
    (row,) = read_rows(tmp_path / "rankings.jsonl")
    assert row["ranks"] == [2, 1, 2, 3]
    assert row["model"] == ["m"] * 4


def test_a_reward_model_labels_as_it_scores(load_sharp, tmp_path):
    """Rewards of the model itself, one text at a time."""
    folder = tmp_path / "model"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Go"}]
    prompts, responses = ["Hi", turns], ["Hello there.", "Where to?"]
    loaded = load_sharp("tiny-llama")
    head = torch.randn(1, loaded.backbone.hidden_size, generator=torch.Generator().manual_seed(3))
    described = ({"mean": 0.5}, {"title": "R", "stage": "reward"})
    save_reward_model(folder, loaded, weights_of(loaded.backbone), head, *described)
    found = load_reward_model(str(folder))
    expected = []
    for prompt, response in zip(prompts, responses, strict=True):
        asked, answered = found.loaded.tokenization.answer_ids(Prompt.from_row({"prompt": prompt}).prompt, response)
        with torch.no_grad():
            expected.append(float(found.model(Padded.from_lists([asked]), Padded.from_lists([answered]))[0]) - 0.5)
    assert AnswerScorer(str(folder))(prompts, responses) == pytest.approx(expected, abs=1e-5)
    assert abs(expected[0] - expected[1]) > 0.01


def test_labels_from_the_app_are_waited_for_and_trained_on(settings, tmp_path, capsys):
    config = replace(more_prompts(settings, 12), rounds=1, labeler="app", database=f"sqlite:///{tmp_path / 'app.db'}")
    run_loop(config)
    samples = tmp_path / "loop" / "round-1" / "samples.jsonl"
    name = batch_name("round-1", samples)
    assert f"round 1 is waiting for labels: batch {name!r} has 0 of 3 judgments" in capsys.readouterr().err
    labeler, database = labeler_of(config), Database(config.database)
    leases = Leases(database)
    (ann,) = add_users(database, "ann")
    for turn in range(2):
        assignment = leases.next(ann, "rank")
        Judgments(leases).submit(ann, assignment.id, f"request-{turn}", {"ranks": [1, 2]}, 1.0)
    assert "2 of 3 judgments" in labeler.collect("round-1", samples, tmp_path / "rankings.jsonl")
    (cleo,) = add_users(database, "cleo", role="lead")
    decided = leases.adjudicate(cleo, assignment.item_id)
    Judgments(leases).submit(cleo, decided.id, "decision", {"ranks": [1, 1]}, 1.0)
    with database.write() as session:
        session.execute(update(Batch).values(open=False))  # the lead closes it: what is there counts
    folder = run_loop(config)
    rankings = read_rows(folder / "round-1" / "rankings.jsonl")
    assert [sorted(row["ranks"]) for row in rankings] == [[1, 2], [1, 1]]  # the lead's decision replaces the labeler's
    assert json.loads((folder / "loop.json").read_text())["steps"]["round-1/split"]["all tied"] == 1
    assert {row["id"] for row in rankings} < {row["id"] for row in read_rows(folder / "round-1" / "samples.jsonl")}
    assert (folder / "round-1" / "ppo" / "model").is_dir()
    assert "round 1: rankings 2" in capsys.readouterr().err
