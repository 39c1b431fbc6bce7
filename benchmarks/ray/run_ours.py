"""Quorate's Ray engine, on a Ray that it starts for the run.

python -m benchmarks.ray.run_ours --size 5M --case b --workers 8 --quorum 6
"""

from __future__ import annotations

import quorate
from benchmarks.local.measuring import Setting
from benchmarks.local.run_ours import train
from benchmarks.ray.roles import MeterOfRoles


def main() -> None:
    setting = Setting.of_command_line(__doc__)
    train(setting, MeterOfRoles(setting), lambda workers, latency: quorate.Ray(workers, latency=latency))


if __name__ == "__main__":
    main()
