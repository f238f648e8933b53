"""`gradtrace view` as a user starts it: what it prints, what it serves, what it says when something is wrong."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from gradtrace.cli import main
from tests.viewer.conftest import write_run
from tests.viewer.serving import Watched, chromium


@contextlib.contextmanager
def viewing(*arguments: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """(address, lines printed) of a viewer process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "BROWSER": "false"}
    process = subprocess.Popen(
        [sys.executable, "-m", "gradtrace.cli", "view", *arguments],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if "Ctrl-C" in line:
            break
    address = next((found[0] for line in lines if (found := re.search(r"http://\S+", line))), "")
    try:
        yield address, lines
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(15)


def test_the_demo_needs_no_training(tmp_path: Path) -> None:
    with (
        viewing("--demo", "--no-open", "--port", "0", folder=tmp_path) as (address, _),
        chromium() as browser,
    ):
        watched = Watched(browser.new_page(viewport={"width": 1440, "height": 900}), address.rstrip("/"))
        page = watched.page
        page.goto(address)
        expect(page.locator("h1")).to_have_text("arithmetic")
        page.get_by_role("link", name="Step 24").click()
        expect(page.locator("h1")).to_have_text("Step 24")
        measured = page.locator(".c-change", has_text=re.compile(r"\d"))
        page.locator("tr.opens:not(.skipped)", has=measured).first.click()
        page.locator(".row .slot-1 .t.fw, .row .slot-1 .t").first.click()
        expect(page.locator(".bar-column").first).to_be_visible()
        for tab, heading in (("TracIn", "TracIn, step 24"), ("Entropy probe", "Entropy probe, step 24")):
            page.get_by_role("link", name=tab).click()
            expect(page.locator("h1")).to_have_text(heading)
        assert watched.errors == [] and watched.foreign_requests == []
    assert list(tmp_path.iterdir()) == []  # the runs lived in a temporary folder


def test_a_taken_port_is_left_alone_and_the_next_one_is_used(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "older", groups=1, steps=1)
    latest = write_run(tmp_path / "runs" / "newer", groups=1, steps=1)
    os.utime(latest / "summary.json", (4e9, 4e9))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with viewing("--no-open", "--port", str(port), folder=tmp_path) as (address, lines):
            assert f"port {port} is taken" in lines[0]
            used = int(re.search(r":(\d+)/", address)[1])  # type: ignore[index]
            assert used > port
            assert f"ssh -L {used}:localhost:{used}" in "\n".join(lines)
            runs = httpx.get(f"{address}api/runs").json()
            assert [run["name"] for run in runs["runs"]] == ["newer", "older"]
            assert runs["default"] == [runs["runs"][0]["id"]]  # the latest run is shown first


def test_another_host_needs_the_token_it_prints(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", groups=1, steps=1)
    with viewing(str(run), "--host", "0.0.0.0", "--port", "0", "--no-open", folder=tmp_path) as (address, _):
        port, token = re.search(r":(\d+)/\?token=(\S+)", address).groups()  # type: ignore[union-attr]
        local = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{local}/api/runs").status_code == 401
        with httpx.Client(base_url=local, follow_redirects=True) as client:
            assert client.get(f"/?token={token}").status_code == 200
            assert client.get("/api/runs").status_code == 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["view", "--runs-dir", "nothing-here"], "gradtrace view --demo"),
        (["view", "no-such-run"], "no run at no-such-run"),
        (["view", "."], "no run at .: the folder has no config.yaml"),
        (["counterfactual", "."], "is no run: it has no config.yaml"),
        (["view", "--demo", "--host", "host.invalid"], "no address of this machine"),
        (["report", "no-such-run"], "no run at no-such-run"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and "Traceback" not in error


def test_help_teaches_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("view", "report"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert f"gradtrace {command} runs/" in capsys.readouterr().out
