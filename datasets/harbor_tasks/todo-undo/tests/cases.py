"""Stories of commands, each line with what it must print; and random ones, played along with a list of old states."""

import random
import shlex
import sys

OLD = '{"next": 4, "things": [{"number": 3, "text": "old", "done": true}]}'
STORIES = (
    ({}, "undo", "nothing to undo", "redo", "nothing to redo", "list", ""),
    ({}, "add Buy milk", "added 1", "undo", "undid: add Buy milk", "list", "", "add Sleep", "added 1"),
    ({}, "add a", "added 1", "done 1", "did 1", "undo", "undid: done 1", "list", "1 [ ] a", "undo", "undid: add a",
     "redo", "redid: add a", "redo", "redid: done 1", "redo", "nothing to redo", "list", "1 [x] a"),
    ({}, "add a", "added 1", "done 7", "no thing 7", "undo", "undid: add a", "undo", "nothing to undo"),
    ({}, "add a", "added 1", "undo", "undid: add a", "add b", "added 1", "redo", "nothing to redo", "list", "1 [ ] b"),
    ({}, "add a", "added 1", "undo", "undid: add a", "done 1", "no thing 1", "redo", "redid: add a"),
    ({"todo.json": OLD}, "undo", "nothing to undo", "add new", "added 4", "undo", "undid: add new", "list",
     "3 [x] old", "remove 3", "removed 3", "undo", "undid: remove 3", "list", "3 [x] old"),
)  # fmt: skip


def check(run):
    stories = [(files, list(zip(lines[::2], lines[1::2], strict=True))) for files, *lines in STORIES]
    stories += [({}, drawn(random.Random(seed))) for seed in range(6)]
    for files, story in stories:
        script = "\n".join(f"python3 /app/todo.py {shlex.join(command.split(' '))}; echo ---" for command, _ in story)
        said = run(["sh", "-c", script], files=files)
        expected = "".join(f"{line}\n---\n" if line else "---\n" for _, line in story)
        if said != expected:
            sys.stdout.write(f"{story} went as {said!r}\n")
            return False
    return True


def drawn(generator):
    number, things, undo, redo = 1, [], [], []
    story = []
    for _ in range(14):
        before = (number, list(things))
        kind = generator.choice(("add", "add", "done", "remove", "undo", "undo", "redo", "list"))
        one = generator.randrange(1, 6)
        command = f"add thing {generator.randrange(99)}" if kind == "add" else f"{kind} {one}"
        there = any(thing[0] == one for thing in things)
        if kind == "list":
            story.append(("list", "\n".join(f"{n} [{'x' if done else ' '}] {text}" for n, text, done in things)))
            continue
        if kind in ("undo", "redo"):
            source, target = (undo, redo) if kind == "undo" else (redo, undo)
            if not source:
                story.append((kind, f"nothing to {kind}"))
                continue
            what, (number, things) = source.pop()
            target.append((what, before))
            story.append((kind, f"{'undid' if kind == 'undo' else 'redid'}: {what}"))
            continue
        if kind != "add" and not there:
            story.append((command, f"no thing {one}"))
            continue
        if kind == "add":
            things = [*things, (number, command.removeprefix("add "), False)]
            story.append((command, f"added {number}"))
            number += 1
        elif kind == "done":
            things = [(n, text, done or n == one) for n, text, done in things]
            story.append((command, f"did {one}"))
        else:
            things = [thing for thing in things if thing[0] != one]
            story.append((command, f"removed {one}"))
        undo.append((command, before))
        redo = []
    return story
