"""How much memory a pass may use, and how much full training of a model needs, reported before it runs out.

The limit is the GPU's memory, or what the kernel lets this process have.
"""

import math
from pathlib import Path
from typing import Any

import torch

from dockyard.config import EngineConfig
from dockyard.errors import DockyardError

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


_FLOAT32 = 4


def bytes_to_train(model: Any, *, num_copies: int) -> int:
    """Besides the weights themselves, and without activations.

    AdamW has two moments of each weight, the sums of gradients of a tree and of the update are two more numbers, all
    in float32; a pass makes its gradients in the weights' own format before they are added. Weights in a narrower
    format have a float32 copy too.
    `num_copies` are the models beside this one: the engine's and the reference.
    """
    total = 0
    for weight in model.parameters():
        size = weight.element_size()
        in_float32 = 5 if size < _FLOAT32 else 4
        total += weight.numel() * (in_float32 * _FLOAT32 + (1 + num_copies) * size)
    return total


def gradient_bytes(model: Any) -> int:
    """Of all weights, while rows are run: what one pass makes, and the float32 sum of a tree that it is added to."""
    return sum(weight.numel() * (weight.element_size() + _FLOAT32) for weight in model.parameters())


def beside_training(engine: EngineConfig, model: Any) -> EngineConfig:
    """The settings of an engine on a GPU where all weights of this model are trained.

    An engine takes half of what is free, and leaves the rest to activations. Here gradients are to fit in besides.
    """
    if model.device.type != "cuda" or engine.kv_cache_gb is not None:
        return engine
    summed = _FLOAT32 * sum(weight.numel() for weight in model.parameters())
    left = free_bytes(model.device) - gradient_bytes(model) - summed
    return engine.model_copy(update={"kv_cache_gb": max(left, 0) / 2 / 2**30})


def refuse_too_large(model: Any, *, num_copies: int) -> None:
    """An error when there is not so much memory left."""
    free, needed = free_bytes(model.device), bytes_to_train(model, num_copies=num_copies)
    if needed > free:
        where = "the GPU" if model.device.type == "cuda" else "this machine"
        raise DockyardError(
            f"training all weights of `{model.config.model_type}` takes {needed / 2**30:.1f} GiB besides the model "
            f"itself, and {where} has {free / 2**30:.1f} GiB left",
            hint="`--trainer.method lora` takes a tenth of that, or choose a smaller model",
        )
