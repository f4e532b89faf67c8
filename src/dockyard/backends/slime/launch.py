"""Hands a run to SLiME: the model's shape, the GPUs, the arguments and the script become one `Launch`."""

from hashlib import blake2b
from itertools import count
from pathlib import Path

from dockyard.backends.launch import Fate, Launch
from dockyard.backends.slime.arguments import Places, arguments, check_more
from dockyard.backends.slime.fates import fate
from dockyard.backends.slime.layout import lay_out
from dockyard.backends.slime.machine import check_machine, checkout_of
from dockyard.backends.slime.models import read_shape, shape_arguments, usual_split
from dockyard.backends.slime.notes import notes
from dockyard.backends.slime.script import HELD, Script, custom_config
from dockyard.cache import cache_dir
from dockyard.config import RunConfig
from dockyard.engine.model_dir import known_as
from dockyard.errors import UsageError
from dockyard.run_dir import backend_dir, task_list_file

_SCRIPT, _CUSTOM = "train.sh", "dockyard.yaml"
_PLACE = "{rollout_id}"
_LARGE_B = 16.0
"""Models with more weights, in billions, are converted by all GPUs of a machine."""


class _Slime:
    """Implements `Backend`."""

    name = "slime"

    def fate(self, key: str, config: RunConfig) -> Fate:
        return fate(key, config)

    def check(self, config: RunConfig) -> None:
        check_machine(config)

    def plan(self, config: RunConfig, folder: Path) -> Launch:
        slime = config.slime
        _refuse_together(config)
        config = _with_recorded(config)
        shape = read_shape(config.model.name)
        model_arguments = shape_arguments(shape)
        layout = lay_out(config, split := usual_split(shape))
        config = _with_context(config, shape["max_position_embeddings"])
        backend = backend_dir(folder)
        ours = arguments(config, layout, Places(folder=backend, task_list=task_list_file(folder)))
        check_more(slime.args, ours | model_arguments)
        script = Script(
            slime=slime,
            checkout=checkout_of(config),
            model=str(_local(config)) if _local(config).is_dir() else config.model.name,
            shape=model_arguments,
            arguments=ours,
            more=slime.args,
            run=folder,
            folder=backend,
            converted=_converted(config),
            num_converting=min(slime.num_gpus, slime.gpus_per_node) if split.num_params_b > _LARGE_B else 1,
            is_async=config.rollout.max_staleness > 0,
            num_nodes=layout.nodes,
        )
        return Launch(
            command=("bash", str(backend / _SCRIPT)),
            files={_SCRIPT: script.text(), _CUSTOM: custom_config(folder)},
            environment={HELD: "1"},
            notes=tuple(notes(config, layout, split)),
        )


BACKEND = _Slime()


def _converted(config: RunConfig) -> Path | None:
    if config.slime.flavour == "miles":
        return None  # its bridge reads the model's own folder
    if config.slime.converted:
        return config.slime.converted.absolute()
    folder = _local(config)
    name = Path(known_as(config.model.name)).name
    if folder.is_dir():  # others may be called so too
        name += f"-{blake2b(bytes(folder), digest_size=4).hexdigest()}"
    return cache_dir().absolute() / "slime" / name


def _local(config: RunConfig) -> Path:
    """The model's folder, if it is no name on the Hub. The script may be run from anywhere."""
    return Path(config.model.name).expanduser().absolute()


def _refuse_together(config: RunConfig) -> None:
    slime, staleness = config.slime, config.rollout.max_staleness
    rules = (
        (
            slime.dynamic_sampling and staleness > 1,
            f"`slime.dynamic_sampling` is SLiME's own loop, which cannot be {staleness} updates ahead",
            "`--rollout.max_staleness 1`",
        ),
        (
            slime.flavour == "miles" and slime.pipeline_parallel > 1 and bool(staleness or slime.rollout_gpus),
            f"Miles sends adapters to engines of their own only from a pipeline of 1, not {slime.pipeline_parallel}",
            "`--slime.pipeline_parallel 1`",
        ),
        (
            slime.dynamic_sampling and slime.flavour == "miles",
            "`slime.dynamic_sampling` has no effect with Miles, whose loop would look for other groups for ever",
            "`--slime.dynamic_sampling false`",
        ),
        (
            slime.dynamic_sampling and config.tasks.source == "recorded",
            "`slime.dynamic_sampling` has nothing to sample from: `tasks.source` is `recorded`",
            "`--slime.dynamic_sampling false`",
        ),
    )
    for broken, problem, hint in rules:
        if broken:
            raise UsageError(problem, hint=hint)


def _with_recorded(config: RunConfig) -> RunConfig:
    """Recorded samples: a file per step, or one for all passes."""
    if config.tasks.source != "recorded":
        return config
    dataset = str(Path(config.tasks.dataset or "").absolute())
    if not dataset.endswith(".pt"):
        hint = "`dockyard convert JOB --output FILE.pt` writes one; `dockyard train` learns from other recordings"
        raise UsageError(f"`tasks.dataset` is `{dataset}`; SLiME reads recorded samples from `.pt` files", hint=hint)
    if _PLACE in dataset:
        steps = next(step for step in count() if not Path(dataset.replace(_PLACE, str(step))).exists())
    else:
        steps = (config.tasks.passes or 1) if Path(dataset).exists() else 0
    if not steps:
        hint = f"`{_PLACE}` in its name counts from 0; `--slime.save_rollouts true` keeps a run's samples"
        raise UsageError(f"`tasks.dataset` is `{dataset}`, which does not exist", hint=hint)
    tasks = config.tasks.model_copy(update={"dataset": dataset})
    return config.model_copy(update={"tasks": tasks, "steps": steps})


def _with_context(config: RunConfig, most: int) -> RunConfig:
    """The model's own limit where the run has none."""
    engine = config.engine
    if engine.context_length and engine.context_length > most:
        hint = f"`--engine.context_length {most}`"
        raise UsageError(f"`engine.context_length` is {engine.context_length}; the model's limit is {most}", hint=hint)
    return config.model_copy(
        update={"engine": engine.model_copy(update={"context_length": engine.context_length or most})}
    )
