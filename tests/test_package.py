"""What a wheel or a source archive would lack: the tests run on an editable install, which has all the repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
FOLDERS = {
    name: ROOT / SETUP["package-dir"].get(name, name.replace(".", "/")) for name in SETUP["packages"]
}  # package to its folder


def tracked(*folders: str) -> list[Path]:
    """The files of the repository under these folders, from the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *folders]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip("not a git checkout")
    return [Path(name) for name in found.stdout.split("\0") if name]


def shipped(file: Path) -> bool:
    """Does a wheel have it?  Modules of the packages, and what package-data names."""
    for name, folder in FOLDERS.items():
        inside = (ROOT / file).relative_to(folder) if folder in (ROOT / file).parents else None
        if inside is None:
            continue
        if inside.parent == Path() and file.suffix in (".py", ".pyi"):
            return True
        if any(inside.match(pattern) for pattern in SETUP["package-data"].get(name, ())):
            return True
    return False


def test_a_wheel_has_every_file_of_the_packages():
    files = tracked("eagle3_cli", "convert")
    assert len(files) > 100
    assert [str(f) for f in files if not shipped(f)] == []


def test_a_source_archive_has_every_file_of_native():
    (extension,) = SETUP["ext-modules"]
    named = {*extension["sources"], *extension["depends"]}
    files = {str(f) for f in tracked("native") if f.suffix in (".c", ".h")}
    assert files == named


def test_a_file_that_no_rule_names_would_be_missed():
    assert not shipped(Path("eagle3_cli/trace.svg"))
    assert not shipped(Path("eagle3_cli/unknown/module.py"))
    assert shipped(Path("convert/plan.py"))
