"""The README's examples give the output that the README shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from quorate.cli.app import app
from quorate.latency import parse_latency
from quorate.policies import POLICIES

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text()
REFERENCE = (REPOSITORY / "docs" / "reference.md").read_text()


@pytest.mark.usefixtures("warm")
def test_the_first_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"```python\n(import quorate.*?)```", README, re.DOTALL)
    assert found is not None
    code = found[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    exec(compile(code.replace("epochs=10", "epochs=1"), "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("(")[0] for line in lines] == ["FullSync", "BackupSync", "KBatchSync"]


def test_every_policy_is_in_the_table() -> None:
    for name, policy in POLICIES.items():
        assert f"| `{name}` | `{policy.__name__}(" in README


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize(
    ("page", "opens", "at_least"),
    [(README, "**Latency.**", 2), (REFERENCE, "## Latency", 7)],
    ids=["readme", "reference"],
)
def test_every_latency_text_parses(page: str, opens: str, at_least: int) -> None:
    section = page.split(opens)[1].split("##")[0]
    texts = [text for text in re.findall(r"`([^`\n]+)`", section) if re.match(r"[a-z][a-z0-9-]*(:[0-9]|$)", text)]
    models = [text for text in texts if not text.startswith(("slow", "pauses", "spells", "trace"))]
    assert len(models) >= at_least
    for text in models:
        parse_latency(text)


def test_the_commands_exist() -> None:
    commands = {shlex.split(command)[1] for command in re.findall(r"`(quorate [^`]*)`", README)}
    assert commands <= {command.callback.__name__ for command in app.registered_commands if command.callback}
