"""The beta distribution and Student's t, for confidence intervals. SciPy has both and is a large thing to install."""

import math

_TINY = 1e-300
_CLOSE = 1e-14
_HALVINGS = 200


def beta_cdf(x: float, a: float, b: float) -> float:
    """The probability that a beta variable is at most `x`: the regularised incomplete beta function."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):  # where the fraction below converges slowly, its mirror image does not
        return 1 - beta_cdf(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / (a * _continued_fraction(x, a, b))


def _continued_fraction(x: float, a: float, b: float) -> float:
    """1 + d1/(1 + d2/(1 + ...)), by Lentz's method."""
    value, upper, lower = 1.0, 1.0, 0.0
    for number in range(1, 10_000):
        half, odd = divmod(number, 2)
        if odd:
            term = -(a + half) * (a + b + half) / ((a + 2 * half) * (a + 2 * half + 1)) * x
        else:
            term = half * (b - half) / ((a + 2 * half - 1) * (a + 2 * half)) * x
        lower = 1 / (1 + term * lower or _TINY)
        upper = 1 + term / upper or _TINY
        value *= upper * lower
        if abs(upper * lower - 1) < _CLOSE:
            break
    return value


def beta_quantile(probability: float, a: float, b: float) -> float:
    """Below this a beta variable is with the given probability."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if beta_cdf(middle, a, b) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_quantile(probability: float, freedom: float) -> float:
    """Below this a variable of Student's distribution is; for probabilities above one half."""
    x = beta_quantile(2 * (1 - probability), freedom / 2, 0.5)
    return math.sqrt(freedom * (1 - x) / x)
