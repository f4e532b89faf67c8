"""An OpenAI-compatible server for a policy, with tools, token ids and logprobs: `simple_openai_server.py MODEL`.

`--model MODEL` may be written too; every other option is one of `dockyard serve`.
"""

import sys

from dockyard.cli import main


def words(arguments: list[str]) -> list[str]:
    """The model by its place, whichever way it was written."""
    if "--model" in arguments:
        at = arguments.index("--model")
        return [*arguments[at + 1 : at + 2], *arguments[:at], *arguments[at + 2 :]]
    return arguments


if __name__ == "__main__":
    sys.exit(main(["serve", *words(sys.argv[1:])]))
