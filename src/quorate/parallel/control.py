"""What ties a script's processes together beside its gradients: decisions, batches, deaths and the trace."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quorate.engines.collective.control.hub import Hub
from quorate.engines.collective.control.link import Link
from quorate.engines.collective.groups import Processes
from quorate.errors import QuorateError
from quorate.ledger import Ledger
from quorate.parallel.judge import Judge
from quorate.policies import Policy


class Control:
    """This process's end of the control plane; in worker 0's process its centre, too."""

    def __init__(
        self,
        processes: Processes,
        heard: Callable[[dict[str, Any]], None],
        failed: Callable[[QuorateError], None],
        patience_s: float,
    ) -> None:
        self._hub: Hub | None = None
        self._judge: Judge | None = None
        if processes.worker == 0:
            self._hub = Hub(processes.workers, patience_s=patience_s)
            self._hub.publish(processes.store)
        self._link = Link(processes.worker, processes.store, heard, failed, patience_s)

    def send(self, kind: str, **fields: Any) -> None:
        """Tell worker 0 something, without waiting."""
        self._link.send(kind, **fields)

    def tell(self, worker: int, message: dict[str, Any]) -> None:
        """Tell a worker something; only in worker 0's process."""
        assert self._hub is not None
        self._hub.tell(worker, message)

    def judge(self, policy: Policy, ledger: Ledger, **options: Any) -> Judge | None:
        """Let the policy run, where this is worker 0's process."""
        if self._hub is not None:
            self._judge = Judge(policy, self._hub.workers, self._hub, ledger=ledger, **options)
            self._judge.start()
        return self._judge

    def ledger_after(self, version: int) -> dict[str, Any] | None:
        """The ledger as a version leaves it, where this is worker 0's process."""
        return None if self._judge is None else self._judge.ledger_after(version)

    def close(self) -> None:
        """End in peace: everybody has said `finished`."""
        self._link.close()
        if self._judge is not None:
            self._judge.close()
        if self._hub is not None:
            self._hub.close()


def folder_of_this_life(trace: str | Path | None) -> Path | None:
    """Where the trace goes: a script that torchrun has restarted begins another one beside the first."""
    if trace is None:
        return None
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return Path(f"{trace}-restart{restarts}") if restarts else Path(trace)
