"""Advantage estimators, one to a file. Importing this package registers them."""

from gradtrace.algorithms.advantages import grpo as grpo
