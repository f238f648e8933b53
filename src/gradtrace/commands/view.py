"""Look at a run in the browser: curves, prompt groups, token heat maps of entropy and influence, and, where the run has
them, TracIn's scores, blame, the entropy probe and counterfactual values.

    gradtrace view                      the latest run in ./runs, live while it is still training
    gradtrace view runs/a runs/b        compare runs; every other run in ./runs can be added on the page
    gradtrace view ablations/demo       the table of an ablation (a probe's folder works as well)
    gradtrace view --demo               two short recorded runs of the demo, no training needed
    gradtrace view runs/a --resample    load its checkpoint: click a token and sample from there
    gradtrace view --no-open --port 7007

Works offline and serves this machine only. On a remote machine, run it there and use the printed `ssh -L` line
on your own. To serve other machines directly name an address; visitors then need the token in the printed link:

    gradtrace view --host 0.0.0.0

With --resample the page writes into the run (RUN/counterfactual), as `gradtrace counterfactual` does. KEY=VALUE are
then settings of the run; a reward in a file of its own is executed only if it is named so (reward.path=FILE:FUNCTION).
"""

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

from gradtrace import viewer
from gradtrace.errors import GradtraceError
from gradtrace.terminal import no_foreign_bars
from gradtrace.viewer.catalog import chosen_runs

if TYPE_CHECKING:
    from gradtrace.commands.resampling import Resampler
    from gradtrace.viewer.counterfactual import Progress, Request, Sampling


DEFAULT_PORT = 6180
PORTS_TO_TRY = 50
DEMO = Path(viewer.__file__).parent / "demo"
"""The runs that scripts/record_demo recorded."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="run folders or names in --runs-dir; default: the latest")
    add("--runs-dir", type=Path, default=Path("runs"), help="folder whose runs are listed on the page (default: runs)")
    add("--host", default="127.0.0.1", help="address to serve; other than loopback needs the token")
    add("--port", type=int, default=DEFAULT_PORT, help=f"default {DEFAULT_PORT}; the next free one if taken")
    add("--token", help="ask visitors for this token; made up when --host is not loopback")
    add("--no-open", action="store_true", help="do not open the browser")
    add("--demo", action="store_true", help="show the recorded runs that ship with the package")
    add("--resample", action="store_true", help="offer to sample continuations from a token of these runs")


def run(args: argparse.Namespace) -> int:
    overrides = [word for word in args.runs if "=" in word]
    args.runs = [word for word in args.runs if "=" not in word]
    if args.resample:
        if args.demo:
            raise GradtraceError(
                "--demo shows recorded runs, which have no checkpoints to sample from: leave out --resample"
            )
        no_foreign_bars()
        runs = [path.resolve() for path in chosen_runs(args.runs, args.runs_dir)]
        return serve(args, LiveSampling(runs, overrides))
    if overrides:
        raise GradtraceError(f"{overrides[0]}: settings of a run belong to --resample")
    if not args.demo:
        return serve(args)
    with tempfile.TemporaryDirectory(prefix="gradtrace-demo-") as folder:
        args.runs_dir = Path(folder)
        args.runs = [str(unpack_demo(args.runs_dir)[0])]
        return serve(args)


class LiveSampling:
    """The model behind "resample from here"; see `gradtrace.viewer.counterfactual.Sampling`."""

    def __init__(self, runs: list[Path], overrides: list[str] | None = None) -> None:
        """Load the latest weights of the first run at once: what is wrong is said before the page opens."""
        from gradtrace.commands.resampling import Resampler

        self._resamplers: dict[Path, Resampler] = {run: Resampler(run, overrides) for run in runs}
        for resampler in list(self._resamplers.values())[:1]:
            resampler.load(resampler.nearest((resampler.steps() or [1])[-1]))

    def runs(self) -> list[Path]:
        return list(self._resamplers)

    def resample(self, request: Request, most_tokens: int, progress: Progress) -> None:
        """k continuations from before and from after a token, stored as the command's are."""
        from gradtrace.instruments.counterfactual.measure import choose

        resampler = self._resamplers[request.run]
        source = resampler.group(request.step, request.group)
        limit = resampler.settings(request.step, source)["max_new_tokens"]
        if request.k * limit > most_tokens:
            raise GradtraceError(f"{request.k} continuations of up to {limit} tokens are too many for a page: lower k")
        with resampler.writing() as writer:
            found = resampler.stored(request.step, source)
            continuations = resampler.continuations(request.step, source)
            group = found or resampler.begin(request.step, source, continuations)
            measurement = group.measurement
            measurement.measure(choose(str(request.position), measurement, source.clues, [request.response]))
            stretches = measurement.stretches()
            plan = stretches.plan(0, at_least=0)
            ends = (request.position, request.position + 1)
            nodes = [measurement.tree.node(request.response, length) for length in ends]
            plan[[node for node in nodes if stretches.leaving[node] > 0]] = request.k
            if measurement.measured[0] and not stretches.count[0] and stretches.leaving[0] > 0:
                plan[0] = max(plan[0], request.k)  # V of the prompt stands on the page as well
            progress(0, int(plan.sum()))
            if plan.any():
                continuations.extend(measurement, plan, progress)
            resampler.save(writer, request.step, group)


def unpack_demo(folder: Path) -> list[Path]:
    """Copies of the recorded runs, the traced one first. Installing and checking out files loses their order in
    time, by which a viewer tells a run that has ended from one that was resumed: the summaries are made the newest."""
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    runs = sorted(folder.iterdir())
    for run in runs:
        (run / "summary.json").touch()
    return runs


def serve(args: argparse.Namespace, sampling: Sampling | None = None) -> int:
    """Serve the runs until Ctrl-C. `sampling`: offers "resample from here" on the runs that it may sample from."""
    import uvicorn

    from gradtrace.viewer.catalog import RunCatalog
    from gradtrace.viewer.security import ImpatientProtocol, access_for
    from gradtrace.viewer.server import create_app

    catalog = RunCatalog(chosen_runs(args.runs, args.runs_dir), args.runs_dir if args.runs_dir.is_dir() else None)
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
