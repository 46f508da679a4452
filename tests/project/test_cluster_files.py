"""Files for clusters and containers: the manifest, SLURM's script, Dockerfiles. No image is built here."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from align.commands.tools import SHUTDOWN_SECONDS
from align.core.heartbeat import EXIT_LOST
from align.core.settings_parser import parse
from align.core.signals import EXIT_STOPPED, GRACE_SECONDS
from align.ppo import PPOConfig
from annotation_ui.cli import _parser
from tests.files import ROOT

MANIFEST = ROOT / "configs" / "cluster" / "kubernetes.yaml"
SCRIPT = ROOT / "configs" / "cluster" / "slurm.sbatch"
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))


def launched(words):
    """What the launcher and the stage read from the words after `align launch`."""
    options = launch_command_parser().parse_args(words)
    return options, parse(PPOConfig, options.training_script_args)


def test_every_pod_runs_one_machine_of_the_launch_finds_the_first_and_has_time_to_save():
    items = {item["kind"]: item for item in yaml.safe_load_all(MANIFEST.read_text())}
    service, job, spec = items["Service"], items["Job"], items["Job"]["spec"]
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "OnFailure", "a Job allows this or Never; Never would make new pods of one index"
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert all(isinstance(entry["value"], str) for entry in pod["containers"][0]["env"])
    assert pod["terminationGracePeriodSeconds"] >= GRACE_SECONDS + 5
    (container,) = pod["containers"]
    assert spec["completionMode"] == "Indexed", "the index is the machine's rank"
    assert container["command"][:2] == ["align", "launch"]
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["command"][2:]]
    options, config = launched(words)
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert options.num_machines == spec["completions"] == spec["parallelism"]
    assert options.num_processes == gpus * options.num_machines
    assert options.machine_rank == 1
    assert config.resume_from_checkpoint
    assert (ROOT / options.config_file).exists()
    assert (ROOT / options.training_script).exists()
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"], "the pods wait for each other before they are ready"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert f"--main_process_ip={job['metadata']['name']}-0.{service['metadata']['name']}" in container["command"]
    launcher = yaml.safe_load((ROOT / "configs/accelerate/two-nodes.yaml").read_text())
    assert service["spec"]["ports"][0]["port"] == launcher["main_process_port"]


def run_script(tmp_path, code, saves=False, restarts=0):
    """The SLURM script with stand-ins for SLURM's commands; `srun` runs its words as one machine, whose launch ends so."""
    saved = "mkdir -p runs/ppo/checkpoints/update-000010; " if saves else ""
    stand_ins = {
        "scontrol": 'if [ "$1" = show ]; then printf "node-a\\nnode-b\\n"; else echo "$@" >> "$TOLD/scontrol"; fi',
        "srun": 'shift; SLURM_NODEID=1 "$@"',
        "align": f'{saved}printf "%s\\n" "$@" > "$TOLD/align"; exit {code}',
    }
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in stand_ins.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "17", "TOLD": str(tmp_path)}
    slurm["SLURM_RESTART_COUNT"] = str(restarts)
    variables = os.environ | slurm | {"PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(SCRIPT)], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    requeued = tmp_path / "scontrol"
    return done, requeued.read_text().split() if requeued.exists() else []


def test_the_slurm_script_launches_one_machine_of_two(tmp_path):
    done, requeued = run_script(tmp_path, 0)
    assert (done.returncode, done.stderr, requeued) == (0, "", [])
    command, *words = (tmp_path / "align").read_text().splitlines()
    options, config = launched(words)
    assert command == "launch"
    assert (options.num_machines, options.num_processes, options.machine_rank) == (2, 16, 1)
    assert options.main_process_ip == "node-a"
    assert config.resume_from_checkpoint
    assert config.output_dir == "runs/ppo"
    (early,) = re.findall(r"--signal=USR1@(\d+)", SCRIPT.read_text())
    assert int(early) > SHUTDOWN_SECONDS, "the launcher ends its processes before SLURM does"


@pytest.mark.parametrize(
    ("code", "saves", "restarts", "again"),
    [
        *((code, False, 0, True) for code in (EXIT_STOPPED, EXIT_LOST, 128 + signal.SIGKILL)),
        *((code, False, 0, False) for code in (1, 2)),  # an error
        (EXIT_LOST, True, 20, True),
        (EXIT_LOST, False, 20, False),  # lost again and again without a new checkpoint
    ],
)
def test_the_slurm_script_goes_back_into_the_queue_after_a_loss(tmp_path, code, saves, restarts, again):
    done, requeued = run_script(tmp_path, code, saves, restarts)
    assert done.returncode == code
    assert requeued == (["requeue", "17"] if again else [])
    assert ("not requeued" in done.stderr) == (restarts > 0 and not again)


def rests(path, name):
    """What stands behind the instructions of that name in a Dockerfile."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.M).replace("\\\n", " ")
    return [line.split(maxsplit=1)[1] for line in text.splitlines() if line.split()[:1] == [name]]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_a_dockerfile_is_clean_copies_what_is_sent_and_pins_what_it_installs(path):
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    assert "*" in rules
    copied = {source for rest in rests(path, "COPY") for source in rest.split()[:-1]}
    assert {source for source in copied if not (ROOT / source).exists()} == set()
    assert {source for source in copied if not any(fnmatch(source, rule) for rule in kept)} == set()
    assert copied >= {"pyproject.toml", "README.md", "LICENSE", "align", "annotation_ui"}
    installs = [command for rest in rests(path, "RUN") for command in rest.split("&&") if "pip install" in command]
    assert len(installs) == 2
    for command in installs:
        assert "-c constraints.txt" in command
        for extras in re.findall(r"\.\[([\w,-]+)\]", command):
            assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert rests(path, "USER")[-1].isdigit(), "not root"
    (base,) = rests(path, "FROM")
    assert re.fullmatch(r"nvidia/cuda:13\.0\.\d-devel-ubuntu24\.04|python:3\.1[1-9]-slim-bookworm", base)
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([program, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_composed_app_is_started_as_its_command_line_allows():
    app, db = COMPOSE["services"]["app"], COMPOSE["services"]["db"]
    assert (ROOT / "docker" / app["build"]["context"]).resolve() == ROOT
    assert (ROOT / app["build"]["dockerfile"]).is_file()
    words = shlex.split(app["command"])
    assert words[:2] == ["align", "annotate"]
    options = _parser().parse_args(words[2:])
    user, database = db["environment"]["POSTGRES_USER"], db["environment"]["POSTGRES_DB"]
    assert options.database == f"postgresql://{user}@db/{database}"
    assert app["environment"]["PGPASSWORD"] == db["environment"]["POSTGRES_PASSWORD"]
    (port,) = app["ports"]
    assert port == f"127.0.0.1:7860:{options.port}", "no other machine reaches it"
    mounted = [volume.split(":") for service in (app, db) for volume in service["volumes"]]
    assert {name for name, _ in mounted} == COMPOSE["volumes"].keys()
    assert str(options.data_dir) in {folder for _, folder in mounted}
