import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from align.cli import stage_configs
from align.core.settings_parser import parse
from align.eval import TASKS
from tests.files import ROOT, read_rows

CONFIGS = ROOT / "configs"
FIRST_RUN = "first-run"
"""Files that need no earlier stage, which a stage without settings names (tests/commands/test_cli.py)."""
CLASSES = {{"rules": "rule-model"}.get(stage, stage): made for stage, made in stage_configs().items()}
CLASSES["raw-text"] = CLASSES["sft"]
"""The class of the settings in each folder."""
FILES = [
    path
    for path in sorted(CONFIGS.rglob("*.yaml"))
    if path.parent.name in CLASSES and "demo" not in path.relative_to(CONFIGS).parts and path.stem != FIRST_RUN
]
SMALL = ("tiny-llama", "smollm2-135m")
ZERO = {"two-nodes": 3}
"""The stage of ZeRO where the name of a file does not tell it."""


def settings(stage, name):
    (path,) = (path for path in FILES if (path.parent.name, path.stem) == (stage, name))
    return parse(CLASSES[stage], ["--config", str(path)])


def assert_arrived(config, written):
    """No key is lost, no number becomes text (YAML reads 1e-3 as text)."""
    for key, value in written.items():
        found = getattr(config, key)
        if isinstance(value, dict):
            assert_arrived(found, value)
        else:
            value = [value] if isinstance(found, list) and not isinstance(value, list) else value  # one may stand alone
            assert (found, type(found)) == (value, type(value)), key


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_value_arrives_and_the_data_are_there(path):
    config = parse(CLASSES[path.parent.name], ["--config", str(path)])
    assert_arrived(config, yaml.safe_load(path.read_text()))
    given = ("train_data", "validation_data", "demonstrations", "prompts", "validation_prompts", "rankings")
    sources = {key: getattr(config, key) for key in given if getattr(config, key, "")}
    assert sources
    assert all((ROOT / source.partition("[")[0]).is_file() for source in sources.values()), sources


@pytest.mark.parametrize(
    "path",
    [*sorted(CONFIGS.glob("eval/*.yaml")), *sorted(CONFIGS.glob("demo/*/*.yaml"))],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_the_files_of_evaluations_and_of_the_demo_parse(path):
    stage = "reward" if path.stem == "judge" else path.stem
    trains = stage in CLASSES and path.parent.name != "eval"
    config = CLASSES[stage] if trains else TASKS["all" if stage == "eval" else stage].load()[0]
    parse(config, ["--config", str(path), *(["--models", "tiny-gpt2"] if stage == "eval" else [])])


@pytest.mark.parametrize("name", SMALL)
def test_judgments_are_of_the_rules_and_the_attributes_that_are_configured(name):
    from align.data.readers import read_records
    from align.data.records import AttributeJudgment, Ranking, RuleJudgment
    from align.extras.rules.judgments import read_rules

    rules = settings("rule-model", name)
    judged = {record.rule for record in read_records(ROOT / rules.train_data, RuleJudgment)}
    assert judged == set(read_rules(rules.rules))
    for path in (path for path in FILES if path.parent.name == "attributes" and path.stem.startswith(name)):
        config = settings("attributes", path.stem)
        for source in (config.train_data, config.validation_data):
            assert all(set(config.heads) <= set(row.attributes) for row in read_records(ROOT / source, AttributeJudgment))
        assert not config.rankings or read_records(ROOT / config.rankings, Ranking)


@pytest.mark.parametrize(
    ("name", "source", "rows"),
    [("attributes", "rankings_round2", 100), ("attributes_heldout", "rankings_round2_heldout", None)],
)
def test_the_shipped_attributes_are_what_the_app_makes_of_the_rankings(name, source, rows):
    from annotation_ui.tasks.rankings import ranking_attributes

    def read(file):
        return read_rows(ROOT / "data" / f"{file}.jsonl")

    assert read(name) == [row for judgment in read(source)[:rows] for row in ranking_attributes([judgment])]


@pytest.mark.parametrize("path", sorted((CONFIGS / "accelerate").iterdir()), ids=lambda path: path.stem)
def test_accelerate_takes_its_files_and_a_run_fills_in_the_rest(path):
    words = ["--config_file", str(path), "align/ppo/train.py"]
    found = _validate_launch_command(launch_command_parser().parse_args(words))[0]  # an unknown key is an error there
    zero = ZERO.get(path.stem, int(path.stem[4]) if path.stem.startswith("zero") else None)
    several = path.stem in ("cpu2", "ddp")  # without ZeRO
    assert (bool(found.use_deepspeed), bool(found.multi_gpu), found.machine_rank) == (zero is not None, several, 0)
    assert found.num_processes == {"one-process": 1, "cpu2": 2}.get(path.stem, 8 * found.num_machines)
    if found.num_machines == 2:
        assert (found.main_process_port, found.deepspeed_multinode_launcher) == (29500, "standard")
        assert found.main_process_ip
    if zero:
        offload = "cpu" if path.stem == "zero3-offload" else "none"
        assert (found.zero_stage, str(found.zero3_init_flag).lower()) == (zero, "false")
        assert (found.offload_optimizer_device or "none", found.offload_param_device or "none") == (offload, offload)
        # What a run fills in (align.runtime.distributed) is left open.
        assert found.gradient_accumulation_steps is found.gradient_clipping is found.deepspeed_config_file is None
        assert (zero == 3) == (str(found.zero3_save_16bit_model).lower() == "true")
