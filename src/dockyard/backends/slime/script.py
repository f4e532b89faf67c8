"""`train.sh`: finds the model, converts it once, and starts SLiME. It can also be run by hand."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from dockyard.backends.slime.arguments import MODEL, REFERENCE
from dockyard.backends.slime.layout import MegatronArguments
from dockyard.config import SlimeConfig
from dockyard.run_dir.paths import RunPaths

HELD = "DOCKYARD_HOLDS_RUN"
"""Set when the launcher has locked the run's folder. Otherwise the script locks it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The contents of the script."""

    slime: SlimeConfig
    checkout: Path
    model: str
    shape: MegatronArguments
    arguments: MegatronArguments
    paths: RunPaths
    converted: Path | None
    """Folder of the base model in Megatron's format. None: it is read without conversion."""
    num_converting: int
    """Number of GPUs used for the conversion."""
    is_async: bool
    num_nodes: int

    def text(self) -> str:
        """Return the whole script."""
        return "\n".join((self._head(), self._environment(), self._hold(), self._find_model(), self._train()))

    def _head(self) -> str:
        return (
            "#!/usr/bin/env bash\n"
            f"# {self.model} on {self.slime.num_gpus} GPUs. Written by `dockyard backend slime`, which overwrites it.\n"
            "set -euo pipefail\n"
        )

    def _environment(self) -> str:
        paths = [str(path.absolute()) for path in (self.checkout, self.slime.megatron)]
        path = f"export PYTHONPATH={shlex.quote(':'.join(paths))}${{PYTHONPATH:+:$PYTHONPATH}}"
        more = '{"runtime_env": {"env_vars": {"PYTHONPATH": "\'"$PYTHONPATH"\'", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}}}'
        address = (
            ': "${RAY_ADDRESS:?names the head of a running Ray cluster, e.g. 10.0.0.1:6379}"\n'
            if self.num_nodes > 1
            else 'export RAY_ADDRESS="${RAY_ADDRESS:-local}"  # Ray starts and ends with this run\n'
        )
        return (
            f"{path}\n"
            "export CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONUNBUFFERED=1\n"
            f"{address}"
            "# Ray's workers get the environment of `ray job submit`, but the run ends with this process.\n"
            f"export RAY_JOB_CONFIG_JSON_ENV_VAR='{more}'\n"
        )

    def _hold(self) -> str:
        lock = shlex.quote(str(self.paths.lock))
        return (
            f'if [ -z "${{{HELD}:-}}" ]; then\n'
            f"  exec 9<>{lock}\n"
            f'  flock --nonblock 9 || {{ echo "error: another process holds {self.paths.root}" >&2; exit 1; }}\n'
            "fi\n"
        )

    def _find_model(self) -> str:
        python, links = shlex.quote(self.slime.python), shlex.quote(str(self.paths.backend / "model"))
        find = f"MODEL=$({python} -m dockyard.backends.slime.model_folder {shlex.quote(self.model)} {links})\n"
        shape = f"SHAPE=(\n{_lines(self.shape)}\n)\n"
        if self.converted is None:
            return f'{find}REFERENCE="$MODEL"\n{shape}'
        return f"{find}REFERENCE={shlex.quote(str(self.converted))}\n{shape}{self._convert()}"

    def _convert(self) -> str:
        """Convert to a temporary folder first, so that an interrupted conversion is not used."""
        python = shlex.quote(self.slime.python)
        launcher = (
            f" -m torch.distributed.run --nproc-per-node {self.num_converting}" if self.num_converting > 1 else ""
        )
        tool = shlex.quote(str(self.checkout / "tools" / "convert_hf_to_torch_dist.py"))
        return (
            'mkdir -p "$(dirname "$REFERENCE")"\n'
            'exec 8>"$REFERENCE.lock"\n'
            "flock 8  # another run may be converting it\n"
            'if [ ! -e "$REFERENCE/latest_checkpointed_iteration.txt" ]; then\n'
            '  rm -rf "$REFERENCE.part"\n'
            f'  {python}{launcher} {tool} "${{SHAPE[@]}}" --hf-checkpoint "$MODEL" --save "$REFERENCE.part"\n'
            '  mv -T "$REFERENCE.part" "$REFERENCE"\n'
            "fi\n"
            "exec 8>&-\n"
        )

    def _train(self) -> str:
        main = "train_async.py" if self.is_async else "train.py"
        more = "".join(f"  {shlex.quote(word)}\n" for word in self.slime.args)
        return (
            f"ARGUMENTS=(\n{_lines(self.arguments)}\n{more})\n"
            f"cd {shlex.quote(str(self.checkout))}\n"
            f'exec {shlex.quote(self.slime.python)} {main} "${{SHAPE[@]}}" "${{ARGUMENTS[@]}}"\n'
        )


def _lines(arguments: MegatronArguments) -> str:
    return "\n".join(f"  {' '.join((option, *map(_word, _words(value))))}" for option, value in arguments.items())


def _words(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else value


def _word(value: str) -> str:
    return f'"{value}"' if value in (MODEL, REFERENCE) else shlex.quote(value)


def custom_config(run: Path) -> str:
    """Return the text of `dockyard.yaml`, whose keys SLiME adds to its `args`."""
    return f"dockyard_run: {json.dumps(str(run))}\n"
