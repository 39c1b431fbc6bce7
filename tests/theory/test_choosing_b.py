"""docs/choosing-b.md: what its tables say, and that a run agrees; tests/experiments/test_pages.py makes them anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.choosing_b import NOISES, SIZES, TAILS
from benchmarks.pages import block
from benchmarks.tables import CHOOSING

import quorate

PAGE = (Path(__file__).parent.parent.parent / "docs" / "choosing-b.md").read_text(encoding="utf-8")


def tables() -> dict[str, dict[str, list[str]]]:
    """Noise -> tail -> the cells by size, as on the page."""
    found = []
    for name in CHOOSING:
        head, _, *rows = (line.strip("| ").split(" | ") for line in block(PAGE, name).splitlines())
        assert head[1:] == [str(size) for size in SIZES]
        found.append({row[0]: row[1:] for row in rows})
    return dict(zip(NOISES, found, strict=True))


@pytest.mark.parametrize("noise", NOISES)
def test_every_cell_is_a_split_of_its_machines(noise: str) -> None:
    table = tables()[noise]
    assert list(table) == list(TAILS)
    for cells in table.values():
        for size, text in zip(SIZES, cells, strict=True):
            split = re.fullmatch(r"(\d+)\+(\d+)(?: ×[\d.]+)?", text)
            assert split is not None
            assert int(split[1]) + int(split[2]) == size


def test_more_backups_for_larger_clusters_and_for_less_noise() -> None:
    for tail in TAILS:
        by_noise = [[int(re.findall(r"\+(\d+)", text)[0]) for text in tables()[noise][tail]] for noise in NOISES]
        assert all(few <= many for few, many in zip(*by_noise, strict=True)), tail
        assert all(row == sorted(row) for row in by_noise), tail


def test_running_the_splits_finds_no_better_one() -> None:
    """Sixteen workers, splits simulated: the page's is within 1 % of the best, with the gain it names."""
    tail = "lognormal, s = 0.5"
    text = tables()["noise-dominated"][tail][SIZES.index(16)]
    quorum, gain = int(text.split("+")[0]), float(text.split("×")[1])
    per_second = {}
    for n in (7, 9, 10, 11, 12, 14, 16):
        engine = quorate.Simulated(16, TAILS[tail])
        run = quorate.train(None, quorate.BackupSync(n, 16 - n), engine, updates=1500)
        per_second[n] = n / run.summary["update_seconds"]["mean"]
    assert per_second[quorum] > 0.99 * max(per_second.values())
    assert per_second[quorum] / per_second[16] == pytest.approx(gain, rel=0.03)
