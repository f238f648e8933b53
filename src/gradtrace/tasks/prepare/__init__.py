"""Known data sets, made ready for training: one module each says how to read a row, `pipeline` cleans and splits."""

from gradtrace.tasks.prepare.base import Example, Preparation
from gradtrace.tasks.prepare.countdown import COUNTDOWN
from gradtrace.tasks.prepare.dapo_math import DAPO_MATH
from gradtrace.tasks.prepare.gsm8k import GSM8K
from gradtrace.tasks.prepare.math_eval import AIME24, AIME25, MATH500
from gradtrace.tasks.prepare.mbpp import MBPP

PREPARATIONS = {
    preparation.name: preparation
    for preparation in (GSM8K, DAPO_MATH, COUNTDOWN, MBPP, MATH500, AIME24, AIME25)
}

__all__ = ["PREPARATIONS", "Example", "Preparation"]
