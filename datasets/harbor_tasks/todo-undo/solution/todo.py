"""A list of things to do: todo.py add TEXT... | done N | remove N | list | undo | redo"""

import json
import sys
from pathlib import Path

FILE = Path("todo.json")


def load():
    if FILE.exists():
        return json.loads(FILE.read_text())
    return {"next": 1, "things": []}


def save(state):
    FILE.write_text(json.dumps(state))


def change(state, words, before):
    """Remember the command and the list as it was before it."""
    state.setdefault("undo", []).append({"words": words, "list": before})
    state["redo"] = []
    save(state)


def shown(state):
    return json.loads(json.dumps({"next": state["next"], "things": state["things"]}))


def step(state, take, put, said):
    """Swap the list with the last one that `take` remembers."""
    if not state.get(take):
        print(f"nothing to {take}")
        return
    last = state[take].pop()
    state.setdefault(put, []).append({"words": last["words"], "list": shown(state)})
    state.update(last["list"])
    save(state)
    print(f"{said}: {' '.join(last['words'])}")


def find(state, number):
    for thing in state["things"]:
        if str(thing["number"]) == number:
            return thing
    return None


def main(words):
    state = load()
    before = shown(state)
    match words:
        case ["add", *text] if text:
            thing = {"number": state["next"], "text": " ".join(text), "done": False}
            state["next"] += 1
            state["things"].append(thing)
            change(state, words, before)
            print(f"added {thing['number']}")
        case ["done" | "remove" as command, number]:
            thing = find(state, number)
            if thing is None:
                print(f"no thing {number}")
                return
            if command == "done":
                thing["done"] = True
            else:
                state["things"].remove(thing)
            change(state, words, before)
            print(f"{'did' if command == 'done' else 'removed'} {number}")
        case ["undo"]:
            step(state, "undo", "redo", "undid")
        case ["redo"]:
            step(state, "redo", "undo", "redid")
        case ["list"]:
            for thing in state["things"]:
                print(f"{thing['number']} [{'x' if thing['done'] else ' '}] {thing['text']}")
        case _:
            print(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
