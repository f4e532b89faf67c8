"""Generates tasks that need three or four model calls: a note names the next note, the last one a word and a file.

Each note lies in a folder of a random name: where is known only from the note before. A script could still follow them
all in one call; under the `shell` agent's `commands = ["cat", "echo"]` there is no shorter way than note by note.

Some notes for training spell the command out: a small model needs successes to climb from. No held-out one does.
"""

import random
from functools import partial
from pathlib import Path

from dockyard.tasks.drafts import Draft, Kinds, write_generated
from dockyard.tasks.vocabulary import Vocabulary


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


KINDS: Kinds = {"three-calls": partial(_trail, num_notes=2), "four-calls": partial(_trail, num_notes=3)}


def write_trail_tasks(folder: Path, *, num_train: int = 64, num_heldout: int = 32, seed: int = 0) -> None:
    """Fill `folder/train` and `folder/heldout` with Harbor tasks. The same arguments give the same tasks."""
    write_generated(folder, "trail", KINDS, num_train=num_train, num_heldout=num_heldout, seed=seed)
