"""`python -m src.train --config configs/harbor_8b.toml`: train with Prime-RL, from a checkout of this repository.

The file may be Prime-RL's own, in today's form or an older one, or a run file. `dockyard backend prime-rl FILE` is the
same.
"""

import argparse
import sys

from dockyard.cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m src.train", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True, metavar="FILE", help="a TOML file; further options are passed on")
    arguments, others = parser.parse_known_args()
    sys.exit(main(["backend", "prime-rl", arguments.config, *others]))
