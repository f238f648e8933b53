"""Advantage estimators, one to a file. Importing this package registers them."""

from gradtrace.algorithms.advantages import gae, grpo, reinforce_plus_plus, rloo, turn_rloo

__all__ = ["gae", "grpo", "reinforce_plus_plus", "rloo", "turn_rloo"]
