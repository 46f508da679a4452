"""The report with results of `align eval`, several runs on one page, Markdown, and the model card."""

import json
import shutil

import pytest
import yaml

from align.cli import main
from align.errors import UserError
from align.eval.core.results import Evaluation, Figure, save_evaluations
from align.eval.report import load_results, write_report, write_reports
from align.eval.report.evaluation_findings import add_evaluation_findings
from align.eval.report.findings import summarize_run
from align.eval.report.loading import load_run
from align.eval.report.model_card import add_results_to_card
from align.eval.report.summary import Summary
from align.eval.rules.scorers import RuleCase
from align.eval.rules.task import agreement_figures, count_violations
from tests.eval.report.example_run import HOSTILE, Page, make_runs


def figures(value, spread=0.05):
    return [
        Figure("mc2", value, value - spread, value + spread, 72, note="guessing gives 0.4", better="higher"),
        Figure("mc1", 0.3, 0.2, 0.4, 72, better="higher"),
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_runs(tmp_path_factory.mktemp("one") / "demo")
    toxic = [
        [Figure("mean toxicity", value, value - 0.01, value + 0.01, 20, "words 1", better="lower")] for value in (0.1, 0.3)
    ]
    evaluations = [
        Evaluation("truthfulness", "start", {}, figures(0.4)),
        Evaluation("truthfulness", "ppo", {}, figures(0.6)),
        Evaluation("toxicity", "start", {}, toxic[0]),
        Evaluation("toxicity", "ppo", {}, toxic[1]),
    ]
    save_evaluations(folder / "eval", evaluations)
    return folder


def test_figures_with_scorer_and_n_are_on_the_page(run):
    page = Page(write_report(run).read_text(encoding="utf-8"))
    for text in ("truthfulness: mc2", "0.600 (0.550 to 0.650)", "words 1", "guessing gives 0.4"):
        assert text in page.text
    assert "evaluation" in {attributes.get("id") for _, attributes in page.elements}


def test_what_differs_beyond_its_interval_is_told_by_its_direction(run):
    summary = summarize_run(load_run(run))
    assert "Truthfulness: mc2 rose from 0.400 (0.350 to 0.450) (start) to 0.600" in " ".join(summary.texts("good"))
    assert "Toxicity: mean toxicity rose from 0.100" in " ".join(summary.texts("bad"))
    assert not any("mc1" in text for text in [*summary.texts("good"), *summary.texts("bad")])


def test_each_figure_has_its_own_direction():
    """In the task `rules`, fewer violations and more agreement are better; figures without a direction are not rated."""
    figures = {
        "overall violation rate": ((0.4, 0.3, 0.5), (0.1, 0.05, 0.2), "lower"),
        "agreement: accuracy": ((0.5, 0.4, 0.6), (0.9, 0.8, 0.95), "higher"),
        "undirected": ((0.5, 0.4, 0.6), (0.9, 0.8, 0.95), ""),
    }
    models = [
        Evaluation("rules", model, {}, [Figure(name, *ends[i], 40, "s", "", ends[2]) for name, ends in figures.items()])
        for i, model in enumerate(("start", "end"))
    ]
    summary = Summary()
    add_evaluation_findings(summary, models)
    assert len(summary.texts("good")) == 2
    assert "agreement: accuracy rose" in " ".join(summary.texts("good"))
    assert not summary.texts("bad")


def test_the_figures_of_rules_state_their_direction():
    cases = [RuleCase("r", "", ({"role": "user", "content": str(n)},), "x") for n in range(10)]
    people = {case: "violates" if n < 5 else "follows" for n, case in enumerate(cases)}
    (rate, *_), _ = count_violations(people, cases, "scorer")
    accuracy, kappa = agreement_figures(people, people, 100, "scorer")
    assert (rate.better, accuracy.better, kappa.better) == ("lower", "higher", "higher")
    # All ten agree: accuracy 0.6915 to 1 by Clopper and Pearson; kappa by it at a chance agreement of one half.
    assert (accuracy.low, accuracy.high) == pytest.approx((0.025**0.1, 1.0))
    assert (kappa.value, kappa.low, kappa.high) == pytest.approx((1.0, (0.025**0.1 - 0.5) / 0.5, 1.0))


def test_nothing_beyond_intervals_is_said_too(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    save_evaluations(tmp_path / "run" / "eval", [Evaluation("truthfulness", name, {}, figures(0.4)) for name in ("a", "b")])
    (tmp_path / "run" / "eval" / "toxicity.json").write_text("{")
    runs = load_run(tmp_path / "run")
    assert "Truthfulness: no figure of a and b differs" in " ".join(summarize_run(runs).texts("note"))
    assert any("toxicity.json" in problem for problem in runs.problems)


def test_several_runs_on_one_page(run, tmp_path):
    shutil.copytree(run, tmp_path / "second")
    config = tmp_path / "second" / "ppo" / "config.yaml"
    config.write_text(config.read_text().replace("max_kl: 25.0", "max_kl: 40.0"))
    metrics = tmp_path / "second" / "ppo" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows[3]["validation/kept"] = 1.0
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.rmtree(tmp_path / "second" / "sft")
    target = write_reports([run, tmp_path / "second"], tmp_path / "both.html")
    html = target.read_text(encoding="utf-8")
    page = Page(html)
    assert "2 runs side by side" in page.text
    assert "Missing in second" in page.text
    assert "ppo.max_kl" in page.text
    assert "http://" not in html.replace(HOSTILE, "").replace("http://www.w3.org", "").replace("http://evil.example", "")
    assert "<script>alert" not in html
    # The first run kept update 1, the second, which allows more KL, update 3.
    assert "answer 1 to Name a color." in page.text
    assert "answer 3 to Name a color." in page.text
    ids = [attributes["id"] for _, attributes in page.elements if attributes.get("id")]
    assert len(ids) == len(set(ids))


def test_markdown_and_where_there_is_nothing(run, tmp_path, capsys):
    main(["report", str(run), "--markdown"])
    out = capsys.readouterr().out
    assert "| truthfulness: mc2 | 0.400 (0.350 to 0.450) | 0.600 (0.550 to 0.650) | 72 |  |" in out
    with pytest.raises(UserError, match="no results of align eval"):
        load_results(tmp_path)


def test_the_card_gets_results_once_and_keeps_what_it_said(run, tmp_path):
    folder = tmp_path / "ppo" / "model"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("---\nlibrary_name: transformers\nbase_model: x\n---\n\n# Policy\n\nSaid before.\n")
    for _ in range(2):
        path = add_results_to_card(folder, load_results(run), "ppo")
    text = path.read_text()
    _, head, body = text.split("---\n", 2)
    metadata = yaml.safe_load(head)
    assert metadata["base_model"] == "x"
    (index,) = metadata["model-index"]
    metrics = {m["type"]: m["value"] for result in index["results"] for m in result["metrics"]}
    assert metrics == {"mc2": 0.6, "mc1": 0.3, "mean toxicity": 0.3}
    assert body.startswith("\n# Policy\n\nSaid before.\n")
    assert body.count("## Results") == 1
    with pytest.raises(UserError, match="hold start, ppo, not other"):
        add_results_to_card(folder, load_results(run), "other")


def test_a_hub_library_reads_the_card(run, tmp_path):
    from huggingface_hub import ModelCard

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlibrary_name: peft\n---\n\n# Policy\n")
    card = ModelCard.load(add_results_to_card(folder, load_results(run), "ppo"))
    assert {result.metric_value for result in card.data.eval_results} == {0.6, 0.3}
