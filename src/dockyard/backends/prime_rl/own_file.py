"""Check and launch a settings file of Prime-RL.

A file for a release before 0.8 is translated first, because Prime-RL rejects the old keys one by one. Keys that the
tables below do not name are passed on unchanged; Prime-RL validates them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from dockyard.backends.launch import BackendLaunch
from dockyard.backends.prime_rl.launch import environment_of
from dockyard.backends.prime_rl.toml import PLUGIN, Table
from dockyard.errors import UsageError
from dockyard.run_dir.durable import disk_errors
from dockyard.settings.load import read_toml
from dockyard.settings.text import toml_document
from dockyard.tasks.folder import load_tasks

_EVAL, _TRAIN = "orchestrator.eval", "orchestrator.train"
MOVED = {
    "wandb": "monitors.wandb",
    "clean_output_dir": "clean",
    "max_model_len": "inference.vllm.max_model_len",
    "ckpt.resume_step": "resume.step",
    "orchestrator.rollouts_per_example": "orchestrator.group_size",
    "orchestrator.client": "orchestrator.model.client",
    "orchestrator.max_concurrent": "orchestrator.concurrency.max_inflight",
    "orchestrator.max_inflight_rollouts": "orchestrator.concurrency.max_inflight",
    "orchestrator.sampling": f"{_TRAIN}.sampling",
    f"{_TRAIN}.sampling.max_tokens": f"{_TRAIN}.sampling.max_completion_tokens",
    f"{_EVAL}.rollouts_per_example": f"{_EVAL}.group_size",
    f"{_EVAL}.sampling.max_tokens": f"{_EVAL}.sampling.max_completion_tokens",
    "inference.model.name": "inference.vllm.model",
    "inference.model": "inference.vllm",
    "inference.parallel.tp": "inference.vllm.tensor_parallel_size",
    "inference.parallel.dp": "inference.vllm.data_parallel_size",
    "inference.gpu_memory_utilization": "inference.vllm.gpu_memory_utilization",
    "inference.enable_lora": "inference.vllm.enable_lora",
    "inference.max_lora_rank": "inference.vllm.max_lora_rank",
    "inference.seed": "inference.vllm.seed",
    "inference.vllm_extra": "inference.vllm",
}
"""Old key -> current key. Applied in this order: a later line may move the result of an earlier one."""
_OVERLAP = "rollouts and training always overlap by one step; `orchestrator.max_off_policy_steps` bounds the rest"
_FILTERS = "filters are now the `curriculum` of a source"
GONE = {
    "max_async_level": _OVERLAP,
    "orchestrator.max_async_level": _OVERLAP,
    "orchestrator.strict_async_level": _OVERLAP,
    "trainer.max_async_level": _OVERLAP,
    "orchestrator.trajectory_strategy": "a rollout is one sequence as long as its history only grows",
    "orchestrator.use_token_client": "rollouts always use token ids",
    "orchestrator.oversampling_factor": "the number of rollouts at once adapts to the engine",
    "orchestrator.seed": "tasks keep the order of their source",
    "orchestrator.buffer": _FILTERS,
    "orchestrator.filters": _FILTERS,
    "inference.parallel": "the sizes are arguments of vLLM",
}
_LATEST = -1
"""The old value for the latest step, which is now an empty table."""
_OF_TASKSET = ("tasks_dir",)
_OF_HARNESS = ("environment_type", "max_turns", "agent")
_REMOVED = {
    "vllm_base_url": "Prime-RL passes the address of its engine",
    "model_name": "Prime-RL passes the name of its model",
}


@dataclass(slots=True)
class Translation:
    """Settings in the current form, and a note for each change."""

    values: Table
    notes: list[str] = field(default_factory=list[str])


def translate(values: Mapping[str, Any]) -> Translation:
    """Return the settings in the current form. Current settings are returned unchanged, without notes."""
    result = Translation(_copy(values))
    for old, new in MOVED.items():
        found = _take(result.values, old)
        if found is not None:
            _put(result, new, found, old)
            result.notes.append(f"`{old}` is now `{new}`")
    for old, why in GONE.items():
        if _take(result.values, old) not in (None, {}):  # moving keys leaves empty tables behind
            result.notes.append(f"`{old}` was removed: {why}")
    for old, new in (("orchestrator.env", _TRAIN), (f"{_TRAIN}.env", _TRAIN), (f"{_EVAL}.env", _EVAL)):
        _move_sources(result, old, new)
    if result.values.get("resume") == {"step": _LATEST}:
        result.values["resume"] = {}
    return result


def _move_sources(result: Translation, old: str, new: str) -> None:
    entries = _take(result.values, old)
    if entries is None:
        return
    tables: list[Any] = cast(list[Any], entries) if isinstance(entries, list) else [None]
    if not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"`{old}` is `{entries}`, not a list of tables", hint=f"write `[[{old}]]`")
    result.notes.append(f"`[[{old}]]` is now `[[{new}.source]]`")
    _put(result, f"{new}.source", [_source(result, table) for table in tables], old)


def _source(result: Translation, entry: Table) -> Table:
    entry = dict(entry)
    plugin = str(entry.pop("id", "")).partition("@")[0].rpartition("/")[2].replace("-", "_")
    arguments = entry.pop("args", {})
    if not isinstance(arguments, dict):
        raise UsageError(f"`args` of `{plugin}` is `{arguments}`, not a table", hint="write `args = {name = value}`")
    arguments = cast(Table, arguments)
    workers, address = entry.pop("num_workers", None), entry.pop("address", None)
    pool = {"pool": {"type": "static", "num_workers": workers}} if isinstance(workers, int) else {}
    serve = pool | ({"address": address} if address else {})
    if "rollouts_per_example" in entry:
        entry["group_size"] = entry.pop("rollouts_per_example")
    if plugin == PLUGIN:
        env = _harbor(result, arguments)
    else:
        harness = entry.pop("harness", None)
        env: Table = {"taskset": entry.pop("taskset", None) or {"id": plugin, **arguments}}
        env |= {"agent": {"harness": harness}} if harness else {}
        if arguments:
            result.notes.append(f"`args` of `{plugin}` are now fields of its `env.taskset`")
    return {**entry, **({"serve": serve} if serve else {}), "env": env}


def _harbor(result: Translation, arguments: Table) -> Table:
    """Return the arguments of `load_environment` as fields of the current plug-in."""
    left = dict(arguments)
    num_parallel = left.pop("n_parallel_envs", None)
    if num_parallel is not None:
        _put(result, "orchestrator.concurrency.max_inflight", num_parallel, "args.n_parallel_envs")
        result.notes.append("`args.n_parallel_envs` is now `orchestrator.concurrency.max_inflight`, for the whole run")
    taskset = {name: left.pop(name) for name in _OF_TASKSET if name in left}
    harness = {name: left.pop(name) for name in _OF_HARNESS if name in left}
    for name, why in _REMOVED.items():
        if left.pop(name, None) is not None:
            result.notes.append(f"`args.{name}` was removed: {why}")
    if left:
        known = ", ".join(f"`{name}`" for name in (*_OF_TASKSET, *_OF_HARNESS, "n_parallel_envs", *_REMOVED))
        raise UsageError(f"`{PLUGIN}` has no argument `{next(iter(left))}`", hint=f"it has {known}")
    return {
        "taskset": {"id": PLUGIN, **taskset},
        "agent": {"harness": {"id": PLUGIN, **harness}, "runtime": {"type": "subprocess"}},
    }


def _take(values: Table, key: str) -> Any:
    """Remove the key and return its value; None if it does not exist."""
    *path, last = key.split(".")
    return _inner(values, *path).pop(last, None)


def _put(result: Translation, key: str, value: Any, old: str) -> None:
    """Set the key. An existing value must be equal; tables are merged."""
    *path, last = key.split(".")
    values = result.values
    for name in path:
        inner = values.setdefault(name, {})
        if not isinstance(inner, dict):
            raise UsageError(f"`{old}` is now `{key}`, but `{name}` there is `{inner}`", hint=f"remove `{name}`")
        values = cast(Table, inner)
    if isinstance(value, dict):
        for name, inner in cast(Table, value).items():
            _put(result, f"{key}.{name}", inner, f"{old}.{name}")
    elif values.setdefault(last, value) != value:
        hint = f"remove one of them; `{key}` is the current name"
        raise UsageError(f"`{old}` is `{value}`, and `{key}` is `{values[last]}`", hint=hint)


def _copy(values: Mapping[str, Any]) -> Table:
    """Copy nested tables, so that the caller's are not changed."""
    return {name: _copy(cast(Table, value)) if isinstance(value, dict) else value for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class OwnFile:
    """The file to launch."""

    file: Path
    """The file in the current form. It is written first if `text` is set."""
    text: str | None
    environments: tuple[str, ...]
    """The types of environment that its rollouts run in."""
    notes: tuple[str, ...]

    def write(self) -> None:
        if self.text is not None:
            with disk_errors(self.file):
                self.file.write_text(self.text)

    def launch(self, rl: Path | None, words: Sequence[str]) -> BackendLaunch:
        """Return the command. `words` are options that are passed to Prime-RL."""
        command = (str(rl or "rl"), "@", str(self.file), *words)
        return BackendLaunch(command=command, environment=environment_of(rl), notes=self.notes)


def read_own_file(file: Path) -> OwnFile:
    """Read the file. Missing tasks are an error here, because Prime-RL would notice only after loading the model."""
    translation = translate(read_toml(file))
    sources = [*_sources(translation.values, "train"), *_sources(translation.values, "eval")]
    if not _sources(translation.values, "train"):
        hint = "add `[[orchestrator.train.source]]`, as in `configs/harbor_8b.toml`"
        raise UsageError(f"`{file}` has no source to train on", hint=hint)
    for source in sources:
        _check_tasks(source, file)
    harnesses = [_inner(source, "env", "agent", "harness") for source in sources]
    environments = tuple({str(harness.get("environment_type", "docker")) for harness in harnesses})
    if not translation.notes:
        return OwnFile(file, None, environments, ())
    new = file.with_suffix(".translated.toml")
    head = f"`{file}` has the form of an older Prime-RL; `{new}` is its translation:"
    notes = (head, *(f"  {note}" for note in translation.notes))
    return OwnFile(new, toml_document(translation.values), environments, notes)


def _check_tasks(source: Table, file: Path) -> None:
    taskset = _inner(source, "env", "taskset")
    if taskset.get("id") != PLUGIN or "run_dir" in taskset:
        return
    folder = taskset.get("tasks_dir")
    if not isinstance(folder, str):
        raise UsageError(f"`tasks_dir` of a taskset in `{file}` is not set", hint="set it to a folder of Harbor tasks")
    load_tasks(Path(folder))


def _sources(values: Table, split: str) -> list[Table]:
    sources = _inner(values, "orchestrator", split).get("source")
    return cast(list[Table], sources) if isinstance(sources, list) else []


def _inner(values: Table, *names: str) -> Table:
    """Return a nested table; an empty one if it does not exist."""
    for name in names:
        inner: Any = values.get(name)
        values = cast(Table, inner) if isinstance(inner, dict) else {}
    return values
