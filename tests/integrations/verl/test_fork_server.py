"""Workers of a job on CPU are forks of one process, and run as if Python had been started for each."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradtrace.integrations.verl.cpu.fork_server import EXECUTABLE, fork_server
from gradtrace.integrations.verl.cpu.forked_worker import ADDRESS
from tests.integrations.verl import harness

pytestmark = [
    harness.needs_verl,
    pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone"),
]
PROGRAM = """
import json, os, sys
found = {"words": sys.argv[1:], "mine": os.environ.get("MINE"), "theirs": "THEIRS" in os.environ, "folder": os.getcwd(),
         "name": __name__, "group": os.getpgid(0) == os.getpid(), "numpy": "numpy" in sys.modules,
         "peft": "peft" in sys.modules, "ray": "ray" in sys.modules, "told": sys.stdin.read()}
print(json.dumps(found), flush=True)
import numpy, random
print(random.random(), numpy.random.rand(), flush=True)
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The words that Ray has in place of Python, and the environment that names the server."""
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as file, fork_server({"THEIRS": "1"}, file) as (settings, environment):
        yield shlex.split(settings[EXECUTABLE]), environment
    assert "not forked" not in log.read_text()


def run(words: list[str], environment: dict[str, str], folder: Path) -> tuple[dict[str, object], str]:
    program = folder / "a program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [*words, "-u", str(program), "two words", "--x=1"],
        env={**os.environ, **environment, "MINE": "yes"},
        cwd=folder,
        input="something",
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = done.stdout.splitlines()
    return json.loads(first), second


def test_a_fork_has_words_files_folder_and_environment_of_its_own_and_packages_of_the_server(
    started: tuple[list[str], dict[str, str]], tmp_path: Path
) -> None:
    """But not Ray, which reads the environment when it is imported; and a process group that Ray may end."""
    words, environment = started
    found, _ = run(words, environment, tmp_path)
    assert (found.pop("words"), found.pop("folder")) == (["two words", "--x=1"], str(tmp_path))
    assert (found.pop("mine"), found.pop("told"), found.pop("name")) == ("yes", "something", "__main__")
    assert found == {"theirs": False, "ray": False, "group": True, "numpy": True, "peft": True}


def test_forks_draw_different_random_numbers(started: tuple[list[str], dict[str, str]], tmp_path: Path) -> None:
    drawn = [run(*started, tmp_path)[1].split() for _ in range(2)]
    assert drawn[0][0] != drawn[1][0] and drawn[0][1] != drawn[1][1]


def test_without_a_server_it_is_python(started: tuple[list[str], dict[str, str]], tmp_path: Path) -> None:
    for environment in ({ADDRESS: str(tmp_path / "nobody listens")}, {ADDRESS: ""}):
        found, _ = run(started[0], environment, tmp_path)
        assert found["words"] == ["two words", "--x=1"] and found["mine"] == "yes" and not found["peft"]


def test_who_asked_lives_as_long_as_the_fork(started: tuple[list[str], dict[str, str]], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, sys; print(os.getpid(), flush=True); sys.stdin.read()")
    words, environment = started
    with subprocess.Popen(
        [*words, str(program)],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as asked:
        assert asked.stdin and asked.stdout
        worker = int(asked.stdout.readline())
        assert worker != asked.pid and asked.poll() is None
        os.kill(worker, 9)
        assert asked.wait(60) == 1
        with pytest.raises(ProcessLookupError):  # the server has taken note of its end
            os.kill(worker, 0)


@pytest.mark.parametrize(
    ("program", "code"),
    [("pass", 0), ("sys.exit(3)", 3), ("sys.exit('no')", 1), ("1 / 0", 1), ("sys.exit()", 0)],
)
def test_the_exit_code_is_that_of_the_program(
    program: str, code: int, started: tuple[list[str], dict[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(f"import sys\n{program}\n")
    words, environment = started
    environment = {**os.environ, **environment}
    for how in (["-W", "ignore", "-m", "own"], [str(tmp_path / "own.py")]):
        done = subprocess.run([*words, *how], cwd=tmp_path, env=environment, capture_output=True)
        assert done.returncode == code, done.stderr


def test_a_fork_is_ended_with_who_asked(started: tuple[list[str], dict[str, str]], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print('ready', flush=True)\nwhile True: time.sleep(0.1)"
    )
    words, environment = started
    environment = {**os.environ, **environment}
    with subprocess.Popen([*words, str(program)], env=environment, stdout=subprocess.PIPE) as asked:
        assert asked.stdout and asked.stdout.readline() == b"ready\n"
        asked.terminate()
        assert asked.wait(60) == 7
