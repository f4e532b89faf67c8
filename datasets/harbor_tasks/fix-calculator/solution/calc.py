"""A calculator for whole numbers: python3 calc.py "2 + 3 * 4"."""

import re
import sys

TOKEN = re.compile(r"\s*(?:([0-9]+)|([-+*/%^()]))")


class Parser:
    """Reads an expression from left to right. Anything wrong is a ValueError or an ArithmeticError."""

    def __init__(self, text):
        self.tokens = []
        text = text.rstrip()
        place = 0
        while place < len(text):
            match = TOKEN.match(text, place)
            if match is None:
                raise ValueError(text[place:])
            self.tokens.append(match.group().strip())
            place = match.end()

    def peek(self):
        return self.tokens[0] if self.tokens else None

    def take(self):
        if not self.tokens:
            raise ValueError("the expression ends early")
        return self.tokens.pop(0)

    def whole(self):
        value = self.sum()
        if self.tokens:
            raise ValueError(self.peek())
        return value

    def sum(self):
        value = self.product()
        while self.peek() in ("+", "-"):
            value = value + self.product() if self.take() == "+" else value - self.product()
        return value

    def product(self):
        value = self.signed()
        while self.peek() in ("*", "/", "%"):
            sign = self.take()
            right = self.signed()
            if sign == "*":
                value *= right
            else:
                quotient = abs(value) // abs(right)
                quotient = quotient if (value < 0) == (right < 0) else -quotient
                value = quotient if sign == "/" else value - quotient * right
        return value

    def signed(self):
        if self.peek() == "-":
            self.take()
            return -self.signed()
        return self.power()

    def power(self):
        value = self.atom()
        if self.peek() == "^":
            self.take()
            exponent = self.signed()
            if exponent < 0:
                raise ValueError("a negative exponent")
            value = value**exponent
        return value

    def atom(self):
        token = self.take()
        if token == "(":
            value = self.sum()
            if self.take() != ")":
                raise ValueError("a bracket stays open")
            return value
        return int(token)


def main():
    try:
        print(Parser(sys.argv[1]).whole())
    except (ValueError, ArithmeticError):
        print("error")


if __name__ == "__main__":
    main()
