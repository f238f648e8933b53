"""What can go wrong in attribution, said so that the reader knows what to change."""


class AttributionError(RuntimeError):
    """Attribution cannot give a true answer here. The message names the cause and the remedy."""
