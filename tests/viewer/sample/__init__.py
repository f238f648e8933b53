"""Runs for tests, benchmarks and what no short real run shows: written by the real writers, with drawn numbers."""

from tests.viewer.sample.run import SampleRun

__all__ = ["SampleRun"]
