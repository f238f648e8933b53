"""What a token was worth: ΔV, the change of the expected reward when it was written, by sampled continuations."""

from gradtrace.instruments.counterfactual.function import Counterfactual, counterfactual

__all__ = ["Counterfactual", "counterfactual"]
