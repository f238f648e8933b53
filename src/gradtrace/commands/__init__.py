"""Commands that are one file each; larger ones are packages of their own (ablate, compare, evaluation, probe)."""
