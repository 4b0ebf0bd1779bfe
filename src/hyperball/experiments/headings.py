"""What a table is called where several stand together: its title, after its number in the paper."""

from __future__ import annotations

import re

NUMBERED = re.compile(r", ((?:table|figure)s? \d[\d, and]*)$")  # the end of a source, such as ", figures 1, 6 and 7"


def heading(title: str, source: str) -> str:
    """A title after the number that the source ends with; one that has none, or begins with it, is left as it is."""
    number = NUMBERED.search(source)
    if number is None or title.lower().startswith(number[1]):
        return title
    return f"{number[1].capitalize()}. {title}"
