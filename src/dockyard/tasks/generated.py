"""Generate small Harbor tasks, with other words, file names and phrasings for the held-out ones.

`demo`: six kinds of shell work, for a first run that learns on a CPU. `trail`: tasks of three or four model calls, in
which a note names the next note and the last one a word and a file. Each note is in a folder with a random name. A
script could still follow them all in one call; with the `shell` agent's `commands = ["cat", "echo"]` each note needs
its own call. Some training notes spell out the command, because a small model needs initial successes; no held-out note
does.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from string import Template

from dockyard.config import TasksConfig
from dockyard.tasks.folder import write_files
from dockyard.tasks.sources import ProvidedTasks

_TRAIN_WORDS = """amber anchor apple autumn bamboo barrel basket beacon berry bishop blanket bottle branch bridge bronze
bucket butter button cabin candle canyon carpet castle cedar cherry chimney circle clover cobalt comet copper coral
cotton cradle crystal dagger dragon eagle ember falcon feather fiddle forest fossil garden ginger glacier goblet granite
hammer harvest helmet hollow honey island ivory jacket jasmine jungle kettle ladder lantern lemon linen""".split()
_TRAIN_STEMS = """alpha backup budget cache chart colors daily draft facts first fruits goals guests hosts index input
items labels letters main memo names notes orders output pages parts people""".split()
_HELDOUT_WORDS = """magnet maple marble meadow mirror mitten monsoon mosaic nectar nickel oasis olive onion orchid
oyster paddle parrot pebble pepper pillow pirate planet plum pocket pollen puzzle quartz rabbit raven ribbon river
rocket saddle salmon silver spider spruce sunset temple thunder timber tulip tunnel turtle velvet violin
walnut willow""".split()
_HELDOUT_STEMS = """plans points prices quotes recipes records report results roster rules sales scores second setup
sizes songs staff status steps stock summary tables target teams tools topics totals users values weeks words""".split()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Words and file names for training or for held-out tasks."""

    words: Sequence[str]
    stems: Sequence[str]
    heldout: bool

    def pick_words(self, rng: random.Random, count: int) -> list[str]:
        return rng.sample(self.words, count)

    def pick_names(self, rng: random.Random, count: int) -> list[str]:
        return [f"{stem}.txt" for stem in rng.sample(self.stems, count)]

    def say(self, rng: random.Random, train: list[str], heldout: list[str], **values: object) -> str:
        return Template(rng.choice(heldout if self.heldout else train)).substitute(values)


TRAIN = Vocabulary(_TRAIN_WORDS, _TRAIN_STEMS, heldout=False)
HELDOUT = Vocabulary(_HELDOUT_WORDS, _HELDOUT_STEMS, heldout=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One task before it is written to disk."""

    instruction: str
    credits: dict[float, str]
    """Reward -> shell condition, run in /app in increasing order. The last true one counts; all are false initially."""
    solution: str
    files: dict[str, str] = field(default_factory=dict[str, str])
    """Initial contents of /app."""


type Kinds = Mapping[str, Callable[[random.Random, Vocabulary], Draft]]
"""Name of a kind of task -> the function that generates it."""


_TASK_TOML = """\
schema_version = "1.4"

[task]
name = "dockyard-{source}/{name}"
description = "A small shell task: {kind}"

[metadata]
kind = "{kind}"

[agent]
timeout_sec = 600

[verifier]
timeout_sec = 60
"""

_DOCKERFILE = """\
FROM debian:bookworm-slim
WORKDIR /app
COPY files/ /app/
"""

_TEST_SH = """\
#!/bin/bash
cd /app
reward=0
{checks}
echo "$reward" > /logs/verifier/reward.txt
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedTasks:
    """A `TaskProvider` that generates tasks of several kinds. The same seed gives the same tasks."""

    source: str
    kinds: Kinds
    num_train: int
    num_heldout: int

    def train(self, folder: Path, seed: int) -> list[Path]:
        return self._write(folder, random.Random(f"{seed}-train"), TRAIN, self.num_train)

    def heldout(self, folder: Path, seed: int) -> list[Path]:
        return self._write(folder, random.Random(f"{seed}-heldout"), HELDOUT, self.num_heldout)

    def _write(self, folder: Path, rng: random.Random, vocabulary: Vocabulary, count: int) -> list[Path]:
        side = "heldout" if vocabulary.heldout else "train"
        paths: list[Path] = []
        for index, (kind, draft) in enumerate(_drafts(rng, self.kinds, vocabulary, count)):
            name = f"{side}-{index:03}-{kind}"
            paths.append(folder / name)
            _write_task(folder / name, _TASK_TOML.format(source=self.source, name=name, kind=kind), draft)
        return paths


def _drafts(rng: random.Random, kinds: Kinds, vocabulary: Vocabulary, count: int) -> Iterator[tuple[str, Draft]]:
    """Yield tasks with alternating kinds and distinct instructions."""
    seen: set[str] = set()
    turns = cycle(kinds.items())
    while len(seen) < count:
        kind, make = next(turns)
        draft = make(rng, vocabulary)
        while draft.instruction in seen:
            draft = make(rng, vocabulary)
        seen.add(draft.instruction)
        yield kind, draft


def _write_task(path: Path, toml: str, draft: Draft) -> None:
    checks = "\n".join(f"if {condition}; then reward={credit}; fi" for credit, condition in draft.credits.items())
    contents = {
        "task.toml": toml,
        "instruction.md": draft.instruction + "\n",
        "environment/Dockerfile": _DOCKERFILE,
        "environment/files/.keep": "",  # COPY needs at least one file
        "tests/test.sh": _TEST_SH.format(checks=checks),
        "solution/solve.sh": f"#!/bin/bash\ncd /app\n{draft.solution}\n",
        **{f"environment/files/{file}": text for file, text in draft.files.items()},
    }
    write_files(path, contents)


def _write(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    [word], [name] = vocabulary.pick_words(rng, 1), vocabulary.pick_names(rng, 1)
    return Draft(
        instruction=vocabulary.say(
            rng,
            [
                "Write the word $word to $name with echo.",
                "Use echo to write the word $word to $name.",
                "With echo, put the word $word into the file $name.",
                "Write the word $word into the file $name using echo.",
            ],
            ["With echo, store the word $word in $name.", "Save the word $word in the file $name using echo."],
            word=word,
            name=name,
        ),
        credits={0.2: f"[ -f {name} ]", 0.5: f"grep -q {word} {name}", 1.0: f'[ "$(cat {name})" = {word} ]'},
        solution=f"echo {word} > {name}",
    )


def _folder(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    [folder], [left, right] = vocabulary.pick_words(rng, 1), vocabulary.pick_names(rng, 2)
    return Draft(
        instruction=vocabulary.say(
            rng,
            [
                "Make the folder $folder with mkdir and the empty files $folder/$left and $folder/$right with touch.",
                "Use mkdir to make the folder $folder, then touch to make $folder/$left and $folder/$right.",
                "With mkdir, make the folder $folder; with touch, make the files $folder/$left and $folder/$right.",
                "Make a folder $folder using mkdir and the files $folder/$left and $folder/$right using touch.",
            ],
            [
                "With mkdir, create the folder $folder; with touch, create $folder/$left and $folder/$right in it.",
                "Create a folder $folder using mkdir and put $folder/$left and $folder/$right in it using touch.",
            ],
            folder=folder,
            left=left,
            right=right,
        ),
        credits={
            0.3: f"[ -d {folder} ]",
            0.6: f"[ -f {folder}/{left} ] || [ -f {folder}/{right} ]",
            1.0: f"[ -f {folder}/{left} ] && [ -f {folder}/{right} ]",
        },
        solution=f"mkdir {folder} && touch {folder}/{left} {folder}/{right}",
    )


def _copy(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    [word], [old, new] = vocabulary.pick_words(rng, 1), vocabulary.pick_names(rng, 2)
    return Draft(
        instruction=vocabulary.say(
            rng,
            [
                "Copy $old to $new with cp.",
                "Use cp to copy the file $old to $new.",
                "With cp, copy the file $old to $new.",
                "Make a copy of $old named $new using cp.",
            ],
            ["With cp, make a copy of $old called $new.", "Duplicate the file $old as $new using cp."],
            old=old,
            new=new,
        ),
        credits={
            0.5: f'[ "$(cat {new})" = {word} ]',
            1.0: f'[ "$(cat {new})" = {word} ] && [ -f {old} ]',
        },
        solution=f"cp {old} {new}",
        files={old: f"{word}\n"},
    )


def _rename(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    [word], [old, new] = vocabulary.pick_words(rng, 1), vocabulary.pick_names(rng, 2)
    return Draft(
        instruction=vocabulary.say(
            rng,
            [
                "Rename $old to $new with mv.",
                "Use mv to rename the file $old to $new.",
                "With mv, rename the file $old to $new.",
                "Move $old to the new name $new using mv.",
            ],
            ["With mv, move the file $old to $new.", "Change the name of $old to $new using mv."],
            old=old,
            new=new,
        ),
        credits={
            0.5: f'[ "$(cat {new})" = {word} ]',
            1.0: f'[ "$(cat {new})" = {word} ] && [ ! -e {old} ]',
        },
        solution=f"mv {old} {new}",
        files={old: f"{word}\n"},
    )


def _count(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    [source, target] = vocabulary.pick_names(rng, 2)
    lines = vocabulary.pick_words(rng, rng.randint(3, 9))
    return Draft(
        instruction=vocabulary.say(
            rng,
            [
                "Count the lines of $source with wc and write the number to $target.",
                "Use wc to count the lines of $source and write the number to $target.",
                "With wc, count the lines of $source and save the number in $target.",
                "Write the number of lines of $source to $target using wc.",
            ],
            [
                "With wc, find out how many lines $source has and put the number into $target.",
                "Store the number of lines of $source in $target using wc.",
            ],
            source=source,
            target=target,
        ),
        credits={
            0.1: f"[ -f {target} ]",
            0.5: f"grep -qw {len(lines)} {target}",
            1.0: f'[ "$(cut -d " " -f 1 {target})" = {len(lines)} ]',
        },
        solution=f"wc -l < {source} > {target}",
        files={source: "".join(f"{line}\n" for line in lines)},
    )


def _pick(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    [source, target] = vocabulary.pick_names(rng, 2)
    lines = vocabulary.pick_words(rng, rng.randint(3, 9))
    which, command, line = rng.choice([("first", "head", lines[0]), ("last", "tail", lines[-1])])
    return Draft(
        instruction=vocabulary.say(
            rng,
            [
                "Write the $which line of $source to $target with $command.",
                "Use $command to write the $which line of $source to $target.",
                "With $command, write the $which line of $source to the file $target.",
                "Save the $which line of $source in $target using $command.",
            ],
            [
                "With $command, put the $which line of $source into $target.",
                "Store the $which line of $source in $target using $command.",
            ],
            which=which,
            command=command,
            source=source,
            target=target,
        ),
        credits={
            0.1: f"[ -f {target} ]",
            0.4: f"grep -q {line} {target}",
            1.0: f'[ "$(cat {target})" = {line} ]',
        },
        solution=f"{command} -n 1 {source} > {target}",
        files={source: "".join(f"{line}\n" for line in lines)},
    )


DEMO_KINDS: Kinds = {
    "write": _write,
    "folder": _folder,
    "copy": _copy,
    "rename": _rename,
    "count": _count,
    "pick": _pick,
}


def write_demo_tasks(folder: Path, *, num_train: int = 64, num_heldout: int = 32, seed: int = 0) -> None:
    """Write Harbor tasks to `folder/train` and `folder/heldout`. The same arguments give the same tasks."""
    tasks = GeneratedTasks(source="demo", kinds=DEMO_KINDS, num_train=num_train, num_heldout=num_heldout)
    _write_both(tasks, folder, seed)


def _trail(rng: random.Random, vocabulary: Vocabulary, *, num_notes: int) -> Draft:
    [word, *folders] = vocabulary.pick_words(rng, num_notes + 1)
    [answer, *names] = vocabulary.pick_names(rng, num_notes + 1)
    notes = [f"{folder}/{name}" for folder, name in zip(folders, names, strict=True)]
    texts = [*(_leads_to(rng, vocabulary, note) for note in notes[1:]), _asks(rng, vocabulary, word, answer)]
    return Draft(
        instruction=vocabulary.say(
            rng,
            [
                "Read $note with cat and do what it says.",
                "Use cat to read $note, then do what it says.",
                "Run cat $note and do what it says.",
                "With cat, read $note and follow it.",
            ],
            ["Look into $note with cat, then follow it.", "Open $note using cat and do as it says."],
            note=notes[0],
        ),
        credits={1.0: f'[ "$(cat {answer})" = {word} ]'},
        solution="\n".join([*(f"cat {note}" for note in notes), f"echo {word} > {answer}"]),
        files={note: f"{text}\n" for note, text in zip(notes, texts, strict=True)},
    )


def _leads_to(rng: random.Random, vocabulary: Vocabulary, note: str) -> str:
    return vocabulary.say(
        rng,
        ["Read $note with cat.", "Now use cat to read $note.", "Run cat $note", "With cat, read $note."],
        ["Continue: look into $note with cat.", "Next, open $note using cat."],
        note=note,
    )


def _asks(rng: random.Random, vocabulary: Vocabulary, word: str, answer: str) -> str:
    return vocabulary.say(
        rng,
        [
            "Write the word $word to $answer with echo.",
            "Now use echo to write the word $word to $answer.",
            "With echo, put the word $word into the file $answer.",
            "Run echo $word > $answer",
        ],
        ["Save the word $word in the file $answer using echo.", "With echo, store the word $word in $answer."],
        word=word,
        answer=answer,
    )


TRAIL_KINDS: Kinds = {"three-calls": partial(_trail, num_notes=2), "four-calls": partial(_trail, num_notes=3)}


def write_trail_tasks(folder: Path, *, num_train: int = 64, num_heldout: int = 32, seed: int = 0) -> None:
    """Write Harbor tasks to `folder/train` and `folder/heldout`. The same arguments give the same tasks."""
    tasks = GeneratedTasks(source="trail", kinds=TRAIL_KINDS, num_train=num_train, num_heldout=num_heldout)
    _write_both(tasks, folder, seed)


def _write_both(tasks: GeneratedTasks, folder: Path, seed: int) -> None:
    tasks.train(folder / "train", seed)
    tasks.heldout(folder / "heldout", seed)


def _provider(source: str, kinds: Kinds, settings: TasksConfig) -> GeneratedTasks:
    return GeneratedTasks(source=source, kinds=kinds, num_train=settings.num_train, num_heldout=settings.num_heldout)


DEMO = ProvidedTasks(partial(_provider, "demo", DEMO_KINDS))
TRAIL = ProvidedTasks(partial(_provider, "trail", TRAIL_KINDS))
