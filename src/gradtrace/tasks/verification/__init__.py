"""Judging in processes that can be killed: a pool of keepers, each in charge of one judging process."""
