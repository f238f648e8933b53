"""RL post-training for language models that shows its work."""

from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "EntropyProbe": "gradtrace.instruments.entropy_probe",
    "InfluenceTracer": "gradtrace.attribution",
    "TracInSelector": "gradtrace.instruments.tracin.selector",
    "TraceWriter": "gradtrace.trace.writer",
    "counterfactual": "gradtrace.instruments.counterfactual.measure",
    "open_run": "gradtrace.runs",
    "record": "gradtrace.instruments.own_loop",
    "show": "gradtrace.commands.report",
    "verify": "gradtrace.instruments.verify.function",
}
__all__ = [
    "EntropyProbe",
    "InfluenceTracer",
    "TracInSelector",
    "TraceWriter",
    "__version__",
    "counterfactual",
    "open_run",
    "record",
    "show",
    "verify",
]


def __dir__() -> list[str]:
    """The public names, so that shells and notebooks complete them before their first use."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Public names are imported on first use: `import gradtrace` and `gradtrace --help` stay instant."""
    if name not in _LAZY:
        raise AttributeError(f"module 'gradtrace' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
