"""The wheel, installed apart from the repository, works as the checkout does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from gradtrace.errors import install

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # From a copy: setuptools leaves build/ behind, whose stale files would go into the next wheel.
    source = folder / "source"
    shutil.copytree(REPOSITORY / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(source)]
    subprocess.run(command, check=True, cwd=folder)
    (built,) = folder.glob("gradtrace-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    target = wheel.parent / "installed"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(command, check=True)
    return target


def run(installed: Path, *code: str) -> str:
    """Python with the wheel's package before the checkout's, outside of the repository."""
    result = subprocess.run(
        [sys.executable, *code],
        cwd=installed.parent,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_wheel_carries_every_file_of_the_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "src/gradtrace"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split()
    assert tracked and not {name.removeprefix("src/") for name in tracked} - names
    assert "gradtrace/py.typed" in names


def test_metadata_names_licence_and_version(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    metadata = message_from_bytes(archive.read(name))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Version"] == wheel.name.split("-")[1]
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


def test_installed_package_is_not_the_checkout_and_finds_its_recipes(installed: Path) -> None:
    program = "import gradtrace; print(gradtrace.__file__)"
    assert run(installed, "-c", program).strip().startswith(str(installed))
    assert "recipe: demo" in run(installed, "-m", "gradtrace.cli", "train", "--cfg")
    assert "gradtrace train" in run(installed, "-m", "gradtrace.cli", "--help")


def test_the_version_stands_in_one_place(wheel: Path, installed: Path) -> None:
    name = next(n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("METADATA"))
    built = message_from_bytes(zipfile.ZipFile(wheel).read(name))["Version"]
    assert run(installed, "-c", "import gradtrace; print(gradtrace.__version__)").strip() == built
    assert built not in (REPOSITORY / "pyproject.toml").read_text()


def test_what_is_missing_is_said_with_a_command_that_works_here(installed: Path) -> None:
    code = "from gradtrace.errors import install; print(install('math'))"
    assert run(installed, "-c", code).strip() == "pip install 'gradtrace[math]'"
    assert install("math") == f"pip install -c {REPOSITORY}/constraints.txt -e '{REPOSITORY}[math]'"
