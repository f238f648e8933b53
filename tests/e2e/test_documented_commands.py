"""Every command of the documentation works after the demo, as it is printed, but for its size."""

from __future__ import annotations

import glob
import json
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
import uvicorn

from gradtrace.cli import build_parser, main
from gradtrace.config.loader import load_config
from gradtrace.training.run import train
from tests.documented import ROOT, Documented, all_commands

TINY = (
    "trainer.cpu_threads=1",
    *("task.arithmetic.operations=1", "task.arithmetic.hidden_size=32", "task.arithmetic.layers=1"),
    *("task.arithmetic.heads=2", "task.arithmetic.warm_start.max_steps=250"),
    *("data.train_batch_size=4", "rollout.n=4", "rollout.max_new_tokens=8", "actor.mini_batch_size=2"),
    *("trainer.validation.prompts=2", "trainer.validation.n=1", "trainer.validation.pass_k=[1]"),
)
"""The demo's recipe at a size that takes seconds."""
WARM = ("task.arithmetic.warm_start.max_steps=2", "task.calculator.warm_start.max_steps=2")
UNTRAINED = (*TINY, *WARM, "trainer.total_steps=1")
SMALLER = {
    "train": (*UNTRAINED, "trainer.tracin.val_batch_size=2"),
    "probe": ("evaluation_prompts=4", "update_prompts=2", "eta=[1]", "fresh=false"),
    "verify": ("--budget", "5s", "--groups", "6", "--tokens", "2", "--halves", "0"),
    "counterfactual": ("--k", "2", "--tokens", "0"),
    "ablate": (*TINY, "--checkpoint", "runs/demo", "--repeat", "1"),
}
"""What is put behind a command so that it takes seconds."""
STANDS_FOR = {
    "RUN": "runs/demo",
    "CHECKPOINT": "runs/demo/checkpoints/step_000020",
    "MODEL": "runs/demo/policy",
    "PATH": "runs/demo/policy",
    "DATA": "data.jsonl",
    "runs/NAME": "runs/demo",
}
KINDS_OF_NEEDS = ("GPU", "the hub", "a model", "data", "an older trace", "verl", "minutes", "evaluations", "that run")
FIRST = {
    "counterfactual": (["counterfactual", "runs/demo"],),
    "ablate collect": (["ablate", "recipe=demo", "sweep.influence.hessian_mode=inverse,identity"],),
    "view runs/demo/probes/step_000020": (["probe", "runs/demo/checkpoints/step_000020"],),
}
"""Commands whose results others read."""
IMPORTED = "runs/theirs"
IMPORT = ["trace", "import", "examples/rollouts.jsonl", IMPORTED, "--tokenizer", "runs/demo/policy"]
SUCCESS = {"verify": (0, 1, 3)}
"""Exit codes that are answers, where 0 is not the only one."""
COMMANDS = all_commands()
RUNNABLE = list({command.words: command for command in COMMANDS if not command.needs}.values())


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder after the demo, and with the files and runs that pages make before they use them."""
    folder = tmp_path_factory.mktemp("documented")
    config = load_config(
        [
            f"trainer.runs_dir={folder / 'runs'}",
            *TINY,
            "trainer.checkpoint.every=10",
            "trainer.total_steps=20",
        ]
    )
    run = train(config).run_dir
    assert run == folder / "runs" / "demo"
    for name in ("mine", "grpo-s0", "grpo-s1", "tracin-s0", "tracin-s1", "hacked", "too_hot", "calculator"):
        shutil.copytree(run, folder / "runs" / name)
    for name, operator in (("data.jsonl", "+"), ("val.jsonl", "-")):
        rows = [
            {"prompt": f"{digit}{operator}2=", "response": str(answer), "reward": float(answer > 2)}
            for digit in range(2)
            for answer in range(5)
        ]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(ROOT / "examples", folder / "examples")
    return folder


def ends_of(sweep: str) -> str:
    """The first and the last of its values."""
    key, values = sweep.split("=")
    first, *_, last = values.split(",")
    return f"{key}={first},{last}"


def words_of(command: Documented) -> list[str]:
    words = list(command.words)
    for name, value in STANDS_FOR.items():
        words = [value + word.removeprefix(name) if word.split("/")[0] == name else word for word in words]
        words = [word.replace(name, value) if name == "runs/NAME" else word for word in words]
    words = [str(min(int(w), 20)) if w.isdigit() and words[i - 1] == "--step" else w for i, w in enumerate(words)]
    if words[0] == "compare":  # as a shell does it
        words = [path for word in words for path in (sorted(glob.glob(word)) if "runs/" in word else [word])]
    if words[:2] == ["select", "runs/demo/policy"] and "--validation" not in words:
        words += ["--validation", "val.jsonl"]
    if words[:2] == ["ablate", "collect"]:
        return words
    if words[:2] == ["verify", "runs/demo/policy"]:  # whose task is that of the recipe
        words += TINY
    words = [ends_of(word) if word.startswith("sweep.") else word for word in words]
    if words[0] == "train" and any(word.startswith("resume=") for word in words):
        return [*words, "trainer.total_steps=21"]
    if words[0] == "train" and "--cfg" in words:
        return words
    is_run = len(words) > 1 or words[0] in ("train", "ablate")
    return [*words, *(SMALLER.get(words[0], ()) if is_run and "--help" not in words else ())]


def is_mention(words: list[str], capsys: pytest.CaptureFixture[str]) -> bool:
    """A command's name inside of a sentence: it needs arguments, and says which."""
    try:
        build_parser(words).parse_args(words)
    except SystemExit as end:
        return end.code == 0 or "arguments are required" in capsys.readouterr().err
    return False


def copy_for(command: Documented, demo: Path, target: Path) -> None:
    """The folder after the demo; of its runs the demo's own and those that the command names, all if it names none."""
    named = re.findall(r"runs/([^/\s,=]+)", " ".join(command.words))

    def left_out(folder: str, names: list[str]) -> list[str]:
        is_wanted = not named or Path(folder) != demo / "runs"
        return [name for name in names if not (is_wanted or any(fnmatch(name, run) for run in ("demo", *named)))]

    shutil.copytree(demo, target, ignore=left_out)


@pytest.mark.parametrize("command", RUNNABLE, ids=str)
def test_a_documented_command_runs_after_the_demo(
    command: Documented,
    demo: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy_for(command, demo, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    words = words_of(command)
    if command.words == ("ablate",) or is_mention(words, capsys):
        return
    for before in FIRST.get("counterfactual" if "counterfactual" in words[2:] else " ".join(words[:2]), ()):
        assert main([*before, *SMALLER[before[0]]]) == 0
    if IMPORTED in words and words[:2] != IMPORT[:2]:
        assert main(IMPORT) == 0
    if words[:2] == ["verify", IMPORTED]:
        assert main(["attribute", *words[1:4]]) == 0
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: sockets[0].close())  # it would serve on
    assert main(words) in SUCCESS.get(words[0], (0,)), f"{command}\n{capsys.readouterr().err[-3000:]}"


def test_the_demo_keeps_the_checkpoint_that_pages_name() -> None:
    kept = load_config([]).trainer.checkpoint
    assert 20 % kept.every == 0 and kept.keep_last == 0


def test_what_a_command_needs_is_said_in_words_that_this_test_knows() -> None:
    """These are not run here; their words are checked by tests/test_documented_commands.py."""
    needing = [command for command in COMMANDS if command.needs]
    print("\n".join(f"{command}  (needs {command.needs})" for command in needing))
    unknown = [str(c) for c in needing if not any(kind in c.needs for kind in KINDS_OF_NEEDS)]
    assert not unknown and len(needing) < len(RUNNABLE)


def test_the_tutorials_python_runs_after_the_demo(
    demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(demo)
    exec(compile(code, "tutorial.md", "exec"), {})
    assert "culprit: token" in capsys.readouterr().out
