"""python -m benchmarks.scaling [--write] [--only NAME …]: the tables and the figure of docs/scaling.md.

Minutes at most; nothing is measured. --write puts them into the page, between the comments that name them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.pages import replaced
from benchmarks.scaling import figure, paper, simulated

PAGE = Path(__file__).parent.parent.parent / "docs" / "scaling.md"
PICTURE = PAGE.with_name("scaling.png")

#: CPU seconds of a call on the driver, as seen once while the Ray engine was being built (no command repeats it;
#: `python -m benchmarks.scaling.driver` has the bare call, which costs less), and of a ticket with its trace on disk
#: (`python -m benchmarks.simulator`, backup 96 %).
RAY_CALL_S, TICKET_S = 0.6e-3, 1 / 110_000

ON_PAPER = {
    "bytes": paper.bytes_per_link,
    "seconds": paper.seconds_of_communication,
    "shards": paper.how_many_shards,
    "fewer": paper.fewer_bytes,
    "tensors": paper.tensor_boundaries,
    "memory": paper.memory,
    "coordinator": lambda: paper.coordinator(RAY_CALL_S, TICKET_S),
}
SIMULATED = {
    "simulated": simulated.seconds_of_updates,
    "places": simulated.places,
    "alive": simulated.versions_alive,
}
TABLES = ON_PAPER | SIMULATED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put them into docs/{PAGE.name}")
    parser.add_argument("--only", nargs="+", choices=[*TABLES, "figure"], default=[*TABLES, "figure"], metavar="NAME")
    arguments = parser.parse_args()
    for name in arguments.only:
        if name == "figure":
            if arguments.write:
                figure.draw(PICTURE)
            continue
        table = TABLES[name]()
        print(f"{name}\n\n{table}\n")
        if arguments.write:
            PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), name, table), encoding="utf-8")


if __name__ == "__main__":
    main()
