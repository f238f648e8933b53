"""gradtrace inside verl 0.9: the instruments on Ray + FSDP2, in a job of yours or by `gradtrace train engine=verl`.

In a job of your own, name this package in one environment variable and ask for what you want:

    VERL_USE_EXTERNAL_MODULES=gradtrace.integrations.verl python -m verl.trainer.main_ppo … \\
        +gradtrace.influence_trace.enable=true

Without `+gradtrace.…` nothing changes. GRADTRACE_ALGORITHM_PATH=my_losses.py brings losses and advantages of your
own. See docs/verl.md.
"""

import sys

ALGORITHMS = "GRADTRACE_ALGORITHM_PATH"
"""Environment variable: a file that registers policy losses and advantages, imported in every process of a job."""
PREFIX = "gradtrace_"
"""Our losses and estimators in verl's registries begin with this."""

# verl imports this package at the end of its own import. A process without verl (`gradtrace train --cfg`) must not
# pay for importing it.
if "verl" in sys.modules:
    from gradtrace.integrations.verl import plugin  # noqa: F401  (registers)
