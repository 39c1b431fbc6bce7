"""`quorate.measure` in one process: which moments make a step, and what it refuses."""

from __future__ import annotations

import csv
import importlib
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quorate
from quorate.measuring import hooks
from quorate.measuring.hooks import FORWARD, WAITING, WIDTH
from tests.toy_tasks import mlp


class CountingClock(hooks.HostClock):
    """A clock that moves only when a test says so: a step's seconds are then exact."""

    time = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.now = lambda: CountingClock.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    CountingClock.time = 0.0
    # By import_module, since the attribute `measure` of the package is the function.
    module = importlib.import_module("quorate.measuring.measure")
    monkeypatch.setattr(module, "clock_for", lambda _device: CountingClock())

    def spend(seconds: float) -> None:
        CountingClock.time += seconds

    return spend


HEADER = "step,worker,seconds,data,forward,backward,optimizer,waiting,core_wait,cores\n"


def rows(path: Path) -> list[tuple[int, int, float]]:
    with path.open(newline="") as file:
        return [(int(one["step"]), int(one["worker"]), float(one["seconds"])) for one in csv.DictReader(file)]


def seconds(path: Path) -> list[float]:
    return [row[2] for row in rows(path)]


def backward(model: nn.Module) -> None:
    model(torch.randn(4, 6)).square().mean().backward()


def test_a_step_runs_from_one_optimizer_step_to_the_last_gradient(
    tmp_path: Path, clock: Callable[[float], None]
) -> None:
    path, model = tmp_path / "times.csv", mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quorate.measure(path, model):
        for step in range(12):
            clock(1.0 + step)  # loading, forward
            backward(model)
            clock(100.0)  # waiting for the others
            optimizer.step()
            clock(0.25)  # the optimizer's own work, and what follows it
    own = [1.0, *(1.25 + step for step in range(1, 12))]
    assert rows(path) == [(step, 0, own[step]) for step in range(12)]


def test_times_have_at_least_six_digits(tmp_path: Path, clock: Callable[[float], None]) -> None:
    path, model = tmp_path / "times.csv", mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quorate.measure(path, model):
        clock(math.pi / 1000)
        backward(model)
        optimizer.step()
    assert seconds(path)[0] == pytest.approx(math.pi / 1000, rel=1e-7)


def test_several_backward_passes_are_one_step(tmp_path: Path, clock: Callable[[float], None]) -> None:
    path, model = tmp_path / "times.csv", mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quorate.measure(path, model):
        for _ in range(8):
            for _ in range(3):
                clock(1.0)
                backward(model)
            optimizer.step()
    assert seconds(path) == [3.0] * 8


def test_parts_of_the_model_that_take_turns_are_all_seen(tmp_path: Path, clock: Callable[[float], None]) -> None:
    """The parameters listened to after the first steps get no gradient later: one step is missed, no other."""
    path = tmp_path / "times.csv"
    first, second = mlp(), mlp()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with quorate.measure(path, nn.ModuleList([first, second])):
        for step in range(20):
            clock(1.0)
            backward(first if step < 10 else second)
            optimizer.step()
    assert rows(path) == [(step, 0, 1.0) for step in range(20) if step != 10]


def test_layers_that_thaw_are_noticed(tmp_path: Path, clock: Callable[[float], None]) -> None:
    class Late(torch.autograd.Function):
        """Passes its input on; its backward takes a second."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            clock(1.0)
            return gradient

    path, first, second = tmp_path / "times.csv", nn.Linear(6, 6), nn.Linear(6, 1)
    model = nn.ModuleList([first, second])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first.requires_grad_(False)
    with quorate.measure(path, model):
        for step in range(600):
            if step == 20:
                first.requires_grad_(True)
            second(Late.apply(first(torch.randn(4, 6)))).mean().backward()
            optimizer.step()
    found = seconds(path)
    assert found[:20] == [0.0] * 20
    assert found[-300:] == [1.0] * 300


def test_hooks_stay_only_where_the_last_gradient_was(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def hooked() -> int:
        return sum(bool(getattr(one, "_post_accumulate_grad_hooks", None)) for one in model.parameters())

    with quorate.measure(tmp_path / "times.csv", model):
        assert hooked() == 20
        for _ in range(6):
            backward(model)
            optimizer.step()
        assert 1 <= hooked() <= 2  # the first layer's weight or bias
    assert hooked() == 0
    optimizers = sys.modules[torch.optim.Optimizer.__module__]
    assert not optimizers._global_optimizer_pre_hooks  # type: ignore[attr-defined]
    assert not optimizers._global_optimizer_post_hooks  # type: ignore[attr-defined]


def test_other_models_and_optimizers_do_not_count(tmp_path: Path, clock: Callable[[float], None]) -> None:
    path, model, critic = tmp_path / "times.csv", mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    others = torch.optim.SGD(critic.parameters(), lr=0.1)
    with quorate.measure(path, model):
        for _ in range(7):
            for _ in range(3):
                backward(critic)
                others.step()
            clock(1.0)
            backward(model)
            optimizer.step()
    assert seconds(path) == [1.0] * 7


def test_two_optimizers_of_one_model_make_one_step(tmp_path: Path, clock: Callable[[float], None]) -> None:
    path, model = tmp_path / "times.csv", mlp()
    weights, biases = list(model.parameters())[::2], list(model.parameters())[1::2]
    optimizers = [torch.optim.SGD(weights, lr=0.1), torch.optim.Adam(biases)]
    with quorate.measure(path, model):
        for _ in range(7):
            clock(1.0)
            backward(model)
            for optimizer in optimizers:
                optimizer.step()
    assert seconds(path) == [1.0] * 7


def test_a_closure_computes_inside_the_optimizers_step(tmp_path: Path, clock: Callable[[float], None]) -> None:
    path, model = tmp_path / "times.csv", mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, tolerance_grad=0, tolerance_change=0)
    x = torch.randn(8, 6)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        clock(1.0)
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with quorate.measure(path, model):
        for _ in range(6):
            optimizer.step(closure)
    found = seconds(path)
    assert len(found) == 6
    assert sum(found) == CountingClock.time


def test_a_step_that_the_scaler_skips_belongs_to_the_next(tmp_path: Path, clock: Callable[[float], None]) -> None:
    path, model = tmp_path / "times.csv", mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    with quorate.measure(path, model):
        for step in range(4):
            clock(1.0)
            loss = model(torch.randn(4, 6)).square().mean()
            scaler.scale(loss * (math.inf if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert seconds(path) == [1.0, 2.0, 1.0]


def test_what_is_not_training_can_be_left_out(tmp_path: Path, clock: Callable[[float], None]) -> None:
    path, model = tmp_path / "times.csv", mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quorate.measure(path, model) as measuring:
        for _ in range(3):
            clock(1.0)
            with measuring.paused():
                clock(50.0)
            clock(0.5)
            backward(model)
            optimizer.step()
    assert seconds(path) == [1.5] * 3


@pytest.mark.parametrize("lazy", [False, True])
def test_unusual_models(tmp_path: Path, lazy: bool, clock: Callable[[float], None]) -> None:
    """Parameters without a gradient, frozen ones, and ones that have no shape yet."""
    path, model = tmp_path / "times.csv", mlp()
    model.add_module("unused", nn.Linear(3, 3))
    model.unused.forward = lambda x: x  # type: ignore[method-assign, union-attr]
    model[0].weight.requires_grad_(False)  # type: ignore[union-attr, operator, index]
    whole: nn.Module = nn.Sequential(nn.LazyLinear(6), model) if lazy else model
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    with quorate.measure(path, whole):
        for _ in range(8):
            clock(1.0)
            backward(whole)
            optimizer.step()
    assert seconds(path) == [1.0] * 8


def test_training_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    def train(path: Path | None) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters())
        if path is None:
            for _ in range(10):
                backward(model)
                optimizer.step()
        else:
            with quorate.measure(path, model):
                for _ in range(10):
                    backward(model)
                    optimizer.step()
        return list(model.parameters())

    assert all(map(torch.equal, train(None), train(tmp_path / "times.csv")))


def test_an_error_in_the_block_comes_through_and_the_rows_are_kept(tmp_path: Path) -> None:
    path, model = tmp_path / "times.csv", mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ZeroDivisionError), quorate.measure(path, model):  # noqa: PT012
        backward(model)
        optimizer.step()
        raise ZeroDivisionError
    assert len(rows(path)) == 1


def test_the_host_clock_measures_seconds(tmp_path: Path) -> None:
    path, model = tmp_path / "times.csv", mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quorate.measure(path, model):
        for _ in range(3):
            time.sleep(0.02)
            backward(model)
            optimizer.step()
    assert min(seconds(path)) >= 0.02


def test_a_block_without_a_step_says_so(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    with (
        pytest.warns(UserWarning, match="no optimizer that holds the model's parameters"),
        quorate.measure(path, mlp()),
    ):
        pass
    assert path.read_text() == HEADER


def test_a_disk_that_fails_at_the_end_does_not_take_the_training_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = tmp_path / "times.csv", mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.warns(UserWarning, match="No space left on device"), quorate.measure(path, model):  # noqa: PT031
        backward(model)
        optimizer.step()
        monkeypatch.setattr(Path, "replace", full)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text("mine")
    with pytest.raises(quorate.BadInput, match=r"already there; name another, or give overwrite=True"):
        quorate.measure(path, mlp())
    assert path.read_text() == "mine"
    with pytest.warns(UserWarning, match="no step"), quorate.measure(path, mlp(), overwrite=True):
        pass
    assert path.read_text() == HEADER


def test_a_folder_that_is_not_there_is_made(tmp_path: Path) -> None:
    quorate.measure(tmp_path / "a" / "b" / "times.csv", mlp())
    assert (tmp_path / "a" / "b").is_dir()


def _frozen() -> nn.Module:
    return mlp().requires_grad_(False)


def _sharded() -> nn.Module:
    from torch.distributed.fsdp import FSDPModule

    return type("ShardedLinear", (FSDPModule, nn.Linear), {"__new__": lambda cls, *_: object.__new__(cls)})(3, 3)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("path", "model", "options", "sentence"),
    [
        (".", mlp, {}, "is a folder; name a file"),
        ("file/times.csv", mlp, {}, "cannot be made: File exists"),
        ("times.csv", lambda: "resnet50", {}, "model is str, but it must be the nn.Module"),
        ("times.csv", _frozen, {}, "no parameter of the model requires a gradient"),
        ("times.csv", _sharded, {}, r"sharded \(FSDP\).*measure the same model under DistributedDataParallel"),
        ("times.csv", mlp, {"wait_s": -1}, "wait_s is -1, but it must be seconds"),
        ("times.csv", mlp, {"wait_s": math.nan}, "wait_s is nan"),
    ],
)
def test_bad_input(tmp_path: Path, path: str, model: Any, options: dict[str, Any], sentence: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(quorate.BadInput, match=sentence):
        quorate.measure(tmp_path / path, model(), **options)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(quorate.BadInput, match="cannot be written"):
        quorate.measure(tmp_path / "times.csv", mlp())
    tmp_path.chmod(0o700)


class FakeEvent:
    """A GPU's event, over when the test says so."""

    over = 0.0
    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        FakeEvent.made += 1

    def record(self, stream: object) -> None:
        self.at = CountingClock.time

    def query(self) -> bool:
        return self.at <= FakeEvent.over

    def synchronize(self) -> None:
        FakeEvent.over = max(FakeEvent.over, self.at)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.query(), "read before it was over"
        return 1e3 * (end.at - self.at)


def test_events_of_a_gpu_are_read_when_they_are_over_and_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    FakeEvent.over, FakeEvent.made, CountingClock.time = -1.0, 0, 0.0
    clock = hooks.clock_for(torch.device("cuda", 0))
    start = clock.now()
    for step in range(1000):
        CountingClock.time += 1.0
        assert clock.forget is not None
        clock.forget(clock.now())
        CountingClock.time += step
        middle = clock.now()
        CountingClock.time += 0.5
        end = clock.now()
        clock.add(start, [(middle, FORWARD), (end, WAITING)])
        start = end
        FakeEvent.over = CountingClock.time if step % 50 == 0 else FakeEvent.over
    clock.add(None, [])
    capturing[0] = True  # a CUDA graph
    clock.add(clock.now(), [(clock.now(), FORWARD)])
    assert FakeEvent.made < 350
    found = list(clock.finish())
    assert found[: 1000 * WIDTH : WIDTH] == pytest.approx([1.0 + step for step in range(1000)])
    assert found[WIDTH - 1 : 1000 * WIDTH : WIDTH] == pytest.approx([0.5] * 1000)
    assert len(found) == 1002 * WIDTH and all(map(math.isnan, found[1000 * WIDTH :]))


def test_training_inside_a_pause_is_left_out_and_pauses_may_be_nested(
    tmp_path: Path, clock: Callable[[float], None]
) -> None:
    path, model = tmp_path / "times.csv", mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(seconds: float) -> None:
        clock(seconds)
        backward(model)
        optimizer.step()

    with quorate.measure(path, model) as measuring:
        train(1.0)
        with measuring.paused():
            train(10.0)
            with measuring.paused():
                train(20.0)
            train(30.0)
        train(2.0)
        train(3.0)
    assert seconds(path) == [1.0, 2.0, 3.0]


# ---------------------------------------------------------------- phases


class Spending(nn.Module):
    """A layer whose forward and backward take a time of their own."""

    def __init__(self, clock: Callable[[float], None], forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self._clock, self._forward_s, self._backward_s = clock, forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._clock(self._forward_s)
        result: torch.Tensor = self.inner(x)
        result.register_hook(lambda _gradient: self._clock(self._backward_s))
        return result


class SpendingSGD(torch.optim.SGD):
    spend: Callable[[float], None]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.spend(0.125)
        return super().step(closure)


def phases(path: Path) -> list[list[float | None]]:
    names = ("data", "forward", "backward", "optimizer", "waiting")
    with path.open(newline="") as file:
        return [[float(one[name]) if one[name] else None for name in names] for one in csv.DictReader(file)]


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("listed", [False, True])
def test_a_step_says_in_which_phase_its_seconds_went(
    tmp_path: Path, clock: Callable[[float], None], passes: int, listed: bool
) -> None:
    path, model = tmp_path / "times.csv", Spending(clock, 2.0, 4.0)
    optimizer = SpendingSGD(model.parameters(), lr=0.1)
    optimizer.spend = clock
    with quorate.measure(path, nn.ModuleList([nn.ModuleList([model])]) if listed else model):
        for _ in range(8):
            for _ in range(passes):
                clock(1.0)  # loading
                backward(model)
            clock(32.0)  # waiting for others
            optimizer.step()
            clock(0.5)  # zero_grad, logging: before the next forward
    first = [1.0 * passes, 2.0 * passes, 4.0 * passes, 0.0, 32.0]
    after = [1.0 * passes + 0.5, 2.0 * passes, 4.0 * passes, 0.125, 32.0]
    assert phases(path) == [first] + [after] * 7
    assert seconds(path) == [sum(first[:4])] + [sum(after[:4])] * 7


def test_phases_that_cannot_be_told_apart_are_left_blank(tmp_path: Path, clock: Callable[[float], None]) -> None:
    """The loop calls a part of the model, whose beginning no hook sees; the seconds are right all the same."""
    path, model = tmp_path / "times.csv", mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quorate.measure(path, model):
        for _ in range(3):
            clock(1.0)
            model.forward(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
    assert seconds(path) == [1.0] * 3
    assert [one[:4] for one in phases(path)] == [[None] * 4] * 3


def test_a_pause_is_in_no_phase(tmp_path: Path, clock: Callable[[float], None]) -> None:
    path, model = tmp_path / "times.csv", mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quorate.measure(path, model) as measuring:
        for _ in range(3):
            clock(1.0)
            with measuring.paused():
                clock(50.0)
                backward(model)
            clock(0.5)
            backward(model)
            optimizer.step()
    assert phases(path) == [[1.5, 0.0, 0.0, 0.0, 0.0]] * 3


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    from quorate.latency.step_times import MORE_COLUMNS, StepTimes

    assert ",".join(("step", "worker", "seconds", *MORE_COLUMNS)) + "\n" == HEADER
    assert StepTimes({}).means("data") == {}


def test_where_the_process_waited_for_a_core_is_written(tmp_path: Path) -> None:
    path, model = tmp_path / "times.csv", mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quorate.measure(path, model):
        for _ in range(3):
            backward(model)
            optimizer.step()
    with path.open(newline="") as file:
        found = {(one["core_wait"], one["cores"]) for one in csv.DictReader(file)}
    ((core_wait, cores),) = found
    assert 0.0 <= float(core_wait) <= 1.0 and float(cores) >= 1


def test_a_compiled_step_function_stays_one_graph(tmp_path: Path) -> None:
    """The forward hooks do nothing inside it: no graph break, seconds as ever, phases unknown."""
    path, model = tmp_path / "times.csv", mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(x).square().mean()
        return result

    with quorate.measure(path, model):
        compiled = torch.compile(loss_of, backend="eager", fullgraph=True)
        for _ in range(3):
            compiled(torch.randn(4, 6)).backward()
            optimizer.step()
    assert len(seconds(path)) == 3
    assert [one[:4] for one in phases(path)] == [[None] * 4] * 3
