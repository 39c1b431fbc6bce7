"""The state of a run as one JSON object of bounded size, for the page and for the terminal."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from quorate.reporting.comparison import REAL, policy_label, seconds_are
from quorate.reporting.live.state import COMPUTING, LATE, LOST, WAITING, LiveMetrics, Point, Worker

EVERY_WORKER = 200  # of more, only the slowest are listed
SLOWEST = 50
KTH_POINTS = 100
STALENESS_BARS = 40
REASONS = 8
_TEXT_LENGTH = 200  # a name or a reason is cut there


def snapshot(metrics: LiveMetrics) -> dict[str, Any]:
    """Everything that is shown of a run; its size does not grow with the run, nor beyond some 200 workers."""
    header = metrics.header
    return {
        "run": _run(header),
        "updates": metrics.updates,
        "expected_updates": metrics.expected_updates,
        "share": metrics.share(),
        "seconds": metrics.seconds,
        "ending": _text(metrics.ending),
        "resumed_at": metrics.resumed_at,
        "pace": _pace(metrics),
        "loss": _last_and_curve(metrics.last_loss, metrics.losses.points()),
        "measures": _measures(metrics),
        "kth_arrival_s": _kth(metrics.rounds.means_s() or []),
        "staleness": _staleness(metrics),
        "tickets": _tickets(metrics),
        "samples": metrics.samples_applied,
        "bytes": {"sent": metrics.bytes_sent, "used": metrics.bytes_used},
        "workers": _workers(metrics),
        "choices": [{**choice._asdict(), "reason": _text(choice.reason)} for choice in reversed(metrics.choices)],
        "quorum": _last_and_curve(metrics.choices[-1].quorum if metrics.choices else None, metrics.quorums.points()),
    }


def _run(header: dict[str, Any]) -> dict[str, Any]:
    policy, engine = header.get("policy") or {}, header.get("engine") or {}
    return {
        "task": _text(header.get("task")),
        "policy": _text(policy_label(policy, header.get("workers"))),
        "engine": _text(engine.get("name")),
        "latency": _text(engine.get("latency")),
        "real": "name" not in engine or seconds_are(header) == REAL,
        "workers": _number(header.get("workers")),
        "seed": _number(header.get("seed")),
        "epochs": _number(header.get("epochs")),
        "until": _text(header.get("until")),
    }


def _number(value: object) -> int | float | None:
    """A number of a header; None where somebody wrote another thing."""
    return value if isinstance(value, int | float) and abs(value) < 1e15 else None


def _text(value: object) -> str | None:
    """Text of a trace, cut where somebody made it long, and without what would command a terminal."""
    if value is None:
        return None
    text = "".join(sign if sign.isprintable() else "�" for sign in str(value)[: _TEXT_LENGTH + 1])
    return text if len(text) <= _TEXT_LENGTH else text[: _TEXT_LENGTH - 1] + "…"


def _pace(metrics: LiveMetrics) -> dict[str, Any]:
    recent = sorted(seconds for _, seconds in metrics.recent)
    spent = sum(recent)
    times = metrics.update_seconds
    return {
        "per_s": metrics.updates / metrics.seconds if metrics.seconds > 0 else None,
        "recent_per_s": len(recent) / spent if spent > 0 else None,
        "mean_s": times.mean,
        "median_s": times.quantile(0.5),
        "p99_s": times.quantile(0.99),
        "recent_count": len(recent),
        "recent_median_s": _quantile(recent, 0.5),
        "recent_p90_s": _quantile(recent, 0.9),
        "recent_p99_s": _quantile(recent, 0.99),
        "curve": _curve(metrics.paces.points()),
    }


def _quantile(values: Sequence[float], level: float) -> float | None:
    return values[max(0, math.ceil(level * len(values)) - 1)] if values else None


def _curve(points: Iterable[Point]) -> dict[str, list[float]]:
    """As columns, which is what a chart takes; six digits are more than it can show."""
    columns = list(zip(*points, strict=True)) or [(), (), (), ()]
    return {
        name: [_six(value) for value in column]
        for name, column in zip(("time", "mean", "low", "high"), columns, strict=True)
    }


def _six(value: float) -> float:
    return float(f"{value:.6g}")


def _last_and_curve(last: float | None, points: list[Point]) -> dict[str, Any]:
    return {"last": last, "curve": _curve(points)}


def _measures(metrics: LiveMetrics) -> list[dict[str, Any]]:
    newest = metrics.evaluations[-1].measures if metrics.evaluations else {}
    return [
        {"name": _text(name), **_last_and_curve(newest.get(name), series.points())}
        for name, series in metrics.measures.items()
    ]


def _kth(means: list[float]) -> dict[str, list[float]]:
    """Mean seconds to the k-th arrival; of many k some, the first and the last among them."""
    count = len(means)
    if count <= KTH_POINTS:
        places = list(range(count))
    else:
        places = [round(step * (count - 1) / (KTH_POINTS - 1)) for step in range(KTH_POINTS)]
    return {"k": [place + 1 for place in places], "mean_s": [_six(means[place]) for place in places]}


def _staleness(metrics: LiveMetrics) -> dict[str, Any]:
    counts = metrics.staleness
    most = max(counts, default=0)
    width = most // STALENESS_BARS + 1
    bars = [0] * (most // width + 1)
    for behind, count in counts.items():
        bars[behind // width] += count
    total = max(1, sum(bars))
    return {
        "mean": metrics.staleness_mean(),
        "max": most,
        "width": width,
        "shares": [_six(count / total) for count in bars] if counts else [],
    }


def _tickets(metrics: LiveMetrics) -> dict[str, Any]:
    reasons = sorted(metrics.drops.items(), key=lambda item: -item[1])
    shown = [{"reason": _text(reason), "count": count} for reason, count in reasons[:REASONS]]
    rest = sum(count for _, count in reasons[REASONS:])
    if rest:
        shown.append({"reason": "other reasons", "count": rest})
    return {
        "applied": metrics.applied_tickets,
        "dropped": metrics.dropped_tickets,
        "lost": metrics.lost_tickets,
        "drop_share": metrics.drop_rate(),
        "reasons": shown,
    }


def _workers(metrics: LiveMetrics) -> dict[str, Any]:
    standing = metrics.standing
    paces = [worker.pace_s for worker in standing.values() if worker.pace_s is not None and worker.state is not LOST]
    usual_s = median(paces) if paces else None
    states = dict.fromkeys((COMPUTING, WAITING, LATE, LOST), 0)
    for worker in standing.values():
        states[worker.state] += 1
    listed = sorted(standing.items())
    if len(listed) > EVERY_WORKER:
        listed = heapq.nlargest(SLOWEST, listed, key=lambda item: (item[1].pace_s or 0.0, -item[0]))
    rows = [_worker(metrics, number, worker, usual_s) for number, worker in listed]
    return {
        "count": len(standing),
        "states": states,
        "usual_s": usual_s,
        "all_listed": len(rows) == len(standing),
        "rows": rows,
    }


def _worker(metrics: LiveMetrics, number: int, worker: Worker, usual_s: float | None) -> dict[str, Any]:
    work = metrics.workers[number]
    slowness = worker.pace_s / usual_s if worker.pace_s is not None and usual_s else None
    return {
        "worker": number,
        "state": worker.state,
        "slowness": None if slowness is None else _six(slowness),
        "pace_s": None if worker.pace_s is None else _six(worker.pace_s),
        "drop_share": _six(worker.drop_share),
        "arrived": work.arrived,
        "dropped": work.dropped,
        "lost": work.lost,
    }
