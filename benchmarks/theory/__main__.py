"""python -m benchmarks.theory: every formula of docs/theory.md beside a run, as the table in it."""

from __future__ import annotations

import torch

from benchmarks.theory.cases import CASES, SPELLS
from benchmarks.theory.runs import as_measured_and_from_marginals, update_s
from quorate import BackupSync

JOINT = [
    ("16th of 16, shared slow spells", SPELLS, 16, 16),
    ("14th of 16, shared slow spells", SPELLS, 16, 14),
    ("100th of 100, chen2016", "chen2016", 100, 100),
    ("96th of 100, chen2016", "chen2016", 100, 96),
]
PAUSES = "shifted-exp:0.9,0.1*pauses:0.02,10"


def main() -> None:
    torch.set_num_threads(1)
    print("| formula | case | formula says | run gives |\n|---|---|---|---|")
    for case in CASES:
        sign = "≤ " if case.relation == "≤" else ""
        print(f"| ({case.number}) | {case.what} | {sign}{case.predicted():.4g} | {case.simulated():.4g} |", flush=True)
    print("\n| mean of the k-th arrival | as measured | composed from marginals |\n|---|---|---|")
    for what, latency, n, k in JOINT:
        measured, composed = as_measured_and_from_marginals(latency, n, k, 2000)
        print(f"| {what} | {measured:.3g} | {composed:.3g} |")
    print("\n| backups | cancelled | left to finish |\n|---|---|---|")
    for backups in (0, 1, 2, 4):
        late = [update_s(BackupSync(16 - backups, backups, how), 16, PAUSES, 4000) for how in ("cancel", "finish")]
        print(f"| {16 - backups}+{backups} | {late[0]:.3g} | {late[1]:.3g} |")


if __name__ == "__main__":
    main()
