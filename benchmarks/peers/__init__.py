"""Other people's tools on the same model and batch as ours: equal numbers first, then time and memory.

    python -m benchmarks.peers.NAME [--quick]

The GRPO step against TRL is benchmarks.trainer.
"""
