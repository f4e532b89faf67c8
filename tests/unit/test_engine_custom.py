"""What `engine.type = "module:Class"` may name, and how a class that does not sample as it should is found out."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_fakes import write_model

from dockyard.backends.launch import Ignored
from dockyard.backends.prime_rl import setting_support as prime_rl
from dockyard.backends.slime import setting_support as slime
from dockyard.cli import main
from dockyard.config import EngineConfig, ModelConfig, RunConfig
from dockyard.engine.custom import CheckedEngine, check_engine
from dockyard.engine.open import EngineSpec, open_engine
from dockyard.engine.protocol import ContextOverflow, EngineSetup, GenerateRequest, Generation
from dockyard.errors import EngineError, UsageError
from dockyard.settings.load import load_run_config
from dockyard.types import Finish

VOCAB = 300
GENERATE = "    async def generate(self, request): ...\n"
PUBLISH = "    async def publish(self, folder, version): ...\n"
CLOSE = "    async def close(self): ...\n"
INIT = "    def __init__(self, setup, host='here'): ...\n"
WHOLE = f"class E:\n{INIT}{GENERATE}{PUBLISH}{CLOSE}"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    before, path = set(sys.modules), list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


def config_of(code: str, **kwargs: object) -> EngineConfig:
    Path("my_engine.py").write_text(code)
    return EngineConfig(type="my_engine:E", kwargs=kwargs)


@pytest.mark.parametrize(
    ("code", "says", "hint"),
    [
        ("E = 3", "`engine.type` is `my_engine:E`, which is not a class", "async def generate(self, request"),
        ("class F: ...", "defines no `E`", "it defines F"),
        (f"class E:\n{INIT}{PUBLISH}{CLOSE}", "it lacks generate", "async def generate(self, request"),
        (f"class E:\n{INIT}{GENERATE}{CLOSE}", "it lacks publish", "async def publish(self, folder: Path, version"),
        (
            f"class E:\n{INIT}    async def generate(self): ...\n{PUBLISH}{CLOSE}",
            "`my_engine:E.generate`, whose signature is `async def generate(self)`: too many positional arguments",
            "define `async def generate(self, request: GenerateRequest) -> Generation`",
        ),
        (
            f"class E:\n{INIT}    def generate(self, request): ...\n{PUBLISH}{CLOSE}",
            "`my_engine:E.generate`, which must be a plain `async def`",
            "define `async def generate(self, request: GenerateRequest) -> Generation`",
        ),
        (
            f"class E:\n{GENERATE}{PUBLISH}{CLOSE}",
            "which cannot be created as `E(setup)`",
            "define `def __init__(self, setup: EngineSetup, ...)`",
        ),
    ],
)
def test_a_class_that_is_no_engine_is_answered_with_what_one_defines(code: str, says: str, hint: str):
    with pytest.raises(UsageError) as raised:
        check_engine(config_of(code))
    assert says in raised.value.message
    assert hint in raised.value.hint


def test_keyword_arguments_are_checked_before_anything_is_loaded():
    check_engine(config_of(WHOLE, host="there"))
    with pytest.raises(UsageError, match=r"cannot be created as `E\(setup, hst=...\)`: .*'hst'"):
        check_engine(config_of(WHOLE, hst="there"))


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize("verb", ["rollout", "eval", "serve"])  # `train` needs torch: `tests/train` has it
def test_every_verb_says_what_is_wrong_with_the_class_before_it_looks_for_the_model(
    verb: str, dry: bool, capsys: pytest.CaptureFixture[str]
):
    config_of(f"class E:\n{INIT}{PUBLISH}{CLOSE}")
    own = ["nowhere"] if verb == "serve" else ["--tasks.train=tasks", "--tasks.heldout=tasks", "--model.name=nowhere"]
    assert main([verb, *own, "--engine.type=my_engine:E", *(["--dry-run"] if dry else [])]) == 2
    assert "`engine.type` is `my_engine:E`: it lacks generate" in capsys.readouterr().err
    assert not Path("runs").exists() or not list(Path("runs").rglob("*.jsonl"))


def test_a_dry_run_shows_the_class_and_its_arguments(capsys: pytest.CaptureFixture[str]):
    config_of(WHOLE)
    words = ["--tasks.source=demo", "--engine.type=my_engine:E", "--engine.kwargs.host=there"]
    assert main(["train", *words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert 'type = "my_engine:E"  # default: "transformers"' in shown
    assert 'kwargs = { host = "there" }' in shown


@pytest.mark.parametrize(
    "ignored", ["url=http://x", "model=m", "retry_s=3", "launch=true", "max_batch=3", 'args=["x"]']
)
def test_settings_of_other_engines_have_no_effect(ignored: str):
    words = ["--tasks.source=demo", "--engine.type=my_engine:E"]
    valid = load_run_config(None, [*words, "--engine.kwargs.x=1", "--engine.context_length=64"])
    assert valid.engine.kwargs == {"x": 1}
    with pytest.raises(UsageError, match=f"`engine.{ignored.partition('=')[0]}` has no effect when"):
        load_run_config(None, [*words, f"--engine.{ignored}"])


def test_arguments_without_a_class_have_no_effect():
    with pytest.raises(UsageError, match="`engine.kwargs` has no effect when `engine.type` is `transformers`"):
        load_run_config(None, ["--tasks.source=demo", "--engine.kwargs.x=1"])


@pytest.mark.parametrize("name", ["vlm", "my_engine", "my engine:E", "my_engine:"])
def test_a_name_that_is_neither_an_engine_nor_a_class_is_refused(name: str):
    with pytest.raises(UsageError, match=r"it must be `transformers`, `vllm`, `sglang`, `openai`, or `module:Class`"):
        load_run_config(None, ["--tasks.source=demo", f"--engine.type={name}"])


@pytest.mark.parametrize("backend", [slime, prime_rl])
@pytest.mark.parametrize("key", ["engine.type", "engine.kwargs"])
def test_other_backends_have_their_own_engines(backend: Any, key: str):
    found = backend.support(key, RunConfig())
    assert isinstance(found, Ignored)
    assert "itself" in found.why


class Sampler:
    """Implements `CustomEngine` with the same distribution after every prompt."""

    def __init__(self, setup: EngineSetup | None = None, *, fault: str = "") -> None:
        self.setup = setup
        self.fault = fault
        self.version = 0
        self.num_calls = 0
        self.closed = False
        self.logits = np.random.default_rng(0).normal(size=VOCAB) * 3

    def distribution(self, temperature: float) -> np.ndarray:
        scores = self.logits / (temperature or 1.0)
        return scores - np.log(np.exp(scores).sum())

    async def generate(self, request: GenerateRequest) -> Generation:
        self.num_calls += 1
        logprobs: Any = self.distribution(request.temperature)
        random = np.random.default_rng(request.seed + (self.num_calls if self.fault == "random" else 0))
        ids: Any = random.choice(VOCAB, request.max_new_tokens, p=np.exp(logprobs))
        if request.temperature == 0:
            wanted = self.logits.argmin() if self.fault == "unlikely" else self.logits.argmax()
            ids = ids if self.fault == "random" else np.full(request.max_new_tokens, wanted)
        if self.fault == "untempered":
            logprobs = self.distribution(1.0)
        elif self.fault == "logits":
            logprobs = self.logits - self.logits.max()
        elif self.fault == "noise":
            logprobs = logprobs - self.num_calls
        versions = np.full(len(ids), self.version)
        return Generation(token_ids=ids, logprobs=logprobs[ids], versions=versions, finish=Finish.LENGTH)

    async def publish(self, folder: Path, version: int) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(folder)
        self.version = version

    async def close(self) -> None:
        self.closed = True


def checked(sampler: Any) -> CheckedEngine:
    return CheckedEngine(sampler, "my:Engine", context_length=32, vocab_size=VOCAB)


def request(**more: Any) -> GenerateRequest:
    values = {"max_new_tokens": 4, "temperature": 1.0, "stop_ids": frozenset({7}), "seed": 1}
    return GenerateRequest(prompt_ids=np.arange(5, dtype=np.int32), **{**values, **more})


async def test_a_good_engine_is_used_as_it_is_within_the_context():
    engine = checked(Sampler())
    found = await engine.generate(request(max_new_tokens=100))
    assert isinstance(found, Generation)
    assert len(found.token_ids) == 27
    assert (found.token_ids.dtype, found.logprobs.dtype, found.versions.dtype) == (np.int32, np.float32, np.int32)
    expected = Sampler().distribution(1.0)[found.token_ids]
    np.testing.assert_allclose(found.logprobs, expected, rtol=1e-6)
    greedy = await engine.generate(request(temperature=0.0))
    assert isinstance(greedy, Generation)
    assert greedy.logprobs.tolist() == [0.0] * 4
    too_long = await engine.generate(replace(request(), prompt_ids=np.arange(32, dtype=np.int32)))
    assert too_long == ContextOverflow(prompt_tokens=32, context_length=32)


GOOD: dict[str, Any] = {
    "token_ids": np.array([1, 2, 7]),
    "logprobs": np.array([-1.0, -2.0, 0.001]),
    "versions": np.array([0, 0, 0]),
    "finish": Finish.STOP,
}


class Answers(Sampler):
    """Returns what it is told to."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer

    async def generate(self, request: GenerateRequest) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_rounding_and_lists_are_no_mistakes():
    lists = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in GOOD.items()}
    for answer in (GOOD, lists):
        found = await checked(Answers(Generation(**answer))).generate(request())
        assert isinstance(found, Generation)
        assert found.logprobs.tolist() == [-1.0, -2.0, 0.0]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"logprobs": np.array([-1.0, -2.0])}, "returned 3 token ids with 2 logprobs and 3 versions"),
        ({"versions": np.array([0])}, "returned 3 token ids with 3 logprobs and 1 versions"),
        ({"logprobs": np.array([-1.0, np.nan, -1.0])}, "returned sampled tokens without a logprob"),
        ({"logprobs": np.array([-1.0, -np.inf, -1.0])}, "returned sampled tokens without a logprob"),
        ({"logprobs": np.array([-1.0, -9999.0, -1.0])}, "returned sampled tokens without a logprob"),
        ({"logprobs": np.array([-1.0, 2.5, -1.0])}, "returned the logprob 2.5: a logprob is at most 0"),
        ({"token_ids": np.array([1, VOCAB, 7])}, "returned the token id 300; the model has 300 tokens"),
        ({"token_ids": np.array([1, 2**40, 7])}, "returned the token id 1099511627776; the model has 300 tokens"),
        ({"token_ids": np.array([1, -1, 7])}, "returned the token id -1"),
        ({"token_ids": np.array([1.0, 2.0, 7.0])}, "returned token ids of type float64"),
        ({"token_ids": np.array([[1, 2, 7]])}, "returned arrays with 2, 1 and 1 dimensions"),
        ({"token_ids": np.array([1, 7, 3])}, "continued after the stop token 7"),
        ({"versions": np.array([0, 1, 1])}, "sampled from version 1; the newest is 0"),
        ({"finish": "stop"}, "returned `'stop'` as finish"),
        ({name: GOOD[name][:0] for name in ("token_ids", "logprobs", "versions")}, "returned 0 tokens"),
        ({name: np.tile(GOOD[name], 2) for name in ("token_ids", "logprobs", "versions")}, "returned 6 tokens"),
    ],
)
async def test_a_result_that_could_not_be_trained_on_is_an_error_with_the_name_of_the_class(
    wrong: dict[str, Any], says: str
):
    with pytest.raises(EngineError) as raised:
        await checked(Answers(Generation(**{**GOOD, **wrong}))).generate(request())
    assert raised.value.message.startswith(f"`my:Engine.generate` {says}")


async def test_what_is_no_generation_and_what_the_class_raises_are_errors_with_its_name(tmp_path: Path):
    with pytest.raises(EngineError, match=r"`my:Engine.generate` returned `NoneType`"):
        await checked(Answers(None)).generate(request())
    with pytest.raises(EngineError, match=r"`my:Engine.generate` failed: ZeroDivisionError: by what"):
        await checked(Answers(ZeroDivisionError("by what"))).generate(request())
    with pytest.raises(EngineError, match=r"`my:Engine.publish` failed: FileNotFoundError"):
        await checked(Sampler()).publish(tmp_path / "nothing", 1)


async def test_tokens_of_an_older_version_than_asked_for_are_an_error(tmp_path: Path):
    sampler = Sampler()
    engine = checked(sampler)
    await engine.publish(tmp_path, 3)
    assert engine.version == 3
    found = await engine.generate(request())
    assert isinstance(found, Generation)
    assert found.versions.tolist() == [3] * 4
    sampler.version = 2
    await engine.generate(request(version=2))
    with pytest.raises(EngineError, match="sampled from version 2 although 3 was published before the call"):
        await engine.generate(request())


def write_tiny(folder: Path) -> None:
    write_model(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "max_position_embeddings": 128}))


def spec_of(model_dir: Path, **settings: Any) -> EngineSpec:
    config = EngineConfig(type=f"{__name__}:Sampler", **settings)
    return EngineSpec(engine=config, model=ModelConfig(name="tiny"), model_dir=model_dir, lora_rank=4, num_versions=2)


async def test_an_engine_is_opened_with_what_the_run_knows_and_closed_with_it(tmp_path: Path):
    write_tiny(tmp_path)
    async with open_engine(spec_of(tmp_path)) as engine:
        assert isinstance(engine, CheckedEngine)
        sampler: Any = engine._engine  # pyright: ignore[reportPrivateUsage]
        assert sampler.setup == EngineSetup(
            model_dir=tmp_path, model=ModelConfig(name="tiny"), context_length=128, lora_rank=4, num_versions=2
        )
        assert not sampler.closed
    assert sampler.closed
    async with open_engine(spec_of(tmp_path, context_length=64)) as engine:
        assert isinstance(engine, CheckedEngine)
        assert engine.context_length == 64
    with pytest.raises(EngineError, match="`engine.context_length` is 256, and the model has 128"):
        async with open_engine(spec_of(tmp_path, context_length=256)):
            pass


async def test_a_constructor_that_fails_is_named_with_its_line(tmp_path: Path):
    write_tiny(tmp_path)
    config = config_of(f"class E:\n    def __init__(self, setup):\n        1 / 0\n{GENERATE}{PUBLISH}{CLOSE}")
    with pytest.raises(UsageError) as raised:
        async with open_engine(replace(spec_of(tmp_path), engine=config)):
            pass
    assert raised.value.message == (
        "`engine.type` is `my_engine:E`, which cannot be created: ZeroDivisionError: division by zero "
        f"(`{tmp_path}/my_engine.py`, line 3)"
    )


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("untempered", "returned logprobs without the temperature"),
        ("logits", "whose probabilities add up to"),
        ("noise", "after the same prompt with temperature 0.5"),
        ("random", "for the same prompt with temperature 0"),
        ("unlikely", "is more likely"),
    ],
)
async def test_logprobs_of_another_distribution_are_found_before_the_first_rollout(
    tmp_path: Path, fault: str, says: str
):
    write_tiny(tmp_path)
    with pytest.raises(EngineError) as raised:
        async with open_engine(spec_of(tmp_path, kwargs={"fault": fault})):
            pass
    assert raised.value.message.startswith(f"`{__name__}:Sampler.generate` returned")
    assert says in raised.value.message
