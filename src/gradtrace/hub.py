"""Models by name: whether the model hub can be asked for one, and what to say where it cannot."""

from __future__ import annotations

import socket
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants

from gradtrace.errors import GradtraceError


def is_out_of_reach(path: str | Path) -> bool:
    """Whether this is no folder and the hub cannot be asked for it. What was downloaded before can still be loaded by
    `local_files_only`; without that, transformers would ask again and again for a minute."""
    return not Path(path).is_dir() and not _has_an_address(constants.ENDPOINT)


@cache
def _has_an_address(endpoint: str) -> bool:
    if getproxies():  # a proxy looks addresses up, not this machine
        return True
    try:
        socket.getaddrinfo(urlsplit(endpoint).hostname, 443)
    except OSError:
        return False
    return True


def not_loaded(path: str | Path, key: str, what: str, error: Exception) -> GradtraceError:
    """Why `what` of the model that `key` names cannot be loaded, and what to do."""
    if not is_out_of_reach(path):
        return GradtraceError(f"{key}={path}: the {what} cannot be loaded. {error}")
    return GradtraceError(
        f"{key}={path}: there is no such folder ({Path(path).absolute()}), the model hub ({constants.ENDPOINT}) cannot "
        "be reached from this machine, and nothing of that name was downloaded before. Give the folder of a model; "
        "scripts/get_smollm2 makes models/SmolLM2-135M-Instruct."
    )
