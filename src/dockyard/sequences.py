"""What token sequences have in common. No torch: the engine's prefix cache and the trainer's packing both ask."""

import numpy as np

from dockyard.types import IntArray


def common_prefix(left: IntArray, right: IntArray) -> int:
    """How many tokens two sequences begin with in common."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length
