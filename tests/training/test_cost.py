"""Energy, emissions and price of a run, on the CPU and across a resume."""

import json

import pytest
import yaml

from align import cli
from align.core.settings import RunConfig
from align.training.cost import cost_metrics, hours_in
from tests.files import read_rows, write_rows


def test_by_hand():
    config = RunConfig(device_watts=500, co2e_per_kwh=0.4, price_per_hour=2.5)
    # 8 device hours at 500 W are 4 kWh, which are 1.6 kg of CO2e; 8 hours at 2.5 cost 20.
    expected = {"cost/device_hours": 8, "cost/kwh": 4, "cost/co2e_kg": 1.6, "cost/price": 20}
    assert cost_metrics(config, 8.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, set()),
        ({"co2e_per_kwh": 0.4}, set()),
        ({"price_per_hour": 1.0}, {"cost/device_hours", "cost/price"}),
        ({"device_watts": 300}, {"cost/device_hours", "cost/kwh"}),
    ],
)
def test_what_is_unknown_is_left_out(settings, names):
    assert cost_metrics(RunConfig(**settings), 1.0).keys() == names


def test_hours_of_a_file_that_was_cut_short(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert hours_in(path) == 0
    path.write_text('{"update": 1, "cost/device_hours": 2.5}\n{"update": 2, "cost/dev')
    assert hours_in(path) == 2.5
    path.write_text('{"update": 1}\n')
    assert hours_in(path) == 0


def test_a_run_its_model_card_and_its_report(tmp_path):
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": f"{n}?", "completion": "yes"} for n in range(4)])
    folder = tmp_path / "sft"
    words = ["sft", "--model", "tiny-gpt2", "--train_data", str(data), "--batch_size", "2", "--report_to", "none"]
    words += ["--output_dir", str(folder), "--save_steps", "1", "--device_watts", "3.6e6", "--co2e_per_kwh", "0.5"]
    cli.main([*words, "--price_per_hour", "36"])
    rows = read_rows(folder / "metrics.jsonl")
    hours = [row["cost/device_hours"] for row in rows if row["update"]]
    assert hours == sorted(hours)
    for row in rows:
        # 3.6 MW for a second are 1 kWh, and 36 an hour are 0.01 a second.
        assert row["cost/kwh"] == pytest.approx(3600 * row["cost/device_hours"], rel=1e-5)
        assert row["cost/co2e_kg"] == pytest.approx(row["cost/kwh"] / 2, rel=1e-5)
        assert row["cost/price"] == pytest.approx(row["cost/kwh"] / 100, rel=1e-5)
    assert 0 < hours[-1] * 3600 <= row["seconds"] + 0.1
    card = (folder / "model" / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert 0 < head["co2_eq_emissions"]["emissions"] <= 1000 * rows[-1]["cost/co2e_kg"] * 1.01
    assert "| cost/kwh |" in card
    cli.main(["report", str(folder)])
    assert "kg CO2e" in (folder / "report.html").read_text()
    # A resumed run adds its hours to those of all earlier attempts, which the last line of metrics has.
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row | {"cost/device_hours": 7.0}) + "\n" for row in rows))
    again = [*words, "--price_per_hour", "36", "--resume_from_checkpoint", "true", "--num_train_epochs", "2"]
    cli.main(again)
    assert read_rows(folder / "metrics.jsonl")[-1]["cost/device_hours"] > 7.0
