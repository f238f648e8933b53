"""How this program is called here, so that a command which it prints can be pasted."""

from __future__ import annotations

import os
import shutil
import sys

NAME = "gradtrace"


def command() -> str:
    """`gradtrace` where the shell finds this installation under that name, else the path that finds it."""
    own = os.path.join(os.path.dirname(sys.executable), NAME)
    found = shutil.which(NAME)
    if not os.path.isfile(own) or (found and os.path.realpath(found) == os.path.realpath(own)):
        return NAME
    here = os.path.relpath(own)
    return own if here.startswith("..") else here
