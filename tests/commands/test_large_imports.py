"""Large packages are imported without the garbage collector, once."""

from __future__ import annotations

import gc
import sys

import pytest

from gradtrace.terminal import large_imports


@pytest.mark.parametrize("is_early", [True, False])
def test_the_collector_rests_while_packages_are_imported_and_not_later(
    monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", sys)
    if is_early:
        monkeypatch.delitem(sys.modules, "transformers")
    frozen = gc.get_freeze_count()
    kept = [[number] for number in range(1000)]
    with pytest.raises(ImportError), large_imports():
        assert gc.isenabled() != is_early
        raise ImportError
    assert gc.isenabled() and (gc.get_freeze_count() - frozen >= len(kept)) == is_early
