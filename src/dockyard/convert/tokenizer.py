"""The tokenizer and template of whoever asks: a model folder, a name on the Hub, or what a program already has."""

import tempfile
from pathlib import Path
from typing import Protocol

from dockyard.engine.model_dir import find_model
from dockyard.gateway.render import Renderer


class SavedTokenizer(Protocol):
    """A tokenizer of `transformers`."""

    name_or_path: str

    def save_pretrained(self, save_directory: str) -> object: ...


def load_renderer(tokenizer: "Renderer | Path | str | SavedTokenizer") -> Renderer:
    """How this model's conversations are written."""
    if isinstance(tokenizer, Renderer):
        return tokenizer
    if isinstance(tokenizer, Path | str):
        folder = Path(tokenizer).expanduser()
        is_folder = (folder / "tokenizer.json").is_file()  # the rest of a model is not needed
        return Renderer.load(folder if is_folder else find_model(str(tokenizer), weights=False), str(tokenizer))
    with tempfile.TemporaryDirectory(prefix="dockyard-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        return Renderer.load(Path(folder), tokenizer.name_or_path)
