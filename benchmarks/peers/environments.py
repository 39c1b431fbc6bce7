"""python -m benchmarks.peers.environments [NAME ...]: an environment of its own for each peer, in .peers/.

A peer whose environment is missing is left out of the benchmark, with a sentence. DDP and Ray's pattern run in
quorate's own environment.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".peers"
#: The last releases that have what is measured. MXNet needs an old numpy.
PACKAGES = {
    "tensorflow": ("tensorflow-cpu==2.21.0",),
    "mxnet": ("mxnet==1.9.1", "numpy==1.23.5"),
    "torchft": ("torchft==0.2.0", "torch==2.13.0", "numpy"),
}
_READY = ".ready"  # written last: an environment whose making was interrupted is made again


def python_of(peer: str) -> str | None:
    """The interpreter of a peer's environment; None if it was not made."""
    folder = FOLDER / peer
    return str(folder / "bin" / "python") if (folder / _READY).exists() else None


def make(peer: str) -> None:
    folder = FOLDER / peer
    if python_of(peer):
        return
    print(f"{peer}: {', '.join(PACKAGES[peer])}", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *PACKAGES[peer]], check=True)
    (folder / _READY).touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="NAME", help=f"{', '.join(PACKAGES)} (default: all)")
    given = parser.parse_args()
    if unknown := [name for name in given.peers if name not in PACKAGES]:
        parser.error(f"there is no peer {unknown[0]!r}; choose from {', '.join(PACKAGES)}")
    failed = []
    for peer in given.peers or PACKAGES:
        try:
            make(peer)
        except subprocess.CalledProcessError:
            failed.append(peer)
    if failed:
        sys.exit(f"pip could not install {', '.join(failed)}; the benchmark leaves out a peer without an environment")


if __name__ == "__main__":
    main()
