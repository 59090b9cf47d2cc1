"""Docstrings as the reference shows them: arguments become lists, roles and pages links, examples code.

A docstring of ours names arguments at the start of a line (``cost: what a mask costs``) and other objects by roles
(``:func:`espalier.fit```). Markdown knows neither. The site's configuration loads :class:`Plain`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

PAGES = Path(__file__).parent / "reference"
SHOWN = re.compile(r"^::: (\S+)$(?:\n    options:\n      heading: (\S+)$)?", re.MULTILINE)
NAMES = r"``[a-z_]\w*``(?:, ``[a-z_]\w*``)*"
ARGUMENT = re.compile(rf"({NAMES}|{NAMES.replace('`', '')}): (?=\S)")
RUN_IN = re.compile(rf"^{NAMES}: .*(?:\n\S.*)*", re.MULTILINE)  # a paragraph of arguments, one after the other
NEXT = re.compile(rf"(?<=[.;])\s+(?={NAMES}: )")
ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):`~?([\w.]+)`")
PAGE = re.compile(r"\bdocs/([\w-]+)\.md\b")


def documented() -> dict[str, str]:
    """The names that the pages of the reference show, and the objects they stand for."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md")))
    return {heading or path: path for path, heading in SHOWN.findall(text)}


def markdown(text: str, known: dict[str, str]) -> str:
    """A docstring as Markdown.

    >>> print(markdown("Cut it.\\n\\nmask: see :func:`p.f`\\n    and docs/gates.md.", {"p.f": "p.f.f"}))
    Cut it.
    <BLANKLINE>
    - **mask**: see [`p.f`][p.f.f]
        and [gates](../gates.md).
    """

    def link(found: re.Match[str]) -> str:
        name = found[1]
        return f"[`{name}`][{known[name]}]" if name in known else f"`{name}`"

    text = RUN_IN.sub(lambda found: NEXT.sub("\n", found[0]), text)
    text = PAGE.sub(r"[\1](../\1.md)", ROLE.sub(link, text))
    lines, listing, example = list[str](), False, False
    for line in text.splitlines():
        if line.lstrip().startswith(">>> ") and not example:
            lines.append("```pycon")
            example = True
        elif example and not line.strip():
            lines.append("```")
            example = False
        if not example and (found := ARGUMENT.match(line)):
            lines += [] if listing or not lines or not lines[-1] else [""]
            line, listing = f"- **{found[1].replace('``', '')}**: {line[found.end() :]}", True
        elif not line.strip():
            listing = False
        lines.append(line)
    return "\n".join([*lines, "```"] if example else lines)


class Plain(griffe.Extension):
    """Rewrites every docstring as it is read."""

    def __init__(self) -> None:
        self.known = documented()

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value, self.known)
