"""`python -m dockyard`: the command, where only the package is on the path."""

import sys

from dockyard.cli import main

sys.exit(main())
