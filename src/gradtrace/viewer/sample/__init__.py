"""Sample runs for `gradtrace view --demo`, tests and pictures: written by the real writers, but not trained."""

from gradtrace.viewer.sample.run import SampleRun, write_sample_runs

__all__ = ["SampleRun", "write_sample_runs"]
