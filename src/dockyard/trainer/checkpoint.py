"""Checkpoints: the trained weights, the optimizer's state, and the random state.

A resumed run needs nothing else besides its records: the seed and the step determine which tasks are due, and rollouts
that were started early are recorded with the version of each token.
"""

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from dockyard.engine.weights import load_weights
from dockyard.errors import DockyardError
from dockyard.trainer.optimizer import Optimizer

_STATE_FILE = "optimizer.pt"


def save_weights(model: Any, folder: Path) -> None:
    """Write an adapter in PEFT's format, or the whole model in that of transformers."""
    if isinstance(model, PeftModel):
        # Adapters have no embeddings. PEFT would otherwise query the Hub each time to see whether they were resized.
        model.save_pretrained(str(folder), save_embedding_layers=False)
    else:
        model.save_pretrained(folder)


def save(folder: Path, model: Any, optimizer: Optimizer, version: int) -> None:
    """Write a checkpoint: the folder of an adapter or a model, with one more file."""
    save_weights(model, folder)
    dtype = str(model.dtype).removeprefix("torch.")
    state = {"version": version, "optimizer": optimizer.state_dict(), "random": _random_state(), "dtype": dtype}
    torch.save(state, folder / _STATE_FILE)


def number_format(folder: Path) -> str | None:
    """The number format of the policy, as in `model.dtype`; None if it is not recorded, as in an adapter alone.

    A fully trained model is written in this format.
    """
    model, state = folder / "config.json", folder / _STATE_FILE
    try:
        if model.is_file():
            return json.loads(model.read_bytes())["dtype"]
        if state.is_file():
            return torch.load(state, map_location="cpu", weights_only=True, mmap=True).get("dtype")
        return None
    except Exception as error:  # whatever the readers raise, `save` did not write this checkpoint
        raise DockyardError(
            f"the checkpoint `{folder}` cannot be read: {error}", hint="`--step` takes another checkpoint"
        ) from error


def restore(folder: Path, model: Any, optimizer: Optimizer) -> int:
    """Restore what `save` wrote, and return its version."""
    try:
        state = torch.load(folder / _STATE_FILE, map_location="cpu", weights_only=True)
        load_weights(model, folder)
        optimizer.load_state_dict(state["optimizer"])
        _set_random_state(state["random"])
        return int(state["version"])
    except Exception as error:  # whatever the readers raise, this checkpoint cannot be used
        raise DockyardError(
            f"the checkpoint `{folder}` cannot be read: {error}", hint="remove it, then resume from the one before"
        ) from error


def _random_state() -> dict[str, torch.Tensor]:
    on_gpu = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **on_gpu}


def _set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
