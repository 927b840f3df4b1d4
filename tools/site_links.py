"""Extension of Python-Markdown for mkdocs.yml: of links to files outside of docs, the site shows the paths."""

from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor

ROOT = Path(__file__).parents[1]


class Paths(Treeprocessor):
    """Turns links such as `../examples/loss.py` into text with the path as its tooltip."""

    def run(self, root: Element) -> None:
        """Change the elements of a page in place."""
        for link in root.iter("a"):
            path = link.get("href", "").removeprefix("../")
            if path != link.get("href") and (ROOT / path).exists():
                link.tag = "span"
                link.attrib = {"title": path}


class Links(Extension):
    """The extension, by the name that mkdocs.yml gives."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Run after links have become elements, and before the site resolves them."""
        md.treeprocessors.register(Paths(md), "paths", 15)


def makeExtension(**settings: Any) -> Extension:
    """Return the extension, as Python-Markdown asks for it."""
    return Links(**settings)
