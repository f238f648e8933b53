"""`gradtrace doctor --device`: what a person with a new machine runs first."""
