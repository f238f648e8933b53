"""Policy losses, one to a file, and the critic's. Importing this package registers the policy losses."""

from gradtrace.algorithms.losses import archer, cispo, gspo, ppo, value

__all__ = ["archer", "cispo", "gspo", "ppo", "value"]
