"""A task's way to the nodes: by name, with its file's code, as an object; and what a node may lack."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from quorate.engines.ray import cluster as cluster_module
from quorate.engines.ray import task_transfer
from quorate.engines.ray.cluster import Cluster, check_software
from quorate.engines.ray.task_transfer import WORTH_MAPPING_BYTES, explained, pack_task, unpack_task
from quorate.errors import BadInput
from quorate.task import BoundTask, bind_task

FILE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
{imports}

FACTOR = 3.0

def scaled(numbers):
    return numbers * FACTOR

class Line:
    batch_size = 4
    made = 0

    def __init__(self):
        self.lock = __import__("threading").Lock()  # cannot be sent; the class can

    def model(self):
        return nn.Linear(3, 1)

    def train_data(self):
        inputs = torch.ones(8, 3)
        return TensorDataset(inputs, scaled(inputs.sum(1, keepdim=True)))

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).pow(2).mean()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.05)
"""


class Table:
    """A task that is an object with data."""

    batch_size = 4

    def __init__(self, rows: int) -> None:
        self.numbers = torch.arange(rows * 3, dtype=torch.float64).reshape(rows, 3)
        self.tail = self.numbers[-2:]

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(3, 1, dtype=torch.float64)

    def train_data(self) -> TensorDataset:
        return TensorDataset(self.numbers)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).mean()  # type: ignore[no-any-return]

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)


class Other:
    """A process that unpacks tasks and looks at them."""

    def look(self, payload: dict[str, Any], what: Callable[[BoundTask], Any]) -> Any:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return what(unpack_task(payload))


@pytest.fixture(scope="module")
def others(cluster: Cluster) -> list[Any]:
    import ray

    kind = ray.remote(num_cpus=0)(Other)
    return [kind.remote() for _ in range(2)]


@pytest.fixture
def on_a_node(others: list[Any]) -> Callable[[BoundTask, Callable[[BoundTask], Any]], Any]:
    """Unpacks a task in two other processes, one after the other, and lets them look at it."""
    import ray

    def look(task: BoundTask, what: Callable[[BoundTask], Any]) -> Any:
        payload = ray.put(pack_task(task))
        try:
            first, second = [ray.get(other.look.remote(payload, what)) for other in others]
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        assert first == second
        return first

    return look


def first_target(task: BoundTask) -> float:
    return float(task.data[0][1])


def test_a_ready_task_goes_by_its_name(on_a_node: Any) -> None:
    task = bind_task("digits", 7)
    assert pack_task(task)["pickled"] is None
    there = on_a_node(task, lambda task: (task.name, task.batch_size, task.source, task.samples()))
    assert there == ("digits", 7, "digits", task.samples())


def test_a_task_from_a_file_goes_with_the_files_code(on_a_node: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE.format(imports=""))
    task = bind_task(f"{file}:Line")
    payload = pack_task(task)
    file.unlink()
    assert on_a_node(task, first_target) == 9.0
    assert not payload["storages"]
    from ray import cloudpickle

    module = sys.modules["quorate_task_mine"]
    assert module.__name__ not in cloudpickle.list_registry_pickle_by_value()


def test_a_class_of_the_users_script_goes_with_its_code(on_a_node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = type("Mine", (Table,), {"__module__": "__main__", "batch_size": 6})
    there = on_a_node(bind_task(mine(4)), lambda task: (task.name, task.batch_size, task.task.numbers.sum().item()))
    assert there == ("__main__:Mine", 6, 66.0)


@pytest.mark.parametrize("rows", [4, WORTH_MAPPING_BYTES // 8])
def test_tensors_are_the_same_shared_as_here_and_each_workers_own(on_a_node: Any, rows: int) -> None:
    """Two workers change their data in place: neither sees the other's change, nor does the store."""

    def change(task: BoundTask) -> tuple[float, float, int]:
        before = task.task.numbers.sum().item()
        task.task.tail.zero_()  # a view of the same memory
        return before, task.task.numbers.sum().item(), task.task.numbers.stride(0)

    task = bind_task(Table(rows))
    assert len(pack_task(task)["storages"]) == 1
    whole = task.task.numbers.sum().item()
    assert on_a_node(task, change) == (whole, task.task.numbers[:-2].sum().item(), 3)


def test_large_tensors_are_mapped_and_not_copied(on_a_node: Any) -> None:
    def of_the_store(task: BoundTask) -> tuple[bool, bool]:
        """Whether the tensor's memory is the store's, and whether writing to it is private."""
        at = task.task.numbers.data_ptr()
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, end = (int(place, 16) for place in line.split()[0].split("-"))
            if start <= at < end:
                return "plasma" in line, line.split()[1] == "rw-p"
        return False, False

    assert on_a_node(bind_task(Table(WORTH_MAPPING_BYTES // 8)), of_the_store) == (True, True)
    assert on_a_node(bind_task(Table(4)), of_the_store) == (False, True)


def test_the_stores_file_is_not_mistaken_for_one_with_its_inode_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soon after a machine has started, the store's inode can be that of /dev/null, which the raylet has open, too."""
    monkeypatch.setattr(os, "getppid", os.getpid)
    with (tmp_path / "store").open("w+b") as file:
        file.write(b"whole")
        file.flush()
        found = os.fstat(file.fileno())
        assert task_transfer._open_at_parent((found.st_dev + 1, found.st_ino)) is None
        descriptor = task_transfer._open_at_parent((found.st_dev, found.st_ino))
    assert descriptor is not None
    assert os.read(descriptor, 9) == b"whole"
    os.close(descriptor)


def test_a_module_that_a_node_lacks_is_named(on_a_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_task.py").write_text("def nothing(): pass\n")
    file = tmp_path / "needy.py"
    file.write_text(FILE.format(imports="from beside_the_task import nothing as scaled_by_nothing") + NEEDS)
    monkeypatch.syspath_prepend(tmp_path)
    task = bind_task(f"{file}:Needy")
    (tmp_path / "beside_the_task.py").unlink()
    with pytest.raises(
        BadInput, match=r"node 127\.0\.0\.1 does not have the module 'beside_the_task'; .*--working-dir"
    ):
        on_a_node(task, first_target)
    del sys.modules["beside_the_task"]


NEEDS = """
class Needy(Line):
    def model(self):
        scaled_by_nothing()
"""


def test_a_task_module_that_a_node_lacks_is_named(on_a_node: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "module_of_the_task.py").write_text(FILE.format(imports=""))
    monkeypatch.syspath_prepend(tmp_path)
    task = bind_task("module_of_the_task:Line")
    (tmp_path / "module_of_the_task.py").unlink()
    with pytest.raises(BadInput, match="does not have the module 'module_of_the_task'"):
        on_a_node(task, first_target)
    del sys.modules["module_of_the_task"]


def test_a_file_that_a_node_lacks_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "data.csv"
    with pytest.raises(BadInput, match=rf"task mine: node \S+ does not have the file '{missing}'"), explained("mine"):
        missing.read_text()


def test_other_mistakes_of_a_task_stay_what_they_are() -> None:
    with pytest.raises(ZeroDivisionError), explained("mine"):
        _ = 1 / 0
    with pytest.raises(BadInput, match=r"^sentence$"), explained("mine"):
        raise BadInput("sentence")


def test_what_cannot_be_sent_is_said_here() -> None:
    task = Table(4)
    task.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(BadInput, match=r"cannot be sent to other machines: cannot pickle '_thread\.lock'"):
        pack_task(bind_task(task))


def test_another_quorate_is_named_with_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = pack_task(bind_task("digits")) | {"quorate": "9.9"}
    with pytest.raises(BadInput, match=rf"has quorate {task_transfer.VERSION}, but the run is of quorate 9\.9"):
        unpack_task(payload)


# ---------------------------------------------------------------- what nodes have


def test_nodes_are_asked_with_code_that_needs_no_quorate(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(cluster_module, "check_installed", lambda address, found: asked.append((address, found)))
    monkeypatch.setattr(cluster, "driver_node", "another")  # so that the only node is one of the others
    check_software(cluster)
    assert asked == [("127.0.0.1", {"quorate": task_transfer.VERSION, "torch": True})]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"quorate": None, "torch": True}, "node 10.0.0.7 does not have quorate; install the run's quorate"),
        ({"quorate": "0.0.1", "torch": False}, "node 10.0.0.7 does not have torch"),
        ({"quorate": "0.0.1", "torch": True}, f"has quorate 0.0.1, but the run is of quorate {task_transfer.VERSION}"),
    ],
)
def test_a_node_without_the_same_quorate_is_named(found: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        cluster_module.check_installed("10.0.0.7", found)
    assert said in str(caught.value)
