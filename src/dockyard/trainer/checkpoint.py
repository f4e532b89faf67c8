"""What a resumed run needs besides its records: what is trained, the optimiser's memory, the random state.

Nothing more: which tasks are due follows from the seed and the step, and rollouts that were begun early are on disk
with the version of the weights behind each token.
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
    """Write an adapter as PEFT, vLLM and the Hub read it, or the whole model as transformers does."""
    if isinstance(model, PeftModel):
        # Adapters have no embeddings. PEFT would ask the Hub each time whether their number has changed.
        model.save_pretrained(str(folder), save_embedding_layers=False)
    else:
        model.save_pretrained(folder)


def save(folder: Path, model: Any, optimizer: Optimizer, version: int) -> None:
    """Write everything; the folder is an adapter's, or a model's, with one file more."""
    save_weights(model, folder)
    dtype = str(model.dtype).removeprefix("torch.")
    state = {"version": version, "optimizer": optimizer.state_dict(), "random": _random_state(), "dtype": dtype}
    torch.save(state, folder / _STATE_FILE)


def number_format(folder: Path) -> str | None:
    """What the policy computed in, as `model.dtype` has it. None where it is not recorded: an adapter alone is float32.

    A model that was trained as a whole is written in it.
    """
    model, state = folder / "config.json", folder / _STATE_FILE
    try:
        if model.is_file():
            return json.loads(model.read_bytes())["dtype"]
        if state.is_file():
            return torch.load(state, map_location="cpu", weights_only=True, mmap=True).get("dtype")
        return None
    except Exception as error:  # whatever the readers raise, this checkpoint is not what `save` wrote
        raise DockyardError(
            f"the checkpoint `{folder}` cannot be read: {error}", hint="`--step` takes another checkpoint"
        ) from error


def restore(folder: Path, model: Any, optimizer: Optimizer) -> int:
    """Take up where `save` left off, and say at which version that was."""
    try:
        state = torch.load(folder / _STATE_FILE, map_location="cpu", weights_only=True)
        load_weights(model, folder)
        optimizer.load_state_dict(state["optimizer"])
        _set_random_state(state["random"])
        return int(state["version"])
    except Exception as error:  # whatever the readers raise, this checkpoint is of no use
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
