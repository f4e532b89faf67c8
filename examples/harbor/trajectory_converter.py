"""Finished Harbor jobs become training samples, from Python or the command line:

HarborTrajectoryConverter(tokenizer).load_job("jobs/your-job-name")
"""

import sys

from dockyard import HarborTrajectoryConverter
from dockyard.cli import main

__all__ = ["HarborTrajectoryConverter"]

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
