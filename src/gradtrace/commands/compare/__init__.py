"""`gradtrace compare`: curves of several runs side by side."""
