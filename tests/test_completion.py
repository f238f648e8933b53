"""Shell completion, in a real bash."""

from __future__ import annotations

import subprocess

import pytest

from gradtrace.cli import COMMANDS
from gradtrace.commands.completion import script


def complete(*words: str) -> list[str]:
    """What bash offers for the last of `words`."""
    asked = " ".join(f"'{word}'" for word in words)
    program = (
        f"{script('bash')}\nCOMP_WORDS=({asked}); COMP_CWORD={len(words) - 1}\n"
        '_gradtrace 2>/dev/null; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    result = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return result.stdout.split()


def test_commands_are_completed() -> None:
    assert complete("gradtrace", "") == list(COMMANDS)
    assert complete("gradtrace", "tr") == ["train", "trace"]


def test_configuration_keys_are_completed_up_to_the_equals_sign() -> None:
    assert complete("gradtrace", "train", "trainer.influence_trace.hessian_m") == [
        "trainer.influence_trace.hessian_mode="
    ]
    assert "trainer.influence_trace=" not in complete("gradtrace", "train", "trainer.infl")


@pytest.mark.parametrize(("command", "option"), [("view", "--demo"), ("doctor", "--model"), ("trace", "export")])
def test_options_and_subcommands_are_completed(command: str, option: str) -> None:
    assert complete("gradtrace", command, option[:5]) == [option]


def test_anything_else_is_a_file() -> None:
    assert "pyproject.toml" in complete("gradtrace", "report", "pyproj")
