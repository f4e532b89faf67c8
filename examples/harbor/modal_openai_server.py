"""vLLM on Modal behind our gateway: OpenAI and Anthropic dialects, tool calls, token ids, a LoRA adapter.

`modal_openai_server.py --model M` deploys it; so does `modal deploy`, with DOCKYARD_MODAL_MODEL and its kin set.
Clients need the key that a secret holds: `modal secret create dockyard-server DOCKYARD_API_KEY=...`.
"""

import argparse
import os
import sys
from typing import NoReturn

from dockyard.backends.modal import server
from dockyard.backends.modal.app import GPU
from dockyard.cli.terminal import show
from dockyard.errors import DockyardError

app = server.app


def parser() -> argparse.ArgumentParser:
    """The arguments, with their defaults."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--model", default=server.DEFAULT_MODEL, help="a Hub name")
    add("--adapter", help="a LoRA adapter in the volume, e.g. runs/NAME/adapters/v00050")
    add("--gpu", default=GPU, help="as Modal names it, e.g. A100-80GB")
    add("--secrets", default=server.DEFAULT_SECRET, help="names of Modal secrets, with commas between")
    return result


def main() -> NoReturn:
    """Deploy with these arguments."""
    given = parser().parse_args()
    names = {server.MODEL: given.model, server.GPU_VARIABLE: given.gpu, server.SECRETS: given.secrets}
    if given.adapter:
        names[server.ADAPTER] = given.adapter
    os.execvpe("modal", ["modal", "deploy", __file__], os.environ | names)


if __name__ == "__main__":
    try:
        main()
    except FileNotFoundError:
        show(DockyardError("the command `modal` is not here", hint="`pip install 'dockyard[modal]'`"), debug=False)
        sys.exit(1)
