"""python -m benchmarks.pieces [--sizes 0.1M 5M 25M] [--repeats N] [--out FILE]: how large an all-reduce on one host?

Steps/s of `quorate.DataParallel` with full sync in 2 and 4 processes over loopback, for several values of
`bucket_bytes`, over those of DDP: an eighth of the model (at least 1 MB), which is the default across hosts, 8 MB, and
25 MB, which is DDP's. The contenders run one after the other, in turned order each repeat; a ratio is of one repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

_HERE = Path(__file__).resolve()
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
_WIDTHS = {"0.1M": (256, 256, 128, 10), "5M": (512, 1536, 1536, 1152, 10), "25M": (1024, 3072, 3072, 3072, 1024, 10)}
_STEPS = {"0.1M": 500, "5M": 80, "25M": 16}
_MB = 1 << 20
#: By name: bucket_bytes; 0: an eighth of the model; None: DDP.
CONTENDERS = {"DDP": None, "an eighth": 0, "8 MB": 8 * _MB, "25 MB": 25 * _MB}


def steps_per_s(size: str, contender: str) -> float | None:
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
    bucket_bytes = CONTENDERS[contender]
    if bucket_bytes is None:
        model: nn.Module = nn.parallel.DistributedDataParallel(net)
    else:
        bucket_bytes = bucket_bytes or max(_MB, 4 * sum(one.numel() for one in net.parameters()) // 8)
        model = quorate.DataParallel(net, optimizer, bucket_bytes=bucket_bytes)
    x, y = torch.randn(16, widths[0]), torch.randn(16, widths[-1])
    began, warm_up = 0.0, max(4, _STEPS[size] // 8)
    for step in range(warm_up + _STEPS[size]):
        if step == warm_up:
            dist.barrier()
            began = time.perf_counter()
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    if isinstance(model, quorate.DataParallel):
        model.finish()
    dist.barrier()
    return _STEPS[size] / (time.perf_counter() - began) if dist.get_rank() == 0 else None


def rate(size: str, processes: int, contender: str) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [str(_HERE), "--step", size, contender]
    environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": f"{_HERE.parents[1] / 'src'}:{_HERE.parents[1]}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return float(done.stdout.splitlines()[-1])


def measure(size: str, processes: int, repeats: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for repeat in range(repeats):
        names = list(rates)
        turn = repeat % len(names)
        for name in (*names[turn:], *names[:turn]):
            rates[name].append(rate(size, processes, name))
    ratios = {
        name: median(ours / ddp for ours, ddp in zip(found, rates["DDP"], strict=True)) for name, found in rates.items()
    }
    print(f"{size} on {processes}: " + "  ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()), flush=True)
    return {"size": size, "processes": processes, "over_ddp": ratios, "steps_per_s": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs of each contender (default 5)")
    parser.add_argument("--sizes", nargs="+", choices=_WIDTHS, default=list(_WIDTHS), metavar="SIZE")
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4], metavar="N", help="default 2 4")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the figures of all runs are written, as JSON")
    parser.add_argument("--step", nargs=2, metavar=("SIZE", "CONTENDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        found = steps_per_s(*given.step)
        if found is not None:
            print(found, flush=True)
        os._exit(0)  # gloo's threads now and then abort a process that ends in order, also under plain DDP
    rows = []
    for size in given.sizes:
        for processes in given.processes:
            rows.append(measure(size, processes, given.repeats))
            if given.out is not None:
                setting = {"cores": os.cpu_count(), "python": platform.python_version(), "repeats": given.repeats}
                given.out.write_text(json.dumps({**setting, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
