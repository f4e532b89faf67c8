"""An OpenAI-compatible server for a policy, with tools, token ids and logprobs: `simple_openai_server.py MODEL`.

`--model MODEL` may be written too; every other option is one of `dockyard serve`.
"""

import argparse
import sys

from dockyard.cli import main


def words(arguments: list[str]) -> list[str]:
    """The model by its place, whichever way it was written."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model")
    given, others = parser.parse_known_args(arguments)
    return [given.model, *others] if given.model else others


if __name__ == "__main__":
    sys.exit(main(["serve", *words(sys.argv[1:])]))
