"""The table of a comparison, on stdout; it fits 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quorate.cli._show import cluster_text, console, megabytes, seconds
from quorate.reporting.comparison import Row, seconds_are

if TYPE_CHECKING:
    from quorate.conditions import Until

WIDE = 100  # columns of a terminal from which on no heading need be cut


def print_table(rows: Sequence[Row], target: Until | None, measure: str | None, header: dict[str, Any]) -> None:
    """What all runs were made on, from the header of one of them; then one row a run."""
    from rich.table import Table
    from rich.text import Text

    screen = console()
    screen.print(Text(f"{cluster_text(header)}, seed {header['seed']}"))
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    columns = _columns(rows, target, measure, seconds_are(header))
    for index, (heading, _) in enumerate(columns):
        table.add_column(
            heading if screen.width < WIDE else heading.replace("-\n", ""),
            justify="left" if index == 0 else "right",
            vertical="bottom",
            no_wrap=True,
        )
    if screen.width < WIDE:
        columns[0] = ("policy", [row.label.replace(", ", ",\n  ") for row in rows])
    for index in range(len(rows)):
        table.add_row(*(Text(cells[index]) for _, cells in columns))
    # Better a line that is too long than a number that is cut off.
    needed = console(width=1000).measure(table).maximum
    console(width=max(needed, screen.width)).print(table)


def _columns(
    rows: Sequence[Row], target: Until | None, measure: str | None, kind_of_seconds: str
) -> list[tuple[str, list[str]]]:
    columns: list[tuple[str, list[str]]] = [("policy", [row.label for row in rows])]
    if target is not None:
        columns.append((f"time to\n{target.target:g}", [_reached(row) for row in rows]))
    else:
        columns.append((f"{kind_of_seconds}\ntime", [seconds(row.seconds) for row in rows]))
        columns.append(("samples\nper s", [_number(row.samples_per_s) for row in rows]))
    columns.append(("speed\nup", ["–" if row.speed_up is None else f"×{row.speed_up:.2f}" for row in rows]))
    if any(row.final is not None for row in rows):
        name = "last\nloss" if measure is None else f"final\n{measure.replace('_', chr(10))}"
        columns.append((name, ["–" if row.final is None else f"{row.final:.3f}" for row in rows]))
    columns += [
        ("up-\ndates", [f"{row.updates:,}" for row in rows]),
        ("stale\navg/max", [f"{row.staleness_mean:.1f}/{row.staleness_max}" for row in rows]),
        ("drop-\nped", [f"{row.dropped_share:.0%}" for row in rows]),
        ("was-\nted", [f"{row.wasted_share:.0%}" for row in rows]),
        ("wait-\ning", [f"{row.waiting_share:.0%}" for row in rows]),
    ]
    if any(row.bytes_sent for row in rows):
        columns += [
            ("MB\nsent", [megabytes(row.bytes_sent) for row in rows]),
            ("bytes\nused", ["–" if row.bytes_used_share is None else f"{row.bytes_used_share:.0%}" for row in rows]),
        ]
    return columns


def _reached(row: Row) -> str:
    if row.time_to_target_s is None:
        return "broke off" if row.broke_off else "never"
    return seconds(row.time_to_target_s)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"
