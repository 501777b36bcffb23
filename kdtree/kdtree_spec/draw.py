# SPDX-License-Identifier: Apache-2.0
"""A picture of a draft tree and its mask."""

from __future__ import annotations

from xml.etree import ElementTree as svg

import numpy as np

from kdtree_spec.tree import Tree, accept, build_tree

# What a drafter may say of the four tokens after "def": likeliest first.
WORDS = [["main", "run", "test"], ["(", "_", ":"], ["args", ")", "self"], ["):", ",", ")"]]
PROBABILITIES = [[0.55, 0.3, 0.1], [0.7, 0.2, 0.05], [0.45, 0.4, 0.1], [0.6, 0.25, 0.1]]
WIDTH = 10
CHOSEN = ["run", "(", ")"]  # what the target chooses in the picture, after the root and each accepted node

COLUMN, ROW, CELL, RADIUS, MARGIN = 84, 54, 24, 14, 28
INK, PALE, KEPT = "#222222", "#c8c8c8", "#1f77b4"


def example() -> tuple[Tree, list[int]]:
    """The tree and the accepted nodes of the picture; a token is 10 * position + rank."""
    log_probs = np.log(np.array(PROBABILITIES, np.float32))
    tokens = np.arange(4)[:, None] * 10 + np.arange(3)
    tree = build_tree(log_probs, tokens, root=-1, width=WIDTH)
    drawn = [-2] * len(tree)
    node = 0
    for depth, word in enumerate(CHOSEN):
        drawn[node] = 10 * depth + WORDS[depth].index(word)
        node = next((c for c in tree.children(node) if tree.tokens[c] == drawn[node]), node)
    return tree, accept(tree, drawn)[0]


def word(tree: Tree, node: int) -> str:
    return "def" if node == 0 else WORDS[tree.tokens[node] // 10][tree.tokens[node] % 10]


def rows_of(tree: Tree) -> list[float]:
    """A node's row: the leaves one below the other, a parent in the middle of its children."""
    rows = [0.0] * len(tree)
    leaves = 0

    def place(node: int) -> float:
        nonlocal leaves
        children = [place(child) for child in tree.children(node)]
        if not children:
            children = [leaves]
            leaves += 1
        rows[node] = (children[0] + children[-1]) / 2
        return rows[node]

    place(0)
    return rows


def draw(tree: Tree, kept: list[int]) -> str:
    """SVG: the tree, the accepted nodes in colour, and beside it the mask, row by row what a node sees."""
    rows = rows_of(tree)
    at = [(MARGIN + tree.depths[i] * COLUMN, MARGIN + rows[i] * ROW) for i in range(len(tree))]
    left = 2 * MARGIN + (max(tree.depths) + 1) * COLUMN
    height = max(MARGIN * 2 + max(rows) * ROW, MARGIN * 2 + len(tree) * CELL)
    width = left + (len(tree) + 1) * CELL + MARGIN
    picture = svg.Element(
        "svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width:g} {height:g}", width=f"{width:g}"
    )
    picture.set("font-family", "sans-serif")
    picture.set("font-size", "12")
    svg.SubElement(picture, "rect", width="100%", height="100%", fill="white")

    def text(x: float, y: float, content: str, colour: str = INK) -> None:
        position = {"x": f"{x:g}", "y": f"{y + 4:g}", "fill": colour, "text-anchor": "middle"}
        svg.SubElement(picture, "text", position).text = content

    for node, parent in enumerate(tree.parents[1:], 1):
        (x1, y1), (x2, y2) = at[parent], at[node]
        line = {"x1": f"{x1:g}", "y1": f"{y1:g}", "x2": f"{x2:g}", "y2": f"{y2:g}"}
        svg.SubElement(picture, "line", line | {"stroke": KEPT if node in kept else PALE, "stroke-width": "2"})
    for node, (x, y) in enumerate(at):
        colour = KEPT if node in kept else INK
        circle = {"cx": f"{x:g}", "cy": f"{y:g}", "r": str(RADIUS), "fill": "white", "stroke": colour}
        svg.SubElement(picture, "circle", circle)
        text(x, y, str(node), colour)
        text(x, y + RADIUS + 9, word(tree, node), colour)
    mask = tree.mask()
    for i in range(len(tree)):
        y = MARGIN + (i + 0.5) * CELL
        text(left, y, str(i))
        text(left + (i + 1) * CELL, MARGIN - 10, str(i))
        for j in range(len(tree)):
            cell = {"x": f"{left + (j + 0.5) * CELL:g}", "y": f"{y - CELL / 2:g}", "width": str(CELL)}
            shown = {"height": str(CELL), "stroke": PALE, "fill": INK if mask[i, j] else "white"}
            svg.SubElement(picture, "rect", cell | shown)
    svg.indent(picture)
    return svg.tostring(picture, encoding="unicode") + "\n"
