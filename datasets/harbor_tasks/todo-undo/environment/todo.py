"""A list of things to do: todo.py add TEXT... | done N | remove N | list"""

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


def find(state, number):
    for thing in state["things"]:
        if str(thing["number"]) == number:
            return thing
    return None


def main(words):
    state = load()
    match words:
        case ["add", *text] if text:
            thing = {"number": state["next"], "text": " ".join(text), "done": False}
            state["next"] += 1
            state["things"].append(thing)
            save(state)
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
            save(state)
            print(f"{'did' if command == 'done' else 'removed'} {number}")
        case ["list"]:
            for thing in state["things"]:
                print(f"{thing['number']} [{'x' if thing['done'] else ' '}] {thing['text']}")
        case _:
            print(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
