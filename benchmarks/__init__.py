"""Benchmarks: each module measures both sides in one run and prints one JSON line of ratios.

python -m benchmarks.rollout --quick     one of them, under a minute
python -m benchmarks                     all of them; rewrites the table in docs/benchmarks.md
"""
