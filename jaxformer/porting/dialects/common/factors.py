"""Factors that a config.json has as a number, where none here is None: 1 there."""

import math

from jaxformer.porting.mapping.settings import Conversion


def _reciprocal(number: float) -> float:
    """Returns 1 / number; of a reciprocal, the short number that it was made of."""
    short = round(1 / number, 9)
    return short if short and 1 / short == number else 1 / number


FACTOR = Conversion(
    lambda number, values: None if number == 1 else float(number),
    lambda factor, config: 1.0 if factor is None else factor,
)
# What is divided by.
DIVISOR = Conversion(
    lambda number, values: None if number == 1 else 1 / number,
    lambda factor, config: 1.0 if factor is None else _reciprocal(factor),
)
# Of attention scores, where none here is 1 / sqrt(H).
SCORE_FACTOR = Conversion(
    lambda number, values: float(number),
    lambda factor, config: 1 / math.sqrt(config.head_width) if factor is None else factor,
)
