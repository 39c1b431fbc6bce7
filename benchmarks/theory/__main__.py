"""python -m benchmarks.theory [--out FILE]: every formula of docs/theory.md beside a run.

In virtual time with fixed seeds, so the same on any machine. `--out FILE` puts the figures into a JSON file;
`python -m benchmarks.tables` makes the page's tables of it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.theory.cases import CASES, SPELLS
from benchmarks.theory.runs import as_measured_and_from_marginals, update_s
from quorate import BackupSync

JOINT = [
    ("16th of 16, shared slow spells", SPELLS, 16, 16),
    ("14th of 16, shared slow spells", SPELLS, 16, 14),
    ("100th of 100, `chen2016`", "chen2016", 100, 100),
    ("96th of 100, `chen2016`", "chen2016", 100, 96),
]
PAUSES = "shifted-exp:0.9,0.1*pauses:0.02,10"
LATE = ("cancel", "finish")

Found = dict[str, list[dict[str, Any]]]


def run() -> Found:
    """All figures; each formula beside its run, k-th arrivals, and seconds of an update by what late work does."""
    formulas = [
        {
            "number": case.number,
            "what": case.what,
            "relation": case.relation,
            "formula": case.predicted(),
            "run": case.simulated(),
        }
        for case in CASES
    ]
    joint = []
    for what, latency, n, k in JOINT:
        measured, composed = as_measured_and_from_marginals(latency, n, k, 2000)
        joint.append({"what": what, "measured_s": measured, "composed_s": composed})
    late = [
        {"late": how, "backups": b, "update_s": update_s(BackupSync(16 - b, b, how), 16, PAUSES, 4000)}
        for how in LATE
        for b in (0, 1, 2, 4)
    ]
    return {"formulas": formulas, "joint": joint, "late": late}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="put the figures into this JSON file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = run()
    for part, rows in found.items():
        print(part)
        for row in rows:
            print(
                "  " + ", ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values())
            )
    if given.out is not None:
        parts = [
            f"{json.dumps(part)}: [\n" + ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows) + "\n ]"
            for part, rows in found.items()
        ]
        given.out.write_text("{\n " + ",\n ".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
