"""`python -m src.train --config configs/harbor_8b.toml`: train with Prime-RL, from a checkout of this repository.

The file may be a run file, or a settings file of Prime-RL in its current or an older form. `dockyard backend prime-rl
FILE` does the same.
"""

import argparse
import sys

from dockyard.cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m src.train", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True, metavar="FILE", help="a TOML file; further options are passed on")
    arguments, others = parser.parse_known_args()
    sys.exit(main(["backend", "prime-rl", arguments.config, *others]))
