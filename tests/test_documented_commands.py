"""Commands that the documentation shows are commands that exist, with options and keys that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gradtrace.cli import build_parser
from gradtrace.config.loader import load_config
from gradtrace.errors import GradtraceError

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted((ROOT / "src" / "gradtrace" / "conf").glob("*.yaml"))
COMMAND = re.compile(r"^\s*(?:\.venv/bin/)?gradtrace (.+)$")
PLACEHOLDER = re.compile(r"…|\.\.\.|COMMAND|=NAME|[\[|]")
NOT_HERE = ("there is no such folder", "there is no file", "needs a model", "there is no runs/")
"""What is wrong with a command whose words are right, on a machine without that model, run or data."""


def commands(path: Path) -> list[str]:
    """Of a page's code blocks and of its text; of a recipe's comments."""
    text = path.read_text()
    if path.suffix == ".yaml":
        blocks = ["\n".join(line.removeprefix("#") for line in text.splitlines() if line.startswith("#"))]
    else:
        blocks = re.findall(r"```(?:bash|sh)?\n(.*?)```", text, re.DOTALL)
        blocks += re.findall(r"`(gradtrace [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [match[1] for line in lines if (match := COMMAND.match(line))]
    return [re.split(r"\s{2,}#|\s#\s|\s{3,}\(", command)[0] for command in found if not PLACEHOLDER.search(command)]


CASES = [(path.name, command) for path in [*PAGES, *RECIPES] for command in commands(path)]


def test_the_documentation_has_commands() -> None:
    assert len(CASES) > 60 and {"README.md", "tutorial.md", "smollm2_gsm8k.yaml"} <= {name for name, _ in CASES}


@pytest.mark.parametrize(("page", "command"), CASES, ids=[f"{page}: {command}" for page, command in CASES])
def test_a_documented_command_is_understood(page: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)
    try:
        args = build_parser(words).parse_args(words)
    except SystemExit:
        why = capsys.readouterr().err
        unfinished = "arguments are required" in why  # a mention in a sentence, `gradtrace data prepare`
        assert unfinished or not why, f"{page} shows `gradtrace {command}`: {why}"
        return
    if words[0] != "train":
        return
    try:
        load_config(args.overrides)
    except GradtraceError as error:
        assert any(reason in str(error) for reason in NOT_HERE), f"{page} shows `gradtrace {command}`: {error}"
