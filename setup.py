"""Copy configs/, data/ and forms/ into the wheel, under align/_package_data/, which pyproject.toml cannot express.

They stay at the root of the repository, where people look for them; `align.core.files` finds them in both places.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithPackageData(build_py):
    """`build_py` that also copies the three folders; an editable install reads them where they are."""

    def run(self) -> None:
        """Copy the package's modules, then the folders."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "align" / "_package_data"
        shutil.rmtree(target, ignore_errors=True)  # a file that was removed since the last build
        for folder in ("configs", "data", "forms"):
            shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns(".*"))


setup(cmdclass={"build_py": BuildWithPackageData})
