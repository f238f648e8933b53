"""Connections that begin a request and never end it do not block the viewer."""

from __future__ import annotations

import http.client
import socket
import threading
from pathlib import Path

import pytest
import uvicorn

from gradtrace.commands.view import bind
from gradtrace.trace.run_files import RunFiles, run_of_traces
from gradtrace.viewer import security
from gradtrace.viewer.catalog import RunCatalog
from gradtrace.viewer.security import access_for
from gradtrace.viewer.server import create_app


def status(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


@pytest.mark.parametrize("beginning", [b"", b"GET / HTTP/1.1\r\nHost: 127", b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET"])
def test_half_open_connections_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beginning: bytes) -> None:
    monkeypatch.setattr(security, "HEADER_SECONDS", 0.3)
    with RunFiles(tmp_path / "run") as files:
        files.write_config("trainer: {total_steps: 1}\n")
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        create_app(RunCatalog([tmp_path / "run"], None), access_for("127.0.0.1", port, None)),
        log_level="critical",
        http=security.ImpatientProtocol,
        limit_concurrency=20,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    held = []
    try:
        while status(port) != 200:  # the server starts
            pass
        for _ in range(30):
            held.append(socket.create_connection(("127.0.0.1", port)))
            held[-1].sendall(beginning)
        while status(port) != 200:  # pytest's own limit ends a test that fails
            pass
        assert all(connection.recv(1 << 16) is not None for connection in held)
    finally:
        for connection in held:
            connection.close()
        server.should_exit = True
        thread.join()


def test_folder_of_traces_stands_for_its_run() -> None:
    for path in ("runs/demo", "runs/demo/influence_trace", "runs/demo/entropy_trace/steps"):
        assert run_of_traces(Path(path)) == Path("runs/demo")
