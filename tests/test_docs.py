"""Links between our pages lead somewhere, pictures are there, and lines are wrapped."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
SOURCE = REPOSITORY / "src" / "quorate"
_LISTED = subprocess.run(["git", "ls-files", "*.md"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
PAGES = [REPOSITORY / name for name in _LISTED.stdout.split() if (REPOSITORY / name).exists()]


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.skipif(not PAGES, reason="needs the repository's git folder to know the pages")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page if not name else (page.parent / name).resolve()
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@pytest.mark.skipif(not PAGES, reason="needs the repository's git folder to know the pages")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_lines_are_wrapped(page: Path) -> None:
    """At 120 columns by habit; a line over 160 is a paragraph that nobody wrapped. Tables cannot be wrapped."""
    lines = enumerate(page.read_text().splitlines(), start=1)
    assert [number for number, line in lines if len(line) > 160 and not line.lstrip().startswith("|")] == []


def test_what_pages_and_errors_tell_to_install_exists() -> None:
    """`quorate[ray]`, `.[ray]`, `install_line("ray")`: extras of pyproject.toml; pages give the form for a clone."""
    extras = set(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    code = [*(REPOSITORY / "src").rglob("*.py"), *(REPOSITORY / "examples").rglob("*.*")]
    named = re.compile(r"""(?:quorate|'\.|/quorate)\[(\w+)]|install_line\(["'](\w+)["']\)""")
    for file in (*PAGES, *code):
        if file.suffix in {".py", ".md", ".yaml"}:
            assert {one or other for one, other in named.findall(file.read_text())} <= extras, file
    for page in PAGES:
        assert "pip install 'quorate[" not in page.read_text(), f"{page}: quorate is on no index; write '.[extra]'"


def test_the_architecture_page_names_files_that_exist() -> None:
    """Every file, folder and thread's home that the page shows, relative to src/quorate or to the repository."""
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w./]+(?:\.py|/))`", page))
    assert len(named) > 60
    missing = [name for name in named if not any((at / name).exists() for at in (SOURCE, REPOSITORY))]
    assert not missing


def test_the_ways_of_a_gradient_are_short() -> None:
    """Files that a reader must open to follow one gradient, by engine."""
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    section = page.partition("## The way of one gradient")[2].partition("\n## ")[0]
    ways = dict(re.findall(r"\*\*([^*]+)\*\* \(\d+ files\)\n(.*?)(?=\n\*\*|\Z)", section, re.DOTALL))
    most = {"Simulated": 8, "Local": 10, "Ray": 11, "DataParallel with a quorum": 12}
    counted = {name: len(set(re.findall(r"`([\w/]+\.py)`", way))) for name, way in ways.items()}
    assert counted.keys() == most.keys()
    assert all(counted[name] <= most[name] for name in most), counted
    assert {name: int(said) for name, said in re.findall(r"\*\*([^*]+)\*\* \((\d+) files\)", section)} == counted


@pytest.mark.parametrize("file", [*PAGES, REPOSITORY / "Makefile"], ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_tests_are_where_pages_and_the_makefile_say(file: Path) -> None:
    named = re.findall(r"(?<![\w/])tests/[\w./]*\w", file.read_text())
    assert [path for path in named if not (REPOSITORY / path).exists()] == []


def test_every_marker_names_the_command_that_runs_its_tests() -> None:
    """And says whether CI does."""
    makefile, ci = (REPOSITORY / "Makefile").read_text(), (REPOSITORY / ".ci" / "run").read_text()
    options = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    for marker in options["markers"]:
        name, _, says = marker.partition(":")
        named = re.search(r"`make (test-[\w-]+)`", says)
        assert named is not None, f"{name} has no command"
        assert re.search(rf'^{named[1]}:.*\n\t.*pytest -m "?{name}\b', makefile, re.MULTILINE), name
        assert ("by CI" in says) == (f"make {named[1]}\n" in f"{ci}\n"), name
        assert f"not {name}" in " ".join(options["addopts"]), f"{name} is run by `make test` as well"
