"""Hands out blocks of shared memory: for versions that somebody reads, and for gradients that wait."""

from __future__ import annotations

from quorate.engines.processes.blocks import Block, Holds
from quorate.engines.processes.memory import BlockLayout, Blocks, gigabytes
from quorate.errors import BadInput


class Store:
    """Hands out blocks. A block comes back when nobody reads it any more."""

    def __init__(self, layout: BlockLayout, blocks: Blocks) -> None:
        self._layout, self._blocks = layout, blocks
        self._all: list[Block] = []
        self._holds = Holds()

    def take(self, worker: int | None = None) -> Block:
        """A block that nobody uses, held once: for this worker's gradient, or for a version."""
        number = self._holds.take(worker)
        if number is None:
            self._add()
            number = self._holds.take(worker)
            assert number is not None
        self._all[number].become(gradient=worker is not None)
        return self._all[number]

    def _add(self) -> None:
        try:
            number = self._blocks.add()
        except OSError as error:
            size = gigabytes(self._blocks.block_bytes)
            raise BadInput(
                f"no memory for another block of {size} beside the {len(self._all)} there are: {error.strerror}; "
                f"take fewer workers, or a policy that keeps fewer versions alive"
            ) from error
        self._all.append(Block(number, self._layout, self._blocks.block(number)))
        self._holds.add()

    def hold(self, block: Block) -> None:
        """One more reason to keep this block."""
        self._holds.hold(block.number)

    def held_more_than_once(self, block: Block) -> bool:
        return self._holds.held_more_than_once(block.number)

    def release(self, block: Block) -> None:
        """One reason less."""
        self._holds.release(block.number)

    def close(self) -> None:
        self._all.clear()
        self._blocks.forget()
