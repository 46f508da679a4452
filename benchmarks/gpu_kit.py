"""What a GPU machine without network needs beside `gpu-machine.txt`: `python -m benchmarks.gpu_kit FOLDER`.

    FOLDER/wheels    this project, and what it needs that the machine lacks or has too old, pinned as in constraints.txt
    FOLDER/peer      TRL 1.12.0, whose PPO is the peer
    FOLDER/model     SmolLM2-135M without its weights: config and tokenizer

On the machine, `--unpack` makes the model with random weights in FOLDER/cache, which $ALIGN_CACHE has to name.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from align.core.files import new_folder
from align.model_registry.registry import resolve_model

ROOT = Path(__file__).parents[1]
MACHINE = ROOT / "benchmarks" / "gpu-machine.txt"
LIMIT_BYTES = 60_000_000
"""Maximum size of a kit: the limit of a transfer to the machine, in addition to the tree."""
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
MODEL, PEER = "smollm2-135m", "trl==1.12.0"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
NEVER = ("torch", "numpy", "pyarrow", "scipy", "triton")
"""Packages that a kit cannot contain, because they are too large or tied to the machine's driver."""
RANDOM = """Random weights (torch.manual_seed(0)) in the shape of SmolLM2-135M-Instruct, with its tokenizer, for
measurements of speed and memory on a machine without network. Its texts are noise.
"""


def pins(file: Path) -> dict[str, str]:
    """Map canonical package names to pinned versions, or to "" if a line has no version."""
    lines = [line.split("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    pairs = [line.partition("==") for line in lines if line]
    return {canonicalize_name(name): version for name, _, version in pairs}


def direct_requirements() -> list[str]:
    """Return the requirements of this project, DeepSpeed and the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["deepspeed"], *TEST_TOOLS]


def missing(direct: Iterable[str], machine: dict[str, str], python: str, of: Callable[[str], list[str] | None]) -> set[str]:
    """Return the canonical names of packages, including dependencies, that are missing or too old on the machine.

    Args:
        direct: direct requirements.
        machine: installed package -> version. "" is accepted as new enough.
        python: Python version of the machine, such as 3.12.
        of: returns the requirements of a package, like `importlib.metadata.requires`.
    """
    there = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    there |= {"platform_machine": "x86_64", "platform_system": "Linux", "os_name": "posix", "extra": ""}
    found: set[str] = set()
    queue = list(direct)
    while queue:
        requirement = Requirement(queue.pop())
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate(there)):
            continue
        version = machine.get(name)
        if version == "" or (version is not None and requirement.specifier.contains(Version(version), prereleases=True)):
            continue
        found.add(name)
        queue += of(name) or []
    return found


def pip(*words: str) -> None:
    """Run pip with this interpreter. Exit if it fails."""
    command = [sys.executable, "-m", "pip", *words, "--quiet", "--disable-pip-version-check"]
    environment = os.environ | {"DS_BUILD_OPS": "0"}  # DeepSpeed without its CUDA kernels
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr[-2000:]}")


def make(kit: Path, python: str) -> None:
    """Replace the kit and print its size.

    Raises:
        SystemExit: If a package of `NEVER` is missing on the machine, or the kit is too large.
    """
    shutil.rmtree(kit, ignore_errors=True)
    machine, pinned = pins(MACHINE), pins(ROOT / "constraints.txt")
    needed = missing(direct_requirements(), machine, python, requires)
    if never := sorted(needed & set(NEVER)):
        raise SystemExit(f"{MACHINE.name}: {', '.join(never)} missing or too old there, and too large for a kit")
    for name in ("wheels", "peer", "model"):
        (kit / name).mkdir(parents=True)
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    target = ["--only-binary", ":all:", "--python-version", python, "--implementation", "cp", *platforms]
    pinned_wheels = [f"{name}=={pinned[name]}" for name in sorted(needed - {"deepspeed"})]
    for name, packages in (("wheels", pinned_wheels), ("peer", [PEER])):
        pip("download", "--no-deps", *target, "--dest", str(kit / name), *packages)
    for source in (f"deepspeed=={pinned['deepspeed']}", str(ROOT)):  # DeepSpeed has no wheel
        pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(kit / "wheels"), source)
    for path in sorted(Path(resolve_model(MODEL)).iterdir()):
        if not re.search(r"safetensors|README", path.name):
            shutil.copy(path, kit / "model" / path.name)
    total = sum(path.stat().st_size for path in kit.rglob("*") if path.is_file())
    if total > LIMIT_BYTES:
        raise SystemExit(f"{kit}: {total / 1e6:.1f} MB, more than the {LIMIT_BYTES / 1e6:.0f} that may travel at once")
    print(f"{kit}: {total / 1e6:.1f} MB")


# ------------------------------------------------------------------------------------------------------- on the machine


def unpack(kit: Path) -> None:
    """Create SmolLM2 in the kit's cache, with its config and tokenizer and with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = kit / "cache" / "models" / f"{MODEL}-r1"
    if not folder.exists():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(kit / "model")).to(torch.bfloat16)
        with new_folder(folder) as temporary:
            model.save_pretrained(temporary)
            shutil.copytree(kit / "model", temporary, dirs_exist_ok=True)
            (temporary / "README.md").write_text(RANDOM, encoding="utf-8")
    print(f"{folder}: {RANDOM}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of Python on the machine")
    parser.add_argument("--unpack", action="store_true", help="on the machine: make the model")
    words = parser.parse_args()
    if words.unpack:
        unpack(words.folder)
    else:
        make(words.folder, words.python)


if __name__ == "__main__":
    main()
