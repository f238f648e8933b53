"""Findings: what is wrong with a run while it runs, in a sentence, with evidence, culprits and how sure we are.

A detector is one file here: a function of the step that has just ended and of the metrics before it.
"""
