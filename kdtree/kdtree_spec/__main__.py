# SPDX-License-Identifier: Apache-2.0
"""python -m kdtree_spec draw [FILE.svg]: a picture of a draft tree and its mask."""

from __future__ import annotations

import argparse
from pathlib import Path

from kdtree_spec.draw import draw, example


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kdtree_spec")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("draw", help="write a picture of a draft tree and its mask")
    command.add_argument("file", type=Path, nargs="?", default=Path("tree.svg"), help="SVG to write")
    args = parser.parse_args()
    args.file.write_text(draw(*example()))
    print(args.file)


if __name__ == "__main__":
    main()
