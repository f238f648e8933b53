"""TRL: two lines in a script that has a `GRPOTrainer`.

    trainer = GRPOTrainer(model=…, reward_funcs=…, args=GRPOConfig(…), train_dataset=…)
    gradtrace.integrations.trl.attach(trainer, run_dir="runs/mine")
    trainer.train()                                   # then: gradtrace view runs/mine

or `TracedGRPOTrainer(…, run_dir="runs/mine")` in its place. Training is unchanged to the last bit.
"""

from __future__ import annotations

from gradtrace.errors import GradtraceError, install

try:
    import trl  # noqa: F401
except ImportError:
    raise GradtraceError(f"gradtrace.integrations.trl needs TRL: {install('trl')}") from None

from gradtrace.integrations.trl.settings import TraceSettings
from gradtrace.integrations.trl.tracing import TracedGRPOTrainer, attach

__all__ = ["TraceSettings", "TracedGRPOTrainer", "attach"]
