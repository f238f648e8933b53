"""The records of the instruments that ship, one module each, in the order in which runs list them."""

from __future__ import annotations

from typing import Any

# isort: off
from gradtrace.trace.kinds import entropy_trace, influence_trace, tracin, entropy_probe, blame, counterfactual

# isort: on
from gradtrace.trace.record import KINDS, load_installed_instruments

load_installed_instruments()

__all__ = [
    "blame",
    "counterfactual",
    "enabled_kinds",
    "entropy_probe",
    "entropy_trace",
    "influence_trace",
    "tracin",
]


def enabled_kinds(sections: Any) -> list[str]:
    """The instruments that a configuration turns on; it has a section under the name of each that it knows."""
    known = [record for name, record in KINDS.items() if hasattr(sections, name)]
    return [record.name for record in known if getattr(getattr(sections, record.name), record.knob)]
