"""Win rates from people's comparisons, from a reward model and from a function."""

import json
import shutil
from itertools import combinations
from pathlib import Path

import pytest

from align.core.errors import UserError
from align.eval.core.answers import keep_best
from align.eval.core.results import read_evaluations
from align.eval.winrate.task import (
    WinrateConfig,
    endpoint_judge,
    function_judge,
    read_comparisons,
    run_winrate,
    training_reward_fingerprint,
)
from align.runtime.endpoint import EndpointConfig
from align.tokenization.encoded import SampledResponse
from annotation_ui.tasks.compare import Compare

HI = ({"role": "user", "content": "Hi"},)


def values(evaluation):
    return {figure.name: figure.value for figure in evaluation.figures}


# --------------------------------------------------------------------------------------------------------------- people


def exported(path, choices, models=("old", "new")):
    rows = []
    for number, choice in enumerate(choices):
        content = {"prompt": "Hi", "responses": ["short", "rather longer"], "model": list(models)}
        rows += [{**row, "id": f"item-{number}", "labeler": "l1"} for row in Compare().rows(content, {"choice": choice})]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_apps_comparisons_with_their_ties(tmp_path, capsys):
    path = exported(tmp_path / "c.jsonl", ["B", "B", "A", "tie", "both_bad", "B"])
    config = WinrateConfig(comparisons=[path], output=str(tmp_path / "out"), resamples=100)
    old, new = run_winrate(config)
    assert values(new)["win rate"] == pytest.approx(4 / 6)
    assert values(old)["win rate"] == pytest.approx(2 / 6)
    assert values(new)["ties"] == pytest.approx(2 / 6)
    assert "c.jsonl" in new.figures[0].scorer
    assert "0.667" in capsys.readouterr().out
    assert read_evaluations(Path(config.output) / "winrate.json")[1] == new


def test_more_than_two_models(tmp_path):
    paths = [
        exported(tmp_path / "1.jsonl", ["A", "A", "A", "B"], ("x", "y")),
        exported(tmp_path / "2.jsonl", ["A", "A", "A", "B"], ("y", "z")),
    ]
    found = run_winrate(WinrateConfig(comparisons=paths, output=str(tmp_path / "out"), resamples=100))
    assert {each.model: values(each)["win rate"] for each in found} == {"x": 0.75, "y": 0.5, "z": 0.25}
    assert [row["won"] for row in found[0].tables["pairs"]] == [3, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, r"c.jsonl:1: field 'model': is missing"),
        ({"ranks": [1]}, r"c.jsonl:1: field 'ranks'"),
        ({"responses": "x"}, r"c.jsonl:1: field 'responses'"),
    ],
)
def test_a_bad_comparison_names_its_line(tmp_path, change, message):
    row = {"prompt": "Hi", "responses": ["a", "b"], "ranks": [1, 2], "model": ["x", "y"]} | change
    (tmp_path / "c.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=message):
        read_comparisons(WinrateConfig(comparisons=[str(tmp_path / "c.jsonl")]))


@pytest.mark.parametrize("ways", [{}, {"judge": "a:b", "reward_model": "x"}])
def test_exactly_one_decides(ways):
    with pytest.raises(UserError, match="give one of comparisons, reward_model, judge and endpoint"):
        WinrateConfig(**ways)


# --------------------------------------------------------------------------------------------------------- reward model


def test_a_reward_model_decides_and_a_second_start_computes_nothing(settings, reward_folders, monkeypatch):
    config = WinrateConfig(**settings, reward_model=reward_folders["tiny-llama"])
    found = run_winrate(config)
    rates = [values(each)["win rate"] for each in found]
    assert sum(rates) == pytest.approx(1)
    assert found[0].figures[0].n == 3
    kept = [json.loads(line) for line in (Path(config.output) / "winrate-tiny-gpt2.jsonl").read_text().splitlines()]
    assert [row["item"] for row in kept[1:]] == ["1", "2", "3"]
    monkeypatch.setattr("align.eval.core.answers.respond", None)
    assert run_winrate(config) == found


def test_which_reward_model_a_policy_was_trained_on(tmp_path, reward_folders, sharp_folders):
    run = tmp_path / "ppo"
    shutil.copytree(sharp_folders["tiny-gpt2"], run / "model")
    (run / "config.yaml").write_text(f"reward_model: {reward_folders['tiny-gpt2']}\n")
    assert training_reward_fingerprint(str(run)) == training_reward_fingerprint(str(run / "model")) != ""
    assert training_reward_fingerprint(sharp_folders["tiny-gpt2"]) == ""


# ------------------------------------------------------------------------------------------------------------- function


def longer(prompts, firsts, seconds):
    return [0.5 + 0.5 * ((len(a) > len(b)) - (len(a) < len(b))) for a, b in zip(firsts, seconds, strict=True)]


def first_place(prompts, firsts, seconds):
    return [1.0] * len(prompts)


def not_a_number(prompts, firsts, seconds):
    return [float("nan")] * len(prompts)


def test_a_judge_that_goes_by_the_place_gives_ties_alone(settings):
    found = run_winrate(WinrateConfig(**settings, judge=f"{__name__}:first_place"))
    assert values(found[0])["win rate"] == 0.5
    assert values(found[0])["position flips"] == 1.0
    verdicts = [json.loads(row) for row in (Path(settings["output"]) / "winrate-judged.jsonl").read_text().splitlines()[1:]]
    assert all(row["flipped"] for row in verdicts)


def stored_rows(path):
    """The last row of each item, without the line of settings."""
    return {row["item"]: row for row in map(json.loads, path.read_text().splitlines()[1:])}


def prompt_folder(folder, prompts):
    folder.mkdir(exist_ok=True)
    (folder / "part.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    return str(folder)


def test_answers_to_other_prompts_in_a_folder_are_not_reused(settings, tmp_path):
    folder = tmp_path / "prompts"
    settings["prompts"] = prompt_folder(folder, ["Hi", "Count to three."])
    config = WinrateConfig(**settings, judge=f"{__name__}:longer")
    run_winrate(config)
    before = stored_rows(Path(config.output) / "winrate-tiny-llama.jsonl")
    prompt_folder(folder, ["Hi", "What color is the sea?"])
    with pytest.raises(UserError, match=r"winrate-tiny-gpt2.jsonl holds results with prompts_sha256"):
        run_winrate(config)
    config.output = str(tmp_path / "second")
    run_winrate(config)
    after = stored_rows(Path(config.output) / "winrate-tiny-llama.jsonl")
    assert after["1"] == before["1"]
    assert after["2"] != before["2"]


def test_where_a_change_of_data_shows_in_no_file_only_changed_prompts_are_answered_anew(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("align.eval.core.answers.fingerprint", lambda source: "")  # as for a data set of a hub
    asked = []

    def longer_and_noted(prompts, firsts, seconds):
        asked.extend(prompt[0]["content"] for prompt in prompts)
        return longer(prompts, firsts, seconds)

    monkeypatch.setitem(globals(), "longer_and_noted", longer_and_noted)
    folder = tmp_path / "prompts"
    settings["prompts"] = prompt_folder(folder, ["Hi", "Count to three."])
    config = WinrateConfig(**settings, judge=f"{__name__}:longer_and_noted")
    run_winrate(config)
    assert asked == ["Hi"] * 2 + ["Count to three."] * 2
    answers = Path(config.output) / "winrate-tiny-llama.jsonl"
    before = stored_rows(answers)
    prompt_folder(folder, ["Hi", "What color is the sea?"])
    asked.clear()
    run_winrate(config)
    assert asked == ["What color is the sea?"] * 2
    assert stored_rows(answers)["1"] == before["1"]
    assert stored_rows(answers)["2"] != before["2"]


def test_a_verdict_that_is_no_number_is_one_line(settings):
    with pytest.raises(UserError, match=r"judge '.*not_a_number' gave nan: a verdict is a number from 0"):
        run_winrate(WinrateConfig(**settings, judge=f"{__name__}:not_a_number"))
    with pytest.raises(UserError, match="judge 'nowhere:x': No module named 'nowhere'; write module:function"):
        function_judge("nowhere:x")


# --------------------------------------------------------------------------------------------- best of n, several models


def test_the_best_of_each_group_is_kept_and_of_equal_ones_the_first():
    answers = [SampledResponse(HI, [1], [number], str(number)) for number in range(6)]
    assert [kept.text for kept in keep_best(answers, [0, 2, 1, 5, 5, 4], 3)] == ["1", "3"]


def test_instructgpts_ladder_is_a_win_rate_of_several_models(settings, reward_folders):
    rungs = ["tiny-llama", "tiny-llama+shots", "tiny-gpt2", "tiny-gpt2+best"]
    more = {"shots": 1, "best_of": 3, "best_of_reward": reward_folders["tiny-gpt2"], "judge": f"{__name__}:longer"}
    found = run_winrate(WinrateConfig(**{**settings, "models": rungs}, **more))
    assert [each.model for each in found] == rungs
    pairs = {(row["model"], row["against"]): row["won"] + row["tied"] + row["lost"] for row in found[0].tables["pairs"]}
    assert pairs == dict.fromkeys(combinations(rungs, 2), 3)
    chosen = Path(settings["output"], "winrate-tiny-gpt2+best-chosen.jsonl").read_text().splitlines()
    assert [len(json.loads(row)["rewards"]) for row in chosen[1:]] == [3] * 3


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"models": ["tiny-llama"]}, "two or more models"),
        ({"models": ["tiny-llama", "tiny-gpt2+best"]}, "set best_of and best_of_reward"),
        ({"models": ["tiny-llama", "tiny-gpt2"], "best_of": 4, "best_of_reward": "r"}, "name one, such as tiny-llama.best"),
        ({"models": ["tiny-llama", "tiny-gpt2+best"], "best_of": 4}, "best_of_reward"),
    ],
)
def test_a_mistake_in_the_models_is_one_line(settings, more, complaint):
    with pytest.raises(UserError, match=complaint) as caught:
        run_winrate(WinrateConfig(**{**settings, **more}, judge=f"{__name__}:longer"))
    assert "\n" not in str(caught.value)


@pytest.fixture
def service(serve):
    """Start an OpenAI-compatible service that names the longer answer.

    Before that, it goes through a script: for each request an HTTP status to fail with, or the text of an answer.
    """

    def start(*script):
        def answer(path, headers, body):
            server.seen.append((path, headers.get("Authorization"), body))
            step = server.script.pop(0) if server.script else None
            if isinstance(step, int):
                return step, {}
            question = body["messages"][0]["content"]
            lengths = [len(question.split(f"<answer_{name}>\n")[1].split("\n</answer_")[0]) for name in "AB"]
            verdict = "TIE" if lengths[0] == lengths[1] else "AB"[lengths[1] > lengths[0]]
            content = step if isinstance(step, str) else f"I weighed A and B.\nVERDICT: {verdict}"
            return 200, {"choices": [{"message": {"content": content}}]}

        server = serve(answer)
        server.script, server.seen = list(script), []
        return server

    return start


def judge_at(url, **settings):
    settings = {"endpoint_model": "m", "endpoint_parallel": 1} | settings
    return endpoint_judge(EndpointConfig(endpoint=url, **settings), pause=0.01)


def test_an_endpoint_is_asked_both_ways_with_its_key(service, monkeypatch):
    monkeypatch.setenv("THE_KEY", "secret")
    server = service(503)
    judge = judge_at(server.url + "/", endpoint_key="THE_KEY", endpoint_timeout=5, endpoint_retries=2)
    assert judge([HI, HI], ["long answer", "b"], ["short", "b"]) == [1.0, 0.5]
    assert len(server.seen) == 3  # one of them a second try
    path, key, body = server.seen[-1]
    assert (path, key, body["model"], body["temperature"]) == ("/v1/chat/completions", "Bearer secret", "m", 0)
    assert "user: Hi" in body["messages"][0]["content"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([401], r"HTTP 401 "),
        (["I cannot say."], r"no verdict in the answer 'I cannot say.'"),
    ],
)
def test_an_endpoint_that_fails_is_one_line(service, script, message):
    judge = judge_at(service(*script).url)
    with pytest.raises(UserError, match=message):
        judge([HI], ["a"], ["bb"])


def test_what_an_endpoint_judged_is_kept(service, settings):
    server = service()
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
    rates = [figure.value for evaluation in expected for figure in evaluation.figures if figure.name == "win rate"]
    assert sum(rates) == pytest.approx(1)


def test_more_than_two_models_get_strengths(tmp_path):
    paths = [
        exported(tmp_path / "1.jsonl", ["A", "A", "A", "B"], ("x", "y")),
        exported(tmp_path / "2.jsonl", ["A", "A", "A", "B"], ("y", "z")),
    ]
    found = run_winrate(WinrateConfig(comparisons=paths, output=str(tmp_path / "out"), resamples=100))
    by_name = {each.model: values(each)["Bradley-Terry strength"] for each in found}
    # x beats y three to one, y beats z three to one, with half a win for each side more: log(3.5 / 1.5) apart each.
    assert by_name == pytest.approx({"x": 0.8473, "y": 0.0, "z": -0.8473}, abs=1e-4)
    assert [row["won"] for row in found[0].tables["pairs"]] == [3, 3]
