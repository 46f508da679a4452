"""An extension in a package of its own, installed as a user installs it."""

import os
import subprocess
import sys

import pytest

from tests.files import ROOT, metrics_of, write_rows

PACKAGE = ROOT / "examples" / "extension_package"
RUN = "import sys; from align.cli import main; main(sys.argv[1:])"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the installed package. The build happens in a copy: it leaves files beside the sources."""
    target, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source") / "package"
    subprocess.run(["cp", "-r", str(PACKAGE), str(source)], check=True)
    words = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target), str(source)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=240)
    return target


def ppo(folder, prompts, path, *words):
    settings = ["--model", "tiny-llama", "--prompts", prompts, "--output_dir", str(folder), "--report_to", "none"]
    settings += ["--rollout_batch_size", "4", "--max_new_tokens", "4", "--missing_eos_score", "none", "--save_steps", "1"]
    settings += ["--reward_functions", "align.ppo.toy_rewards:share_of_e", "--kl_coef", "0", *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", RUN, "ppo", *settings]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_an_installed_extension_is_found_by_its_name_and_keeps_its_state(installed, tmp_path, align_cache):
    prompts, named = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "Hi"}]), ["--extensions", "brief_answers"]
    done = ppo(tmp_path / "run", prompts, [str(installed)], *named, "--total_updates", "1")
    assert done.returncode == 0, done.stderr[-2000:]
    done = ppo(
        tmp_path / "run", prompts, [str(installed)], *named, "--total_updates", "2", "--resume_from_checkpoint", "auto"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = metrics_of(tmp_path / "run")
    assert [row["update"] for row in rows] == [1, 2]
    for row in rows:
        assert row["reward/kl_penalized"] == pytest.approx(row["reward/mean"] + 0.5 * row["reward/brief"], abs=1e-6)
    counts = [4 * row["reward/brief"] for row in rows]
    assert [row["brief_answers/count"] for row in rows] == pytest.approx([counts[0], sum(counts)])
    assert sum(counts) > 0


def test_without_its_package_the_name_is_unknown(tmp_path, align_cache):
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "Hi"}])
    done = ppo(tmp_path / "run", prompts, [], "--extensions", "brief_answers")
    assert done.returncode == 2
    assert "extension 'brief_answers'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
