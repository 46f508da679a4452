import shutil
import sys
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest

from align.core.errors import UserError
from align.core.settings import dump
from align.eval.pairwise import item_numbers
from align.eval.results import read_evaluations
from align.eval.store import fingerprint
from align.eval.winrate import (
    EndpointJudge,
    FunctionJudge,
    WinrateConfig,
    read_comparisons,
    run_winrate,
    training_reward_fingerprints,
)
from align.ppo import PPOConfig
from align.runtime.endpoint import EndpointConfig
from annotation_ui.reports import overview
from annotation_ui.reports.export import Selection, rows_to_export
from annotation_ui.tasks.compare import Compare
from tests.annotation_ui.running import add_batch, add_users, do, read
from tests.eval.files import stored_rows, values
from tests.files import write_rows


@pytest.fixture
def settings(sharp_folders, tmp_path):
    models = [sharp_folders["tiny-gpt2"], sharp_folders["tiny-llama"]]
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": text} for text in ("Hi", "Count to three.", "Who?")])
    few = {"max_new_tokens": 6, "dtype": "float32", "output": str(tmp_path / "out")}
    return {"models": models, "prompts": prompts, **few}


HI = ({"role": "user", "content": "Hi"},)


def rate(evaluation, name="win rate"):
    return values(evaluation.measurements)[name]


def exported(path, choices, models=("old", "new")):
    rows = []
    for number, choice in enumerate(choices):
        content = {"prompt": "Hi", "responses": ["short", "rather longer"], "model": list(models)}
        rows += [{**row, "id": f"item-{number}", "labeler": "l1"} for row in Compare().rows(content, {"choice": choice})]
    return write_rows(path, rows)


def test_the_apps_comparisons_with_their_ties(tmp_path, capsys):
    path = exported(tmp_path / "c.jsonl", ["B", "B", "A", "tie", "both_bad", "B"])
    config = WinrateConfig(comparisons=[path], output=str(tmp_path / "out"))
    old, new = run_winrate(config)
    assert rate(new) == pytest.approx(4 / 6)
    assert rate(old) == pytest.approx(2 / 6)
    assert rate(new, "ties") == pytest.approx(2 / 6)
    assert "c.jsonl" in new.measurements[0].scorer
    assert "0.667" in capsys.readouterr().out
    assert read_evaluations(Path(config.output) / "winrate.json")[1] == new


def test_more_than_two_models(tmp_path):
    paths = [
        exported(tmp_path / "1.jsonl", ["A", "A", "A", "B"], ("x", "y")),
        exported(tmp_path / "2.jsonl", ["A", "A", "A", "B"], ("y", "z")),
    ]
    found = run_winrate(WinrateConfig(comparisons=paths, output=str(tmp_path / "out")))
    assert {each.model: rate(each) for each in found} == {"x": 0.75, "y": 0.5, "z": 0.25}
    assert [row["won"] for row in found[0].tables["pairs"]] == [3, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, r"c.jsonl:1: field 'model': is missing"),
        ({"ranks": [1]}, r"c.jsonl:1: field 'ranks'"),
        ({"responses": "x"}, r"c.jsonl:1: field 'responses'"),
        ({"also_by": [["z"]]}, r"c.jsonl:1: field 'also_by'"),
    ],
)
def test_a_bad_comparison_names_its_line(tmp_path, change, message):
    row = {"prompt": "Hi", "responses": ["a", "b"], "ranks": [1, 2], "model": ["x", "y"]} | change
    path = write_rows(tmp_path / "c.jsonl", [row])
    with pytest.raises(UserError, match=message):
        read_comparisons([str(path)], False)


def test_comparisons_of_one_prompt_depend_on_each_other_whatever_their_ids(tmp_path):
    """Three pairs of models on one prompt have three ids, and two files may number different prompts alike."""
    rows = [
        {"id": str(number % 3), "prompt": f"Prompt {number // 3}", "responses": ["a", "b"], "ranks": [1, 2], "model": pair}
        for number, pair in enumerate([["x", "y"], ["x", "z"], ["y", "z"]] * 2)
    ]
    compared = read_comparisons([write_rows(tmp_path / "c.jsonl", rows)], False)
    assert item_numbers(compared).tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("decision", ["A", "B", "tie"])
def test_the_decision_of_a_lead_counts_instead_of_the_labelers_answers(app, tmp_path, decision):
    """Two leads decide one of two items: the later one counts, in the measured win rates and in the leads' table."""
    database, judgments = app
    row = {"prompt": "p", "responses": ["a", "bcd"], "model": ["new", "old"]}
    add_batch(database, [("t", {**row, "id": str(number)}) for number in range(2)], "compare", labelers_per_item=3)
    users = add_users(database, "ann", "bob", "eve")
    for user, choice in zip(users, ("A", "A", "B"), strict=True):
        for _ in range(2):
            do(judgments, user, "compare", {"choice": choice})
    for name, given in (("mia", "tie"), ("boss", decision)):
        (lead,) = add_users(database, name, role="lead")
        assignment = judgments.leases.adjudicate(lead, 1)
        judgments.submit(lead, assignment.id, name, Compare().shown({"choice": given}, assignment.shown_order), 1)
    rows = rows_to_export(database, Selection("rankings"))
    assert len(rows) == 3 + 2 + 3
    path = write_rows(tmp_path / "c.jsonl", rows)
    found = {each.model: rate(each) for each in run_winrate(WinrateConfig(comparisons=[path], output=str(tmp_path / "o")))}
    of_new = {"A": 1, "B": 0, "tie": 0.5}[decision]
    assert found == {"new": pytest.approx((of_new + 2) / 4), "old": pytest.approx((2 - of_new) / 4)}
    shown = {row["model"]: row["win rate"] for row in read(database, overview.win_rates)}
    assert shown == {name: pytest.approx(value, abs=5e-4) for name, value in found.items()}


def test_a_response_of_several_models_counts_for_each(tmp_path):
    row = {"prompt": "p", "responses": ["a", "b"], "ranks": [1, 2], "model": ["x", "y"], "also_by": [["v", "y"], ["w"]]}
    compared = read_comparisons([write_rows(tmp_path / "c.jsonl", [row])], False)
    pairs = {(each.first, each.second) for each in compared if each.outcome == 1}
    assert pairs == {("x", "y"), ("x", "w"), ("v", "y"), ("v", "w"), ("y", "w")}
    assert len(compared) == len(pairs)


@pytest.mark.parametrize("ways", [{}, {"judge": "a:b", "reward_model": "x"}])
def test_exactly_one_decides(ways):
    with pytest.raises(UserError, match="exactly one of comparisons, reward_model, judge and endpoint"):
        WinrateConfig(**ways)


def test_a_reward_model_decides_and_a_second_start_computes_nothing(settings, reward_folders, monkeypatch):
    config = WinrateConfig(**settings, reward_model=reward_folders["tiny-llama"])
    found = run_winrate(config)
    assert sum(map(rate, found)) == pytest.approx(1)
    assert found[0].measurements[0].n == 3
    assert list(stored_rows(Path(config.output) / "winrate-tiny-gpt2.jsonl")) == ["1", "2", "3"]
    monkeypatch.setattr("align.eval.answers.respond", None)
    assert run_winrate(config) == found


def test_which_reward_model_a_policy_was_trained_on(tmp_path, reward_folders, sharp_folders):
    run = tmp_path / "ppo"
    shutil.copytree(sharp_folders["tiny-gpt2"], run / "model")
    (run / "config.yaml").write_text(dump(PPOConfig(reward_model=[reward_folders["tiny-gpt2"]])))
    expected = {fingerprint(reward_folders["tiny-gpt2"])}
    assert training_reward_fingerprints(str(run)) == training_reward_fingerprints(str(run / "model")) == expected
    assert training_reward_fingerprints(sharp_folders["tiny-gpt2"]) == set()


def longer(prompts, firsts, seconds):
    return [0.5 + 0.5 * ((len(a) > len(b)) - (len(a) < len(b))) for a, b in zip(firsts, seconds, strict=True)]


def first_place(prompts, firsts, seconds):
    return [1.0] * len(prompts)


def test_a_judge_that_goes_by_the_place_gives_ties_alone(settings):
    found = run_winrate(WinrateConfig(**settings, judge=f"{__name__}:first_place"))
    assert rate(found[0]) == 0.5
    assert rate(found[0], "position flips") == 1.0
    assert all(row["flipped"] for row in stored_rows(Path(settings["output"]) / "winrate-judged.jsonl").values())


def test_only_changed_prompts_are_answered_and_judged_anew(settings, tmp_path, monkeypatch):
    asked = []

    def longer_and_noted(prompts, firsts, seconds):
        asked.extend(prompt[0]["content"] for prompt in prompts)
        return longer(prompts, firsts, seconds)

    def run(*prompts):
        asked.clear()
        write_rows(tmp_path / "folder" / "part.jsonl", [{"prompt": text} for text in prompts])
        run_winrate(config)
        return stored_rows(Path(config.output) / "winrate-tiny-llama.jsonl")

    monkeypatch.setitem(globals(), "longer_and_noted", longer_and_noted)
    (tmp_path / "folder").mkdir()
    settings["prompts"] = str(tmp_path / "folder")
    config = WinrateConfig(**settings, judge=f"{__name__}:longer_and_noted")
    before = run("Hi", "Count to three.")
    assert asked == ["Hi"] * 2 + ["Count to three."] * 2
    after = run("Hi", "What color is the sea?")
    assert asked == ["What color is the sea?"] * 2
    assert after["1"] == before["1"]
    assert after["2"] != before["2"]


def test_verdicts_of_a_changed_judge_are_not_read(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    config, scorers = WinrateConfig(**settings, judge="changing_judge:judge"), set()
    for verdict in ("0.0", "1.0 "):
        monkeypatch.delitem(sys.modules, "changing_judge", raising=False)
        (tmp_path / "changing_judge.py").write_text(f"def judge(p, a, b): return [{verdict}] * len(p)\n")
        if scorers:
            with pytest.raises(UserError, match="contains results with judge_version"):
                run_winrate(config)
            (tmp_path / "out" / "winrate-judged.jsonl").unlink()
        scorers.add(run_winrate(config)[0].measurements[0].scorer)
    monkeypatch.delitem(sys.modules, "changing_judge")
    assert len(scorers) == 2


def not_a_number(prompts, firsts, seconds):
    return [float("nan")] * len(prompts)


def of_two(prompts, responses):
    return [0.5] * len(prompts)


def test_a_bad_judge_is_one_line():
    with pytest.raises(UserError, match="judge 'nowhere:x': No module named 'nowhere'"):
        FunctionJudge("nowhere:x")
    with pytest.raises(UserError, match=r"judge '.*not_a_number' gave nan:"):
        FunctionJudge(f"{__name__}:not_a_number")([HI], ["a"], ["b"])
    with pytest.raises(
        UserError, match=r"judge '.*of_two' failed: TypeError: of_two\(\) takes 2 .*; completed results are saved"
    ):
        FunctionJudge(f"{__name__}:of_two")([HI], ["a"], ["b"])


def test_each_pair_of_several_models_is_judged_and_one_model_is_not(settings):
    rungs = ["tiny-llama", "tiny-llama+few_shot", "tiny-gpt2"]
    found = run_winrate(WinrateConfig(**{**settings, "models": rungs}, num_few_shot=1, judge=f"{__name__}:longer"))
    assert [each.model for each in found] == rungs
    pairs = {(row["model"], row["against"]): row["won"] + row["tied"] + row["lost"] for row in found[0].tables["pairs"]}
    assert pairs == dict.fromkeys(combinations(rungs, 2), 3)
    with pytest.raises(UserError, match="two or more models"):
        run_winrate(WinrateConfig(**{**settings, "models": ["tiny-llama"]}, judge=f"{__name__}:longer"))


@pytest.fixture
def service(serve):
    """An OpenAI-compatible service that names the longer answer, after the answers that it is given as a script."""

    def answer(path, headers, body):
        server.seen.append((path, headers.get("Authorization"), body))
        question = body["messages"][0]["content"]
        lengths = [len(question.split(f"<answer_{name}>\n")[1].split("\n</answer_")[0]) for name in "AB"]
        verdict = "TIE" if lengths[0] == lengths[1] else "AB"[lengths[1] > lengths[0]]
        content = server.script.pop(0) if server.script else f"I weighed A and B.\nVERDICT: {verdict}"
        return 200, {"choices": [{"message": {"content": content}}]}

    server = SimpleNamespace(url=serve(answer), script=[], seen=[])
    return server


def test_an_endpoint_is_asked_both_ways_with_its_key(service, monkeypatch):
    monkeypatch.setenv("THE_KEY", "secret")
    endpoint = EndpointConfig(endpoint=service.url + "/", endpoint_model="m", endpoint_parallel=1, endpoint_key="THE_KEY")
    assert EndpointJudge(endpoint)([HI, HI], ["long answer", "b"], ["short", "b"]) == [1.0, 0.5]
    assert len(service.seen) == 2
    path, key, body = service.seen[-1]
    assert (path, key, body["model"], body["temperature"]) == ("/v1/chat/completions", "Bearer secret", "m", 0)
    assert "user: Hi" in body["messages"][0]["content"]


def test_what_an_endpoint_judged_is_kept(service, settings):
    server = service
    whole = WinrateConfig(**settings, endpoint=server.url, endpoint_model="m", endpoint_parallel=1)
    expected = run_winrate(whole)
    asked = len(server.seen)
    path = Path(whole.output) / "winrate-judged.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    server.script, server.seen = ["no idea"], []
    with pytest.raises(UserError, match="no verdict"):
        run_winrate(whole)
    assert path.read_text() == "".join(lines[:-1])
    server.seen = []
    assert run_winrate(whole) == expected
    assert asked == 6
    assert len(server.seen) == 2
    assert sum(map(rate, expected)) == pytest.approx(1)
