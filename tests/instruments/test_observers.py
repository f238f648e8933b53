"""What an observer's error costs: its table of this step, with the reason, and nothing else."""

from __future__ import annotations

import pytest
import torch

from gradtrace.attribution.collectives import Ranks
from gradtrace.instruments.contract import Backward, Observer, OptimizerStep, Rows
from gradtrace.instruments.observers import Observers

UPDATE = OptimizerStep(step=1, epoch=0, mini_batch=0, number=0, rows=torch.arange(2))
ROWS = Rows(torch.arange(2), torch.ones(2, 3, dtype=torch.bool), torch.ones(2).double(), lambda name: None)
BACKWARD = Backward(UPDATE, 0, torch.arange(2), torch.ones(2), torch.arange(2), torch.ones(2, 3, dtype=torch.bool))
HOOKS = ("begin", "before_passes", "around_backward", "before_step", "after_step", "end")


class Failing(Observer):
    """Fails in one hook; `dropped` counts how often it was taken off the model."""

    def __init__(self, hook: str) -> None:
        self.dropped = 0

        def fail(*arguments: object) -> None:
            raise RuntimeError(f"no {hook}")

        setattr(self, hook, fail)

    def drop(self) -> None:
        self.dropped += 1


def whole_step(observers: Observers) -> dict[str, str]:
    """Instrument → why it has no table of a step of two mini-batches."""
    observers.begin({"failing": True, "sound": True})
    for number in range(2):
        observers.before_passes(UPDATE, ROWS)
        with observers.around_backward(BACKWARD):
            pass
        observers.before_step(UPDATE)
        observers.after_step(UPDATE, moved=number == 0)
    return {name: table.failure for name, table in observers.end().items()}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_failure_in_any_hook_reaches_the_table_and_spares_the_others(hook: str) -> None:
    failing = Failing(hook)
    observers = Observers(Ranks(), {"failing": failing, "sound": Observer()})
    assert whole_step(observers) == {"failing": f"no {hook}", "sound": ""}
    assert failing.dropped == 1 and not observers
    assert whole_step(observers)["failing"] == f"no {hook}", "the next step is tried again"


@pytest.mark.parametrize("hook", HOOKS)
def test_with_on_error_raise_it_ends_the_run(hook: str) -> None:
    observers = Observers(Ranks(), {"failing": Failing(hook)}, raising=["failing"])
    with pytest.raises(RuntimeError, match=f"no {hook}"):
        whole_step(observers)
