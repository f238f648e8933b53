"""Entropy trace: entropy and log-prob of every token of a rollout."""
