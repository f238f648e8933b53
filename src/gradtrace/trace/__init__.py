"""Trace files: what they hold (`schema`), how they are written (`writer`) and read (`reader`)."""
