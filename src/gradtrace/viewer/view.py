"""Serve runs to the browser; `gradtrace view` (commands/view.py) says how it is used."""

from __future__ import annotations

import argparse
import getpass
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from gradtrace.errors import GradtraceError
from gradtrace.trace.places import run_of_traces

if TYPE_CHECKING:
    from gradtrace.viewer.resample import Sampling

DEFAULT_PORT = 6180
PORTS_TO_TRY = 50
DEMO = Path(__file__).parent / "demo"
"""The runs that scripts/record_demo recorded."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="run folders or names in --runs-dir; default: the latest")
    add("--runs-dir", default="runs", help="folder whose runs are listed on the page (default: runs)")
    add("--host", default="127.0.0.1", help="address to serve; other than loopback needs the token")
    add("--port", type=int, default=DEFAULT_PORT, help=f"default {DEFAULT_PORT}; the next free one if taken")
    add("--token", help="ask visitors for this token; made up when --host is not loopback")
    add("--no-open", action="store_true", help="do not open the browser")
    add("--demo", action="store_true", help="show the recorded runs that ship with the package")


def run(args: argparse.Namespace, sampling: Sampling | None = None) -> int:
    """`sampling`: offers "resample from here" on the runs that it may sample from."""
    if not args.demo:
        return serve(args, sampling)
    with tempfile.TemporaryDirectory(prefix="gradtrace-demo-") as folder:
        args.runs, args.runs_dir = [str(unpack_demo(Path(folder))[0])], folder
        return serve(args)


def unpack_demo(folder: Path) -> list[Path]:
    """Copies of the recorded runs, the traced one first. Installing and checking out files loses their order in
    time, by which a viewer tells a run that has ended from one that was resumed: the summaries are made the newest."""
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    runs = sorted(folder.iterdir())
    for run in runs:
        (run / "summary.json").touch()
    return runs


def serve(args: argparse.Namespace, sampling: Sampling | None = None) -> int:
    """Serve the runs until Ctrl-C."""
    import uvicorn

    from gradtrace.viewer.catalog import RunCatalog
    from gradtrace.viewer.protocol import ImpatientProtocol
    from gradtrace.viewer.security import access_for
    from gradtrace.viewer.server import create_app

    runs_dir = Path(args.runs_dir)
    catalog = RunCatalog(chosen_runs(args.runs, runs_dir), runs_dir if runs_dir.is_dir() else None)
    for line in catalog.skipped:
        print(f"left out: {line}", file=sys.stderr)
    listener = bind(args.host, args.port)
    port = listener.getsockname()[1]
    if port != args.port:
        print(f"port {args.port} is taken, using {port}")
    access = access_for(args.host, port, args.token, posts=sampling is not None)
    url = address(args.host, port, access.token)
    print(f"gradtrace view: {url}")
    print(
        f"from another machine: ssh -L {port}:localhost:{port} {getpass.getuser()}@{socket.gethostname()}",
        end="",
    )
    print(f"   then open {address('localhost', port, access.token)}")
    print("Ctrl-C ends it.", flush=True)
    if not args.no_open:
        threading.Thread(target=open_browser, args=(url, port), daemon=True).start()
    config = uvicorn.Config(
        create_app(catalog, access, sampling),
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        http=ImpatientProtocol,
        timeout_keep_alive=20,
        limit_concurrency=256,
        h11_max_incomplete_event_size=16 * 1024,
    )
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def chosen_runs(names: list[str], runs_dir: Path) -> list[Path]:
    """The runs to show first: those named (a path, or a name in `runs_dir`), else the latest."""
    from gradtrace.viewer.catalog import is_run, latest_run

    if not names:
        latest = latest_run(runs_dir)
        if latest is None:
            raise GradtraceError(
                f"no run in {runs_dir}/ yet. `gradtrace train` makes one; `gradtrace view --demo` shows one; "
                "--runs-dir looks elsewhere"
            )
        return [latest]
    paths = []
    for name in names:
        candidates = [run_of_traces(Path(name)), run_of_traces(runs_dir / name)]
        found = next((path for path in candidates if is_run(path)), None)
        if found is None:
            there = ", ".join(sorted(folder.name for folder in runs_dir.glob("*") if is_run(folder))[:20])
            where = f"no run at {candidates[0]} nor at {candidates[1]}"
            if candidates[0].is_dir():
                where = f"no run at {candidates[0]}: the folder has no config.yaml, no metrics.jsonl and no traces"
            raise GradtraceError(f"{where}; {runs_dir} has {there or 'none (`gradtrace train` makes one)'}")
        paths.append(found)
    return paths


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on `port`, or on the next free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in range(port, min(port + PORTS_TO_TRY, 65536)) if port else (0,):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
        except socket.gaierror as error:
            raise GradtraceError(f"{host} is no address of this machine: {error.strerror}") from error
        except PermissionError as error:
            raise GradtraceError(f"port {candidate} needs privileges; take one above 1023 with --port") from error
        except OSError as error:
            listener.close()
            if "assign" in str(error):
                raise GradtraceError(f"{host} is no address of this machine") from error
            continue
        listener.listen(128)
        return listener
    raise GradtraceError(f"ports {port} to {port + PORTS_TO_TRY - 1} are all taken; choose one with --port")


def address(host: str, port: int, token: str | None) -> str:
    """The link to open. Bound to every interface, the machine's name is what others can reach."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    name = f"[{name}]" if ":" in name else name
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def open_browser(url: str, port: int) -> None:
    """Open the browser once the server answers, and only where one can appear (not a text browser in this terminal)."""
    shows_windows = not sys.platform.startswith("linux") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    )
    if not shows_windows:
        return
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    webbrowser.open(url)
