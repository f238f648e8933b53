"""RL post-training for language models that shows its work."""

__version__ = "0.1.0"
