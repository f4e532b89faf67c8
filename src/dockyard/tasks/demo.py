"""Generates small Harbor tasks of six kinds of shell work, for a first run that learns on a CPU.

Held-out tasks share nothing with training but the kinds: their words, file names and phrasings are others.
"""

import random
from pathlib import Path

from dockyard.tasks.drafts import Draft, Kinds, write_generated
from dockyard.tasks.vocabulary import Vocabulary


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


KINDS: Kinds = {
    "write": _write,
    "folder": _folder,
    "copy": _copy,
    "rename": _rename,
    "count": _count,
    "pick": _pick,
}


def write_demo_tasks(folder: Path, *, num_train: int = 64, num_heldout: int = 32, seed: int = 0) -> None:
    """Fill `folder/train` and `folder/heldout` with Harbor tasks. The same arguments give the same tasks."""
    write_generated(folder, "demo", KINDS, num_train=num_train, num_heldout=num_heldout, seed=seed)
