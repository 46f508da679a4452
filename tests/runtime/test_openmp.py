"""What torch's OpenMP says that it read when it was loaded."""

import os
import re
import subprocess
import sys

import pytest


def settings_read(**given: str) -> dict[str, str]:
    """OpenMP's settings in a process that imports this package and then torch, by what it prints itself."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    env |= {"OMP_DISPLAY_ENV": "VERBOSE", **given}
    done = subprocess.run([sys.executable, "-c", "import align, torch"], capture_output=True, text=True, check=True, env=env)
    return dict(re.findall(r"(GOMP_SPINCOUNT|OMP_WAIT_POLICY) = '(\w+)'", done.stderr))


@pytest.mark.full  # a quarter of a minute of waiting threads
@pytest.mark.skipif(sys.platform != "linux", reason="torch brings GNU's OpenMP on Linux alone")
def test_threads_wait_awake_for_a_short_time_unless_the_user_says_how_long():
    assert settings_read()["GOMP_SPINCOUNT"] == "10000"
    assert settings_read(GOMP_SPINCOUNT="7")["GOMP_SPINCOUNT"] == "7"
    assert settings_read(OMP_WAIT_POLICY="ACTIVE")["OMP_WAIT_POLICY"] == "ACTIVE"
    assert settings_read(OMP_WAIT_POLICY="ACTIVE")["GOMP_SPINCOUNT"] != "10000"
