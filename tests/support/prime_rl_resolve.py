"""Prints, as JSON, what Prime-RL's own classes make of its files: `python prime_rl_resolve.py FILE...`.

For a Python with verifiers 0.3.1 and our plug-in; PYTHONPATH names `packages/prime-rl-configs/src` of its repository.
"""

import json
import sys

from prime_rl.configs.rl import RLConfig  # pyright: ignore[reportMissingImports]
from prime_rl.utils.config import cli  # pyright: ignore[reportMissingImports]

resolved = {file: cli(RLConfig, args=["@", file]).model_dump(mode="json") for file in sys.argv[1:]}
print(json.dumps(resolved))
