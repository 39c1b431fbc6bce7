"""The tables that follow from formulas alone (benchmarks.scaling.links)."""

from __future__ import annotations

from benchmarks.scaling.links import (
    FP32_BYTES,
    HALF_BYTES,
    Load,
    Rate,
    even_shards,
    fewest_shards,
    ring_bytes,
    ring_s,
    server_traffic,
    shard_memory_bytes,
    shared_s,
)
from benchmarks.scaling.models import MODELS, busiest_shard

SIZES = {"25M": 25_000_000, "350M": 350_000_000, "7B": 7_000_000_000}
MACHINES = (100, 1000)
RATES_GBIT = (10, 100)
LATENCY_S = 50e-6  # within one data centre
BACKUPS = {100: 4, 1000: 40}  # 4 %, as Chen et al. chose for 100


def rate(gbit: float) -> Rate:
    return Rate(bytes_per_s=gbit * 1e9 / 8, latency_s=LATENCY_S)


def load(parameters: int, machines: int, backups: int = 0, per_node: int = 1, gradient: int = FP32_BYTES) -> Load:
    return Load(
        workers=machines * per_node,
        version_bytes=FP32_BYTES * parameters,
        gradient_bytes=gradient * parameters,
        backups=backups,
        per_node=per_node,
    )


# ------------------------------------------------------------ as text


def bytes_text(size: float) -> str:
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= one:
            return f"{three(size / one)} {unit}"
    return f"{three(size / 1e3)} kB"


def three(value: float) -> str:
    """Three digits."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def seconds_text(seconds: float, bold_above_s: float | None = None) -> str:
    text = three(seconds) if seconds >= 0.0995 else f"{seconds:.3f}"
    return f"**{text}**" if bold_above_s is not None and seconds > bold_above_s else text


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


# ------------------------------------------------------------ the tables


def bytes_per_link() -> str:
    """Most bytes through one link in one direction."""
    head = ["parameters", "machines", "a worker's own link", "one server", "S = n/10", "S = n", "S = n, on the workers"]
    rows = []
    for name, parameters in SIZES.items():
        for machines in MACHINES:
            one = load(parameters, machines)
            by_shards = [server_traffic(one, shards) for shards in (1, machines // 10, machines)]
            shared = server_traffic(one, machines, on_workers=True).busiest
            cells = [by_shards[0].node_in, *(traffic.server_out for traffic in by_shards), shared, ring_bytes(one)]
            rows.append([name, f"{machines:,}", *map(bytes_text, cells)])
    return table([*head, "ring all-reduce"], rows)


def seconds_of_communication() -> str:
    """Version out and gradients in, links shared fairly."""
    head = ["parameters", "machines", "Gbit/s", "one server", "S = n/10", "S = n", "S = n, on the workers"]
    rows = []
    for name, parameters in SIZES.items():
        for machines in MACHINES:
            one = load(parameters, machines)
            for gbit in RATES_GBIT:
                link = rate(gbit)
                cells = [shared_s(one, link, shards) for shards in (1, machines // 10, machines)]
                cells += [shared_s(one, link, machines, on_workers=True), ring_s(one, link)]
                rows.append([name, f"{machines:,}", str(gbit), *(seconds_text(cell, 1.0) for cell in cells)])
    return table([*head, "ring all-reduce"], rows)


def how_many_shards() -> str:
    """The fewest servers for a given time of communication."""
    limits_s = (0.1, 1.0, 10.0)
    rows = []
    for name, parameters in SIZES.items():
        for machines in MACHINES:
            for gbit in RATES_GBIT:
                found = [fewest_shards(load(parameters, machines), rate(gbit), limit) for limit in limits_s]
                cells = ["no S" if shards is None else f"{shards:,}" for shards in found]
                rows.append([name, f"{machines:,}", str(gbit), *cells])
    return table(["parameters", "machines", "Gbit/s", *(f"at most {limit:g} s" for limit in limits_s)], rows)


def fewer_bytes() -> str:
    """What a 16-bit wire, eight workers a machine, and backups change, at 350M and 100 workers, by one link's bytes."""
    parameters, machines = SIZES["350M"], 100
    backups = BACKUPS[machines]
    cases = {
        "as above: 100 machines, fp32": (load(parameters, machines), None),
        "gradients in 16 bits": (load(parameters, machines, gradient=HALF_BYTES), None),
        "8 workers on each of 100 machines": (load(parameters, machines, per_node=8), None),
        f"{backups} more as backups, all send": (load(parameters, machines + backups, backups), None),
        f"{backups} more as backups, late ones stop first": (load(parameters, machines + backups, backups), machines),
    }
    rows = []
    for name, (one, sent) in cases.items():
        single, shards = server_traffic(one, sent=sent), server_traffic(one, 10, sent=sent)
        cells = [single.server_out, single.server_in, shards.server_out, shards.server_in, single.node_in]
        rows.append([name, *map(bytes_text, [*cells, single.node_out, ring_bytes(one)])])
    head = ["", "one server, out", "in", "each of 10 shards, out", "in", "a worker's machine, in", "out"]
    return table([*head, "ring all-reduce"], rows)


def tensor_boundaries() -> str:
    """How even shards can be where no tensor is cut."""
    rows = []
    for name, sizes_of in MODELS.items():
        sizes = sizes_of()
        parameters = sum(sizes)
        over = [busiest_shard(sizes, shards) * shards / parameters for shards in (10, 100, 1000)]
        rows.append(
            [
                f"{name}, {parameters / 1e6:,.1f}M",
                f"{len(sizes):,}",
                f"{max(sizes) / parameters:.1%}",
                f"{even_shards(max(sizes), parameters)}",
                *(f"×{ratio:.2f}" if ratio < 9.995 else f"×{ratio:.0f}" for ratio in over),
            ]
        )
    head = [
        "model",
        "tensors",
        "the largest",
        "shards that can be even",
        "busiest of 10 over 1/10",
        "of 100",
        "of 1,000",
    ]
    return table(head, rows)


def memory() -> str:
    """Memory of one shard: Adam, two versions alive, one gradient in hand; and if none of 100 were added yet."""
    rows = []
    for name, parameters in SIZES.items():
        one = load(parameters, 100)
        cells = [
            shard_memory_bytes(one, shards, optimizer_states=2, versions_alive=2, unsummed=unsummed)
            for unsummed in (1, one.workers)
            for shards in (1, 10, 100)
        ]
        rows.append([name, *map(bytes_text, cells), bytes_text(one.version_bytes + one.gradient_bytes)])
    head = ["parameters", "S = 1", "S = 10", "S = 100", "S = 1, all 100 wait", "S = 10", "S = 100"]
    return table([*head, "a worker: version and gradient"], rows)


def coordinator(seconds_a_call: float, seconds_a_ticket: float) -> str:
    """Updates a second at which one core of the driver is full: n calls to workers and S to shards for each."""
    rows = []
    for machines in MACHINES:
        for shards in (1, machines // 10, machines):
            busy = (machines + shards) * seconds_a_call
            cells = [f"{machines:,}", f"{shards:,}", f"{busy:.2f} s", f"{three(1 / busy)}"]
            rows.append([*cells, three(1 / (machines * seconds_a_ticket))])
    head = ["workers", "shards", "CPU of Ray calls an update", "updates/s that fill a core"]
    return table([*head, "the same for quorate's own decisions and trace"], rows)
