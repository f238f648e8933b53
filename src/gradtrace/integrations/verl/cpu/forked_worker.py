"""What is started in place of Python: asks `fork_server` for a fork that runs the program, and stands for it while it
lives.

Without a server it becomes Python itself. It is started by its path and imports nothing of ours, since starting quickly
is its purpose.
"""

import json
import os
import signal
import socket
import sys

ADDRESS = "GRADTRACE_FORK_SERVER"
PYTHON = (sys.executable, "-I", "-S", __file__)
"""How it is started."""


def main() -> None:
    words = sys.argv[1:]
    request = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
    # Whoever ends this process before it knows its fork must not leave that one behind.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.environ[ADDRESS])
            socket.send_fds(connection, [b" "], [0, 1, 2])
            connection.sendall(json.dumps(request).encode())
            connection.shutdown(socket.SHUT_WR)
            answers = connection.makefile()
            if fork := answers.readline():
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGTERM, lambda *_: os.kill(int(fork), signal.SIGTERM))
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
                sys.exit(int(answers.read() or 1))  # there is no more to read when the fork has ended
    except (KeyError, OSError):
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main()
