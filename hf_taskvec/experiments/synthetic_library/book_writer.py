"""A small library of made-up books, written on the spot: simple English, seeded, the same on every machine.

What the unlearning experiment needs of it, and what was chosen for that:

- **General prose** to pretrain θ_0: scenes about every theme and in every voice (and a plain one), with people and
  places that change from scene to scene. So the base knows the language, the words, the manners of writing and what
  names are made of, as a real base does; but no book's people, places and events.
- **A series**: two books that share their theme, their voice, the invented cast and the invented places, but tell
  different scenes, and each has some people and one place of its own. They are the pair that is *aligned*, as two
  volumes by one author are: nothing but the people and places, what they are like, and the style connects them.
- **Unrelated books**, each with a theme, a voice, a cast and places of its own.

A book is a row of chapters, a chapter a row of scenes. A scene has two people, a place and a thing, which stay the same
from its first sentence to its last; sentences follow the beats of the voice (arrival, trouble, talk, turn, end). People
and places have *habits*: what someone owns, does, feels and says, whom one meets at a place and what one sees there.
Half of the time a slot is filled out of habit, otherwise with any word of the theme. The words are in `themes`. Which
theme and voice a book gets is drawn from the seed, so other seeds give other worlds. The order of the scenes and all
that fills them is random: a model can continue a passage word for word only if it has read it, while people, places,
habits and manner can be learnt from the other volume.

What was adjusted after a look at outcomes: in `recipes/configs/default.yaml` everything, on seeds below 20
(`docs/results.md` tells how). And two things here. General prose without the books' voices was tried too, and cost the
unrelated book more. And the habits came late: without them the volumes of a series shared only names, and the other
volume often lost no more than the unrelated book. They did not change that (significant in 4 of 11 runs without them,
in 4 of 10 with them, on other seeds), so they are here for the books' sake; reading longer books less often did, but
then a book is hardly known, and nobody can tell whether it was forgotten. How strong a habit is, a half, was the first
guess; three quarters was tried on seeds 0 and 1 and was not clearly better.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_taskvec.errors import BadValueError
from hf_taskvec.experiments.synthetic_library.themes import COMMON, PLAIN, THEMES, VOICES, Theme

_ONSETS = [
    "b",
    "br",
    "c",
    "d",
    "dr",
    "f",
    "fl",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "qu",
    "r",
    "s",
    "st",
    "t",
    "th",
    "tr",
    "v",
    "w",
    "z",
]
_VOWELS = ["a", "e", "i", "o", "u", "ae", "ea", "oo"]
_ENDS = ["l", "n", "r", "s", "th", "m", "nd", "rk", "ll", "sk"]
_PLACE_ENDS = ["mere", "wick", "fell", "stow", "garth", "holm", "combe", "haven", "moor", "ridge"]
_HIGHEST_SHARE = 20  # scenes of a chapter, at most
_PERSONAL = ("thing", "deed", "lore", "mood", "manner")  # what a person has a habit in
_LOCAL = ("sight", "role", "weather", "state")  # and a place
_HABIT = 0.5  # how often a slot is filled out of habit


Voice = tuple[tuple[str, ...], ...]  # patterns for each beat of a scene


@dataclass(frozen=True)
class Place:
    """Somewhere in a book, with what is always seen there."""

    name: str
    habits: dict[str, str]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Person:
    """Someone in a book, with pronouns, and with what this person always has, does, feels and says."""

    name: str
    habits: dict[str, str]
    he: str
    him: str
    his: str

    @property
    def himself(self) -> str:
        """The reflexive pronoun."""
        return f"{self.him}self"

    @property
    def He(self) -> str:  # noqa: N802 (a slot of the patterns)
        """The pronoun at the start of a sentence."""
        return self.he.capitalize()

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class World:
    """What the books of one series share."""

    theme: Theme
    voice: Voice
    cast: tuple[Person, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True)
class WrittenBook:
    """A generated book."""

    name: str
    text: str = field(repr=False)


@dataclass(frozen=True)
class Library:
    """General prose, the two volumes of a series, and books that have nothing to do with it."""

    general: str = field(repr=False)
    series: tuple[WrittenBook, WrittenBook]
    unrelated: tuple[WrittenBook, ...]


def write_library(seed: int = 0, *, words: int = 6000, general_words: int = 60_000, unrelated: int = 1) -> Library:
    """The library of a seed.

    Args:
        seed (`int`, *optional*, defaults to 0):
            Another seed gives other people, places, themes and voices.
        words (`int`, *optional*, defaults to 6000):
            Of each book, about.
        general_words (`int`, *optional*, defaults to 60000):
            Of the general prose, about.
        unrelated (`int`, *optional*, defaults to 1):
            How many unrelated books; each has a theme of its own, so at most seven.

    Returns:
        `Library`: General prose, the two volumes of a series, and the unrelated books.

    Raises:
        `BadValueError`: If there are not as many themes, or the books are too short.

    Example:
        >>> found = write_library(0, words=300, general_words=300)
        >>> len(found.series), len(found.unrelated)
        (2, 1)

    """
    if not 0 <= unrelated < len(THEMES):
        raise BadValueError(f"unrelated={unrelated}: there are themes for 0 to {len(THEMES) - 1} unrelated books.")
    if words < 200 or general_words < 200:
        raise BadValueError(f"words={words} and general_words={general_words} must both be at least 200.")
    draw = random.Random(f"library {seed}")
    themes = draw.sample(sorted(THEMES), unrelated + 1)
    voices = draw.sample(sorted(VOICES), len(VOICES))
    taken: set[str] = set()
    worlds = [_world(draw, theme, VOICES[voices[i % len(voices)]], taken) for i, theme in enumerate(themes)]
    series = tuple(
        WrittenBook(
            f"{themes[0]}-{volume}",
            _book(random.Random(f"{seed} volume {volume}"), _volume(draw, worlds[0], taken), words),
        )
        for volume in (1, 2)
    )
    others = tuple(
        WrittenBook(theme, _book(random.Random(f"{seed} {theme}"), world, words))
        for theme, world in zip(themes[1:], worlds[1:], strict=True)
    )
    return Library(
        _general(random.Random(f"{seed} general"), general_words, [PLAIN, *VOICES.values()], taken),
        (series[0], series[1]),
        others,
    )


def _world(draw: random.Random, theme: str, voice: Voice, taken: set[str]) -> World:
    words = THEMES[theme]
    cast = tuple(_person(draw, words, taken) for _ in range(6))
    return World(words, voice, cast, tuple(_place(draw, words, spot, taken) for spot in draw.sample(words.spot, 5)))


def _volume(draw: random.Random, world: World, taken: set[str]) -> World:
    """The series' world with two people and a place of this volume's own."""
    cast = tuple(_person(draw, world.theme, taken) for _ in range(2))
    place = _place(draw, world.theme, draw.choice(world.theme.spot), taken)
    return World(world.theme, world.voice, (*world.cast, *cast), (*world.places, place))


def _name(draw: random.Random, taken: set[str]) -> str:
    while True:
        name = (
            draw.choice(_ONSETS)
            + draw.choice(_VOWELS)
            + draw.choice("bdglmnrtv")
            + draw.choice("aeio")
            + draw.choice(_ENDS)
        )
        if name.capitalize() not in taken:
            taken.add(name.capitalize())
            return name.capitalize()


def _place_name(draw: random.Random, taken: set[str]) -> str:
    while True:
        name = (
            draw.choice(_ONSETS) + draw.choice("aeiou") + draw.choice("lnrm") + draw.choice(_PLACE_ENDS)
        ).capitalize()
        if name not in taken:
            taken.add(name)
            return name


def _person(draw: random.Random, theme: Theme, taken: set[str]) -> Person:
    habits = _habits(draw, theme, _PERSONAL)
    return Person(_name(draw, taken), habits, *draw.choice((("he", "him", "his"), ("she", "her", "her"))))


def _place(draw: random.Random, theme: Theme, spot: str, taken: set[str]) -> Place:
    return Place(f"the {spot} of {_place_name(draw, taken)}", _habits(draw, theme, _LOCAL))


def _habits(draw: random.Random, theme: Theme, kinds: tuple[str, ...]) -> dict[str, str]:
    return {kind: draw.choice(_words(theme, kind)) for kind in kinds}


def _words(theme: Theme, kind: str) -> Sequence[str]:
    return COMMON[kind] if kind in COMMON else getattr(theme, kind)


def _book(draw: random.Random, world: World, words: int) -> str:
    paragraphs: list[str] = []
    count, chapter = 0, 0
    while count < words:
        chapter += 1
        paragraphs.append(f"Chapter {chapter}")
        for _ in range(draw.randint(8, _HIGHEST_SHARE)):
            paragraphs.append(_scene(draw, world))
            count += len(paragraphs[-1].split())
            if count >= words:
                break
    return "\n\n".join(paragraphs) + "\n"


def _general(draw: random.Random, words: int, voices: list[Voice], taken: set[str]) -> str:
    """Scenes of all themes in some voices, each with people and places that come nowhere else."""
    paragraphs: list[str] = []
    count = 0
    while count < words:
        world = _world(draw, draw.choice(sorted(THEMES)), draw.choice(voices), set(taken))
        paragraphs.append(_scene(draw, world))
        count += len(paragraphs[-1].split())
    return "\n\n".join(paragraphs) + "\n"


def _scene(draw: random.Random, world: World) -> str:
    a, b = draw.sample(world.cast, 2)
    place, other = draw.sample(world.places, 2)
    habits = place.habits | a.habits | {"lore": b.habits["lore"]}  # it is {b} who says it
    habits |= {f"{kind}2": word for kind, word in (other.habits | b.habits).items()}
    fixed = {"a": a, "b": b, "place": place, "place2": other}
    fixed["thing"] = _Slots(draw, fixed, habits, world.theme)["thing"]
    sentences = [
        _sentence(pattern, _Slots(draw, fixed, habits, world.theme))
        for number, beat in enumerate(world.voice)
        for pattern in draw.sample(beat, draw.choice((1, 2)) if 0 < number < 4 else 1)
    ]
    return " ".join(sentences)


class _Slots(dict[str, object]):
    """What a scene has fixed; another slot is filled when a pattern asks for it, out of habit or with something new."""

    def __init__(self, draw: random.Random, fixed: dict[str, object], habits: dict[str, str], theme: Theme) -> None:
        super().__init__(fixed)
        self._draw, self._habits, self._theme = draw, habits, theme

    def __missing__(self, slot: str) -> str:
        # Not the same twice: no `small and small`, no deed done while it is done.
        free = [word for word in _words(self._theme, slot.rstrip("2")) if word not in self.values()]
        habit = self._habits.get(slot)
        self[slot] = found = habit if habit in free and self._draw.random() < _HABIT else self._draw.choice(free)
        return found


def _sentence(pattern: str, slots: _Slots) -> str:
    text = pattern.format_map(slots)
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    start = next(i for i, letter in enumerate(text) if letter.isalpha())
    return text[:start] + text[start].upper() + text[start + 1 :]
