"""Influence trace: which tokens pushed towards the accepted answers."""
