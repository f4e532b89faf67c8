"""A calculator for whole numbers: python3 calc.py "2 + 3 * 4"."""

import re
import sys

TOKEN = re.compile(r"\d+|[-+*/%^()]")


class Parser:
    """Reads an expression from left to right."""

    def __init__(self, text):
        self.tokens = TOKEN.findall(text)

    def peek(self):
        return self.tokens[0] if self.tokens else None

    def take(self):
        return self.tokens.pop(0)

    def sum(self):
        value = self.product()
        if self.peek() in ("+", "-"):
            sign = self.take()
            rest = self.sum()
            value = value + rest if sign == "+" else value - rest
        return value

    def product(self):
        value = self.power()
        while self.peek() in ("*", "/", "%"):
            sign = self.take()
            right = self.power()
            if sign == "*":
                value *= right
            elif sign == "/":
                value //= right
            else:
                value %= right
        return value

    def power(self):
        value = self.atom()
        while self.peek() == "^":
            self.take()
            value = value ** self.atom()
        return value

    def atom(self):
        token = self.take()
        if token == "-":
            return -self.atom()
        if token == "(":
            value = self.sum()
            self.take()
            return value
        return int(token)


def main():
    print(Parser(sys.argv[1]).sum())


if __name__ == "__main__":
    main()
