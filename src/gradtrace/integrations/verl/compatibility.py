"""verl 0.9.1 beside newer packages than it knows."""

from __future__ import annotations

import importlib.util
import sys
import types
import warnings


def stand_in_for_trl_value_head() -> None:
    """verl 0.9.1, where it finds TRL installed, mends a class of it that TRL 1.x no longer has, and fails at that
    before any model is built. An empty class under the name satisfies it; nothing else uses the name."""
    name = "trl.experimental.ppo"
    if name in sys.modules or importlib.util.find_spec("trl") is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "experimental" is in the name already
        missing = importlib.util.find_spec(name) is None
    if missing:
        module = types.ModuleType(name)
        module.AutoModelForCausalLMWithValueHead = type(  # type: ignore[attr-defined]
            "AutoModelForCausalLMWithValueHead", (), {}
        )
        sys.modules[name] = module
