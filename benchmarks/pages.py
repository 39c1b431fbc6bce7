"""Tables on a page, each between <!-- name --> and <!-- /name -->, where a command puts it and a test finds it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent

#: What makes the tables of a page, by the names in its comments.
Tables = Mapping[str, Callable[[], str]]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table as Markdown has it."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def block(page: str, name: str) -> str:
    """The table of this name as it stands on the page."""
    return _find(page, name)[1]


def replaced(page: str, name: str, table: str) -> str:
    found = _find(page, name)
    return page[: found.start(1)] + table + "\n" + page[found.end() - len(f"<!-- /{name} -->") :]


def names(page: str) -> list[str]:
    """Those of the tables on the page, in order."""
    return re.findall(r"<!-- ([\w-]+) -->\n(?:.*?)<!-- /\1 -->", page, flags=re.DOTALL)


def _find(page: str, name: str) -> re.Match[str]:
    found = re.search(rf"<!-- {name} -->\n(.*?)\n?<!-- /{name} -->", page, flags=re.DOTALL)
    if found is None:
        raise SystemExit(f"there is no place for {name!r}: write <!-- {name} --> and <!-- /{name} --> into the page")
    return found


def main(what: str | None, pages: Mapping[Path, Tables]) -> None:
    """A command that prints the tables of some pages, or writes them there."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put them into their pages")
    given = parser.parse_args()
    for file, tables in pages.items():
        page = file.read_text(encoding="utf-8")
        for name, make in tables.items():
            table = make().rstrip("\n")
            print(f"{file.relative_to(REPOSITORY)}, {name}\n\n{table}\n")
            page = replaced(page, name, table)
        if given.write:
            file.write_text(page, encoding="utf-8")
