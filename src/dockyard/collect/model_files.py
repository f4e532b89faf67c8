"""The files of a model on this machine: the folder with its weights or tokenizer, and the renderer of its prompts."""

import logging
from dataclasses import dataclass
from pathlib import Path

from dockyard.config import EngineConfig, ModelConfig
from dockyard.engine.model_dir import find_model
from dockyard.engine.open import import_embedded
from dockyard.errors import DockyardError
from dockyard.gateway.render.renderer import Renderer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Where a model is, and how its prompts are rendered."""

    folder: Path
    renderer: Renderer


def find_files(model: ModelConfig, engine: EngineConfig) -> ModelFiles | None:
    """Find a model's files, downloading them if necessary.

    Returns None for a model without a tokenizer here, which only an `openai` endpoint may serve: as text.
    """
    if engine.type == "transformers":
        import_embedded()
    try:
        folder = find_model(model.name, weights=engine.launch or not engine.is_server)
        return ModelFiles(folder=folder, renderer=Renderer.load(folder, model.name))
    except DockyardError as error:
        if engine.type != "openai":
            raise
        logger.warning(
            "no tokenizer for %s here: text mode, no token ids or logprobs, nothing to train on exactly (%s)",
            model.name,
            error,
        )
        return None
