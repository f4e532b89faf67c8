"""Expressions with their values, written down; and random ones, whose values Python's own arithmetic gives."""

import random
import sys

CASES = {
    "2 + 3 * 4": "14",
    "7 - 2 - 1": "4",
    "100 / 7 / 2": "7",
    "2 ^ 3 ^ 2": "512",
    "-2 ^ 2": "-4",
    "(-2) ^ 2": "4",
    "--3": "3",
    "2 * -3": "-6",
    "-7 / 2": "-3",
    "7 / -2": "-3",
    "-7 % 2": "-1",
    "7 % -2": "1",
    "  ( 1+2 )*3 ": "9",
    "2 ^ (3 - 3)": "1",
    "10 - 2 * 3 + 4": "8",
    "2 ^ -1": "error",
    "1 / 0": "error",
    "5 % (2 - 2)": "error",
    "": "error",
    "2 +": "error",
    "(1": "error",
    "1)": "error",
    "1 2": "error",
    "2 $ 3": "error",
    "print(1)": "error",
}


def check(run):
    generator = random.Random(7)
    drawn = [expression(generator, 4) for _ in range(10)]
    cases = CASES | {text: "error" if value is None else str(value) for text, value in drawn}
    for text, expected in cases.items():
        said = run(["python3", "/app/calc.py", text])
        if said is None or said.strip() != expected:
            sys.stdout.write(f"`{text}` should give {expected}, not {said!r}\n")
            return False
    return True


def expression(generator, depth):
    """Text and value; every part in brackets, so that Python and the calculator mean the same."""
    if depth == 0 or generator.random() < 0.2:
        number = generator.randrange(60)
        return str(number), number
    (left, a), (right, b) = expression(generator, depth - 1), expression(generator, depth - 1)
    sign = generator.choice("+-*/%")
    return f"({left}{sign}{right})", value_of(sign, a, b)


def value_of(sign, a, b):
    if a is None or b is None or (sign in "/%" and b == 0):
        return None
    if sign in "+-*":
        return {"+": a + b, "-": a - b, "*": a * b}[sign]
    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return quotient if sign == "/" else a - quotient * b
