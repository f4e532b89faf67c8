"""What training all weights of a model takes, told before it is too late."""

from typing import Any

from dockyard.config import EngineConfig
from dockyard.errors import DockyardError
from dockyard.trainer.free_memory import free_bytes

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
