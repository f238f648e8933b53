"""Policy losses, one to a file. Importing this package registers them."""

from gradtrace.algorithms.losses import archer, cispo, gspo, ppo

__all__ = ["archer", "cispo", "gspo", "ppo"]
