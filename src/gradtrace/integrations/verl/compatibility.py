"""verl 0.9.1 beside newer packages than it knows."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path


def stand_in_for_trl_value_head() -> None:
    """verl 0.9.1, where it finds TRL installed, mends a class of it that TRL 1.x no longer has, and fails at that
    before any model is built. An empty class under the name satisfies it; nothing else uses the name."""
    name = "trl.experimental.ppo"
    spec = importlib.util.find_spec("trl")
    if name in sys.modules or spec is None or not spec.submodule_search_locations:
        return
    folder = Path(spec.submodule_search_locations[0]) / "experimental" / "ppo"
    has_it = folder.is_dir() or folder.with_suffix(".py").is_file()
    if has_it or int(importlib.metadata.version("trl").split(".")[0]) < 1:
        return
    module = types.ModuleType(name)
    head = type("AutoModelForCausalLMWithValueHead", (), {})
    module.AutoModelForCausalLMWithValueHead = head  # type: ignore[attr-defined]
    sys.modules[name] = module
