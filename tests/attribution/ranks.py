"""Two gloo processes for a test, forked from a server that has imported what the test imports."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from pathlib import Path

import torch.multiprocessing as mp


def on_two_ranks(worker: Callable[[int, int, str], None], folder: Path) -> None:
    """`worker(rank, port, folder)` on both."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.set_forkserver_preload([worker.__module__])
    mp.start_processes(worker, args=(port, str(folder)), nprocs=2, start_method="forkserver")
