import re
from fnmatch import fnmatch
from functools import partial

import pytest

from align.cli import stage_configs
from tests.files import read_rows, write_rows
from tests.project.markdown import code_in, page, section, table

STAGES = {
    "sft": "Supervised fine-tuning",
    "reward": "Reward model",
    "rules": "Rule model",
    "attributes": "Attribute model",
    "ppo": "PPO",
    "dpo": "DPO",
    "distill": "Distillation",
}
SHARED = {
    "All stages": set(STAGES),
    "All stages except PPO": set(STAGES) - {"ppo"},
    "Reward model and DPO": {"reward", "dpo"},
}


ANSWERS = [{"prompt": f"{n}?", "response": text} for n in range(4) for text in ("Yo", "I am 7.")]
VERDICTS = {"Yo": "violates", "I am 7.": "follows"}
DATA = {
    "judgments": [
        row | {"rule": rule, "verdict": VERDICTS[row["response"]]}
        for row in ANSWERS
        for rule in ("no-digits", "no-exclamation-marks")
    ],
    "ratings": [row | {"attributes": {"polite": n // 2 % 2, "rating": 1 + n // 2}} for n, row in enumerate(ANSWERS)],
    "demonstrations": [{"prompt": "Hi", "completion": "Yo"}, {"prompt": "Count.", "completion": "1 2 3"}],
    # Ranks 1 and 3 apart too, so that more than one distance is written.
    "rankings": [{"prompt": f"{n}?", "responses": ["a", "bb", "c c"], "ranks": [1, 2, 3]} for n in range(2)],
    "prompts": [{"prompt": "Hi"}, {"prompt": "Count."}],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, serve):
    """The folders of two updates of each stage on tiny-llama, with everything on that writes a metric."""
    from align.dpo import run_dpo
    from align.extras.attributes import run_attribute_model
    from align.extras.distill import run_distill
    from align.extras.rules import run_rule_model
    from align.ppo import run_ppo
    from align.reward import run_reward
    from align.sft import run_sft

    root = tmp_path_factory.mktemp("docs")
    data = {name: write_rows(root / f"{name}.jsonl", rows) for name, rows in DATA.items()}
    cost = {"device_watts": 300, "co2e_per_kwh": 0.4, "price_per_hour": 2}
    config = {
        stage: partial(made, dtype="float32", report_to=["none"], save_steps=1, output_dir=str(root / stage), **cost)
        for stage, made in stage_configs().items()
    }
    demonstrations, rankings = data["demonstrations"], data["rankings"]
    learned = {"train_data": demonstrations, "validation_data": demonstrations, "batch_size": 1}
    start = str(run_sft(config["sft"](model="tiny-llama", layer_lr_decay=0.5, **learned)))
    run_distill(config["distill"](model=start, **learned))
    learned = {"train_data": rankings, "validation_data": rankings, "batch_size": 1}
    terms = {"demonstrations": demonstrations, "centering_weight": 0.01, "lm_loss_weight": 0.5}
    scorer = str(run_reward(config["reward"](model=start, layer_lr_decay=0.5, **terms, **learned)))
    run_dpo(config["dpo"](model=start, **learned))
    rated = {"train_data": data["ratings"], "validation_data": data["ratings"], "batch_size": 4}
    run_attribute_model(config["attributes"](model=start, form="generative", **rated))
    judged = {"rules": ["forms/rules/plain-style.yaml"], "held_out_rules": ["no-exclamation-marks"]}
    judge = run_rule_model(
        config["rules"](model=start, train_data=data["judgments"], validation_split=0.5, batch_size=2, **judged)
    )
    ppo = config["ppo"](
        model=start,
        reward_model=[scorer, scorer],
        selection={"reward_model": scorer},
        rules={"model": str(judge)},
        kl_in="loss",
        kl_estimator="k3",
        ent_coef=0.01,
        reward_functions=["align.ppo.toy_rewards:share_of_e"],
        prompts=data["prompts"],
        validation_prompts=data["prompts"],
        ptx={"data": demonstrations},
        total_updates=2,
        rollout_batch_size=4,
        max_new_tokens=4,
        missing_eos_score=None,
        samples_per_prompt=2,
        num_mini_batches=2,
        length_adjustment=0.5,
        hold_length=0.1,
        value_fit="first",
        eval_steps=1,
        engine="vllm-server",
        vllm={"url": serve(start).url, "importance_cap": 2.0},
    )
    run_ppo(ppo)
    return {stage: root / stage for stage in STAGES}


def defined(stage):
    """The names that the page defines for a stage: those that it shares with others and its own."""
    text = page("metrics")
    titles = [title for title, stages in SHARED.items() if stage in stages] + [STAGES[stage]]
    return [name for title in titles for row in table(section(text, title), "name") for name in code_in(row[0])]


@pytest.mark.parametrize("stage", STAGES)
def test_every_metric_is_defined_and_every_definition_is_of_a_metric(runs, stage):
    names, seen = defined(stage), {name for row in read_rows(runs[stage] / "metrics.jsonl") for name in row}
    assert len(names) == len(set(names))
    exact = {name for name in names if "*" not in name and "<" not in name}
    patterns = {name: re.sub("<[a-z]+>", "*", name) for name in names if name not in exact}
    others = [name for name in seen if name not in exact]
    undefined = [name for name in others if not any(fnmatch(name, pattern) for pattern in patterns.values())]
    assert not undefined
    assert exact <= seen
    assert all(any(fnmatch(name, pattern) for name in others) for pattern in patterns.values())


@pytest.mark.parametrize("stage", STAGES)
def test_the_files_of_a_run_folder(runs, stage):
    listed = {}
    for name, stages, _ in table(section(page("metrics"), "Files of a run folder"), "file"):
        if stages == "all" or stage in stages.split(", "):
            listed |= {code.rstrip("/"): code.endswith("/") for code in code_in(name)}
    found = {path.name: path.is_dir() for path in runs[stage].iterdir()}
    assert found.items() <= listed.items()
    # Nothing broke, and nobody asked for a report.
    assert listed.keys() - found.keys() - {"unscored.jsonl"} == {"broken-batch-N.json", "report.html"}
    checkpoint = runs[stage] / "checkpoints" / "update-000002"
    assert sorted(path.name for path in checkpoint.parent.iterdir())[-1] == checkpoint.name
    files = {"checksums.json", "state.safetensors", "trainer.json"}
    files |= {"value_regression.safetensors"} if stage == "ppo" else set()
    assert {path.name for path in checkpoint.iterdir()} == files
    assert all(f"`{name}`" in page("metrics") for name in files)
