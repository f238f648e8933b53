"""All instruments: ours in the order in which runs list them, then those of installed packages.

A package names its module under the entry point `gradtrace.instruments`; importing that module calls `register`. The
configuration, its documentation, the hosts, the reader of traces and the viewer learn of an instrument from here.
"""

from __future__ import annotations

import dataclasses
import logging
import pkgutil
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import Instrument
from gradtrace.trace.columns import register_instrument

logger = logging.getLogger(__name__)
_INSTRUMENTS: dict[str, Instrument] = {}


def register(instrument: Instrument) -> Instrument:
    """Make an instrument known to everything. The same one again changes nothing."""
    known = _INSTRUMENTS.get(instrument.name, instrument)
    if known is not instrument and known.record != instrument.record:
        raise GradtraceError(f"there is an instrument {instrument.name!r} already; take another name")
    if instrument.record is not None:
        register_instrument(instrument.record)
    _INSTRUMENTS[instrument.name] = instrument
    return instrument


def later(path: str) -> Callable[..., Any]:
    """The class `module:Class`, which is imported when it is first called: what registers it imports no torch."""
    return lambda *args: pkgutil.resolve_name(path)(*args)


def forget(name: str) -> None:
    """Take an instrument out again, as tests do."""
    _INSTRUMENTS.pop(name, None)


def instruments() -> dict[str, Instrument]:
    return dict(_INSTRUMENTS)


def in_order() -> list[Instrument]:
    """Those that select responses first: the others do not see what is left out."""
    return sorted(_INSTRUMENTS.values(), key=lambda one: not one.selects)


def enabled(sections: Any) -> dict[str, Instrument]:
    """The instruments that a configuration turns on. `sections` has their settings as attributes, or not at all."""
    return {
        one.name: one
        for one in in_order()
        if (settings := getattr(sections, one.key, None)) is not None and one.is_on(settings)
    }


def check_run(sections: Any, prefix: str, responses: int, dropout: float = 0.0) -> None:
    """Raise for settings of instruments that do not fit a run with so many responses to a prompt, and with this dropout
    in its adapters."""
    for one in enabled(sections).values():
        settings = getattr(sections, one.key)
        if hasattr(settings, "check_run"):
            settings.check_run(f"{prefix}{one.key}", responses, dropout)


def section_fields() -> list[tuple[str, Any, Any]]:
    """(key, type, field) of every instrument's section, for `dataclasses.make_dataclass`."""
    found: list[tuple[str, Any, Any]] = []
    for one in _INSTRUMENTS.values():
        if isinstance(one.settings, type):
            found.append((one.key, one.settings, dataclasses.field(default_factory=one.settings)))
        else:
            found.append((one.key, type(one.default()), one.settings))
    return found


def load_installed() -> None:
    """Import the modules that installed packages name."""
    for entry in entry_points(group="gradtrace.instruments"):
        try:
            entry.load()
        except Exception as error:  # another package's mistake must not take our commands away
            logger.warning("instrument %s (%s) cannot be loaded: %s", entry.name, entry.value, error)
