"""python -m benchmarks.trees BEFORE [AFTER] [--repeats N] [--out FILE]: did a change make quorate slower?

BEFORE and AFTER (default: this one) are checkouts, for example made with `git worktree add`. Each case runs in both, in
processes of its own, one after the other and in turned order each repeat. The figure of a case is the median over the
repeats of AFTER's rate over BEFORE's: below 1 is slower.

simulator: tickets per CPU second · local: updates/s of 8 workers (a: nobody sleeps; b, c: 6+2 with stragglers) ·
torchrun: steps/s of quorate.DataParallel in 2 processes, with DDP beside it
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

_HERE = Path(__file__).resolve().parents[2]
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
_WIDTHS = {"0.1M": (256, 256, 128, 10), "5M": (512, 1536, 1536, 1152, 10)}
_STEPS = {"0.1M": 600, "5M": 80}
_WARM_UP = 20
DDP = "ddp"


class Case(NamedTuple):
    part: str
    name: str
    command: list[str]
    with_ddp: bool = False


def cases() -> list[Case]:
    found = []
    for policy in ("full-sync", "backup 96 %", "async", "k-batch n"):
        one = ["-m", "benchmarks.simulator", "--one"]
        found.append(Case("simulator", policy, [*one, json.dumps([policy, 100, 150_000, False])]))
    one = ["-m", "benchmarks.simulator", "--one", json.dumps(["backup 96 %", 100, 150_000, True])]
    found.append(Case("simulator", "backup 96 %, with trace", one))
    for size, updates in (("0.1M", {"a": 1500, "b": 100, "c": 150}), ("5M", {"a": 100, "b": 80, "c": 100})):
        for case, quorum in (("a", 8), ("b", 6), ("c", 6)):
            setting = [
                f"--size={size}",
                f"--case={case}",
                "--workers=8",
                f"--quorum={quorum}",
                f"--updates={updates[case]}",
            ]
            found.append(Case("local", f"{size}, {case}", ["-m", "benchmarks.local.run_ours", *setting]))
    for size in _WIDTHS:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(Path(__file__).resolve())]
        found.append(Case("torchrun", size, [*launch, "--step", size], with_ddp=True))
    return found


def rate(tree: Path, command: list[str]) -> float:
    """The rate that the command prints in its last line, alone or as a JSON object."""
    environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": f"{tree / 'src'}:{tree}"}
    done = subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed in {tree}:\n{done.stderr}")
    last = json.loads(done.stdout.splitlines()[-1])
    return float(last["updates_per_s"] if isinstance(last, dict) else last)


def compare(case: Case, before: Path, after: Path, repeats: int) -> dict[str, Any]:
    runs: dict[str, list[float]] = {"before": [], "after": []} | ({DDP: []} if case.with_ddp else {})
    for repeat in range(repeats):
        turn = repeat % len(runs)
        for name in (*list(runs)[turn:], *list(runs)[:turn]):
            more = ["--ddp"] if name == DDP else []
            runs[name].append(rate(before if name == "before" else after, [*case.command, *more]))
    ratios = [new / old for new, old in zip(runs["after"], runs["before"], strict=True)]
    row: dict[str, Any] = {"part": case.part, "case": case.name, "after_over_before": median(ratios), "rates": runs}
    beside = ""
    if case.with_ddp:
        row["after_over_ddp"] = median(new / ddp for new, ddp in zip(runs["after"], runs[DDP], strict=True))
        beside = f"   over DDP {row['after_over_ddp']:.2f}"
    middle = f"{median(runs['before']):12,.1f}/s before {median(runs['after']):12,.1f}/s after"
    figure = f"{row['after_over_before']:.3f}× ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"{case.part:10} {case.name:24} {middle}   {figure}{beside}", flush=True)
    return row


def steps_per_s(size: str, ddp: bool) -> float | None:
    """Run inside torchrun: steps/s of a training loop; None outside of process 0."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import quorate

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    widths = _WIDTHS[size]
    layers = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())]
    net = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    model = nn.parallel.DistributedDataParallel(net) if ddp else quorate.DataParallel(net, optimizer)
    x, y = torch.randn(16, widths[0]), torch.randn(16, widths[-1])
    began = 0.0
    for step in range(_WARM_UP + _STEPS[size]):
        if step == _WARM_UP:
            dist.barrier()
            began = time.perf_counter()
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    if not ddp:
        model.finish()
    dist.barrier()
    return _STEPS[size] / (time.perf_counter() - began) if dist.get_rank() == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", type=Path)
    parser.add_argument("after", nargs="?", type=Path, default=_HERE)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs of each case and tree (default 5)")
    parser.add_argument("--only", choices=("simulator", "local", "torchrun"), help="one part instead of all three")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the figures of all runs are written, as JSON")
    parser.add_argument("--step", choices=_WIDTHS, help=argparse.SUPPRESS)
    parser.add_argument("--ddp", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        found = steps_per_s(given.step, given.ddp)
        if found is not None:
            print(found, flush=True)
        os._exit(0)  # gloo's threads now and then abort a process that ends in order, also under plain DDP
    if given.before is None or not (given.before / "src" / "quorate").is_dir():
        parser.error("BEFORE must be a checkout of quorate, with src/quorate in it")
    before, after = given.before.resolve(), given.after.resolve()
    commits = {
        name: subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True).stdout.strip()
        for name, tree in (("before", before), ("after", after))
    }
    rows = []
    for case in cases():
        if given.only in (None, case.part):
            rows.append(compare(case, before, after, given.repeats))
            if given.out is not None:
                given.out.write_text(json.dumps({**commits, "repeats": given.repeats, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
