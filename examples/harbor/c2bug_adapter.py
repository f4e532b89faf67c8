"""C2Bug's rows become Harbor tasks, from Python or the command line: `c2bug_adapter.py OUT --limit 5`.

The tasks are made of the four files in c2bug_template, beside this one: change them as you like.
"""

import sys
from pathlib import Path

from dockyard.cli import main
from dockyard.tasks.c2bug import write_c2bug_tasks

__all__ = ["write_c2bug_tasks"]

TEMPLATE = Path(__file__).with_name("c2bug_template")

if __name__ == "__main__":
    sys.exit(main(["tasks", "c2bug", "--template", str(TEMPLATE), *sys.argv[1:]]))
