"""The Ray engine keeps the contract: actors on one node that share memory, and on several that send objects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("ray")

from quorate.engines import Ray
from tests.contract.suite import ModelContract
from tests.engines.ray.clusters import SeveralNodes, one_node, several_nodes

LATENCY = "shifted-exp:0.001,0.002*pauses:0.1,8"


@pytest.mark.ray
class TestRay(ModelContract):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def cluster(cls) -> Iterator[None]:
        with one_node(cpus=4):
            yield

    def engine(self, workers: int) -> Ray:
        return Ray(workers, latency=LATENCY)


@pytest.mark.ray
class TestRayOnSeveralNodes(ModelContract):
    """Every gradient and every version crosses a border, and the model is cut in two."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def cluster(cls) -> Iterator[SeveralNodes]:
        with several_nodes(2, cpus=2) as nodes:
            yield nodes

    def engine(self, workers: int) -> Ray:
        return Ray(workers, shards=2, latency=LATENCY)
