"""Ablation: one shared rollout, scored with every combination of settings of the influence trace."""
