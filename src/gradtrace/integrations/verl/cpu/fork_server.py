"""One process that has imported what verl needs, of which the workers of a job on CPU are copies.

A job has ten workers, and each would take five seconds of a core to import the same packages: most of what a start,
and every restart, takes on a small machine. Ray starts `forked_worker` instead, which asks here for a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from gradtrace.integrations.verl.cpu.forked_worker import ADDRESS, PYTHON

PACKAGES = (
    *("torch._dynamo", "torch.distributed.checkpoint", "tensordict", "accelerate", "peft", "datasets"),
    *("transformers.modeling_utils", "transformers.models.auto", "hydra", "fastapi", "aiohttp"),
    *("gradtrace.policy.loss", "gradtrace.rollout.sampler", "gradtrace.instruments.findings.watch"),
)
"""Where the time goes when a worker imports verl. Ray and what imports it are not here: Ray reads the environment of a
process once, when it is imported, and each worker has its own."""
ONE_THREAD = {
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""pyarrow's allocator and numpy's products have threads otherwise; a process that forks should have none but its own.
torch has as many in a fork as its own environment says (see `become`)."""
EXECUTABLE = "+ray_kwargs.ray_init.runtime_env.py_executable"


@contextlib.contextmanager
def fork_server(environment: dict[str, str], log: IO[bytes]) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """A server for as long as the job lives. Yields the settings and the environment by which Ray finds it."""
    if sys.platform != "linux":
        yield {}, {}
        return
    with tempfile.TemporaryDirectory(prefix="gradtrace") as folder:
        address = str(Path(folder) / "workers")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)  # from now on one may ask; the server answers when it is ready
            server = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, **ONE_THREAD},
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C is for the launcher
            )
        try:
            yield {EXECUTABLE: shlex.join(PYTHON)}, {ADDRESS: address}
        finally:
            server.stdin.close()  # type: ignore[union-attr]  # by which it ends, also if the launcher is killed
            server.wait()


def wait_for_request(listener: socket.socket) -> dict[str, Any]:
    """Returns in every fork, with what it is to be; never in the server."""
    with listener:
        for name in PACKAGES:
            importlib.import_module(name)
        if len(os.listdir("/proc/self/task")) > 1:
            raise SystemExit("gradtrace: a package has started a thread, so workers are not forked")
        gc.collect()
        gc.freeze()  # what is never collected stays shared
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers that end leave nothing behind
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                raise SystemExit
            connection, _ = listener.accept()
            with connection:
                _, files, _, _ = socket.recv_fds(connection, 1, 3)
                request = json.load(connection.makefile())
                if os.fork() == 0:
                    os.setpgid(0, 0)  # Ray ends the whole process group of a worker that has died
                    connection.sendall(f"{os.getpid()}\n".encode())
                    return {**request, "files": files, "connection": connection.detach()}
                for file in files:
                    os.close(file)


def become(request: dict[str, Any]) -> None:
    """Run the program of the request in this process, as Python would."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for place, file in enumerate(request["files"]):
        os.dup2(file, place)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    import numpy
    import torch

    numpy.random.seed()  # Python's own generator does so by itself after a fork
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    words = list(request["words"])
    sys.orig_argv = [sys.executable, *words]
    while words[0] in ("-u", "-W"):
        if words.pop(0) == "-W":
            warnings.simplefilter(words.pop(0))
    code: Any = 1
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], request["folder"]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = words, os.path.dirname(words[0])
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        os.write(request["connection"], str(code).encode())  # it stays open until the process has ended


if __name__ == "__main__":
    become(wait_for_request(socket.socket(fileno=int(sys.argv[1]))))
