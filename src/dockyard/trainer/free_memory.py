"""How much memory there is for a pass: a GPU's, or this machine's as far as the kernel lets this process have it."""

import math
from pathlib import Path

import torch

_MEMINFO, _GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> float:
    """Infinite where nobody says."""
    if device.type != "cuda":
        return min(available(_MEMINFO), left_to_group(_GROUP))
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def available(meminfo: Path) -> float:
    """What programs could take before anything is swapped, as Linux says it."""
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else math.inf


def left_to_group(group: Path) -> float:
    """A container may have less than the machine. Files that it has read are no loss."""
    limit = group / "memory.max"
    if not limit.exists() or limit.read_text().strip() == "max":
        return math.inf
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / "memory.current").read_text()) - int(statistics["inactive_file"])
    return max(0, int(limit.read_text()) - used)
