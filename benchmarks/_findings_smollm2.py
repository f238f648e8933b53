"""The fault bench's runs of a real model: SmolLM2-135M on countdown, as its recipe trains it, with two of the faults.

These are few and short: a look at whether findings hold beyond the demo, apart from the bench's own figures. The steps
before a fault begins are the clean ones.
"""

from __future__ import annotations

import dataclasses

from benchmarks._findings_faults import FAULTS, force_token_at
from benchmarks._validity_states import countdown_overrides

STEPS, SEEDS = 10, (2,)
ROW, PLACE, UNTRAINED = 7, 3, 3
"""`<repo_name>`, a token of the model's pre-training that no chat holds, is put into this response at this place."""

SMOLLM2_FAULTS = {
    "SmolLM2, learning rate × 30": FAULTS["learning rate × 30"],
    "SmolLM2, untrained token": dataclasses.replace(
        FAULTS["untrained token"],
        spoil=lambda trainer, batch: force_token_at(batch, ROW, PLACE, UNTRAINED),
        is_culprit=lambda culprit: (culprit["row"], culprit["position"]) == (ROW, PLACE),
    ),
}


def settings() -> tuple[str, ...]:
    """The recipe with findings and blame as they come, 4 prompts × 8 responses, no other traces."""
    return (
        *(*countdown_overrides(), "rollout.n=8", "trainer.blame.enable=true"),
        *("trainer.checkpoint.every=0", "trainer.samples_every=0", "trainer.cpu_threads=1"),
    )
