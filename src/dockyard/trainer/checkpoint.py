"""What a resumed run needs besides its records: what is trained, the optimiser's memory, the random state.

Nothing more: which tasks are due follows from the seed and the step, and rollouts that were begun early are on disk
with the version of the weights behind each token.
"""

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
    state = {"version": version, "optimizer": optimizer.state_dict(), "random": _random_state()}
    torch.save(state, folder / _STATE_FILE)


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
