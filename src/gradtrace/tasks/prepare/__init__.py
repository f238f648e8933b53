"""Known data sets, made ready for training: modules say how to read a row, `pipeline` cleans and splits."""

from gradtrace.tasks.prepare.base import Example, Preparation
from gradtrace.tasks.prepare.countdown import COUNTDOWN
from gradtrace.tasks.prepare.gsm8k import GSM8K
from gradtrace.tasks.prepare.mathematics import AIME24, AIME25, DAPO_MATH, MATH500
from gradtrace.tasks.prepare.mbpp import MBPP

PREPARATIONS = {
    preparation.name: preparation for preparation in (GSM8K, DAPO_MATH, COUNTDOWN, MBPP, MATH500, AIME24, AIME25)
}

__all__ = ["PREPARATIONS", "Example", "Preparation"]
