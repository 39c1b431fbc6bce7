"""What the trainings came to, as tables: for people and for programs."""

from __future__ import annotations

import csv
from pathlib import Path

from experiments.delay.results import Methods, Training, seconds_to, spread_of
from experiments.delay.rows import Setting
from experiments.delay.settings import DELAYS, NETS, REPAIRED_DELAY, REPAIRS

SUMMARY, TUNING, TEXT = "summary.csv", "tuning.csv", "summary.md"


def best_of_delay(finals: Methods, net: str, delay: int) -> str | None:
    """Whether the delay's own rate or the one that is best without a delay did better; None where there is neither."""
    found = [repair for repair in ("none", "lr") if finals.get((net, delay, repair))]
    return max(found, key=lambda repair: spread_of(finals[net, delay, repair]).mean, default=None)


def write_summary(
    folder: Path, finals: Methods, tuning: Methods, iteration_s: dict[tuple[str, int], float]
) -> list[Path]:
    """Final accuracies of every method, and of every rate that was tried."""
    with (folder / SUMMARY).open("w", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(
            [
                "net",
                "delay",
                "repair",
                "lr",
                "momentum",
                "compensation",
                "seeds",
                "diverged",
                "mean",
                "half_width",
                "min",
                "max",
            ]
        )
        for net, delay, repair in _in_order(finals):
            trainings = finals[net, delay, repair]
            spread = spread_of(trainings)
            numbers = [round(value, 4) for value in (spread.mean, spread.half_width, spread.lowest, spread.highest)]
            rates = _rates(trainings[0].setting)
            writer.writerow([net, delay, repair, *rates, spread.seeds, spread.diverged, *numbers])
    with (folder / TUNING).open("w", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(["net", "delay", "repair", "lr", "momentum", "compensation", "accuracy", "diverged"])
        for net, delay, repair in _in_order(tuning):
            for one in sorted(tuning[net, delay, repair], key=lambda one: (one.setting.compensation, one.setting.lr)):
                writer.writerow([net, delay, repair, *_rates(one.setting), one.accuracy, one.rows[-1].diverged])
    (folder / TEXT).write_text(_text(finals) + _times(finals, iteration_s))
    return [folder / SUMMARY, folder / TUNING, folder / TEXT]


def _rates(setting: Setting) -> list[str]:
    return [f"{value:g}" for value in (setting.lr, setting.momentum, setting.compensation)]


def _in_order(methods: Methods) -> list[tuple[str, int, str]]:
    return sorted(methods, key=lambda method: (NETS.index(method[0]), method[1], REPAIRS.index(method[2])))


def _text(finals: Methods) -> str:
    lines = ["| net | rate | " + " | ".join(f"delay {delay}" for delay in DELAYS) + " |", "|---" * 6 + "|"]
    for net in NETS:
        for repair, name in (("none", "that of delay 0"), ("lr", "its own")):
            cells = [cell(finals.get((net, delay, repair if delay else "none"))) for delay in DELAYS]
            lines.append(f"| {net} | {name} | {' | '.join(cells)} |")
    lines += ["", f"| delay {REPAIRED_DELAY} | " + " | ".join(REPAIRS) + " |", "|---" * (len(REPAIRS) + 1) + "|"]
    for net in NETS:
        cells = [cell(finals.get((net, REPAIRED_DELAY, repair))) for repair in REPAIRS]
        lines.append(f"| {net} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _times(finals: Methods, iteration_s: dict[tuple[str, int], float]) -> str:
    """How much sooner a delay has the accuracy it ends with than a training without one has it."""
    lines = ["", "| net | delay | ends at | seconds to it | without a delay | ratio |", "|---" * 6 + "|"]
    for net in NETS:
        without = finals.get((net, 0, "none"))
        for delay in DELAYS[1:]:
            repair = best_of_delay(finals, net, delay)
            if repair is None or not without:
                continue
            trainings = finals[net, delay, repair]
            end = spread_of(trainings).mean
            late = seconds_to(trainings, end, iteration_s[net, delay])
            sync = seconds_to(without, end, iteration_s[net, 0])
            if late is not None and sync is not None:
                lines.append(f"| {net} | {delay} | {100 * end:.1f} | {late:.0f} | {sync:.0f} | {sync / late:.2f} |")
    return "\n".join(lines) + "\n"


def cell(trainings: list[Training] | None) -> str:
    """Mean ± 95 % interval of the seeds in per cent; lowest to highest where seeds diverged."""
    if not trainings:
        return "–"
    spread = spread_of(trainings)
    lowest, highest = (f"{100 * value:.1f}" for value in (spread.lowest, spread.highest))
    if spread.diverged == spread.seeds:
        return f"diverged ({spread.diverged} of {spread.seeds})"
    if spread.diverged:
        shown = lowest if lowest == highest else f"{lowest} to {highest}"
        return f"{shown} ({spread.diverged} of {spread.seeds} diverged)"
    text = f"{100 * spread.mean:.1f}" + (f" ± {100 * spread.half_width:.1f}" if spread.seeds > 1 else "")
    return text + (f" ({spread.seeds} seed{'s' * (spread.seeds > 1)})" if spread.seeds < 3 else "")
