"""The instruments: each answers one question about training, on top of the attribution engine and the trace files.

Importing this package makes them known to everything: ours in the order in which runs list them, then those of
installed packages. It imports no torch.
"""

from __future__ import annotations

# isort: off
from gradtrace.instruments import entropy_trace as entropy_trace
from gradtrace.instruments import influence as influence
from gradtrace.instruments import tracin as tracin
from gradtrace.instruments import entropy_probe as entropy_probe
from gradtrace.instruments import blame as blame
from gradtrace.instruments import mismatch as mismatch
from gradtrace.instruments import counterfactual as counterfactual
from gradtrace.instruments.registry import load_installed

# isort: on
load_installed()
