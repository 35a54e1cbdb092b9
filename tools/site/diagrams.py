"""Draw the diagrams of docs/explanation: `python tools/site/diagrams.py`.

The packed row comes from the packer, and the limits of drift from the code that judges runs. A test
draws all of them again. The pictures are 400 units wide, so that a phone shows their text at a
readable size, and follow the reader's light or dark mode.
"""

import html
import math
from collections.abc import Sequence
from pathlib import Path

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.data.packing.packed import PackedTensors
from ttrl.monitoring.drift import limits
from ttrl.records import TokenizedResult

OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "explanation"
WIDTH = 400
STYLE = """
    :root { color-scheme: light dark; }
    text { font: 13px system-ui, sans-serif; fill: #24292f; }
    .small { font-size: 11px; }
    .soft { fill: #57606a; }
    .middle { text-anchor: middle; }
    .end { text-anchor: end; }
    .bold { font-weight: 600; }
    .box { fill: #f6f8fa; stroke: #8c959f; }
    .line { fill: none; stroke: #57606a; stroke-width: 1.5; }
    .grid { stroke: #d0d7de; }
    .g0 { fill: #8c959f; } .g1 { fill: #3b7dd8; } .g2 { fill: #c2661b; } .g3 { fill: #2c8f4e; }
    .on { fill: #ffffff; }
    .bad { fill: #cf222e; } .badline { stroke: #cf222e; stroke-width: 2.5; }
    .goodline { fill: none; stroke: #2c8f4e; stroke-width: 2.5; }
    .curve { fill: none; stroke: #3b7dd8; stroke-width: 2.5; }
    .masked { fill: #eaeef2; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; }
      .soft { fill: #9da7b3; }
      .box { fill: #22272e; stroke: #768390; }
      .line { stroke: #9da7b3; }
      .grid { stroke: #444c56; }
      .masked { fill: #2d333b; }
      .bad { fill: #ff7b72; } .badline { stroke: #ff7b72; }
      .on { fill: #ffffff; }
    }
"""
WORDS = {1: "2", 2: "+", 3: "3", 4: "=", 5: "5", 6: "6", 7: ".", 8: "!"}
PROMPT = [1, 2, 3, 4]
REPLIES = [[5, 7], [6, 7], [5, 8]]
REWARDS = [1.0, 0.0, 1.0]


class Drawing:
    """Shapes of one picture, from top to bottom."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.shapes: list[str] = []
        self.markers = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        self.markers += 'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" class="soft"/>'
        self.markers += "</marker>"

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Write words with their baseline at y."""
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{html.escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        """Draw a rectangle."""
        size = f'width="{width:g}" height="{height:g}" rx="4"'
        self.shapes.append(f'<rect x="{x:g}" y="{y:g}" {size} class="{kind}"/>')

    def path(
        self, points: Sequence[tuple[float, float]], kind: str, *, arrow: bool = False
    ) -> None:
        """Draw a line through points."""
        way = "M" + " ".join(f"{x:.4g} {y:.4g}" for x, y in points)
        tip = ' marker-end="url(#tip)"' if arrow else ""
        self.shapes.append(f'<path d="{way}" class="{kind}"{tip}/>')

    def svg(self, height: float) -> str:
        """Return the picture."""
        size = f'width="{WIDTH + 80}" viewBox="0 0 {WIDTH} {height:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        title = f"<title>{html.escape(self.title)}</title>"
        defs = f"<defs>{self.markers}<style>{STYLE}</style></defs>"
        return "\n".join([head, title, defs, *self.shapes, "</svg>", ""])


def example() -> PackedTensors:
    """Return a packed group: three replies to "2 + 3 =", without padding."""
    mean = sum(REWARDS) / len(REWARDS)
    samples = [
        TokenizedResult(
            task_id="sums/1",
            sample=number,
            token_ids=[*PROMPT, *reply],
            assistant_mask=[False] * len(PROMPT) + [True] * len(reply),
            input_pos=range(len(PROMPT) + len(reply)),
            prompt_length=len(PROMPT),
            logprobs=[math.nan] * len(PROMPT) + [-0.5] * len(reply),
            reward=reward,
            advantage=reward - mean,
        )
        for number, (reply, reward) in enumerate(zip(REPLIES, REWARDS, strict=True))
    ]
    return packed_tensors_from_tokenized_results(samples, seq_len=9, pad_id=0, shortest_shared=1)


def attends(packed: PackedTensors, query: int, key: int) -> bool:
    """Return whether a position of the first row sees another: an earlier one of its ancestors."""
    groups = packed.group_ids[0].tolist()
    parents = dict(zip(groups, packed.parent_ids[0].tolist(), strict=True))
    group = groups[query]
    while group != groups[key] and parents[group] != group:
        group = parents[group]
    return key <= query and group == groups[key]


def packed_row() -> str:
    """Draw the row and the positions that each one attends to."""
    packed = example()
    tokens = packed.tokens[0].tolist()
    labels = packed.labels[0].tolist()
    groups = packed.group_ids[0].tolist()
    cell = 34
    left = 84
    drawing = Drawing("A packed row: the prompt once, three replies, and who sees whom")
    lanes = [
        ("input", [WORDS[one] for one in tokens]),
        ("predicts", [WORDS.get(one, "") for one in labels]),
        ("position", [str(one) for one in packed.input_pos[0].tolist()]),
        ("advantage", [f"{one:+.1f}" if one else "" for one in packed.advantages[0].tolist()]),
    ]
    drawing.text(left + 1.5 * cell, 16, "prompt", "small middle")
    for reply in range(len(REPLIES)):
        drawing.text(left + (4 + 2 * reply) * cell, 16, f"reply {reply + 1}", "small middle")
    for lane, (name, words) in enumerate(lanes):
        y = 24 + lane * 28
        drawing.text(left - 8, y + 18, name, "small soft end")
        for column, word in enumerate(words):
            if lane == 0:
                drawing.box(left + column * cell + 1, y, cell - 2, 26, f"g{groups[column]}")
            kind = "middle on bold" if lane == 0 else "middle small"
            drawing.text(left + (column + 0.5) * cell, y + 18, word, kind)
    top = 172
    drawing.text(left, top - 12, "sees", "small soft")
    for query in range(len(tokens)):
        y = top + query * cell * 0.7
        drawing.text(left - 8, y + 16, WORDS[tokens[query]], "end")
        for key in range(len(tokens)):
            kind = f"g{groups[key]}" if attends(packed, query, key) else "masked"
            drawing.box(left + key * cell + 1, y, cell - 2, cell * 0.7 - 2, kind)
    return drawing.svg(top + len(tokens) * cell * 0.7 + 6)


def proof() -> str:
    """Draw the proof of a server's weights after a sync."""
    drawing = Drawing("How a server proves its weights")
    steps = [
        ("The trainer writes the checkpoint", "and canary.json: SHA-256 of each tensor, log-probs"),
        ("The server loads the files", "in place, or by a restart"),
        ("1  Are all weights the same, bit for bit?", "workers read again, compare, hash"),
        ("2  Does it reproduce the canary?", "log-probs of a fixed text, a greedy reply"),
    ]
    y = 8
    for number, (title, words) in enumerate(steps):
        drawing.box(40, y, 320, 52)
        drawing.text(200, y + 22, title, "middle bold")
        drawing.text(200, y + 41, words, "middle small soft")
        if number < len(steps) - 1:
            drawing.path([(200, y + 52), (200, y + 74)], "line", arrow=True)
        y += 76
    drawing.path([(110, y - 24), (110, y + 10)], "line", arrow=True)
    drawing.text(118, y - 4, "yes, twice", "small")
    drawing.path([(290, y - 24), (290, y + 10)], "line", arrow=True)
    drawing.text(298, y - 4, "no, once", "small bad")
    drawing.box(20, y + 12, 180, 52, "g3")
    drawing.text(110, y + 34, "It serves the policy", "middle on bold")
    drawing.text(110, y + 53, "requests name their weights", "middle small on")
    drawing.box(210, y + 12, 180, 52)
    drawing.text(300, y + 34, "Restart, and again", "middle bold")
    drawing.text(300, y + 53, "a second no ends the run", "middle small bad")
    back = [(390, y + 38), (396, y + 38), (396, 110), (362, 110)]
    drawing.path(back, "line", arrow=True)
    return drawing.svg(y + 72)


def drift() -> str:
    """Draw measured differences between sampler and trainer, and the limits."""
    drawing = Drawing("Differences of healthy runs, and the limits that end a run")
    fp32 = limits("fp32", "cpu")
    bf16 = limits("bf16", "cpu")
    rows = [
        ("fp32, mean", [("tiny", 2e-7, 1e-6), ("135M", 8e-6, 8e-6)], fp32.mean),
        ("fp32, p99.9", [("135M", 4e-5, 4e-5)], fp32.p999),
        ("bf16, mean", [("tiny", 0.007, 0.009)], bf16.mean),
        ("bf16, p99.9", [("135M", 0.3, 0.3)], bf16.p999),
    ]
    left = 92
    right = 384
    least = -7
    decades = 8

    def place(value: float) -> float:
        return left + (math.log10(value) - least) / decades * (right - left)

    bottom = 40 + 52 * len(rows)
    for power in range(least, least + decades + 1, 2):
        drawing.path([(place(10.0**power), 28), (place(10.0**power), bottom)], "grid")
        drawing.text(place(10.0**power), bottom + 16, f"1e{power}", "small soft middle")
    drawing.text(right, bottom + 32, "|Δ log-probability|, nats", "small soft end")
    for number, (name, measured, limit) in enumerate(rows):
        y = 52 + 52 * number
        drawing.text(8, y + 5, name, "small")
        drawing.box(place(limit), y - 12, right - place(limit), 24, "masked")
        drawing.path([(place(limit), y - 16), (place(limit), y + 16)], "badline")
        drawing.text(place(limit) - 4, y - 14, f"{limit:g}", "small bad end")
        for words, low, high in measured:
            drawing.box(place(low) - 4, y - 4, place(high) - place(low) + 8, 8, "g3")
            drawing.text((place(low) + place(high)) / 2, y + 18, words, "small soft middle")
    drawing.text(left, 16, "green: healthy runs", "small soft")
    drawing.text(right, 16, "right of red: the run ends", "small bad end")
    return drawing.svg(bottom + 40)


def gradient_noise() -> str:
    """Draw the progress of a step by its batch, in units of the noise scale."""
    drawing = Drawing("Progress of a step against the size of its batch")
    left = 52
    right = 384
    top = 36
    bottom = 246

    def place(batch: float, share: float) -> tuple[float, float]:
        across = (math.log2(batch) + 4) / 8
        return left + across * (right - left), bottom - share * (bottom - top)

    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawing.path([place(1 / 16, share), place(16, share)], "grid")
        drawing.text(left - 6, place(1, share)[1] + 4, f"{share:.0%}", "small soft end")
    for power in (-4, -2, 0, 2, 4):
        name = {-4: "1/16 ×", -2: "1/4 ×", 0: "S/|G|²", 2: "4 ×", 4: "16 ×"}[power]
        drawing.text(place(2.0**power, 0)[0], bottom + 18, name, "small soft middle")
    title = "progress of a step, as a share of a noiseless one's"
    drawing.text(left, top - 20, title, "small soft")
    curve = [2.0 ** (step / 8) for step in range(-32, 33)]
    drawing.path([place(batch, batch / (batch + 1)) for batch in curve], "curve")
    drawing.path([place(1, 0), place(1, 0.5)], "badline")
    drawing.text(place(1, 0)[0] - 8, place(1, 0.54)[1], "half of the progress", "small end")
    drawing.text(left + 8, place(1, 0.42)[1], "twice the batch,", "small")
    drawing.text(left + 8, place(1, 0.35)[1], "nearly twice as far", "small")
    drawing.text(right - 4, place(1, 0.6)[1], "twice the batch,", "small end")
    drawing.text(right - 4, place(1, 0.53)[1], "hardly any further", "small end")
    drawing.text(right, bottom + 38, "prompts with a signal in a step", "small soft end")
    return drawing.svg(bottom + 46)


DIAGRAMS = {
    "packed_row.svg": packed_row,
    "proof.svg": proof,
    "drift.svg": drift,
    "gradient_noise.svg": gradient_noise,
}


def main() -> None:
    """Write all diagrams."""
    for name, draw in DIAGRAMS.items():
        (OUTPUT / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
