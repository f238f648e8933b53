"""Blame: the squared norm of a step's gradient, shared out exactly to responses and tokens."""
