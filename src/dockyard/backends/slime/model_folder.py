"""`python -m dockyard.backends.slime.model_folder NAME DIR`: print a folder of the model that SLiME accepts.

SLiME compares `config.json` with its own arguments and refuses Qwen3-Coder's `shared_expert_intermediate_size: 0`,
which means that there is no shared expert. DIR then becomes a folder of links with a `config.json` without that key.
"""

import json
import sys
from pathlib import Path

from dockyard.engine.model_dir import find_model
from dockyard.errors import DockyardError

_CONFIG, _REFUSED_KEY = "config.json", "shared_expert_intermediate_size"


def acceptable(model: Path, folder: Path) -> Path:
    """Return the model's folder, or the folder of links."""
    config = json.loads((model / _CONFIG).read_bytes())
    if config.get(_REFUSED_KEY) != 0:
        return model
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        link = folder / file.name
        link.unlink(missing_ok=True)
        if file.name != _CONFIG:
            link.symlink_to(file.absolute())
    config.pop(_REFUSED_KEY)
    (folder / _CONFIG).write_text(json.dumps(config, indent=2))
    return folder


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{acceptable(find_model(sys.argv[1]), Path(sys.argv[2])).absolute()}\n")
    except DockyardError as problem:
        sys.exit(f"error: {problem.message}\nhint: {problem.hint}")
