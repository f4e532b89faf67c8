"""How much memory is free, and how much full training of a model needs.

The limit is the memory of the GPU, or on a CPU what the kernel allows this process.
"""

import math
from pathlib import Path
from typing import Any

import torch

from dockyard.config import EngineConfig
from dockyard.errors import DockyardError

_MEMINFO, _GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> float:
    """The free memory; infinite if it is not known."""
    if device.type != "cuda":
        return min(available(_MEMINFO), left_to_group(_GROUP))
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def available(meminfo: Path) -> float:
    """Linux's estimate of what programs could allocate without swapping."""
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else math.inf


def left_to_group(group: Path) -> float:
    """What the limit of a container leaves. Cached files do not count as used."""
    limit = group / "memory.max"
    if not limit.exists() or limit.read_text().strip() == "max":
        return math.inf
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / "memory.current").read_text()) - int(statistics["inactive_file"])
    return max(0, int(limit.read_text()) - used)


_FLOAT32 = 4


def bytes_to_train(model: Any, *, num_copies: int) -> int:
    """The memory for full training, without the weights themselves and activations.

    Each weight has two moments of AdamW and two sums of gradients (of a tree, and of the update), all in float32, and
    a gradient of one pass in its own format. Weights in a narrower format also have a float32 copy. `num_copies` is the
    number of further copies of the model: the engine's and the reference.
    """
    total = 0
    for weight in model.parameters():
        size = weight.element_size()
        in_float32 = 5 if size < _FLOAT32 else 4
        total += weight.numel() * (in_float32 * _FLOAT32 + (1 + num_copies) * size)
    return total


def gradient_bytes(model: Any) -> int:
    """The memory of gradients while rows run: those of one pass, and the float32 sum of the tree."""
    return sum(weight.numel() * (weight.element_size() + _FLOAT32) for weight in model.parameters())


def beside_training(engine: EngineConfig, model: Any) -> EngineConfig:
    """The settings of an engine that shares a GPU with full training of this model.

    By default an engine takes half of the free memory. Here it also leaves room for gradients.
    """
    if model.device.type != "cuda" or engine.kv_cache_gb is not None:
        return engine
    summed = _FLOAT32 * sum(weight.numel() for weight in model.parameters())
    left = free_bytes(model.device) - gradient_bytes(model) - summed
    return engine.model_copy(update={"kv_cache_gb": max(left, 0) / 2 / 2**30})


def refuse_too_large(model: Any, *, num_copies: int) -> None:
    """Raise an error if the free memory is less than full training needs."""
    free, needed = free_bytes(model.device), bytes_to_train(model, num_copies=num_copies)
    if needed > free:
        where = "the GPU" if model.device.type == "cuda" else "this machine"
        raise DockyardError(
            f"training all weights of `{model.config.model_type}` takes {needed / 2**30:.1f} GiB besides the model "
            f"itself, and {where} has {free / 2**30:.1f} GiB left",
            hint="`--trainer.method lora` takes a tenth of that, or choose a smaller model",
        )
