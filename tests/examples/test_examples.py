import json
import re
import runpy
from pathlib import Path

import pytest

from tests.files import ROOT, read_rows

EXAMPLES = Path(__file__).parents[2] / "examples"


def main_of(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


@pytest.mark.slow
def test_ppo_on_objects_in_memory_raises_a_reward_function(tmp_path):
    rewards = main_of("own_reward_function")(output_dir=str(tmp_path / "run"))
    assert len(rewards) == 30
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1


def test_fine_tuning_on_a_list_of_dicts_teaches_the_answer(tmp_path):
    assert main_of("own_data_in_memory")(output_dir=str(tmp_path / "run")) == "Phobos."


def test_a_reward_model_of_rankings_orders_answers_in_plain_transformers(tmp_path):
    rewards = main_of("reward_model_elsewhere")(output_dir=str(tmp_path / "run"))
    assert min(rewards[:2]) > rewards[2] > rewards[3]


def test_every_script_is_tested():
    tested = Path(__file__).read_text()
    names = [path.stem for path in EXAMPLES.glob("*.py")]
    assert len(names) == 3
    assert [name for name in names if f'main_of("{name}")' not in tested] == []


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 600


def name_of(path):
    return path.stem


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_outputs_are_stripped_and_links_lead_somewhere(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in notebook["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", "".join(cell["source"])):
            assert (path.parent / link.partition("#")[0]).exists(), link


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_the_notebook_runs(path, tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # an error in a cell is raised
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "a plot"
    if path.stem == "ppo_on_your_own_reward":
        rows = read_rows(next(tmp_path.glob("align-*/ppo/metrics.jsonl")))
        rewards = [row["reward/share_of_e"] for row in rows]
        assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
    else:
        text = "".join(output.get("text", "") for output in outputs)
        before, after = (int(re.search(rf"{stage} (\d+)% polite", text).group(1)) for stage in ("SFT", "PPO"))
        assert after > before + 20
