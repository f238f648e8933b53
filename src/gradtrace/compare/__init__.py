"""Curves of several runs side by side: `gradtrace compare`. `picture` draws lines with bands as SVG for anyone."""

from gradtrace.compare.picture import Curve, line_picture

__all__ = ["Curve", "line_picture"]
