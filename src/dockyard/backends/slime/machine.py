"""What this machine lacks to run SLiME, with the command that helps."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from dockyard.config import RunConfig
from dockyard.errors import DockyardError, UsageError

_CLONE = {"slime": "https://github.com/THUDM/slime", "miles": "https://github.com/radixark/miles"}
_PROBE = """
import importlib.util, json
wanted = ["torch", "ray", "sglang", "megatron", "dockyard"]
missing = [name for name in wanted if importlib.util.find_spec(name) is None]
gpus = 0 if "torch" in missing else __import__("torch").cuda.device_count()
print(json.dumps({"missing": missing, "gpus": gpus}))
"""


def check_machine(config: RunConfig) -> None:
    """Without enough GPUs SLiME would wait for them, for ever."""
    checkout = checkout_of(config)
    _check_folders(config, checkout)
    found = _probe(config, checkout)
    if found["missing"]:
        names = ", ".join(f"`{name}`" for name in found["missing"])
        hint = "start in SLiME's image (`slimerl/slime:latest`) with `pip install dockyard`, or name a `--slime.python`"
        raise DockyardError(f"`{config.slime.python}` has no {names}", hint=hint)
    needed, there = config.slime.num_gpus, found["gpus"]
    if needed > config.slime.gpus_per_node:
        if not os.environ.get("RAY_ADDRESS"):
            hint = "`ray start` on each machine, then `export RAY_ADDRESS=HEAD:6379`"
            raise DockyardError(f"{needed} GPUs are on several machines, and RAY_ADDRESS is not set", hint=hint)
    elif there < needed:
        hint = f"`--slime.num_gpus {there}`" if there else "`--write` writes the files for elsewhere"
        raise DockyardError(f"`slime.num_gpus` is {needed}, and this machine has {there} GPUs", hint=hint)


def checkout_of(config: RunConfig) -> Path:
    """SLiME's checkout, which has no default."""
    if config.slime.checkout is None:
        hint = f"`git clone {_CLONE[config.slime.flavour]}`, then `--slime.checkout DIR`"
        raise UsageError("`slime.checkout` is not set", hint=hint)
    return config.slime.checkout.absolute()


def _check_folders(config: RunConfig, checkout: Path) -> None:
    slime = config.slime
    for option, folder, inside in (
        ("checkout", checkout, f"{slime.flavour}/utils/arguments.py"),
        ("checkout", checkout, "train.py"),
        ("megatron", slime.megatron, "megatron"),
    ):
        if not (folder / inside).exists():
            clone = _CLONE[slime.flavour] if option == "checkout" else "https://github.com/NVIDIA/Megatron-LM"
            hint = f"`git clone {clone}`, then `--slime.{option} DIR`"
            raise DockyardError(f"`slime.{option}` is `{folder}`, where there is no `{inside}`", hint=hint)


def _probe(config: RunConfig, checkout: Path) -> dict[str, Any]:
    """What the Python that runs SLiME has."""
    slime = config.slime
    paths = (str(checkout), str(slime.megatron.absolute()), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {"PYTHONPATH": ":".join(path for path in paths if path)}
    try:
        done = subprocess.run(
            [slime.python, "-c", _PROBE], capture_output=True, text=True, env=environment, timeout=300
        )
        return json.loads(done.stdout.splitlines()[-1])
    except (OSError, IndexError, ValueError, subprocess.TimeoutExpired) as error:
        message = f"`slime.python` is `{slime.python}`, which does not run: {error}"
        raise DockyardError(message, hint="name the Python of SLiME's environment") from None
