"""TracIn selection: which responses help a validation set."""

from gradtrace.instruments.tracin.selector import Piece, TracInSelector

__all__ = ["Piece", "TracInSelector"]
