"""Forward and backward of one batch as a CUDA graph: one launch instead of some hundred small ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quorate.engines._bench import Bench
from quorate.flat import Flat

_WARM_UPS = 3
#: By how much a replay may differ from the same batch computed call by call, as a share of the gradient.
_CLOSE = 1e-3


def record(compute: Callable[[], Tensor], clear: Callable[[], None]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The calls of `compute` as a graph, and what it gave, which every replay writes anew; `clear` goes between calls.

    Libraries set themselves up in their first calls, which cannot be recorded.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            compute()
            clear()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = compute()
    return graph, made


class Recorded:
    """The gradient of any batch of one size, at the parameters in the learner's own buffer.

    The memory it reads and writes is always the same: `start` (the model's buffers before the forward pass) is set
    before a replay; `gradient`, `after` (the buffers) and `numbers` (loss, norm) are what it leaves for a while.
    """

    def __init__(self, bench: Bench, samples: int) -> None:
        device = bench.learner.flat.buffer.device
        self._bench, self.samples = bench, samples
        self._indices = torch.arange(samples, device=device) % (bench.task.samples() or samples)
        self.start, self.after = bench.buffers.flat.copy(), bench.buffers.flat.copy()
        self.gradient = Flat(bench.learner.flat.layout, device)
        self._graph, self.numbers = record(self._compute, bench.learner.clear_gradients)
        #: Whether every parameter has a gradient.
        self.is_whole = all(parameter.grad is not None for parameter in bench.learner.params)
        bench.learner.clear_gradients()

    def _compute(self) -> Tensor:
        """Gives the loss and the norm of the gradient, which is finite if and only if every element is."""
        bench = self._bench
        bench.buffers.load(self.start.views)
        loss = bench.task.loss(bench.learner.model, bench.task.batch(self._indices, self._indices.device))
        loss.backward()  # type: ignore[no-untyped-call]
        bench.buffers.save(self.after.views)
        there = [parameter.grad for parameter in bench.learner.params]
        grads = [grad for grad in there if grad is not None]
        views = [view for view, grad in zip(self.gradient.views, there, strict=True) if grad is not None]
        torch._foreach_copy_(views, grads)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        return torch.stack([loss.detach().float(), norm.float()])

    def replay(self, batch: int) -> None:
        """Compute the gradient of a batch, by its number."""
        self._indices.copy_(self._bench.batches.samples([batch]))
        self._bench.batches.seed(batch)
        self._graph.replay()


def recorded(bench: Bench, batch: int = 0) -> Recorded | None:
    """A recording for batches of the size of this one; None where it cannot be made, or is not the same as computing.

    Whatever a loss does in Python is done once, when it is recorded: a loss that draws numbers from Python, counts its
    calls or waits for the device cannot be. So a batch is computed both ways, and compared.
    """
    if bench.task.index_device.type != "cuda":
        return None
    try:
        made = Recorded(bench, bench.ledger.size(batch))
    except RuntimeError:  # torch says so in many ways
        torch.cuda.synchronize()
        bench.learner.clear_gradients()
        bench.buffers.reset()
        return None
    bench.buffers.reset()
    apart = [grad for grad in bench.alone(batch) if grad is not None]
    made.replay(batch)
    bench.buffers.reset()
    if not made.is_whole or not bench.short_batch_is_whole():
        return None
    differences = torch._foreach_sub(made.gradient.views, apart)
    norms = [torch.linalg.vector_norm(torch.stack(torch._foreach_norm(one))) for one in (list(differences), apart)]
    return made if bool(norms[0] <= _CLOSE * norms[1] + 1e-12) else None
