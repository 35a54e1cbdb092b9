"""Choose colours for pictures of packed rows: a hue per tree, lightness by depth, and a diverging
scale for advantages.

Given in OKLCH: equal steps of lightness look equal in every hue. The order of the hues was searched
to keep neighbouring trees distinct for every kind of colour blindness
(tests/data/pictures/test_colours.py simulates each). Pictures draw borders too: nothing rests on
colour only.
"""

import math

HUES = (255.0, 90.0, 165.0, 315.0, 30.0)
"""Degrees, in the order of the trees of a row, and again from the start."""
# From roots to the deepest: lightness, chroma. All under text: dark on the light theme's, light on
# the dark theme's.
_THEMES = {"light": ((0.66, 0.125), (0.89, 0.06)), "dark": ((0.53, 0.12), (0.37, 0.065))}

UP = {"light": "#1f5fb4", "dark": "#74aefc"}
"""A positive advantage at the end of the scale."""
DOWN = {"light": "#c2410c", "dark": "#fb9a5c"}
"""A negative one."""
FLAT = {"light": "#c9ccd1", "dark": "#565c64"}
"""None of either, but trained."""


def group_colour(tree: int, depth: int, depths: int, theme: str = "light") -> str:
    """Return #rrggbb for a group. depths: of the whole picture (1: only roots), spread over the
    range of lightness.
    """
    (first, first_chroma), (last, last_chroma) = _THEMES[theme]
    share = min(depth / (max(depths, 2) - 1), 1.0)
    return oklch(
        first + (last - first) * share,
        first_chroma + (last_chroma - first_chroma) * share,
        HUES[tree % len(HUES)],
    )


def advantage_colour(value: float, largest: float, theme: str = "light") -> str:
    """Return #rrggbb on a scale from -largest to largest, symmetric around FLAT."""
    share = min(abs(value) / largest, 1.0) if largest else 0.0
    return mix(FLAT[theme], (UP if value > 0 else DOWN)[theme], share)


def mix(one: str, other: str, share: float) -> str:
    """Mix two colours, from `one` (share 0) to `other` (share 1), both #rrggbb."""
    channels = ((int(one[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in channels)


def oklch(lightness: float, chroma: float, hue: float) -> str:
    """Return #rrggbb of an OKLCH colour (Ottosson's OKLab), with chroma lowered until it can be
    shown.
    """
    while True:
        a = chroma * math.cos(math.radians(hue))
        b = chroma * math.sin(math.radians(hue))
        long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
        medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
        short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
        linear = (
            4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
            -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
            -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
        )
        if chroma <= 0 or all(-1e-4 <= channel <= 1.0001 for channel in linear):
            break
        chroma -= 0.005
    encoded = (
        12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055
        for c in (min(max(c, 0.0), 1.0) for c in linear)
    )
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in encoded)
