"""How this program is called here, so that a command which it prints can be pasted; and how it starts quickly."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
from collections.abc import Iterator

NAME = "gradtrace"


def command() -> str:
    """`gradtrace` where the shell finds this installation under that name, else the path that finds it."""
    own = os.path.join(os.path.dirname(sys.executable), NAME)
    found = shutil.which(NAME)
    if not os.path.isfile(own) or (found and os.path.realpath(found) == os.path.realpath(own)):
        return NAME
    here = os.path.relpath(own)
    return own if here.startswith("..") else here


@contextlib.contextmanager
def large_imports() -> Iterator[None]:
    """Import torch and transformers without the garbage collector, which would look again and again at a million
    objects that stay: a fifth of the time. Later collections leave them out as well."""
    if "transformers" in sys.modules:  # too late, and by now there may be objects that do not stay
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
