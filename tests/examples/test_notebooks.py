import json
import re

import pytest

from tests.files import ROOT, read_rows

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
