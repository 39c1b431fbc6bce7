"""What the tests of the local engine share."""

from __future__ import annotations

import pytest

from quorate.engines.local import crew
from quorate.engines.processes import failures
from quorate.engines.processes.silence import AnswerTimes, SilenceLimits


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that does not answer is given up in a fraction of a second, instead of after a minute."""
    monkeypatch.setattr(AnswerTimes, "limits", lambda *_: SilenceLimits(stopped=0.3, silent=0.5, hanging=0.9))


@pytest.fixture
def quick_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that fail again and again are started again without a rest."""
    monkeypatch.setattr(failures, "_BACK_OFF_S", 0.001)


@pytest.fixture
def no_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost workers stay lost."""
    real, begun = crew.Crew.start, set()

    def start(self: crew.Crew, worker: int) -> None:
        if (self, worker) not in begun:
            begun.add((self, worker))
            real(self, worker)

    monkeypatch.setattr(crew.Crew, "start", start)
