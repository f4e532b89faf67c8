"""What the settings of a run require of each other: missing, meaningless and contradictory ones.

These are not validators of `RunConfig`, because `RunConfig()` must be valid: the defaults are read from it.
"""

from collections.abc import Mapping

from dockyard.config import Config, EngineConfig, GRPOConfig, RunConfig, TasksConfig
from dockyard.settings.messages import SettingProblem
from dockyard.settings.text import changed_keys

_ANY_DATASET = ("heldout", "repo", "ids", "limit", "heldout_share", "passes", "order")
READ_BY_SOURCE = {
    "folder": ("train", *_ANY_DATASET),
    "demo": ("num_train", "num_heldout", "passes", "order"),
    "trail": ("num_train", "num_heldout", "passes", "order"),
    "harbor": ("dataset", "registry", *_ANY_DATASET),
    "swebench": ("dataset", "split", "map", *_ANY_DATASET),
    "c2bug": ("dataset", "split", "map", "repositories", "image", *_ANY_DATASET),
    "recorded": ("dataset", "heldout", "passes"),
}
"""Which settings of `tasks` each source reads."""
_READ_BY_CUSTOM = ("kwargs", *_ANY_DATASET)
_EMBEDDED_ONLY = ("engine.max_batch", "engine.prefix_cache_mb", "engine.kv_cache_gb", "engine.deterministic")
_SERVER_ONLY = ("engine.url", "engine.model", "engine.api_key_env", "engine.retry_s")
_LAUNCH_ONLY = ("engine.command", "engine.memory_share", "engine.args")
_ADDRESS_OPTIONS = ("--host", "--port", "--uds", "--api-key", "--ssl-keyfile", "--ssl-certfile")

type Ignored = dict[str, tuple[str, ...]]
"""A circumstance of these settings, e.g. "`grpo.kl_coef` is 0", and the settings that have no effect then."""


def run_problems(config: RunConfig) -> list[SettingProblem]:
    """Everything that is wrong with settings that are valid one by one."""
    return [*_missing(config), *without_effect(config, _ignored(config)), *_contradictory(config)]


def without_effect(config: Config, ignored: Ignored, names: Mapping[str, str] | None = None) -> list[SettingProblem]:
    """The settings that were changed although others make them meaningless. `names` are flags by key."""
    changed = changed_keys(type(config)(), config)
    shown = {key: (names or {}).get(key, key) for key in changed}
    return [
        SettingProblem(
            f"`{shown[key]}` has no effect when {when}", f"remove `{shown[key]}`, or change the other setting"
        )
        for when, keys in ignored.items()
        for key in keys
        if key in shown
    ]


def ignored_by_engine(engine: EngineConfig) -> Ignored:
    """The settings of `engine` that the chosen engine does not read."""
    circumstances = {
        "`engine.deterministic` is true": (
            engine.type == "transformers" and engine.deterministic,
            ("engine.max_batch", "engine.prefix_cache_mb"),
        ),
        f"`engine.type` is `{engine.type}`": (
            True,
            (
                *(_EMBEDDED_ONLY if engine.type != "transformers" else ()),
                *(_SERVER_ONLY if not engine.is_server else ()),
                *(("engine.launch",) if engine.type != "vllm" else ()),
                *(("engine.kwargs",) if not engine.is_custom else ()),
            ),
        ),
        "`engine.launch` is true": (engine.launch, ("engine.url", "engine.model", "engine.api_key_env")),
        "`engine.launch` is false": (not engine.launch, _LAUNCH_ONLY),
    }
    return _that_hold(circumstances)


def _missing(config: RunConfig) -> list[SettingProblem]:
    """Settings that others make necessary."""
    found: list[SettingProblem] = []
    if config.tasks.source == "folder" and config.tasks.train is None:
        found.append(
            SettingProblem(
                "`tasks.train` is not set, and `tasks.source` is `folder`",
                "`--tasks.train DIR` names a folder of Harbor tasks; `--tasks.source demo` generates small ones",
            )
        )
    if config.tasks.source == "recorded" and config.tasks.dataset is None:
        found.append(
            SettingProblem(
                "`tasks.dataset` is not set, and `tasks.source` is `recorded`",
                "`--tasks.dataset PATH` names a Harbor job, a run folder or a file of samples",
            )
        )
    if config.engine.is_server and config.engine.url is None and not config.engine.launch:
        found.append(
            SettingProblem(
                f"`engine.url` is not set, and `engine.type` is `{config.engine.type}`",
                "`--engine.url http://localhost:8000` names a server; `--engine.type vllm --engine.launch true` starts "
                "one; `--engine.type transformers` needs none",
            )
        )
    if config.grpo.overlong == "penalty" and config.grpo.overlong_length is None:
        found.append(
            SettingProblem(
                "`grpo.overlong_length` is not set, and `grpo.overlong` is `penalty`",
                "`--grpo.overlong_length 20000` subtracts a full point of reward at 20000 sampled tokens",
            )
        )
    return found


def _contradictory(config: RunConfig) -> list[SettingProblem]:
    found = [
        SettingProblem(
            f"`engine.args` has `{option}`, but the run decides the address of the server that it starts",
            "remove it; to use a server of your own, `--engine.launch false --engine.url http://HOST:PORT`",
        )
        for option in (word.partition("=")[0].replace("_", "-") for word in config.engine.args)
        if option in _ADDRESS_OPTIONS
    ]
    length, buffer = config.grpo.overlong_length, config.grpo.overlong_buffer
    if length is not None and buffer is not None and buffer > length:
        found.append(
            SettingProblem(
                f"`grpo.overlong_buffer` is {buffer}, more than `grpo.overlong_length`, which is {length}",
                f"the penalty starts `overlong_buffer` tokens before `overlong_length`: set it to at most {length}",
            )
        )
    return found


def _ignored(config: RunConfig) -> Ignored:
    """The settings that this run does not read, and why."""
    agent, tasks = config.agent.name, config.tasks
    circumstances = {
        f"`tasks.source` is `{tasks.source}`": (True, _not_read(tasks.source)),
        "`tasks.heldout` is set": (tasks.heldout is not None, ("tasks.heldout_share",)),
        "`tasks.order` is set": (tasks.order is not None, ("tasks.passes",)),
        "no tasks are held out": (
            not tasks.holds_out,
            ("eval.samples", "eval.every", "sampling.eval_temperature", "trainer.keep_best"),
        ),
        "`eval.every` is 0": (config.eval.every == 0, ("trainer.keep_best",)),
        "passes are counted": (config.counts_passes, ("steps",)),
        f"`agent.name` is `{agent}`": (agent in ("oracle", "nop") or ":" in agent, ("agent.max_turns",)),
        "`environment.type` is `sandbox`": (config.environment.type == "sandbox", ("environment.cpus",)),
        "`environment.type` is `docker`": (config.environment.type == "docker", ("environment.storage_mb",)),
        "`trainer.method` is `full`": (config.trainer.method == "full", ("trainer.lora_r", "trainer.lora_alpha")),
        "`model.device` is `cpu`": (config.model.device == "cpu", ("trainer.compile", "trainer.offload")),
    }
    return {**_that_hold(circumstances), **ignored_by_engine(config.engine), **_ignored_by_loss(config.grpo)}


def _ignored_by_loss(grpo: GRPOConfig) -> Ignored:
    circumstances = {
        f"`grpo.aggregation` is `{grpo.aggregation}`": (grpo.aggregation != "constant", ("grpo.constant_length",)),
        # With a correction the ratio is taken to the current weights, so it is 1 and cannot be clipped. A loss of the
        # user's may read any of them.
        f"`grpo.correction` is `{grpo.correction}`": (
            grpo.loss is None,
            ("grpo.correction_cap",)
            if grpo.correction == "none"
            else ("grpo.ratio", "grpo.clip_low", "grpo.clip_high"),
        ),
        "`grpo.kl_coef` is 0": (grpo.kl_coef == 0, ("grpo.kl_type",)),
        f"`grpo.overlong` is `{grpo.overlong}`": (
            grpo.overlong != "penalty",
            ("grpo.overlong_length", "grpo.overlong_buffer"),
        ),
        "`grpo.dynamic_sampling` is true": (grpo.dynamic_sampling, ("grpo.zero_variance",)),
        "`grpo.dynamic_sampling` is false": (not grpo.dynamic_sampling, ("grpo.max_tries",)),
    }
    return _that_hold(circumstances)


def _that_hold(circumstances: dict[str, tuple[bool, tuple[str, ...]]]) -> Ignored:
    return {when: keys for when, (holds, keys) in circumstances.items() if holds}


def _not_read(source: str) -> tuple[str, ...]:
    others = TasksConfig.model_fields.keys() - {"source", *READ_BY_SOURCE.get(source, _READ_BY_CUSTOM)}
    found = tuple(f"tasks.{name}" for name in sorted(others))
    return (*found, "grpo.max_tries", "grpo.reward") if source == "recorded" else found
