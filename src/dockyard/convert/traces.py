"""Files of traces: Harbor's columns, a row for each conversation, read and written a few rows at a time.

Harbor exports a row for each thing the model said, with all that came before it, so the last row of a trial tells the
rows before it again. What Harbor's words cannot tell (who said what, thoughts, calls, what is copied) stands in
`conversation_json`, a column of ours that readers of Harbor's columns need not know.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dockyard.convert.conversation import Conversation, Converted
from dockyard.convert.parquet import Column, ParquetWriter, open_parquet, read_parquet
from dockyard.convert.sample_files import whole_file, writing
from dockyard.convert.trace_rows import MAIN, TraceRow, conversations_in
from dockyard.convert.trace_text import NoConversationError, as_dict, to_harbor
from dockyard.errors import DockyardError
from dockyard.gateway.history import Json, Message

_COLUMNS: tuple[Column, ...] = (
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
    """One trial as a file of traces tells it."""

    where: str
    """The file and the trial's first row."""
    trial: str
    task: str
    agent: str
    model: str
    result: str
    """A reward in digits, or the name of an exception, or nothing."""
    reward: float | None
    conversations: tuple[Conversation, ...]
    problem: str = ""
    """Why there are no conversations."""
    notes: frozenset[str] = frozenset()


def write_traces(path: Path, trials: Iterable[Converted]) -> int:
    """Write every trial whose words are known. How many they were."""
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
    """What is the same for all rows of a trial; some of it stands in its `result.json` alone."""
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
        "messages": [_message_json(message) for message in conversation.messages],
    }


def _message_json(message: Message) -> Json:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json()}}
        for call in message.calls
    ]
    fields = {"reasoning_content": message.reasoning, "tool_calls": calls, "tool_call_id": message.call_id}
    return {"role": message.role, "content": message.text, **{name: value for name, value in fields.items() if value}}


def read_traces(path: Path) -> Iterator[Trace]:
    """Trial after trial. Raises an error that names the columns if it is a file of something else."""
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
    """Our names to the file's."""
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
            f"`{path}` is no file of traces\ncolumns found: {', '.join(f'`{name}`' for name in found) or 'none'}\n"
            f"columns needed: {', '.join(lacks)}",
            hint="rename the columns, or convert the job's folder itself: `dockyard convert JOB_DIR`",
        )
    return matched


def _last_rows(file: Any, path: Path, columns: dict[str, str]) -> dict[tuple[str, str], int]:
    """The last row of each trial: those of its subagents may stand far behind its own."""
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
