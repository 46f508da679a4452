"""The files for clusters: Kubernetes' manifest says what its controller needs, SLURM's script asks for what it is told."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from align.commands.launch import SHUTDOWN_SECONDS
from align.core.heartbeat import EXIT_LOST
from align.core.settings_parser import parse
from align.core.signals import EXIT_STOPPED, GRACE_SECONDS
from align.ppo import PPOConfig

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "configs" / "cluster" / "kubernetes.yaml"
SCRIPT = ROOT / "configs" / "cluster" / "slurm.sbatch"


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
