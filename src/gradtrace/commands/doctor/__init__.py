"""`gradtrace doctor`: what a person with a new machine, or with a run that looks wrong, asks first."""
