"""What engines share that compute gradients in this process: the model, and how its numbers are made."""

from __future__ import annotations

import torch
from torch import Tensor

from quorate.engines._abreast import Abreast
from quorate.engines._behind import TogetherBehind
from quorate.engines._bench import Bench, Strategy
from quorate.engines._kept import HALF, Kept, finds_nan_early
from quorate.engines._lanes import MOST as MOST_LANES
from quorate.engines._lanes import lanes
from quorate.engines._recorded import Recorded, recorded
from quorate.engines._replayed import Replayed
from quorate.engines._summed import Summed
from quorate.engines._together import Together, may_go_together
from quorate.engines.base import Engine, Job, Outcome
from quorate.errors import BadInput
from quorate.events import Ticket
from quorate.policies import Delayed, Policy
from quorate.seeds import derive

_NOTHING_LEARNED = Outcome(None, None)


class InProcessEngine(Engine):
    """Keeps a model for all workers; without a task, nothing is computed and only sizes are known."""

    def __init__(self, device: str | torch.device, model_bytes: int | None) -> None:
        self.device = checked_device(device)
        self.model_bytes = model_bytes
        self._bench: Bench | None = None
        self._strategy: Strategy | None = None
        self._saved_settings: tuple[Tensor, bool, bool] | None = None
        self.graphs = True

    @property
    def arithmetic(self) -> str | None:
        """How gradients are combined: the same way gives the same bits."""
        return None if self._strategy is None else self._strategy.arithmetic

    def _open_model(self, job: Job, together: bool | None, arithmetic: str | None = None) -> None:
        """Make the model. `together`: compute a synchronous round as one big batch, and gradients of several versions
        side by side (None: on a GPU).

        `arithmetic`: do as a recorded run did, where its engine could have done otherwise.
        """
        cudnn = torch.backends.cudnn
        self._saved_settings = torch.get_rng_state(), cudnn.deterministic, cudnn.benchmark
        cudnn.deterministic, cudnn.benchmark = True, False  # equal seeds, equal runs
        self._bench = self._strategy = None  # of an earlier run
        if job.task is None:
            return
        self._bench = bench = Bench(job, self.device)
        wanted = self.device.type != "cpu" if together is None else together
        if finds_nan_early(job.policy) or (arithmetic or "").startswith(Kept.arithmetic):
            several = self.workers > 1  # one batch alone is no bigger
            rounds = isinstance(job.policy, Delayed) and not job.learning.delay_compensation
            if rounds and several and wanted and may_go_together(bench):
                self._strategy = TogetherBehind(bench, job.policy)
            else:
                # What one worker computes next is known if it reads old versions.
                abreast = min(MOST_LANES, max(self.workers, job.policy.history + 1)) if wanted else 1
                self._strategy = self._kept_apart(bench, job.policy, abreast, half=arithmetic == HALF)
            return
        if wanted and may_go_together(bench):
            self._strategy = Together(bench, self._recorded(bench, job.policy.begin(self.workers).per_update))
        else:
            self._strategy = Summed(bench)

    def _kept_apart(self, bench: Bench, policy: Policy, abreast: int, half: bool) -> Strategy:
        """abreast: how many gradients at most are computed side by side."""
        if half:
            return Kept(bench, policy, half)
        side_by_side = lanes(bench, abreast, self.graphs) if abreast > 1 else None
        if side_by_side is not None:
            return Abreast(bench, policy, side_by_side)
        recording = self._recorded(bench)
        return Kept(bench, policy) if recording is None else Replayed(bench, policy, recording)

    def _recorded(self, bench: Bench, groups: int = 1) -> Recorded | None:
        return recorded(bench, groups) if self.device.type == "cuda" and self.graphs else None

    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None) -> Outcome:
        return _NOTHING_LEARNED if self._strategy is None else self._strategy.apply(tickets, weights)

    def drop(self, ticket: Ticket) -> None:
        if self._strategy is not None:
            self._strategy.ended(ticket, arrived=True)

    def evaluate(self) -> dict[str, float]:
        if self._bench is None:
            return {}
        self._bench.buffers.settle()
        with self._bench.learner.evaluation() as model:
            version = self._bench.learner.version
            measures = self._bench.task.evaluate(model, derive(self._bench.seed, "evaluate", version))
        self._bench.buffers.reset()  # measuring must not change what is measured
        return measures

    def parameters(self) -> dict[str, Tensor]:
        if self._bench is None:
            return {}
        self._bench.buffers.settle()
        return self._bench.learner.state_dict()

    def averaged_parameters(self) -> dict[str, Tensor] | None:
        if self._bench is None:
            return None
        self._bench.buffers.settle()
        return self._bench.learner.average_dict()

    def parameter_bytes(self) -> int:
        return (self.model_bytes or 0) if self._bench is None else self._bench.learner.nbytes

    def close(self) -> None:
        if self._saved_settings is not None:
            state, deterministic, benchmark = self._saved_settings
            self._saved_settings = None
            torch.set_rng_state(state)
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, benchmark


def checked_device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError:
        raise BadInput(f"device {device!r} is not known to torch; write e.g. cpu, cuda or cuda:0") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"device {str(device)!r} was asked for, but torch sees no GPU here; use cpu")
    if found.type not in ("cpu", "cuda"):
        raise BadInput(f"device {str(device)!r} is not one that runs are made on; use cpu or cuda")
    return found
