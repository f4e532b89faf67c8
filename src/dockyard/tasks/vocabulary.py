"""The words, file names and phrasings of generated tasks: those of training, and others for held-out tasks."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from string import Template

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
    """What one side of the split may say."""

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
