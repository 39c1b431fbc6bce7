"""The memory of the process that calls `quorate.train` with the Ray engine, from the call to its return.

python -m benchmarks.ray.run_memory --size 25M [--folder] [--updates 30]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
from collections import Counter
from pathlib import Path

import quorate
from benchmarks.local import workload
from benchmarks.local.task import LinearMap

WORKERS, QUORUM = 8, 6
UPDATES = 30  # six checkpoints
CHECKPOINT_EVERY = 5
_LOOK_EVERY_S = 0.02


class _Peaks:
    """The most resident memory since `start`: by the kernel's own mark, and by its kinds, looked at often."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look, daemon=True)
        self.peaks: Counter[str] = Counter()
        self.looks = 0

    def start(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident now
        self._looking.start()

    def stop(self) -> dict[str, int]:
        self._over.set()
        self._looking.join()
        mark = _kilobytes("/proc/self/status")["VmHWM"]
        return {"resident_bytes": 1024 * mark, **self.peaks, "looks": self.looks}

    def _look(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            now = _kilobytes("/proc/self/smaps_rollup")
            private = now["Private_Clean"] + now["Private_Dirty"] + now["Private_Hugetlb"]
            shared = now["Shared_Clean"] + now["Shared_Dirty"] + now["Shared_Hugetlb"]
            for name, kilobytes in (("private", private), ("shared", shared), ("private_and_shared", private + shared)):
                self.peaks[f"{name}_bytes"] = max(self.peaks[f"{name}_bytes"], 1024 * kilobytes)
            self.looks += 1


def _kilobytes(path: str) -> dict[str, int]:
    fields = (line.split() for line in Path(path).read_text().splitlines())
    return {field[0].rstrip(":"): int(field[1]) for field in fields if len(field) == 3 and field[2] == "kB"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=workload.WIDTHS, default="25M", help="parameters of the net")
    parser.add_argument("--folder", action="store_true", help="with an `out` folder and checkpoints in it")
    parser.add_argument("--updates", type=int, default=UPDATES)
    given = parser.parse_args()
    task = LinearMap(given.size, WORKERS, given.updates * QUORUM)
    data_bytes = sum(tensor.nbytes for tensor in task.train_data().tensors)
    peaks = _Peaks()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run" if given.folder else None
        every = CHECKPOINT_EVERY if given.folder else None
        peaks.start()
        result = quorate.train(
            task,
            quorate.BackupSync(QUORUM, WORKERS - QUORUM),
            quorate.Ray(WORKERS),
            updates=given.updates,
            seed=workload.SEED,
            out=out,
            checkpoint_every=every,
        )
        found = peaks.stop()
        checkpoints = 0 if out is None else len(list(out.glob("checkpoints/*")))
    print(
        json.dumps(
            {**found, "data_bytes": data_bytes, "updates": result.summary["updates"], "checkpoints_kept": checkpoints}
        )
    )


if __name__ == "__main__":
    main()
