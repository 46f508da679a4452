import pytest

from align.commands.demo import CONFIGS, MODELS
from align.core.files import read_json, read_json_lines
from align.ppo import PPOConfig
from benchmarks.studies.critic import VARIANTS, main, stage


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_variants_change_the_demos_settings(variant, tmp_path):
    path = CONFIGS / MODELS["smollm2-135m"] / "ppo.yaml"
    demo, changed = (stage(PPOConfig, path, tmp_path, 1, **VARIANTS[name]) for name in ("demo", variant))
    names = {name for name in vars(demo) if vars(demo)[name] != vars(changed)[name]}
    assert names == {name.split(".")[0] for name in VARIANTS[variant]}


@pytest.mark.slow
def test_a_run_has_figures_and_is_not_repeated(tmp_path, capsys):
    words = ["--model", "tiny-llama", "--seeds", "1", "--variants", "demo"]
    words += ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    main(words)
    figures = read_json(tmp_path / "results" / "demo-1.json")
    updates = list(read_json_lines(tmp_path / "results" / "demo-1.jsonl"))
    last = [row["value/explained_variance"] for row in updates if row["update"] >= 9]
    assert figures["explained_variance"] == pytest.approx(sum(last) / 4)
    assert figures["kl"] > 0
    assert figures["words"][1] > 0
    capsys.readouterr()
    main(words)
    assert read_json(tmp_path / "results" / "demo-1.json") == figures
    assert "finished" not in capsys.readouterr().out
