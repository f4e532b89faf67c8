"""C2Bug's rows become Harbor tasks, from Python or the command line: `c2bug_adapter.py OUT --limit 5`.

The tasks are made of the four files in c2bug_template; `--template DIR` takes a copy that you changed.
"""

import sys

from dockyard.cli import main
from dockyard.tasks.c2bug import write_c2bug_tasks

__all__ = ["write_c2bug_tasks"]

if __name__ == "__main__":
    sys.exit(main(["tasks", "c2bug", *sys.argv[1:]]))
