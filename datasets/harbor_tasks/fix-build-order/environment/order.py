"""Prints the steps of a build in the order in which to run them."""

import sys


def read(lines):
    needs = {}
    for line in lines:
        name, _, rest = line.strip().partition(":")
        needs[name] = rest.split()
    return needs


def order(needs):
    done = []

    def visit(name):
        for other in needs[name]:
            visit(other)
        done.append(name)

    for name in needs:
        if name not in done:
            visit(name)
    return done


def main():
    for name in order(read(sys.stdin)):
        print(name)


if __name__ == "__main__":
    main()
