"""Draws the pictures of the pages: python -m tools.drawings writes docs/images/{step,replay,mesh}.svg."""

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "docs" / "images"
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600 }
.small { font-size: 12px; fill: #59636e }
.page { fill: #ffffff; stroke: #d0d7de } .box { fill: #f6f8fa; stroke: #8c959f } .line { stroke: #8c959f; fill: none }
.a { fill: #ddf4ff; stroke: #0969da } .b { fill: #fff1e5; stroke: #bc4c00 } .free { fill: none; stroke: #8c959f }
.arrow { fill: #8c959f } path.a { fill: none; stroke-width: 2 } .none { stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .small { fill: #9198a1 } .page { fill: #0d1117; stroke: #3d444d }
.box { fill: #151b23; stroke: #656c76 }
.line, .free { stroke: #656c76 } .arrow { fill: #656c76 }
.a { fill: #0c2d6b; stroke: #58a6ff } .b { fill: #5a1e02; stroke: #f0883e }
}"""


def page(title: str, width: int, height: int, parts: Iterable[str]) -> str:
    """Return a whole drawing of `width` x `height` pixels, for pages that are light or dark."""
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">',
            f"<style>\n{STYLE}\n</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path class="arrow" d="M0,0 L8,4 L0,8 Z"/></marker></defs>',
            f'<rect class="page" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            *parts,
            "</svg>\n",
        )
    )


def text(x: float, y: float, words: str, style: str = "", anchor: str = "middle") -> str:
    """Return words whose baseline is at y."""
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, words: Sequence[str], style: str = "box") -> str:
    """Return a box with lines of words in its middle, the first of them strong."""
    top = y + height / 2 + 5 - 8 * (len(words) - 1)
    lines = (
        text(x + width / 2, top + 16 * i, line, "small" if i else ("title" if len(words) > 1 else ""))
        for i, line in enumerate(words)
    )
    return f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>' + "".join(lines)


def arrow(*points: tuple[float, float]) -> str:
    """Return a line through the points that ends in an arrow."""
    return f'<path class="line" marker-end="url(#head)" d="M{" L".join(f"{x:g},{y:g}" for x, y in points)}"/>'


def step() -> str:
    """Return one step of reinforcement learning, and below it where each kind of replay records and imposes routes."""
    stages = (
        ("Prompts", "a batch"),
        ("Generate", "rollout engine"),
        ("Score", "rewards"),
        ("Old logprobs", "trainer"),
        ("Update", "trainer, k times"),
    )
    at = [24 + 148 * i for i in range(len(stages))]
    parts = [box(x, 36, 120, 48, stage) for x, stage in zip(at, stages, strict=True)]
    parts += [arrow((x + 120, 60), (x + 146, 60)) for x in at[:-1]]
    parts += [arrow((at[4] + 60, 36), (at[4] + 60, 16), (at[1] + 60, 16), (at[1] + 60, 34))]
    parts += [text((at[1] + at[4]) / 2 + 60, 30, "new weights", "small")]
    rows = (
        ("no replay", ("route freely", "free none"), ("route freely", "free none"), ("route freely", "free none")),
        ("R2", ("route freely", "free none"), ("record", "a"), ("impose", "b")),
        ("R3", ("record", "a"), ("impose", "b"), ("impose", "b")),
    )
    parts += [text(24, 116, "the experts of each token", "small", "start")]
    for y, (name, *cells) in zip((128, 172, 216), rows, strict=True):
        parts.append(text(24, y + 21, name, "title", "start"))
        for x, (words, style) in zip((at[1], at[3], at[4]), cells, strict=True):
            parts.append(box(x, y, 120, 32, (words,), style))
    parts += [arrow((at[3] + 120, 188), (at[4] - 2, 188)), arrow((at[1] + 120, 232), (at[3] - 2, 232))]
    parts += [arrow((at[3] + 120, 232), (at[4] - 2, 232))]
    return page("One step of reinforcement learning, with and without routing replay", 760, 268, parts)


def replay() -> str:
    """Return two passes over four tokens with four experts: routes that moved, and routes that were imposed."""
    old, moved = (0, 2, 1, 3), (0, 2, 3, 3)
    parts = []
    panels = ((24, "old policy", old, ()), (272, "update, no replay", moved, (2,)), (520, "update, R2", old, ()))
    for left, title, routes, changed in panels:
        parts.append(text(left, 28, title, "title", "start"))
        for token, expert in product(range(4), range(4)):
            chosen = routes[token] == expert
            style = ("b" if token in changed else "a") if chosen else "free"
            parts.append(box(left + 52 + 38 * expert, 44 + 34 * token, 30, 26, (), style))
        parts += [text(left, 62 + 34 * token, f"token {token + 1}", "small", "start") for token in range(4)]
        parts += [text(left + 67 + 38 * expert, 196, f"e{expert + 1}", "small") for expert in range(4)]
    return page("The experts of four tokens in two passes, with and without replay", 760, 212, parts)


def mesh() -> str:
    """Return eight ranks as attention and as experts see them: tp 2, dp 2, pp 2, and ep 4 over tp x dp."""
    parts = [text(24, 28, "attention: tp 2, dp 2, pp 2", "title", "start")]
    parts += [text(396, 28, "experts: ep 4, pp 2", "title", "start")]
    for stage in range(2):
        y = 44 + 104 * stage
        for copy, style in enumerate(("a", "b")):
            x = 24 + 172 * copy
            parts.append(f'<rect class="{style}" x="{x}" y="{y}" width="160" height="92" rx="6"/>')
            parts.append(text(x + 80, y + 20, f"stage {stage + 1}, copy {copy + 1}", "small"))
            for half in range(2):
                words = (f"rank {4 * stage + 2 * copy + half}", f"tp {half}")
                parts.append(box(x + 10 + 72 * half, y + 32, 66, 50, words))
        parts.append(f'<rect class="a" x="396" y="{y}" width="340" height="92" rx="6"/>')
        parts.append(text(566, y + 20, f"stage {stage + 1}, each expert once", "small"))
        for rank in range(4):
            words = (f"rank {4 * stage + rank}", f"e {2 * rank + 1}, {2 * rank + 2}")
            parts.append(box(406 + 82 * rank, y + 32, 74, 50, words))
    return page("Eight ranks as a mesh, for attention and for eight experts", 760, 256, parts)


if __name__ == "__main__":
    for draw in (step, replay, mesh):
        (IMAGES / f"{draw.__name__}.svg").write_text(draw(), encoding="utf-8")
