"""All that calls observers: their order, the seconds of each, and what an error costs.

Before each collective hook all processes hear which instruments have failed in any of them; those sit out the rest of
the step everywhere. So no process waits for another that has given up.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from gradtrace.attribution.collectives import Ranks
from gradtrace.instruments.contract import Backward, Observer, OptimizerStep, Rows, Table


class Observers:
    """The observers of one process. `raising`: names of those whose errors end the run (`on_error=raise`); with several
    processes an error is raised where the table is written, since here the others would wait."""

    def __init__(self, ranks: Ranks, observers: Mapping[str, Observer], raising: Collection[str] = ()) -> None:
        self.ranks = ranks
        self.observers = dict(observers)
        self.raising = set(raising)
        self._planned: list[str] = []
        self._active: list[str] = []
        """Those of the planned ones that have failed in no process, as far as this one has heard."""
        self._failures: dict[str, str] = {}
        self._seconds: dict[str, float] = defaultdict(float)

    def __bool__(self) -> bool:
        """Whether any instrument observes the step under way."""
        return bool(self._active)

    def begin(self, plans: Mapping[str, Any]) -> None:
        """A step with these plans, the same in every process, begins."""
        self._planned = [name for name in self.observers if plans.get(name) is not None]
        self._active = list(self._planned)
        self._failures.clear()
        self._seconds.clear()
        for name in list(self._active):
            with self._watched(name):
                self.observers[name].begin(plans[name])

    def before_passes(self, update: OptimizerStep, rows: Rows) -> None:
        for name in self._agreed():
            with self._watched(name):
                self.observers[name].before_passes(update, rows)

    @contextmanager
    def around_backward(self, backward: Backward) -> Iterator[None]:
        with ExitStack() as stack:
            for name in self._active:
                if name not in self._failures:
                    stack.enter_context(self._around(name, backward))
            yield

    def before_step(self, update: OptimizerStep) -> None:
        for name in self._agreed():
            with self._watched(name):
                self.observers[name].before_step(update)

    def after_step(self, update: OptimizerStep, moved: bool) -> None:
        for name in self._agreed():
            with self._watched(name):
                self.observers[name].after_step(update, moved)

    def end(self) -> dict[str, Table]:
        """The tables of the instruments that had a plan."""
        tables = {}
        for name in self._agreed():
            with self._watched(name):
                tables[name] = self.observers[name].end()
        self._agreed()
        for name in self._planned:
            if name in self._failures:
                tables[name] = Table(failure=self._failures[name])
            tables[name].seconds = self._seconds[name]
        self._planned = self._active = []
        return tables

    def drop(self) -> None:
        """Every process gives the step up: there will be no tables of it. Not collective."""
        for name in self._active:
            self.observers[name].drop()
        self._planned = self._active = []

    def close(self) -> None:
        for observer in self.observers.values():
            observer.close()

    def _agreed(self) -> list[str]:
        """The instruments that have failed in no process. Collective."""
        if not self._active:
            return []
        for failures in self.ranks.gather(dict(self._failures)):
            for name, why in failures.items():
                self._failures.setdefault(name, why)
        for name in [name for name in self._active if name in self._failures]:
            self.observers[name].drop()
        self._active = [name for name in self._active if name not in self._failures]
        return self._active

    @contextmanager
    def _around(self, name: str, backward: Backward) -> Iterator[None]:
        stack = ExitStack()
        with self._watched(name):
            stack.enter_context(self.observers[name].around_backward(backward))
        try:
            yield
        except BaseException:  # the training's own
            stack.__exit__(*sys.exc_info())
            raise
        with self._watched(name):
            stack.close()

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        """Time what happens inside; an error becomes the instrument's failure in this step."""
        begin = time.perf_counter()
        try:
            yield
        except Exception as error:
            if name in self.raising and self.ranks.size == 1:
                raise
            where = f"rank {self.ranks.place}: " if self.ranks.size > 1 else ""
            self._failures.setdefault(name, f"{where}{error}")
        finally:
            self._seconds[name] += time.perf_counter() - begin
