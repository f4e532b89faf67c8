"""Settings from defaults, a file and the command line, and what is said about mistakes."""

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from dockyard.config import ALGORITHMS, Config, GRPOConfig, OnResume, RunConfig
from dockyard.errors import UsageError
from dockyard.run_dir.resume import refuse_fixed, resumable_keys
from dockyard.settings.load import anchored, load, load_run_config, written_settings
from dockyard.settings.messages import SettingsError, suggest
from dockyard.settings.overrides import Overrides, Patch, read_overrides
from dockyard.settings.text import changed_keys, expected_text, settings_by_key, settings_help, to_toml, toml_value


class OvenConfig(Config):
    """How the bread is baked."""

    heat: float = Field(default=220, gt=0, le=300)
    """In degrees."""
    fan: bool = False
    """Whether the air moves."""
    rack: int | None = Field(default=None, ge=1)
    """Counted from below."""
    extras: dict[str, Any] = Field(default_factory=dict)
    """Passed on as they are."""
    steps: list[str] = Field(default_factory=list)
    """What to do, in order."""


class BakeryConfig(Config):
    """One day at the bakery."""

    loaves: int = Field(default=10, ge=0)
    """How many."""
    flour: str = Field(default="rye", min_length=1)
    """Which flour."""
    shelf: Path = Path("shelf")
    """Where the loaves go."""
    oven: OvenConfig = OvenConfig()


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def problems_of(toml: Path | None, *overrides: str) -> list[tuple[str, str]]:
    with pytest.raises(SettingsError) as caught:
        load(BakeryConfig, toml, overrides)
    assert caught.value.exit_code == 2
    return [(problem.message, problem.hint) for problem in caught.value.problems]


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path):
    toml = write(tmp_path / "run.toml", "loaves = 3\n[oven]\nheat = 180\n")
    config = load(BakeryConfig, toml, ["--oven.heat", "1e2"])
    assert (config.loaves, config.oven.heat, config.flour) == (3, 100.0, "rye")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--oven.heat", "1.5e2"], OvenConfig(heat=150)),
        (["--oven.heat=150"], OvenConfig(heat=150)),
        (["--oven.heat=100", "--oven.heat", "150"], OvenConfig(heat=150)),
        (["--oven.fan", "true"], OvenConfig(fan=True)),
        (["--oven.rack", "2"], OvenConfig(rack=2)),
        (["--oven.rack", "2", "--oven.rack=none"], OvenConfig(rack=None)),
        (["--oven.extras.foo", "3"], OvenConfig(extras={"foo": 3})),
        (["--oven.extras.a.b", "true", "--oven.extras.a.c=x y"], OvenConfig(extras={"a": {"b": True, "c": "x y"}})),
        (["--oven.extras.day", "2026-01-22"], OvenConfig(extras={"day": "2026-01-22"})),
        (["--oven.extras.number", '"3"'], OvenConfig(extras={"number": "3"})),
        (["--oven.extras.x", "NaN"], OvenConfig(extras={"x": "NaN"})),
        (["--oven.extras.x", "-1"], OvenConfig(extras={"x": -1})),
        (["--oven.extras", '{"a": [1, 2.5]}'], OvenConfig(extras={"a": [1, 2.5]})),
        (["--oven.extras", "{ a = [1, 2.5], b = 'c' }"], OvenConfig(extras={"a": [1, 2.5], "b": "c"})),
        (["--oven.steps", '["knead", "wait"]'], OvenConfig(steps=["knead", "wait"])),
    ],
)
def test_overrides_are_read_by_the_type_of_their_setting(words: list[str], expected: OvenConfig):
    assert load(BakeryConfig, None, words).oven == expected


def test_a_text_setting_keeps_what_looks_like_a_number():
    assert load(BakeryConfig, None, ["--flour", "405"]).flour == "405"


def test_one_key_of_a_table_is_added_to_those_of_the_file(tmp_path: Path):
    toml = write(tmp_path / "run.toml", "[oven.extras]\na = 1\nb = 2\n")
    assert load(BakeryConfig, toml, ["--oven.extras.b", "3"]).oven.extras == {"a": 1, "b": 3}
    assert load(BakeryConfig, toml, ["--oven.extras", '{"c": 4}']).oven.extras == {"c": 4}


def test_an_unknown_key_in_the_file_names_the_nearest_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run.toml", "[grpo]\ngrup_size = 3\n")
    with pytest.raises(UsageError) as caught:
        load_run_config(Path("run.toml"), [])
    assert caught.value.message == "`grpo.grup_size` in `run.toml` is not a setting"
    assert caught.value.hint == "did you mean `grpo.group_size`? `dockyard train --help` lists every setting"


def test_an_unknown_key_with_no_near_one_lists_its_section(tmp_path: Path):
    toml = write(tmp_path / "run.toml", "[oven]\nzzzz = 3\n")
    [(message, hint)] = problems_of(toml)
    assert message == f"`oven.zzzz` in `{toml}` is not a setting"
    assert "`oven.heat`, `oven.fan`, `oven.rack`" in hint


def test_an_unknown_section_lists_the_sections(tmp_path: Path):
    [(message, hint)] = problems_of(write(tmp_path / "run.toml", "[qqqqqq]\nx = 3\n"))
    assert message.startswith("`qqqqqq` in ")
    assert "the sections are `oven`;" in hint


def test_a_misspelt_section_names_the_nearest_one(tmp_path: Path):
    [(_, hint)] = problems_of(write(tmp_path / "run.toml", "[ovne]\nheat = 3\n"))
    assert hint.startswith("did you mean `oven`?")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("lr", ["trainer.lr"]),
        ("learning.lr", ["trainer.lr"]),
        ("name", ["model.name", "agent.name"]),
        ("trainer.warmup-steps", ["trainer.warmup_steps"]),
        ("run-dir", ["run_dir"]),
        ("trainr.lora_rr", ["trainer.lora_r"]),
        ("grp_size", ["grpo.group_size"]),
        ("zork.qux", []),
    ],
)
def test_suggestions_look_in_the_section_and_then_everywhere(key: str, expected: list[str]):
    assert suggest(key, settings_by_key(RunConfig)) == expected


def test_an_unknown_option_gets_the_dotted_key_as_hint():
    [(message, hint)] = problems_of(None, "--heat", "3")
    assert message == "`--heat` is not a setting"
    assert hint.startswith("did you mean `--oven.heat`?")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--oven.heat", "0"],
            "`--oven.heat` on the command line is `0`; it must be a number greater than 0 and at most 300",
        ),
        (
            ["--oven.heat=hot"],
            "`--oven.heat` on the command line is `hot`; it must be a number greater than 0 and at most 300",
        ),
        (["--oven.heat=nan"], "`--oven.heat` on the command line is `nan`; it must be a finite number"),
        (["--loaves=1.5"], "`--loaves` on the command line is `1.5`; it must be an integer of at least 0"),
        (["--oven.fan=maybe"], "`--oven.fan` on the command line is `maybe`; it must be true or false"),
        (["--oven.extras=3"], "`--oven.extras` on the command line is `3`; it must be a table"),
        (["--oven.extras.x=null"], "`--oven.extras.x` is `null`; a table cannot hold null"),
        (["--shelf="], "`--shelf` is empty; it must be a path"),
        (["--flour="], "`--flour` on the command line is empty; it must be text with a length of at least 1"),
        (["--loaves="], "`--loaves` on the command line is empty; it must be an integer of at least 0"),
        (["--oven", "3"], "`--oven` is a section, not a setting"),
        (["--oven.heat.x", "3"], "`--oven.heat.x` is not a setting"),
        (["--oven.extras.", "3"], "`--oven.extras.` is not a setting"),
        (["--oven.fan"], "`--oven.fan` needs a value"),
        (["--oven.fan", "--loaves=3"], "`--oven.fan` needs a value"),
        (["loose"], "`loose` is not an option"),
    ],
)
def test_a_wrong_override_says_the_key_the_value_and_what_was_expected(words: list[str], message: str):
    assert [said for said, _ in problems_of(None, *words)] == [message]


def test_a_wrong_value_in_the_file_says_where_and_what_the_setting_means(tmp_path: Path):
    toml = write(tmp_path / "run.toml", '[oven]\nheat = 500\nrack = "top"\n')
    assert problems_of(toml) == [
        (
            f"`oven.heat` in `{toml}` is `500`; it must be a number greater than 0 and at most 300",
            "`oven.heat`: In degrees.",
        ),
        (
            f"`oven.rack` in `{toml}` is `top`; it must be an integer of at least 1, or none",
            "`oven.rack`: Counted from below.",
        ),
    ]


def test_a_section_that_is_not_a_table_is_reported_also_when_it_is_overridden(tmp_path: Path):
    toml = write(tmp_path / "run.toml", "oven = 3\n")
    for words in ([], ["--oven.heat", "100"]):
        [(message, _)] = problems_of(toml, *words)
        assert message.endswith("is `3`; it must be a section")


def test_all_mistakes_are_reported_at_once_each_with_its_place(tmp_path: Path):
    toml = write(tmp_path / "run.toml", "loafs = 3\nflour = 4\n[oven]\nheat = -1\n")
    messages = [message for message, _ in problems_of(toml, "--oven.rack", "0", "--steam", "1")]
    assert sorted(messages) == sorted(
        [
            "`--steam` is not a setting",
            "`--oven.rack` on the command line is `0`; it must be an integer of at least 1, or none",
            f"`loafs` in `{toml}` is not a setting",
            f"`flour` in `{toml}` is `4`; it must be text",
            f"`oven.heat` in `{toml}` is `-1`; it must be a number greater than 0 and at most 300",
        ]
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = 1\nb == 2\n", "is not valid TOML: Invalid value (at line 2, column 4)"),
        (b"a = 1\nb = [1,", "is not valid TOML: Invalid value (at line 2, column 8)"),
        (b"a = '\xff'", "is not UTF-8 text (byte 5)"),
    ],
)
def test_a_file_that_is_not_toml_says_where(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load(BakeryConfig, path, [])
    assert caught.value.message == f"`{path}` {message}"


def test_a_missing_file_and_a_folder_are_misuse(tmp_path: Path):
    with pytest.raises(UsageError, match="does not exist"):
        load(BakeryConfig, tmp_path / "none.toml", [])
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        load(BakeryConfig, tmp_path, [])


def test_task_folders_are_needed_unless_tasks_are_generated():
    with pytest.raises(UsageError, match="`tasks.train` is not set"):
        load_run_config(None, [])
    assert load_run_config(None, ["--tasks.source", "demo"]).tasks.train is None


def test_a_setting_that_the_task_source_would_ignore_is_an_error():
    with pytest.raises(UsageError, match="`tasks.train` has no effect"):
        load_run_config(None, ["--tasks.source=demo", "--tasks.train=x"])
    with pytest.raises(UsageError, match="`tasks.num_train` has no effect"):
        load_run_config(None, ["--tasks.num_train=8", "--tasks.train=x"])


def test_relative_paths_stay_as_given_until_they_are_anchored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    config = load_run_config(None, ["--tasks.train", "tasks", "--model.name", "models/mine"])
    assert (config.tasks.train, config.model.name) == (Path("tasks"), "models/mine")
    fixed = anchored(config)
    assert changed_keys(config, fixed) == ["run_dir", "model.name", "tasks.train"]
    assert (fixed.tasks.train, fixed.model.name) == (tmp_path / "tasks", str(tmp_path / "models" / "mine"))
    assert anchored(RunConfig()).model.name == RunConfig().model.name


def reload(config: Config, folder: Path) -> Config:
    return load(type(config), write(folder / "resolved.toml", to_toml(config)), [])


def test_the_resolved_settings_load_back_to_the_same(tmp_path: Path):
    words = ["--tasks.train=a b", "--trainer.lr=3e-7", '--agent.kwargs={"a b": {"c": [1, "é\\n\\u007f\\"\\\\"]}}']
    config = load_run_config(None, words)
    assert reload(config, tmp_path) == config


def test_what_differs_from_the_defaults_is_marked():
    lines = to_toml(load(BakeryConfig, None, ["--oven.heat=100", "--oven.rack=2"])).splitlines()
    assert [line for line in lines if "default" in line] == [
        "heat = 100.0  # default: 220.0",
        "rack = 2  # default: none",
    ]
    assert "fan = false" in lines
    assert "# rack is not set" in to_toml(BakeryConfig()).splitlines()


def test_every_setting_that_may_be_none_is_none_by_default():
    """TOML has no null, so no other default could be replaced by none and loaded back."""
    optional = [field for field in settings_by_key(RunConfig).values() if "None" in str(field.annotation)]
    assert optional
    assert all(field.get_default() is None for field in optional)


values = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_any_value_survives_toml_on_one_line(value: Any):
    text = toml_value(value)
    assert "\n" not in text
    assert tomllib.loads(f"value = {text}") == {"value": value}


def test_what_toml_cannot_hold_is_refused():
    with pytest.raises(UsageError, match="cannot be written as TOML"):
        toml_value({"a": None})
    assert math.isinf(tomllib.loads(f"x = {toml_value(math.inf)}")["x"])


def test_help_lists_every_setting_with_type_default_limits_and_meaning():
    text = settings_help(BakeryConfig)
    assert "[oven] How the bread is baked." in text
    assert "  --oven.heat FLOAT  (default: 220.0; greater than 0; at most 300)\n      In degrees." in text
    assert "  --oven.rack INT|none  (default: none; at least 1)" in text
    assert "  --oven.steps LIST  (default: [])" in text
    for key, field in settings_by_key(RunConfig).items():
        assert f"  --{key} " in settings_help(RunConfig)
        assert field.description, f"`{key}` has no docstring"


def test_the_resolved_settings_are_json_too():
    assert json.loads(BakeryConfig().model_dump_json())["oven"]["heat"] == 220


@pytest.mark.parametrize(
    ("circumstance", "ignored"),
    [
        ("--agent.name=oracle", "--agent.max_turns=3"),
        ("--agent.name=my:Agent", "--agent.max_turns=3"),
        ("--engine.deterministic=true", "--engine.max_batch=3"),
        ("--engine.type=transformers", "--engine.url=http://localhost:8000"),
        ("--engine.type=transformers", "--engine.model=policy"),
        ("--engine.type=transformers", "--engine.api_key_env=KEY"),
        ("--engine.type=transformers", "--engine.retry_s=3"),
        ("--engine.type=transformers", "--engine.launch=true"),
        ("--engine.type=transformers", "--engine.memory_share=0.3"),
        ("--tasks.train=somewhere", "--eval.samples=3"),
        ("--grpo.aggregation=token", "--grpo.constant_length=100"),
        ("--grpo.correction=none", "--grpo.correction_cap=3"),
        ("--grpo.correction=token", "--grpo.clip_high=0.3"),
        ("--grpo.correction=sequence", "--grpo.ratio=sequence"),
        ("--grpo.kl_coef=0", "--grpo.kl_type=k2"),
        ("--grpo.algorithm=dapo", "--grpo.kl_type=k2"),
        ("--grpo.overlong=mask", "--grpo.overlong_length=100"),
        ("--grpo.overlong=keep", "--grpo.overlong_buffer=100"),
        ("--grpo.dynamic_sampling=true", "--grpo.zero_variance=exclude"),
        ("--grpo.dynamic_sampling=false", "--grpo.max_tries=5"),
    ],
)
def test_a_setting_that_another_makes_meaningless_is_refused(circumstance: str, ignored: str):
    source = [] if "train" in circumstance else ["--tasks.source=demo"]
    load_run_config(None, [*source, circumstance])
    key = ignored.removeprefix("--").partition("=")[0]
    with pytest.raises(UsageError, match=f"`{key}` has no effect when"):
        load_run_config(None, [*source, circumstance, ignored])


@pytest.mark.parametrize("kind", ["vllm", "sglang", "openai"])
def test_a_server_needs_its_address_and_leaves_no_use_for_the_embedded_engines_settings(kind: str):
    words = ["--tasks.source=demo", f"--engine.type={kind}"]
    with pytest.raises(UsageError, match=f"`engine.url` is not set, and `engine.type` is `{kind}`"):
        load_run_config(None, words)
    words += ["--engine.url=https://localhost:8000/v1", "--engine.model=m", "--engine.api_key_env=KEY"]
    assert load_run_config(None, words).engine.model == "m"
    for ignored in ("--engine.max_batch=3", "--engine.prefix_cache_mb=3", "--engine.deterministic=true"):
        key = ignored.removeprefix("--").partition("=")[0]
        with pytest.raises(UsageError, match=f"`{key}` has no effect when `engine.type` is `{kind}`"):
            load_run_config(None, [*words, ignored])


@pytest.mark.parametrize("name", ["demo", "multi_turn", "one_gpu"])
def test_a_run_file_that_comes_with_dockyard_has_valid_settings(name: str):
    config = load_run_config(Path(__file__).parents[2] / "configs" / f"{name}.toml", [])
    assert config.run_dir == Path("runs", name)


def test_a_server_that_the_run_starts_has_no_address_and_is_a_vllm():
    launched = ["--tasks.source=demo", "--engine.type=vllm", "--engine.launch=true"]
    engine = load_run_config(None, [*launched, "--engine.memory_share=0.5", '--engine.args=["--enforce-eager"]']).engine
    assert (engine.url, engine.memory_share, engine.args) == (None, 0.5, ("--enforce-eager",))
    for ignored in ("--engine.url=http://localhost:8000", "--engine.model=m", "--engine.api_key_env=KEY"):
        with pytest.raises(UsageError, match="has no effect when `engine.launch` is true"):
            load_run_config(None, [*launched, ignored])
    with pytest.raises(UsageError, match="`engine.launch` has no effect when `engine.type` is `sglang`"):
        load_run_config(None, ["--tasks.source=demo", "--engine.type=sglang", "--engine.launch=true"])
    for option in ("--port", "--port=80", "--api_key"):
        with pytest.raises(UsageError, match="but the run decides the address of the server that it starts"):
            load_run_config(None, [*launched, f'--engine.args=["{option}", "80"]'])
    for share in ("0", "1", "1.5"):
        with pytest.raises(UsageError, match="`--engine.memory_share` on the command line is"):
            load_run_config(None, [*launched, f"--engine.memory_share={share}"])
    with pytest.raises(UsageError, match="is `\\[\\]`; it must be a list of at least 1"):
        load_run_config(None, [*launched, "--engine.command=[]"])
    asked = ["--tasks.source=demo", "--engine.type=vllm", "--engine.url=http://localhost:8000"]
    for ignored in ("--engine.memory_share=0.5", '--engine.args=["--enforce-eager"]', '--engine.command=["vllm"]'):
        with pytest.raises(UsageError, match="has no effect when `engine.launch` is false"):
            load_run_config(None, [*asked, ignored])


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "http://me:secret@localhost", "http://a b"])
def test_a_servers_address_is_http_and_holds_no_password(url: str):
    with pytest.raises(UsageError, match=r"`--engine.url` on the command line is"):
        load_run_config(None, ["--tasks.source=demo", "--engine.type=vllm", f"--engine.url={url}"])


def test_an_algorithm_sets_what_the_user_leaves_out_and_the_resolved_settings_say_so(tmp_path: Path):
    gspo = load_run_config(None, ["--tasks.source=demo", "--grpo.algorithm=gspo"]).grpo
    assert (gspo.ratio, gspo.clip_low, gspo.clip_high, gspo.aggregation) == ("sequence", 3e-4, 4e-4, "rollout")
    toml = write(tmp_path / "run.toml", '[tasks]\nsource = "demo"\n[grpo]\nalgorithm = "dapo"\nkl_coef = 0.1\n')
    dapo = load_run_config(toml, ["--grpo.aggregation=rollout"])
    assert (dapo.grpo.kl_coef, dapo.grpo.aggregation, dapo.grpo.dynamic_sampling) == (0.1, "rollout", True)
    assert reload(dapo, tmp_path) == dapo


def test_every_algorithm_has_valid_settings_and_grpo_has_the_defaults():
    for name in ALGORITHMS:
        assert load_run_config(None, ["--tasks.source=demo", f"--grpo.algorithm={name}"]).grpo.algorithm == name
    assert GRPOConfig(algorithm="grpo") == GRPOConfig()


@pytest.mark.parametrize("value", ["5", '"gspo"', "{ algorithm = 3 }", '{ algorithm = ["gspo"] }'])
def test_what_is_no_algorithm_is_explained(tmp_path: Path, value: str):
    toml = write(tmp_path / "run.toml", f'grpo = {value}\n[tasks]\nsource = "demo"\n')
    with pytest.raises(UsageError, match="`grpo"):
        load_run_config(toml, [])


def test_a_penalty_for_length_needs_a_length_longer_than_its_buffer():
    words = ["--tasks.source=demo", "--grpo.overlong=penalty"]
    with pytest.raises(UsageError, match="`grpo.overlong_length` is not set, and `grpo.overlong` is `penalty`"):
        load_run_config(None, words)
    with pytest.raises(UsageError, match="`grpo.overlong_buffer` is 200, more than `grpo.overlong_length`"):
        load_run_config(None, [*words, "--grpo.overlong_length=100", "--grpo.overlong_buffer=200"])
    assert load_run_config(None, [*words, "--grpo.overlong_length=100"]).grpo.overlong_buffer is None


def test_recorded_rollouts_cannot_be_tried_again():
    words = ["--tasks.source=recorded", "--tasks.dataset=job", "--grpo.algorithm=dapo"]
    assert load_run_config(None, words).grpo.dynamic_sampling
    with pytest.raises(UsageError, match="`grpo.max_tries` has no effect when `tasks.source` is `recorded`"):
        load_run_config(None, [*words, "--grpo.max_tries=5"])


def test_every_setting_is_marked_as_one_that_may_change_on_resume_or_may_not():
    marks = {
        key: [m for m in field.metadata if isinstance(m, OnResume)] for key, field in settings_by_key(RunConfig).items()
    }
    assert [key for key, found in marks.items() if len(found) != 1] == []


def test_nothing_that_rollouts_or_updates_are_computed_from_may_change_on_resume():
    changeable = resumable_keys()
    sections = {key.partition(".")[0] for key in changeable if "." in key}
    assert sections.isdisjoint({"tasks", "agent", "sampling", "grpo"})
    assert changeable.isdisjoint({"seed", "model.name", "trainer.lr", "trainer.lora_r", "engine.type", "eval.samples"})
    assert {"run_dir", "steps", "engine.url", "rollout.concurrency", "trainer.save_every"} <= changeable


@pytest.mark.parametrize("key", sorted(settings_by_key(RunConfig)))
def test_a_resumed_run_accepts_a_change_of_exactly_the_settings_that_are_marked(key: str):
    section, _, name = key.rpartition(".")
    changed = {name: "another value"}
    old = RunConfig()
    new = old.model_copy(update={section: getattr(old, section).model_copy(update=changed)} if section else changed)
    if key in resumable_keys():
        refuse_fixed(old, new)
    else:
        with pytest.raises(UsageError, match=f"`{key}` cannot change in a run that has started"):
            refuse_fixed(old, new)


def test_a_linear_schedule_fixes_the_number_of_steps():
    old = RunConfig.model_validate({"trainer": {"schedule": "linear"}})
    with pytest.raises(UsageError, match="`steps` cannot change in a run that has started") as caught:
        refuse_fixed(old, old.model_copy(update={"steps": 99}))
    assert "`rollout.concurrency`" in caught.value.hint
    assert "`steps`" not in caught.value.hint


def test_a_short_name_is_read_by_the_type_of_its_setting_and_named_in_errors():
    aliases = {"--rack": "oven.rack", "--heat": "oven.heat"}
    given = read_overrides(BakeryConfig, ["--rack=2", "--oven.heat", "100", "--heat", "150"], aliases)
    assert load(BakeryConfig, None, given).oven == OvenConfig(rack=2, heat=150)
    with pytest.raises(SettingsError) as caught:
        load(BakeryConfig, None, read_overrides(BakeryConfig, ["--rack", "0", "--heat=hot"], aliases))
    assert [problem.message for problem in caught.value.problems] == [
        "`--heat` on the command line is `hot`; it must be a number greater than 0 and at most 300",
        "`--rack` on the command line is `0`; it must be an integer of at least 1, or none",
    ]


def test_a_patch_overrides_the_file_and_is_overridden_by_what_comes_after_it(tmp_path: Path):
    toml = write(tmp_path / "run.toml", 'loaves = 3\nflour = "oat"\n[oven]\nheat = 180\nextras = { a = 1 }\n')
    words = read_overrides(BakeryConfig, ["--loaves", "4"])
    low = Patch({"loaves": 5, "shelf": Path("here"), "oven.heat": 200.0}, "--low")
    config = load(BakeryConfig, toml, words.before(low).after(Patch({"oven.extras.b": 2, "oven.rack": None}, "--high")))
    assert (config.loaves, config.shelf, config.flour) == (4, Path("here"), "oat")
    assert config.oven == OvenConfig(heat=200, extras={"a": 1, "b": 2})


def test_a_wrong_value_of_a_flag_that_stands_for_several_settings_names_the_flag_and_the_setting():
    with pytest.raises(SettingsError) as caught:
        load(BakeryConfig, None, Overrides((Patch({"loaves": -1, "flour": "rye"}, "--many"),)))
    assert caught.value.message == "`loaves`, set by `--many`, is `-1`; it must be an integer of at least 0"


def test_a_value_that_is_typed_already_is_not_parsed_again():
    text = '{"looks": "like JSON"} --loaves=3'
    assert load(BakeryConfig, None, Overrides((Patch({"flour": text, "oven.steps": [text]}, "--x"),))).flour == text


def test_only_what_the_user_wrote_is_written(tmp_path: Path):
    toml = write(tmp_path / "run.toml", "loaves = 3\n[oven]\nheat = 180\n")
    given = read_overrides(BakeryConfig, ["--oven.extras.a=1", "--rack", "2"], {"--rack": "oven.rack"})
    places = written_settings(toml, given, BakeryConfig).places
    assert places == {
        "loaves": f"in `{toml}`",
        "oven.heat": f"in `{toml}`",
        "oven.rack": "on the command line",
        "oven.extras": "on the command line",
    }


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("rollout.max_staleness", "an integer between 0 and 8"),
        ("trainer.adam_beta2", "a number greater than 0 and less than 1"),
        ("tasks.heldout_share", "a number of at least 0 and less than 1"),
        ("tasks.limit", "an integer of at least 1, or none"),
        ("trainer.compile", "true or false"),
        ("tasks.train", "a path, or none"),
        ("agent.kwargs", "a table"),
        ("engine.args", "a list"),
        ("model.name", "text"),
    ],
)
def test_what_a_value_must_be_is_said_in_words(key: str, expected: str):
    assert expected_text(settings_by_key(RunConfig)[key]) == expected


def test_a_setting_whose_type_has_a_name_lists_its_choices():
    assert "--environment.seal off|processes|standard|strict  (" in settings_help(RunConfig)
