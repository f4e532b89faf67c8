"""Reads and writes trace files with Harbor's columns, one row per conversation, a few rows at a time.

Harbor exports one row for each reply, with everything before it, so the last row of a trial repeats the rows before.
What Harbor's columns cannot express (roles, reasoning, calls, copied messages) is stored in `conversation_json`, an
additional column that other readers can ignore. Tokens are made from the text.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dockyard.chat_format import chat_message, parse_message
from dockyard.convert.conversation import Conversation, Converted, group_name
from dockyard.convert.sample_files import ParquetColumn, ParquetWriter, open_parquet, read_parquet, whole_file, writing
from dockyard.convert.tokenize import Tokeniser, isolate_errors, skip
from dockyard.convert.trace_text import HarborReader, NoConversationError, as_dict, to_harbor, tools_of
from dockyard.errors import DockyardError
from dockyard.rollout.blame import BY_NAME
from dockyard.rollout.job import is_exception, rollout_of_exception
from dockyard.rollout.plan import Place
from dockyard.types import ASSISTANT, Blame, Failure, Json, Message, Rollout

MAIN = "main"
"""The source of the rows with the agent's main history. Other sources are subagents or summaries."""
_EPISODE = re.compile(r"(?:episode-)?(\d+)")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One row, by our column names."""

    number: int
    values: Json

    @property
    def key(self) -> tuple[str, str]:
        """The key that the rows of one trial share. A row without a trial name is a trial of its own."""
        trial = self.text("trial_name")
        return (self.text("run_id"), trial) if trial else ("", f"row-{self.number}")

    @property
    def episode(self) -> int | None:
        found = _EPISODE.fullmatch(self.text("episode"))
        return int(found[1]) if found else None

    @property
    def source(self) -> str:
        source = self.text("trace_source")
        return "" if source == MAIN else source

    def text(self, name: str) -> str:
        value = self.values.get(name)
        return "" if value is None else str(value)

    def number_in(self, name: str) -> float | None:
        try:
            number = float(self.values[name])
        except (KeyError, TypeError, ValueError):
            return None
        return number if math.isfinite(number) else None


def conversations_in(rows: list[TraceRow], notes: set[str]) -> Iterator[Conversation]:
    """The conversations in all rows of a trial. Raises `NoConversationError`."""
    if "conversation_json" in rows[0].values and all(row.text("conversation_json") for row in rows):
        yield from map(_recorded, rows)
        return
    for source in dict.fromkeys(row.source for row in rows):
        own = sorted((row for row in rows if row.source == source), key=lambda row: row.episode or 0)
        yield from _joined(own, source, notes)


def _recorded(row: TraceRow) -> Conversation:
    try:
        recorded = json.loads(row.text("conversation_json"))
        return Conversation(
            messages=tuple(map(parse_message, recorded["messages"])),
            tools=tuple(recorded["tools"]),
            sampled=frozenset(recorded["sampled"]),
            cut=frozenset(recorded["cut"]),
            name=recorded["name"],
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NoConversationError(f"`conversation_json` of row {row.number} is damaged: {error}") from error


def _joined(rows: list[TraceRow], name: str, notes: set[str]) -> Iterator[Conversation]:
    """Join the rows of one source, in the order of their episodes. A row that continues the one before replaces it."""
    every = len(rows) > 1 and [row.episode for row in rows] == list(range(len(rows)))
    said: list[Message] = []
    chain: Conversation | None = None
    for row in rows:
        now = _conversation(row, name, notes)
        continues = chain is not None and now.messages[: len(chain.messages)] == chain.messages
        if chain is not None and not continues:
            said += [chain.messages[place] for place in chain.replies]
            yield chain
        sampled = _sampled(now, said, only_last=every)
        before = chain.sampled or frozenset[int]() if chain is not None and continues else frozenset[int]()
        chain = Conversation(messages=now.messages, tools=now.tools, sampled=before | sampled, name=name)
    if chain is not None:
        yield chain


def _sampled(conversation: Conversation, said: list[Message], *, only_last: bool) -> frozenset[int]:
    """The replies sampled in this row. With `only_last`, earlier replies have rows of their own.

    Without it, a reply that is also in an earlier conversation is a copy.
    """
    replies = conversation.replies
    return frozenset(replies[-1:] if only_last else [p for p in replies if conversation.messages[p] not in said])


def _conversation(row: TraceRow, name: str, notes: set[str]) -> Conversation:
    reader = HarborReader(row.text("agent"), tools_of(row.values.get("tool_definitions")), notes)
    try:
        messages = reader.messages(row.values["conversations"])
    except NoConversationError as error:
        raise NoConversationError(f"`conversations` of row {row.number}: {error}") from error
    if messages[0].role == ASSISTANT and row.text("instruction"):
        messages.insert(0, Message("user", row.text("instruction")))
    return Conversation(messages=tuple(messages), tools=reader.tools, name=name)


_COLUMNS: tuple[ParquetColumn, ...] = (
    ("conversations", "messages"),
    ("agent", "text"),
    ("model", "text"),
    ("model_provider", "text"),
    ("date", "text"),
    ("task", "text"),
    ("episode", "text"),
    ("run_id", "text"),
    ("trial_name", "text"),
    ("result", "text"),
    ("tool_definitions", "text"),
    ("trace_source", "text"),
    ("reward", "number"),
    ("conversation_json", "text"),
)
_ALIASES = {"conversations": ("messages", "conversations_sharegpt", "conversation"), "task": ("task_name",)}
_READ = (*(name for name, _ in _COLUMNS if name not in ("model_provider", "date")), "instruction")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One trial in a trace file."""

    where: str
    """The file and the trial's first row."""
    trial: str
    task: str
    agent: str
    model: str
    result: str
    """A reward as text, or the name of an exception, or empty."""
    reward: float | None
    conversations: tuple[Conversation, ...]
    problem: str = ""
    """Why there are no conversations."""
    notes: frozenset[str] = frozenset()


def write_traces(path: Path, trials: Iterable[Converted]) -> int:
    """Write every trial whose text is known. Returns their number."""
    count = 0
    with whole_file(path) as draft, ExitStack() as stack:
        with writing(path):
            rows = stack.enter_context(ParquetWriter(draft, _COLUMNS))
        for trial in trials:
            count += bool(trial.conversations)
            for row in _rows(trial):
                with writing(path):
                    rows.write(row, 2 * len(row["conversation_json"]))
        with writing(path):
            stack.close()
    return count


def _rows(trial: Converted) -> Iterator[dict[str, Any]]:
    about = _about(trial)
    episodes: Counter[str] = Counter()
    for conversation in trial.conversations:
        source = conversation.name or MAIN
        episodes[source] += len(conversation.replies)
        yield {
            **about,
            "conversations": to_harbor(conversation),
            "episode": f"episode-{max(episodes[source] - 1, 0)}",
            "trace_source": source,
            "tool_definitions": _dump(conversation.tools) if conversation.tools else None,
            "conversation_json": _dump(_to_json(conversation)),
        }


def _about(trial: Converted) -> dict[str, Any]:
    """The columns that all rows of a trial share. Some are only in its `result.json`."""
    rollout = trial.rollout
    result = _read_result(Path(trial.where))
    config, model = _inner(result, "config"), _inner(_inner(result, "agent_info"), "model_info")
    failed = rollout.failure.cause if rollout.failure else None
    return {
        "agent": trial.agent,
        "model": trial.model,
        "model_provider": model.get("provider") or trial.model.rpartition("/")[0] or "unknown-provider",
        "date": result.get("started_at") or "",
        "task": rollout.task,
        "run_id": config.get("job_id") or trial.trial,
        "trial_name": trial.trial,
        "result": failed if rollout.reward is None else str(float(rollout.reward)),
        "reward": rollout.reward,
    }


def _read_result(trial: Path) -> Json:
    try:
        content = json.loads((trial / "result.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return as_dict(content) or {}


def _inner(values: Json, name: str) -> Json:
    return as_dict(values.get(name)) or {}


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _to_json(conversation: Conversation) -> Json:
    return {
        "name": conversation.name,
        "tools": list(conversation.tools),
        "sampled": sorted(conversation.replies),
        "cut": sorted(conversation.cut),
        "messages": [chat_message(message) for message in conversation.messages],
    }


def read_traces(path: Path) -> Iterator[Trace]:
    """Read a trace file trial by trial. The error for another kind of file names its columns."""
    file = open_parquet(path)
    columns = _match(file.schema_arrow.names, path)
    last = _last_rows(file, path, columns)
    held: dict[tuple[str, str], list[TraceRow]] = {}
    for number, values in enumerate(read_parquet(file, path, list(columns.values())), 1):
        row = TraceRow(number, {ours: values[theirs] for ours, theirs in columns.items()})
        held.setdefault(row.key, []).append(row)
        if last[row.key] == number:
            yield _trace(path, held.pop(row.key))


def _match(found: list[str], path: Path) -> dict[str, str]:
    """Map our column names to those of the file."""
    matched = {
        name: next(each for each in (name, *_ALIASES.get(name, ())) if each in found)
        for name in _READ
        if any(each in found for each in (name, *_ALIASES.get(name, ())))
    }
    lacks = [] if "conversations" in matched else ["`conversations` (a list of messages with `role` and `content`)"]
    if not {"task", "trial_name"} & set(matched):
        lacks.append("`task` or `trial_name`")
    if lacks:
        raise DockyardError(
            f"`{path}` is not a trace file\ncolumns found: {', '.join(f'`{name}`' for name in found) or 'none'}\n"
            f"columns needed: {', '.join(lacks)}",
            hint="rename the columns, or convert the job's folder itself: `dockyard convert JOB_DIR`",
        )
    return matched


def _last_rows(file: Any, path: Path, columns: dict[str, str]) -> dict[tuple[str, str], int]:
    """The last row number of each trial. Rows of its subagents may come much later than its own."""
    names = {name: columns[name] for name in ("run_id", "trial_name") if name in columns}
    keys = list(names.values()) or [columns["task"]]
    rows = enumerate(read_parquet(file, path, keys), 1)
    return {TraceRow(number, {name: row[column] for name, column in names.items()}).key: number for number, row in rows}


def _trace(path: Path, rows: list[TraceRow]) -> Trace:
    first = rows[0]
    conversations: tuple[Conversation, ...] = ()
    notes: set[str] = set()
    problem = ""
    try:
        conversations = tuple(conversations_in(rows, notes))
    except NoConversationError as error:
        problem = str(error)
    reward = first.number_in("reward")
    trial = first.text("trial_name") or first.key[1]
    return Trace(
        where=f"{path} row {first.number}",
        trial=trial,
        task=first.text("task") or trial.rpartition("__")[0] or trial,
        agent=first.text("agent"),
        model=first.text("model"),
        result=first.text("result"),
        reward=first.number_in("result") if reward is None else reward,
        conversations=conversations,
        problem=problem,
        notes=frozenset(notes),
    )


def read_trace_file(path: Path, tokeniser: Tokeniser) -> Iterator[Converted]:
    """Convert each trial of a trace file."""
    seen: Counter[str] = Counter()
    for trace in read_traces(path):
        group = group_name(trace.task, trace.agent, trace.model)
        found = _found(trace, group, seen[group])
        seen[group] += 1
        if trace.problem:
            yield skip(found, "unreadable", f"{trace.where}: {trace.problem}")
        elif trace.result and found.rollout.reward is None:
            what = "" if found.rollout.failure else ", neither a reward nor an exception"
            yield skip(found, "no_reward", f"`result` is `{trace.result}`{what}")
        else:
            yield isolate_errors(found, partial(tokeniser.tokenise, found))


def _found(trace: Trace, group: str, attempt: int) -> Converted:
    rollout = _rollout(trace, Place(task=trace.task, kind="", attempt=attempt))
    return Converted(
        where=trace.where,
        trial=trace.trial,
        agent=trace.agent,
        model=trace.model,
        rollout=rollout,
        group=group,
        conversations=trace.conversations,
        notes=(*sorted(trace.notes), *_notes(rollout, trace.reward)),
    )


def _notes(rollout: Rollout, reward: float | None) -> tuple[str, ...]:
    if rollout.reward is None:
        return () if rollout.failure else ("no_reward",)
    return ("failed_unrewarded",) if reward is None else ()


def _rollout(trace: Trace, place: Place) -> Rollout:
    """`result` is a reward, the exception that Harbor recorded instead, or Dockyard's cause of a dropped rollout."""
    if trace.result in BY_NAME and trace.reward is None:
        failure = Failure(cause=trace.result, blame=Blame.INFRASTRUCTURE, message="the cause in the trace file")
    elif is_exception(trace.result):
        return rollout_of_exception(place, trace.result, trace.reward)
    else:
        failure = None
    return Rollout(
        task=place.task, kind=place.kind, attempt=place.attempt, segments=(), reward=trace.reward, failure=failure
    )
