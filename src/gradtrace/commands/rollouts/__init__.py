"""Rollouts that others made, and stored rollouts scored anew."""
