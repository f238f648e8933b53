"""`python -m gradtrace.integrations.verl.cpu WORKERS`: the settings of a verl job on CPU, as words of its command."""

from __future__ import annotations

import sys

from gradtrace.integrations.verl import cpu
from gradtrace.integrations.verl.launch.translate import hydra_value

if __name__ == "__main__":
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    print(*(f"{key}={hydra_value(value)}" for key, value in cpu.settings(workers).items()))
