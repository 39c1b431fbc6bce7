"""docs/scaling.md: its tables are those of the command, and its sentences say what the tables do."""

from __future__ import annotations

import re
from itertools import product

import pytest
from benchmarks.pages import block, replaced
from benchmarks.scaling import paper, simulated
from benchmarks.scaling.__main__ import ON_PAPER, PAGE, PICTURE, TABLES
from benchmarks.scaling.links import even_shards, ring_s, shared_s
from benchmarks.scaling.models import MODELS, busiest_shard

TEXT = PAGE.read_text(encoding="utf-8")
PROSE = " ".join(TEXT.split())  # sentences, wherever their lines are wrapped


def rows(name: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in block(TEXT, name).splitlines()[2:]]


@pytest.mark.parametrize("name", ON_PAPER)
def test_tables_on_paper_are_those_of_the_command(name: str) -> None:
    assert block(TEXT, name) == ON_PAPER[name]()


@pytest.mark.parametrize(("name", "gbit"), [("25M", 10), ("350M", 100), ("7B", 10)])
def test_simulated_rows_are_those_of_the_command(name: str, gbit: int) -> None:
    assert simulated.row(name, 100, gbit) in rows("simulated")


def test_the_small_simulated_tables_are_those_of_the_command() -> None:
    assert block(TEXT, "places") == simulated.places()
    assert rows("alive")[0][0] == "96+4" and all(int(row[2]) <= int(row[3]) for row in rows("alive"))


def test_the_required_sizes_are_all_there() -> None:
    wanted = set(product(("25M", "350M", "7B"), ("100", "1,000"), ("10", "100")))
    for name in ("seconds", "simulated"):
        assert {tuple(row[:3]) for row in rows(name)} == wanted
    assert {tuple(row[:2]) for row in rows("bytes")} == {row[:2] for row in wanted}


def test_simulated_and_paper_agree_as_the_page_says() -> None:
    ratios = [float(ratio) for ratio in re.findall(r"\((\d\.\d\d)\)", block(TEXT, "simulated"))]
    assert len(ratios) == 72
    assert f"down to {min(ratios):.2f} where both matter" in PROSE
    assert max(ratios) <= 1.01
    by_case = {
        tuple(row[:3]): [float(cell.split()[0].replace(",", "")) for cell in row[3:]] for row in rows("simulated")
    }
    few, many = by_case["25M", "100", "10"], by_case["25M", "1,000", "10"]
    gains = few[4] / few[5], many[4] / many[5]
    assert f"updates {gains[0]:.1f} times as fast at 100 machines and {gains[1]:.1f} times at 1,000" in PROSE
    assert few[0] / few[1] < 1.1 and many[0] / many[1] < 1.1  # one server binds: next to nothing
    assert f"one server: {few[0]:.0f} s here, 16 s plus the step above" in PROSE


def test_sentences_with_figures() -> None:
    link = paper.rate(10)
    assert f"{shared_s(paper.load(25_000_000, 100), link):.0f} s. It" in PROSE
    seven = paper.load(7_000_000_000, 100)
    least = min(ring_s(seven, link), *(shared_s(seven, link, 100, on_workers=on) for on in (False, True)))
    assert f"7B parameters at 10 Gbit/s are {least:.0f} s of communication" in PROSE
    evens = [even_shards(max(sizes()), sum(sizes())) for sizes in MODELS.values()]
    assert "at most {} even shards for ResNet-50, {} for GPT-2 medium, {} for LLaMA 7B".format(*evens) in PROSE
    assert (
        "the busiest shard of the three has {}, {} and {} an even share".format(*(row[5] for row in rows("tensors")))
        in PROSE
    )
    steps_s = 2 * 999 * paper.LATENCY_S
    assert round(steps_s, 2) == 0.1 and "2·(n−1) steps are 0.1 s at 1,000 machines" in PROSE
    thousand = paper.load(25_000_000, 1000)
    assert round(steps_s / (ring_s(thousand, paper.rate(100)) - steps_s)) == 6 and "six times what 25M" in PROSE


def test_models_have_the_sizes_they_are_known_for() -> None:
    known = {"ResNet-50": 25_557_032, "GPT-2 medium": 354_823_168, "LLaMA 7B": 6_738_415_616}
    assert {name: sum(sizes()) for name, sizes in MODELS.items()} == known


def test_whole_tensors_are_cut_as_the_engine_does() -> None:
    assert busiest_shard([5, 4, 3, 3, 3], 2) == 9  # 5+4, 3+3+3
    assert busiest_shard([7, 1, 1], 3) == 7
    assert busiest_shard([2] * 6, 1) == 12


def test_a_table_is_put_between_its_comments_and_nowhere_else() -> None:
    page = "before\n<!-- bytes -->\n<!-- /bytes -->\nafter <!-- seconds -->\n"
    once = replaced(page, "bytes", "| a |")
    assert once == "before\n<!-- bytes -->\n| a |\n<!-- /bytes -->\nafter <!-- seconds -->\n"
    assert replaced(once, "bytes", "| b |") == once.replace("| a |", "| b |")
    with pytest.raises(SystemExit, match="no place for 'seconds'"):
        replaced(page, "seconds", "")


def test_the_page_has_every_table_and_the_picture() -> None:
    assert re.findall(r"<!-- (\w+) -->", TEXT) and set(re.findall(r"<!-- (\w+) -->", TEXT)) == set(TABLES)
    assert PICTURE.stat().st_size < 100_000 and f"({PICTURE.name})" in PROSE
