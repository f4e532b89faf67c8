"""Small builds written down; large ones drawn at random around an order or a circle that is known."""

import random
import sys

SMALL = {
    "a: b\nb: c\n": "c b a",
    "b: a\nc: a\n": "a b c",
    "app: lib assets\nlib: headers\nassets: icons\ntest: app\n": "headers icons assets lib app test",
    "# a comment\n\nx: y\n  \ny:\n": "y x",
    "a: b\na: c\nc: b\n": "b c a",
    "lone:\n": "lone",
    "a: b b\nb: c\nb: c\n": "c b a",
    "z: a\na: z\n": "cycle: a z",
    "a: a\nb: c\n": "cycle: a",
    "d: a\na: b\nb: c\nc: a\ne: f\n": "cycle: a b c",
    "a: b\nb: a\nc: d\nd: c\nm: a c\na: m2\nm2: c\n": "cycle: a b c d",
}


def check(run):
    cases = {text: said.replace(" ", "\n") if "cycle" not in said else said for text, said in SMALL.items()}
    cases |= {chain(3000): "\n".join(f"s{number:04}" for number in reversed(range(3000)))}
    cases |= dict(layers(random.Random(seed)) for seed in (1, 2))
    cases |= {chain(2000) + "s1999: s0500\nlast: s0000\n": "cycle: " + " ".join(f"s{n:04}" for n in range(500, 2000))}
    for text, expected in cases.items():
        said = run(["python3", "/app/order.py"], stdin=text)
        if said is None or said.split() != expected.split():
            sys.stdout.write(f"a build of {text.count(chr(10))} lines, beginning with {text[:60]!r}, is wrong\n")
            return False
    return True


def chain(length):
    return "".join(f"s{number:04}: s{number + 1:04}\n" for number in range(length - 1))


def layers(generator):
    """Each step needs its layer's gate, and each gate all of the layer below, so that the order is the layers'."""
    lines, order = [], []
    below = []
    for layer in range(10):
        names = [f"{generator.choice('abcdefgh')}{layer}-{number:03}" for number in range(150)]
        lines += [f"gate{layer}: {' '.join(below)}", *(f"{name}: gate{layer}" for name in names)]
        order += [f"gate{layer}", *sorted(names)]
        below = names
    generator.shuffle(lines)
    return "\n".join(lines) + "\n", "\n".join(order)
