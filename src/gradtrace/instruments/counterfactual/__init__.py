"""What a token was worth: ΔV, the change of the expected reward when it was written, by sampled continuations."""
