"""The records of the instruments that ship, one module each, in the order in which runs list them."""

from gradtrace.trace.kinds import entropy_trace, influence_trace, tracin, entropy_probe  # noqa: I001
from gradtrace.trace.record import load_installed_instruments

load_installed_instruments()

__all__ = ["entropy_probe", "entropy_trace", "influence_trace", "tracin"]
