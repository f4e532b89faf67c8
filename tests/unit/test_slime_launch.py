"""SLiME's arguments and script: every option exists there, shapes and GPUs are right, what cannot work is refused."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slime_flags import PINNED, flags_of

from dockyard.backends.launch import BackendLaunch
from dockyard.backends.slime import hooks
from dockyard.backends.slime.launch import BACKEND
from dockyard.backends.slime.layout import MODELS, shape_arguments
from dockyard.backends.slime.model_folder import acceptable
from dockyard.errors import DockyardError, UsageError
from dockyard.settings.load import load_run_config

CODER = "Qwen/Qwen3-Coder-30B-A3B-Instruct"
FLAGS: dict[str, list[str]] = json.loads(PINNED.read_text())


def plan(*words: str, model: str = "Qwen/Qwen3-8B") -> BackendLaunch:
    source = () if any(word.startswith("--tasks.source") for word in words) else ("--tasks.source=demo",)
    config = load_run_config(None, [f"--model.name={model}", "--slime.checkout=/slime", *source, *words])
    return BACKEND.plan(config, Path("/runs/mine"))


def options(launch: BackendLaunch) -> dict[str, list[str]]:
    """As bash would hand them to SLiME, but for the variables."""
    found: dict[str, list[str]] = {}
    for array in re.findall(r"^(?:SHAPE|ARGUMENTS)=\(\n(.*?)^\)", launch.files["train.sh"], re.M | re.S):
        for line in array.splitlines():
            option, *values = shlex.split(line)
            assert option not in found
            found[option] = values
    return found


EVERYTHING = (
    "--trainer.warmup_steps=2",
    "--slime.dynamic_sampling=true",
    "--slime.save_rollouts=true",
    "--engine.context_length=32768",
    "--slime.num_gpus=16",
)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("flavour", ["slime", "miles"])
@pytest.mark.parametrize("words", [(), EVERYTHING, ("--rollout.max_staleness=1",)], ids=["plain", "all", "async"])
def test_every_option_we_write_is_one_that_slime_or_megatron_has(model: str, flavour: str, words: tuple[str, ...]):
    if flavour == "miles":
        words = tuple(word for word in words if "dynamic_sampling" not in word)  # refused there
    written = options(plan(f"--slime.flavour={flavour}", *words, model=model))
    assert written.keys() - {*FLAGS[flavour], *FLAGS["megatron"]} == set()


@pytest.mark.parametrize("name", FLAGS)
def test_the_list_of_options_is_that_of_the_real_one(name: str):
    checkout = os.environ.get(f"{name.upper()}_REPO")
    if not checkout:
        pytest.skip(f"{name.upper()}_REPO does not name a checkout")
    assert flags_of(name, Path(checkout)) == FLAGS[name]


@pytest.mark.parametrize(
    ("model", "script", "differing"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8B.sh", set[str]()),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7B.sh", set[str]()),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", "qwen2.5-32B.sh", {"--norm-epsilon"}),  # of the base model
        (CODER, "qwen3-30B-A3B.sh", {"--ffn-hidden-size", "--rotary-base"}),  # a sibling's
    ],
)
def test_shapes_are_those_of_slimes_own_scripts(model: str, script: str, differing: set[str]):
    checkout = os.environ.get("SLIME_REPO")
    if not checkout:
        pytest.skip("SLIME_REPO does not name a checkout")
    source = '. "$1/scripts/models/$2"; printf "%s\\n" "${MODEL_ARGS[@]}"'
    done = subprocess.run(["bash", "-c", source, "-", checkout, script], capture_output=True, text=True, check=True)
    theirs: dict[str, list[str]] = {}
    for word in done.stdout.split("\n")[:-1]:
        if word.startswith("--"):
            theirs[word] = []
        else:
            theirs[list(theirs)[-1]].append(word)
    ours = {key: [] if value is None else [str(value)] for key, value in shape_arguments(MODELS[model]).items()}
    said_otherwise = {"--position-embedding-type", "--rotary-percent", "--use-rotary-position-embeddings"}
    assert theirs.keys() - ours.keys() <= said_otherwise
    assert ours.keys() - theirs.keys() <= said_otherwise
    same = {key for key in theirs.keys() & ours.keys() if _values(theirs[key]) == _values(ours[key])}
    assert theirs.keys() & ours.keys() - same == differing


def _values(words: list[str]) -> list[object]:
    """Numbers as numbers: 1e-6 is 1e-06."""
    return [json.loads(word) if re.match(r"[\d\[]", word) else word for word in words]


def test_settings_reach_slime_as_its_options():
    written = options(
        plan(
            *("--steps=7", "--seed=3", "--grpo.group_size=8", "--grpo.tasks_per_step=4", "--grpo.clip_high=0.3"),
            *("--trainer.lr=2e-6", "--trainer.schedule=linear", "--trainer.warmup_steps=3", "--trainer.save_every=5"),
            *("--sampling.temperature=0.8", "--sampling.max_new_tokens=999", "--eval.samples=2"),
        )
    )
    expected = {
        "--num-rollout": "7",
        "--seed": "3",
        "--n-samples-per-prompt": "8",
        "--rollout-batch-size": "4",
        "--global-batch-size": "32",
        "--eps-clip": "0.2",
        "--eps-clip-high": "0.3",
        "--lr": "2e-06",
        "--lr-decay-style": "linear",
        "--lr-warmup-iters": "3",
        "--lr-warmup-init": "5e-07",  # our first step of four
        "--save-interval": "5",
        "--rollout-temperature": "0.8",
        "--rollout-max-response-len": "999",
        "--rollout-max-context-len": "40960",
        "--eval-interval": "7",
        "--n-samples-per-eval-prompt": "2",
        "--load": "/runs/mine/backend/checkpoints",
    }
    assert {option: written[option] for option in expected} == {option: [value] for option, value in expected.items()}
    assert written["--eval-prompt-data"] == ["heldout", "/runs/mine/task-list.json"]


def test_numbers_reach_slime_as_they_are():
    written = options(plan("--sampling.temperature=0.66666667", "--trainer.lr=1.23456789e-6"))
    assert [float(written[option][0]) for option in ("--rollout-temperature", "--lr")] == [0.66666667, 1.23456789e-6]


def test_the_kl_penalty_is_in_the_loss_and_goes_with_its_coefficient():
    with_kl, without = options(plan()), options(plan("--grpo.kl_coef=0"))
    assert [with_kl[f"--{name}"] for name in ("use-kl-loss", "kl-loss-coef", "kl-loss-type")] == [
        [],
        ["0.001"],
        ["low_var_kl"],
    ]
    assert not [option for option in without if "kl" in option]
    assert "--kl-coef" not in with_kl
    assert without["--ref-load"] == ["$REFERENCE"]  # the weights to begin with, all the same


@pytest.mark.parametrize(
    ("words", "main", "function", "colocated"),
    [
        ((), "train.py", "generate_rollout", True),
        (("--slime.rollout_gpus=4",), "train.py", "generate_rollout", False),
        (("--rollout.max_staleness=2",), "train_async.py", "generate_rollout_async", False),
    ],
)
def test_staleness_decides_between_turns_and_training_while_sampling(
    words: tuple[str, ...], main: str, function: str, colocated: bool
):
    launch = plan(*words)
    written = options(launch)
    assert f"exec python3 {main} " in launch.files["train.sh"]
    assert written["--rollout-function-path"] == [f"dockyard.backends.slime.hooks.{function}"]
    assert ("--colocate" in written, written.get("--rollout-num-gpus")) == (colocated, None if colocated else ["4"])


def test_every_hook_that_slime_is_pointed_at_is_there():
    paths = {path for words in ((), EVERYTHING) for values in options(plan(*words)).values() for path in values}
    named = {path.removeprefix("dockyard.backends.slime.hooks.") for path in paths if path.startswith("dockyard.")}
    assert named >= {"SlimeDataSource", "generate_rollout", "reward_post_process", "generate", "keep_informative"}
    assert [name for name in named if not callable(vars(hooks).get(name))] == []


def test_nothing_is_evaluated_where_no_task_is_held_out(tmp_path: Path):
    written = options(plan("--tasks.source=folder", f"--tasks.train={tmp_path}"))
    assert not [option for option in written if option.startswith("--eval-") and option != "--eval-function-path"]


def test_miles_trains_adapters_and_reads_the_models_own_folder():
    launch = plan("--slime.flavour=miles", "--trainer.lora_r=8", "--trainer.lora_alpha=24")
    written = options(launch)
    assert (written["--lora-rank"], written["--lora-alpha"]) == (["8"], ["24"])
    assert 'REFERENCE="$MODEL"' in launch.files["train.sh"]
    assert "convert_hf_to_torch_dist" not in launch.files["train.sh"]
    assert not [option for option in options(plan()) if "lora" in option]


@pytest.mark.parametrize(
    ("model", "words", "expected"),
    [
        ("Qwen/Qwen3-8B", (), "tensor 2 × context 1 × pipeline 1 × data 4, expert 1; 8 engines of 1"),
        ("Qwen/Qwen3-8B", ("--slime.num_gpus=1",), "tensor 1 × context 1 × pipeline 1 × data 1"),
        ("Qwen/Qwen3-8B", ("--engine.context_length=40960",), "tensor 2 × context 4 × pipeline 1 × data 1"),
        (CODER, (), "tensor 4 × context 1 × pipeline 1 × data 2, expert 8; 1 engines of 8"),
        (CODER, ("--slime.num_gpus=64",), "data 16, expert 8; 8 engines of 8"),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", ("--rollout.max_staleness=1", "--slime.num_gpus=16"), "8 train, 8 sample"),
    ],
)
def test_models_are_split_over_gpus(model: str, words: tuple[str, ...], expected: str):
    assert expected in plan(*words, model=model).notes[0]


def test_the_optimiser_leaves_the_gpus_only_where_it_must():
    assert "--optimizer-cpu-offload" in options(plan(model=CODER))
    assert "--optimizer-cpu-offload" not in options(plan("--slime.num_gpus=64", model=CODER))
    assert "--optimizer-cpu-offload" not in options(plan())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--slime.num_gpus=3",), "3 training GPUs are not a multiple of tensor 2"),
        (("--slime.rollout_gpus=8",), "leave none of 8 GPUs for training"),
        (("--slime.num_gpus=1", "--rollout.max_staleness=1"), "leave none of 1 GPUs for training"),
        (("--slime.gpus_per_engine=3",), "8 GPUs for engines are not a multiple of 3"),
        (("--slime.num_gpus=20", "--slime.rollout_gpus=8"), "12 training GPUs do not fill whole machines of 8"),
        (("--slime.expert_parallel=3",), "8 training GPUs are not a multiple of expert 3"),
        (("--grpo.tasks_per_step=3", "--grpo.group_size=2"), "3 × 2 rollouts cannot be split evenly across 4 replicas"),
        (("--engine.context_length=50000",), "`engine.context_length` is 50000; the model's limit is 40960"),
        (("--slime.dynamic_sampling=true", "--rollout.max_staleness=2"), "does not support `rollout.max_staleness` 2"),
        (("--slime.dynamic_sampling=true", "--slime.flavour=miles"), "does not work with Miles"),
        (
            ("--slime.flavour=miles", "--slime.pipeline_parallel=2", "--slime.rollout_gpus=4"),
            "only with `pipeline_parallel` 1, not 2",
        ),
        (("--tasks.source=recorded", "--tasks.dataset=x.parquet"), "SLiME reads recorded samples from `.pt` files"),
        (("--tasks.source=recorded", "--tasks.dataset=/none/x.pt"), "`/none/x.pt`, which does not exist"),
        (
            ("--tasks.source=recorded", "--tasks.dataset=/none/x.pt", "--slime.dynamic_sampling=true"),
            "`slime.dynamic_sampling` has no effect: `tasks.source` is `recorded`",
        ),
        (("--model.name=./model",), "`./model`, whose shape is not known here"),
        (("--model.name=some/model",), "`some/model`, whose shape is not known here"),
    ],
)
def test_what_cannot_work_is_refused_with_a_way_out(words: tuple[str, ...], message: str):
    with pytest.raises(UsageError) as caught:
        plan(*words)
    assert message in caught.value.message
    assert "`" in caught.value.hint


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('["--lr", "1"]', "`slime.args` has `--lr`, which is set by `trainer.lr`"),
        ('["--kl-loss-co=0.5"]', "`slime.args` has `--kl-loss-co`, which is set by `grpo.kl_coef`"),
        (
            '["--recompute-method", "block"]',
            "`slime.args` has `--recompute-method`, but the launcher sets `--recompute-method`",
        ),
        (
            '["--load-debug-rollout-data", "x.pt"]',
            "has `--load-debug-rollout-data`, which is set by `tasks.dataset`",
        ),
        ('["--update-weights-interval", "4"]', "which is set by `rollout.max_staleness`"),
        ('["--num-layers=1"]', "`slime.args` has `--num-layers`, but the launcher sets `--num-layers`"),
        ('["--kl-coef", "0.1"]', "`slime.args` has `--kl-coef`, which has no effect here"),
    ],
)
def test_arguments_by_hand_change_nothing_that_the_run_decides(more: str, message: str):
    with pytest.raises(UsageError) as caught:
        plan(f"--slime.args={more}")
    assert message in caught.value.message


def test_other_arguments_by_hand_come_last():
    script = plan('--slime.args=["--use-wandb", "--wandb-group", "my run"]').files["train.sh"]
    assert "  --use-wandb\n  --wandb-group\n  'my run'\n)\n" in script


def test_recorded_samples_are_trained_on_without_engines(tmp_path: Path):
    for step in range(3):
        (tmp_path / f"{step}.pt").touch()
    source = ("--tasks.source=recorded", f"--tasks.dataset={tmp_path}/{{rollout_id}}.pt")
    written = options(plan(*source))
    assert written["--load-debug-rollout-data"] == [f"{tmp_path}/{{rollout_id}}.pt"]
    assert written["--num-rollout"] == ["3"]
    assert not [option for option in written if option.startswith(("--sglang", "--router", "--eval-interval"))]
    assert "--use-rollout-logprobs" not in written  # a file may have none
    again = options(plan("--tasks.source=recorded", f"--tasks.dataset={tmp_path}/0.pt", "--tasks.passes=5"))
    assert again["--num-rollout"] == ["5"]


def test_the_script_is_bash_whatever_folders_are_called():
    config = load_run_config(
        None,
        ["--tasks.source=demo", "--model.name=Qwen/Qwen3-8B", "--slime.checkout=/a b/it's", "--slime.num_gpus=16"],
    )
    launch = BACKEND.plan(config, Path("/runs/my 'run'"))
    checked = subprocess.run(["bash", "-n"], input=launch.files["train.sh"], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "RAY_ADDRESS:?" in launch.files["train.sh"]  # two machines need a cluster


def test_a_models_own_config_counts_more_than_what_is_known_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shape = MODELS["Qwen/Qwen3-8B"] | {"num_hidden_layers": 3, "rope_parameters": {"rope_theta": 5e6}}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    written = options(plan(model=str(tmp_path)))
    assert (written["--num-layers"], written["--rotary-base"]) == (["3"], ["5000000"])
    monkeypatch.chdir(tmp_path.parent)
    script = plan(model=f"./{tmp_path.name}").files["train.sh"]
    assert f"-m dockyard.backends.slime.model_folder {tmp_path} " in script  # it may be run from anywhere


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "has the type `llama`"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "has `rope_type` 'yarn'"),
        ({"use_sliding_window": True}, "has `use_sliding_window` True"),
        ({"norm_topk_prob": False}, "has `norm_topk_prob` False"),
        ({"mlp_only_layers": [0]}, r"has `mlp_only_layers` \[0\]"),
        ({"rope_theta": None}, "has no `rope_theta`"),
    ],
)
def test_a_model_that_the_arguments_cannot_describe_is_refused(tmp_path: Path, change: dict[str, Any], message: str):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[CODER] | change))
    with pytest.raises(UsageError, match=message):
        plan(model=str(tmp_path))


def test_a_broken_config_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="config.json` is not JSON"):
        plan(model=str(tmp_path))


def test_a_config_that_slime_stumbles_over_is_replaced_in_a_folder_of_links(tmp_path: Path):
    model, links = tmp_path / "model", tmp_path / "run" / "links"
    model.mkdir()
    (model / "model.safetensors").write_text("weights")
    (model / "config.json").write_text('{"hidden_size": 8, "shared_expert_intermediate_size": 0}')
    for _ in range(2):  # also when the run is resumed
        assert acceptable(model, links) == links
    assert json.loads((links / "config.json").read_text()) == {"hidden_size": 8}
    assert (links / "model.safetensors").read_text() == "weights"
    assert "shared_expert" in (model / "config.json").read_text()
    (model / "config.json").write_text('{"hidden_size": 8}')
    assert acceptable(model, links) == model


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in of SLiME's with all that it needs, on a machine of 8 GPUs."""
    files = {
        "slime/utils/arguments.py": "",
        "train.py": "",
        "torch/__init__.py": "class cuda:\n    device_count = staticmethod(lambda: 8)\n",
        **{f"{name}/__init__.py": "" for name in ("ray", "sglang", "megatron")},
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "empty").mkdir()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


def check(checkout: Path, *words: str) -> None:
    given = [f"--slime.checkout={checkout}", f"--slime.megatron={checkout}", f"--slime.python={sys.executable}", *words]
    BACKEND.check(load_run_config(None, ["--tasks.source=demo", "--model.name=Qwen/Qwen3-8B", *given]))


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("--slime.checkout=none", "`slime.checkout` is not set", "git clone https://github.com/THUDM/slime"),
        (
            "--slime.checkout=none --slime.flavour=miles",
            "`slime.checkout` is not set",
            "git clone https://github.com/radixark/miles",
        ),
        ("--slime.flavour=miles", "which has no `miles/utils/arguments.py`", "--slime.checkout DIR"),
        ("--slime.megatron=empty", "which has no `megatron`", "--slime.megatron DIR"),
        ("--slime.python=/no/python", "`/no/python`, which does not run", "the Python of SLiME's environment"),
        ("--slime.python=false", "`false`, which does not run", "the Python of SLiME's environment"),
        (
            "--slime.num_gpus=16 --slime.gpus_per_node=16",
            "`slime.num_gpus` is 16, and this machine has 8",
            "num_gpus 8",
        ),
        ("--slime.num_gpus=16", "need several machines, and RAY_ADDRESS is not set", "export RAY_ADDRESS=HEAD:6379"),
    ],
)
def test_what_is_missing_on_this_machine_is_named_with_the_next_command(
    checkout: Path, words: str, message: str, hint: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(checkout)
    with pytest.raises(DockyardError) as caught:
        check(checkout, *words.split())
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_python_without_ray_is_told_apart_from_one_that_has_all(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    check(checkout)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check(checkout, "--slime.num_gpus=16")
    (checkout / "ray" / "__init__.py").rename(checkout / "empty" / "__init__.py")
    (checkout / "ray").rmdir()
    with pytest.raises(DockyardError, match="has no `ray`"):
        check(checkout)
