"""Colours of trees: can they be told apart, and read on, by everybody?"""

import itertools

import pytest

from ttrl.data.pictures import colours

# What people without one kind of cone see, on linear RGB (Machado, Oliveira and Fernandes 2009,
# severity 1).
SIGHT = {
    "all three": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no long": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "no medium": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "no short": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def linear(colour: str) -> list[float]:
    encoded = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in encoded]


def times(matrix, vector) -> list[float]:
    return [sum(a * b for a, b in zip(line, vector, strict=True)) for line in matrix]


def oklab(rgb: list[float]) -> list[float]:
    cones = times(
        (
            (0.4122214708, 0.5363325363, 0.0514459929),
            (0.2119034982, 0.6806995451, 0.1073969566),
            (0.0883024619, 0.2817188376, 0.6299787005),
        ),
        [min(max(c, 0), 1) for c in rgb],
    )
    return times(
        (
            (0.2104542553, 0.7936177850, -0.0040720468),
            (1.9779984951, -2.4285922050, 0.4505937099),
            (0.0259040371, 0.7827717662, -0.8086757660),
        ),
        [c ** (1 / 3) for c in cones],
    )


def distance(one: str, other: str, sight: str) -> float:
    """In OKLab, where about 0.02 is just seen."""
    a, b = (oklab(times(SIGHT[sight], linear(colour))) for colour in (one, other))
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5


def contrast(one: str, other: str) -> float:
    """WCAG."""
    light, dark = sorted(
        (sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(one))) for one in (one, other)),
        reverse=True,
    )
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_neighbouring_trees_and_depths_differ_for_everybody(theme: str, sight: str) -> None:
    for depth, least in ((0, 0.08), (1, 0.035)):
        trees = [
            colours.group_colour(tree, depth, 2, theme) for tree in range(len(colours.HUES) + 1)
        ]
        assert trees[0] == trees[-1]
        assert min(distance(a, b, sight) for a, b in itertools.pairwise(trees)) > least
    for tree in range(len(colours.HUES)):
        levels = [colours.group_colour(tree, depth, 6, theme) for depth in range(6)]
        assert min(distance(a, b, sight) for a, b in itertools.pairwise(levels)) > 0.02
    assert distance(colours.UP[theme], colours.DOWN[theme], sight) > 0.15


def test_text_is_readable_on_every_group() -> None:
    for theme, ink in (("light", "#1c1e21"), ("dark", "#e9eaec")):
        for tree in range(len(colours.HUES)):
            for depth in range(8):
                assert contrast(colours.group_colour(tree, depth, 8, theme), ink) > 4.0


def test_the_scale_of_advantages_is_symmetric_and_bounded() -> None:
    assert colours.advantage_colour(0, 2) == colours.FLAT["light"]
    assert colours.advantage_colour(2, 2) == colours.advantage_colour(9, 2) == colours.UP["light"]
    assert colours.advantage_colour(-2, 2) == colours.DOWN["light"]
    assert colours.oklch(1, 0, 0) == "#ffffff" and colours.oklch(0, 0, 0) == "#000000"
    assert colours.mix("#000000", "#ff8800", 0.5) == "#804400"
