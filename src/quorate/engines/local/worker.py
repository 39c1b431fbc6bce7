"""A worker process: computes orders one by one, answers each, and abandons those that are cancelled."""

from __future__ import annotations

import contextlib
import faulthandler
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from time import monotonic_ns, perf_counter
from typing import Any

import torch

from quorate.engines.shared import messages
from quorate.engines.shared.batches import Batches, Loader
from quorate.engines.shared.compute import Cancelled, Computer, TensorPlace
from quorate.engines.shared.shared_memory import Blocks, ControlWords
from quorate.engines.shared.task_transfer import import_main, read_description, read_task
from quorate.errors import BadInput
from quorate.ledger import Ledger

IDLE, STARTING, LOADING, DELAYED, FORWARD, BACKWARD, SENDING = range(7)
STAGES = ("waiting for work", "starting", "loading", "held back", "forward", "backward", "sending")

#: True in worker processes. A run that starts there comes from a script without `if __name__ == "__main__"`.
in_worker_process = False


def work(number: int, connection: socket.socket, blocks: int, words: int, job: int) -> int:
    """Run a worker until it ends; returns the exit status."""
    global in_worker_process
    in_worker_process = True
    faulthandler.register(signal.SIGUSR1, file=2)  # prints the stack of a hanging worker
    try:
        worker = WorkerProcess(number, connection, read_description(job), blocks, words, job)
    except Exception as error:
        _tell_failure(connection, error, -1, -1)
        return 1
    try:
        connection.send(messages.READY_PACKET)
        return worker.serve()
    except (ConnectionError, BrokenPipeError):
        return 0  # the main process is gone


def _tell_failure(connection: socket.socket, error: Exception, ticket: int, batch: int) -> None:
    bad_input = isinstance(error, BadInput)
    text = str(error) if bad_input else "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):
        connection.send(messages.pack_failed(ticket, batch, bad_input, text))


class WorkerProcess:
    """Serves orders until the main process sends a stop or closes the connection."""

    def __init__(
        self, number: int, connection: socket.socket, description: dict[str, Any], blocks: int, words: int, job: int
    ) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._control = ControlWords(words, description["workers"])
        self._words, self._base = self._control.words, number * ControlWords.WORDS
        self._ticket = -1
        self._stage(STARTING)
        torch.set_num_threads(description["threads"])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        _prefer_to_be_killed()
        device = torch.device(description["devices"][number % len(description["devices"])])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        sys.argv[:] = description["argv"]  # the user's script may read it when it is imported
        import_main(description["main"])
        task = read_task(job, description)
        seed = description["seed"]
        ledger = Ledger(description["samples"], description["batch_size"], None, seed)
        batches = Batches(task, ledger, seed, device)
        self._loader = Loader(batches)
        self._blocks = Blocks(blocks, description["block_bytes"])
        self._places: dict[tuple[int, bool], TensorPlace] = {}
        self._computer = Computer(
            task,
            seed=seed,
            device=device,
            wire=description["wire"],
            look_through=description["look_through"],
            check=self._check,
        )
        if self._computer.layouts[0].nbytes != description["block_bytes"]:
            raise BadInput(f"task {task.name}: model() gives another model in a worker than in the main process")
        self._stage(IDLE)

    def serve(self) -> int:
        while True:
            packet = self._connection.recv(messages.PACKET_BYTES)
            order = messages.unpack_order(packet) if packet else None
            if order is None:
                return 0
            try:
                answer = self._carry_out(order)
            except Cancelled:
                since = (monotonic_ns() - self._words[self._base + ControlWords.CANCELLED_AT]) * 1e-9
                answer = messages.pack_abandoned(order.ticket, max(0.0, since))
            except Exception as error:
                _tell_failure(self._connection, error, order.ticket, order.batch)
                return 1
            self._send(answer)

    def _send(self, answer: bytes) -> None:
        self._stage(SENDING)
        self._connection.send(answer)
        self._stage(IDLE)

    def _carry_out(self, order: messages.TicketOrder) -> bytes:
        self._ticket = order.ticket
        self._check()
        started = perf_counter()
        self._stage(LOADING)
        batch = self._loader.get(order.batch, self._check)
        loaded = perf_counter()
        self._loader.expect(order.next_batch)
        if order.delay_s > 0:
            self._stage(DELAYED)
            self._hold_back(order.delay_s)
        self._check()
        self._stage(FORWARD)
        computer = self._computer
        computer.look_at(self._place(order.version_block, gradient=False), (order.version_block, order.version))
        computed = computer.compute(batch, self._place(order.gradient_block, gradient=True), self._backward_begins)
        if not computed.finite:
            return messages.pack_refused(order.ticket)
        compute_s = perf_counter() - loaded
        done = messages.DoneAnswer(order.ticket, computed.loss, loaded - started, compute_s, computed.some_missing)
        return messages.pack_done(done)

    def _place(self, block: int, gradient: bool) -> TensorPlace:
        """Views of a block as a version or as a gradient; blocks change their role."""
        found = self._places.get((block, gradient))
        if found is None:
            piece = self._computer.layouts[0], self._blocks.block(block)
            found = self._places[block, gradient] = TensorPlace([piece], gradient=gradient)
        return found

    def _backward_begins(self) -> None:
        self._stage(BACKWARD)
        self._check()

    def _hold_back(self, seconds: float) -> None:
        """Sleep for the injected latency; a new packet or a cancellation ends this order."""
        until = perf_counter() + seconds
        while (left := until - perf_counter()) > 0:
            # poll() waits whole milliseconds; select() sleeps the rest.
            if self._poll.poll(int(left * 1000)):
                raise Cancelled
            self._check()
            if left < 0.001:
                select.select((), (), (), left)

    def _check(self) -> None:
        """Raise Cancelled if the main process has cancelled the current ticket."""
        if self._words[self._base + ControlWords.TICKET] != self._ticket:
            raise Cancelled

    def _stage(self, stage: int) -> None:
        self._words[self._base + ControlWords.STAGE] = stage


def _prefer_to_be_killed() -> None:
    """Let the out-of-memory killer choose a worker, which is replaced, rather than the main process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
