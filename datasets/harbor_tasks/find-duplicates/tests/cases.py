"""Folders with known duplicates, hard names among them."""

import random
import sys

NAMES = (
    *("plain.txt", "with", "with space", "-n", "quote'd", 'double"d', "star*", "back\\slash"),
    *("sub/deep/a b", "sub/Zed", "é"),
)


def check(run):
    cases = [draw(random.Random(seed)) for seed in range(6)]
    cases += [({"a": "x", "b": "y"}, ""), ({"a": "", "b": ""}, ""), ({"one": "same\n", "two": "same"}, "")]
    for files, expected in cases:
        said = run(["sh", "/app/duplicates.sh", "given"], files={f"given/{name}": text for name, text in files.items()})
        if said != expected:
            return wrong(f"of {files} it says {said!r}, not {expected!r}")
    ends = 'sh /app/duplicates.sh nothing-here; echo "$?"; sh /app/duplicates.sh file; echo "$?"'
    links = "ln -s a given/c; mkfifo given/pipe; cp -R given as; sh /app/duplicates.sh given && diff -rx pipe given as"
    shells = (
        (ends, {"file": "x"}, "2\n2\n"),
        (links, {"given/a": "1", "given/b": "1"}, "1 a\n1 b\n"),
        ("cd given && sh /app/duplicates.sh ..", {"given/a": "1", "b": "1"}, "1 b\n1 given/a\n"),
        ("sh /app/duplicates.sh ./-", {"-/a": "1", "-/b": "1"}, "1 a\n1 b\n"),
    )
    for script, files, expected in shells:
        said = run(["sh", "-c", script], files=files)
        if said != expected:
            return wrong(f"`{script}` says {said!r}, not {expected!r}")
    return True


def wrong(why):
    sys.stdout.write(why + "\n")
    return False


def draw(generator):
    names = [*NAMES, *(f"more/{number}" for number in range(20))]
    files = {name: generator.choice(("", "x\n", "yy\n", "zzz", f"only {name}")) for name in names}
    groups = [sorted(name for name in names if files[name] == text) for text in {*files.values()} - {""}]
    shown = sorted(group for group in groups if len(group) > 1)
    lines = [f"{number} {name}\n" for number, group in enumerate(shown, 1) for name in group]
    return files, "".join(lines)
