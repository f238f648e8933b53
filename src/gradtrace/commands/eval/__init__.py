"""How good is a model at a task: sampled responses, judged, with intervals; and comparisons between models."""
