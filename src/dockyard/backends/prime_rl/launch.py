"""`dockyard backend prime-rl`: write Prime-RL's settings for a run file and start its command `rl`.

`rl` starts further programs by name, so their folder must be on the PATH.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dockyard.backends.launch import BackendLaunch, Support
from dockyard.backends.prime_rl.setting_support import support
from dockyard.backends.prime_rl.toml import CONTEXT_LENGTH, PLUGIN, RUN, rl_settings
from dockyard.config import RunConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.paths import RunPaths
from dockyard.settings.text import toml_document

_INSTALL = "see `docs/guides/prime-rl.md` for how to install Prime-RL and Dockyard together"
_IMPORT_TIMEOUT_S = 300


def find_rl(checkout: Path | None) -> Path | None:
    """Find `rl` in the checkout's environment; without a checkout on the PATH, beside Python, or in `./prime-rl`."""
    if checkout:
        return checkout / ".venv" / "bin" / "rl"
    on_path = shutil.which("rl")
    others = (Path(sys.executable).parent, Path("prime-rl", ".venv", "bin").absolute())
    places = [*([Path(on_path)] if on_path else []), *(folder / "rl" for folder in others)]
    return next((rl for rl in places if rl.is_file()), None)


def environment_of(rl: Path | None) -> Mapping[str, str]:
    """Return a PATH on which `rl` finds the other programs of Prime-RL."""
    return {"PATH": f"{rl.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"} if rl else {}


def check_installed(rl: Path | None) -> None:
    """Raise an error if `rl` is missing or its Python cannot import the plug-in, without which it reads no settings."""
    if rl is None or not rl.is_file():
        where = f"`{rl}` does not exist" if rl else "there is no `rl` on the PATH, nor in `./prime-rl/.venv`"
        raise DockyardError(f"Prime-RL is not installed: {where}", hint=_INSTALL)
    python = rl.parent / "python"
    try:
        done = subprocess.run(
            [str(python), "-c", f"import {PLUGIN}"],
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise DockyardError(f"`{python}` cannot be started: {error.strerror}", hint=_INSTALL) from None
    except subprocess.TimeoutExpired:
        return  # the disk is slow; `rl` itself has no time limit
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no error message"])[-1]
        raise DockyardError(f"`{python}` cannot import the plug-in `{PLUGIN}`: {said}", hint=_INSTALL)


FILE = "rl.toml"
_DIFFERENCES = (
    "Prime-RL's advantages are rewards minus their group's mean, without division; its loss is a mean over tokens",
    "Prime-RL has its own clipping rule, and its KL term is against the weights that sampled, not the base model",
)


@dataclass(frozen=True, slots=True)
class PrimeRL:
    """Implements `Backend`."""

    name: str = "prime-rl"

    def support(self, key: str, config: RunConfig) -> Support:
        return support(key, config)

    def check(self, config: RunConfig) -> None:
        check_installed(find_rl(config.prime_rl.checkout))

    def plan(self, config: RunConfig, folder: Path) -> BackendLaunch:
        _refuse_contradictions(config)
        outputs = RunPaths(folder).backend
        values = _resume_or_clean(outputs / RUN) | rl_settings(config, folder, outputs)
        rl = find_rl(config.prime_rl.checkout)
        return BackendLaunch(
            command=(str(rl or "rl"), "@", str(outputs / FILE)),
            files={FILE: toml_document(values)},
            environment=environment_of(rl),
            notes=(*_notes(config), *_DIFFERENCES),
        )


BACKEND = PrimeRL()


def _refuse_contradictions(config: RunConfig) -> None:
    if not config.steps and not config.counts_passes:
        raise UsageError(
            "`steps` is 0, which Prime-RL takes as no limit", hint="`dockyard eval` evaluates without training"
        )
    if config.rollout.concurrency < config.grpo.group_size:
        raise UsageError(
            f"`rollout.concurrency` is {config.rollout.concurrency}: Prime-RL starts whole groups, "
            f"and `grpo.group_size` is {config.grpo.group_size}",
            hint=f"`--rollout.concurrency {config.grpo.group_size}` or more",
        )
    if config.prime_rl.num_infer_gpus % config.prime_rl.tensor_parallel:
        raise UsageError(
            f"`prime_rl.num_infer_gpus` is {config.prime_rl.num_infer_gpus}, which is not a multiple of "
            f"`prime_rl.tensor_parallel`, {config.prime_rl.tensor_parallel}",
            hint="each replica of the model uses `tensor_parallel` GPUs",
        )


def _resume_or_clean(run: Path) -> dict[str, object]:
    """Prime-RL refuses a used folder unless it is to resume from the last checkpoint there, or to start over."""
    if any((run / "checkpoints").glob("step_*")):
        return {"resume": {}}
    return {"clean": True} if run.exists() else {}


def _notes(config: RunConfig) -> list[str]:
    gpus = config.prime_rl.num_train_gpus + config.prime_rl.num_infer_gpus
    trainer = config.trainer
    notes = [
        f"{gpus} GPUs: {config.prime_rl.num_train_gpus} for training, {config.prime_rl.num_infer_gpus} for inference",
        f"LoRA of rank {trainer.lora_r} and alpha {trainer.lora_alpha}, AdamW at {trainer.lr:g}; "
        f"{config.grpo.tasks_per_step} tasks with {config.grpo.group_size} rollouts each per step",
    ]
    if not config.engine.context_length:
        notes.append(f"`engine.context_length` is not set: sequences are limited to {CONTEXT_LENGTH} tokens")
    if not config.rollout.max_staleness:
        notes.append("`rollout.max_staleness` is 0: rollouts still running when new weights arrive are restarted")
    if config.counts_passes:
        notes.append("every step is full: where a pass ends within a step, tasks of the next pass fill it")
    if config.tasks.holds_out:
        notes.append("the last evaluation uses the weights before the last step: Prime-RL never serves the final ones")
    return notes
