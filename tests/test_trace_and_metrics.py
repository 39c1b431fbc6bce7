"""The trace is complete and readable, and the only source of every number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import quorate
from quorate.metrics import Histogram, metrics_of, round_quorum
from quorate.schema import with_current_names
from quorate.trace import Recorder, TraceWriter, Update, feed, read_trace
from tests.toy_tasks import Toy


@pytest.fixture
def run(tmp_path: Path) -> Path:
    engine = quorate.Simulated(4, "shifted-exp:1,1", faults="lose:0@9;join:0@12")
    quorate.train(Toy(), quorate.BackupSync(3, 1, late="finish"), engine, epochs=3, out=tmp_path / "run")
    return tmp_path / "run"


def test_a_run_leaves_its_trace_summary_and_parameters(run: Path) -> None:
    assert {file.name for file in run.iterdir()} == {"trace.jsonl", "summary.json", "parameters.safetensors"}
    assert json.loads((run / "summary.json").read_text()) == metrics_of(run).summary()
    first = next(read_trace(run))
    assert first["event"] == "run"
    assert first["schema"] == 2
    assert first["policy"] == {"name": "backup", "quorum": 3, "backups": 1, "late": "finish"}


def test_late_work_is_named_in_the_trace(run: Path, tmp_path: Path) -> None:
    reasons = {record["reason"] for record in read_trace(run) if record["event"] == "drop"}
    assert "late: its version is over" in reasons
    quorate.train(
        Toy(), quorate.BackupSync(3, 1), quorate.Simulated(4, "shifted-exp:1,1"), updates=5, out=tmp_path / "other"
    )
    events = [record["event"] for record in read_trace(tmp_path / "other")]
    assert "cancel" in events
    assert next(read_trace(tmp_path / "other"))["policy"]["late"] == "cancel"


def test_a_trace_written_again_is_the_same_to_the_byte(run: Path, tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "again.jsonl")
    feed(read_trace(run), writer)
    writer.close()
    original = (run / "trace.jsonl").read_text().splitlines()
    again = (tmp_path / "again.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in again] == [json.loads(line) for line in original]
    assert again[1:] == original[1:]


def test_torn_and_foreign_traces_are_refused_with_the_line(run: Path, tmp_path: Path) -> None:
    text = (run / "trace.jsonl").read_text()

    def refused(content: str, words: str) -> None:
        path = tmp_path / "bad.jsonl"
        path.write_text(content)
        with pytest.raises(quorate.BadInput, match=words):
            list(read_trace(path))

    refused("", "is empty")
    refused("a,b,c\n1,2,3\n", "not a quorate trace")
    refused('{"event": "start"}\n', "not a quorate trace")
    refused(text[: len(text) // 2], "torn: line")
    refused(text + text, "goes on after its end")
    refused("".join(text.splitlines(keepends=True)[:-1]), "without an end")
    refused(text.replace('"schema": 2', '"schema": 99', 1), "schema 99.*reads schemas 1 to 2; upgrade quorate")
    refused(text.replace('"schema": 2', '"schema": 0', 1), "schema 0.*use the release that wrote it")
    with pytest.raises(quorate.BadInput, match="does not exist"):
        list(read_trace(tmp_path / "nowhere"))


def test_a_header_that_says_too_little_cannot_be_replayed(tmp_path: Path) -> None:
    (tmp_path / "thin.jsonl").write_text('{"event":"run","schema":1}\n{"event":"end"}\n')
    with pytest.raises(quorate.BadInput, match="policy"):
        quorate.replay(tmp_path / "thin.jsonl")


def test_a_crash_before_the_first_update_leaves_no_folder(tmp_path: Path) -> None:
    class Crashes(Toy):
        def loss(self, model: object, batch: object) -> object:  # type: ignore[override]
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            quorate.train(Crashes(), quorate.FullSync(), quorate.Simulated(2), updates=2, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_replay_that_decides_otherwise_is_found_out(run: Path) -> None:
    trace = run / "trace.jsonl"
    lines = trace.read_text().splitlines(keepends=True)
    header = json.loads(lines[0])
    header["policy"]["late"] = "cancel"
    trace.write_text("".join([json.dumps(header) + "\n", *lines[1:]]))
    with pytest.raises(quorate.ReplayMismatch):
        quorate.replay(run, Toy())


def test_a_replay_with_another_task_is_found_out(run: Path) -> None:
    class Other(Toy):
        def loss(self, model: object, batch: object) -> object:  # type: ignore[override]
            return super().loss(model, batch) * 1.001  # type: ignore[arg-type]

    with pytest.raises(quorate.ReplayMismatch, match="recorded"):
        quorate.replay(run, Other())
    assert not quorate.replay(run, Other(), gradients=False).gradients
    with pytest.raises(quorate.BadInput, match="has 55"):
        quorate.replay(run, Toy(samples=55))


@pytest.mark.parametrize(
    ("policy", "now", "before"),
    [
        (quorate.SoftSync(3), "quorum", "gradients"),
        (quorate.KBatchSync(3), "quorum", "k"),
        (quorate.Deadline(1.5, min_quorum=2), "min_quorum", "minimum"),
        (quorate.AdaptiveBackup(min_quorum=2), "min_quorum", "least"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_options_of_earlier_traces_get_their_names_of_today(
    policy: quorate.Policy, now: str, before: str, tmp_path: Path
) -> None:
    quorate.train(None, policy, quorate.Simulated(4, "constant:1"), updates=5, out=tmp_path / "run")
    text = (tmp_path / "run" / "trace.jsonl").read_text()
    old = tmp_path / "old.jsonl"
    old.write_text(text.replace(f'"{now}":', f'"{before}":', 1))
    assert old.read_text() != text
    assert next(read_trace(old))["policy"] == policy.describe()
    assert quorate.replay(old).lines == len(text.splitlines()) - 1


def test_a_users_policy_of_the_same_name_keeps_its_options() -> None:
    own = {"name": "deadline", "minimum": 2, "source": "my_policy.py:Deadline", "source_file": None}
    header = {"policy": own, "engine": {"name": "simulated", "arithmetic": "abreast"}}
    assert with_current_names(header) == {"policy": own, "engine": {"name": "simulated", "arithmetic": "vmapped"}}


@pytest.mark.parametrize(
    ("policy", "quorum"),
    [
        (quorate.BackupSync(3, 1), 3),
        (quorate.KBatchSync(3), 3),
        (quorate.Deadline(quorum=3), 3),
        (quorate.Deadline(), None),
        (quorate.SoftSync(3), None),
        (quorate.FullSync(), None),
    ],
    ids=repr,
)
def test_the_quorum_of_a_round(policy: quorate.Policy, quorum: int | None) -> None:
    header = policy.header(4)
    assert round_quorum(header) == quorum
    assert round_quorum({"policy": header["policy"]}) == quorum  # of a trace that does not say whether it has rounds


def test_worker_seconds_add_up() -> None:
    """Full sync, constant seconds, one slow worker: the others wait for it."""
    engine = quorate.Simulated(3, "constant:1*slow:2=4")
    metrics = quorate.train(None, quorate.FullSync(), engine, updates=10).metrics
    assert metrics.seconds == 40
    assert [metrics.workers[w].compute_s for w in range(3)] == [10, 10, 40]
    assert [metrics.workers[w].idle_s for w in range(3)] == [30, 30, 0]
    assert metrics.kth_arrival_means() == [1, 1, 4]
    engine = quorate.Simulated(3, "constant:1*slow:2=4", model_bytes=100)
    metrics = quorate.train(None, quorate.BackupSync(2, 1), engine, updates=10).metrics
    assert metrics.seconds == 10
    assert metrics.workers[2].wasted_s == 10
    assert metrics.summary()["bytes"] == {"sent": 30 * 100 + 20 * 100, "used": 40 * 100, "wasted": 1000}
    assert metrics.summary()["worker_seconds"] == {"compute": 30, "wasted": 10, "idle": 0}


def test_a_version_read_twice_is_sent_once() -> None:
    engine = quorate.Simulated(1, "constant:1", model_bytes=100)
    summary = quorate.train(None, quorate.KBatchSync(4), engine, updates=2).summary
    assert summary["bytes"] == {"sent": 2 * 100 + 8 * 100, "used": 1000, "wasted": 0}


def test_staleness_and_drops_are_counted() -> None:
    engine = quorate.Simulated(4, "constant:1*slow:3=10")
    summary = quorate.train(None, quorate.Async(max_staleness=5), engine, updates=300).summary
    assert summary["staleness"]["max"] <= 5
    assert summary["tickets"]["reasons"]["too stale"] > 5


def test_distinct_samples_of_a_part_of_an_epoch() -> None:
    result = quorate.train(Toy(), quorate.BackupSync(2, 2), quorate.Simulated(4, "shifted-exp:1,1"), updates=3)
    assert result.summary["samples"] == {"applied": 48, "distinct": 48}


def test_a_measure_that_is_not_finite_is_null_in_json(tmp_path: Path) -> None:
    class Unmeasurable(Toy):
        def evaluate(self, model: object) -> dict[str, float]:
            return {"accuracy": float("nan")}

    quorate.train(Unmeasurable(), quorate.FullSync(), quorate.Simulated(2), updates=2, out=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["evaluation"] == {"accuracy": None}
    assert quorate.replay(tmp_path / "run", Unmeasurable()).lines > 5


def test_reasons_of_any_kind_are_written_as_json(tmp_path: Path) -> None:
    class Quoting(quorate.FullSync):
        def why(self) -> str:
            return 'a "quoted" reason \\ and more'

    quorate.train(None, Quoting(), quorate.Simulated(2), updates=2, out=tmp_path / "run")
    reasons = [record["reason"] for record in read_trace(tmp_path / "run") if record["event"] == "apply"]
    assert reasons == ['a "quoted" reason \\ and more'] * 2


def test_histogram_quantiles_are_close() -> None:
    histogram = Histogram()
    values = [1.5**k * (1 + i / 1000) for k in range(-20, 20) for i in range(25)]
    for value in values:
        histogram.add(value)
    values.sort()
    for level in (0.01, 0.25, 0.5, 0.75, 0.99):
        assert histogram.quantile(level) == pytest.approx(values[int(level * len(values)) - 1], rel=0.002)
    histogram.add(0.0)
    assert histogram.quantile(0.0001) == 0.0


def test_progress_is_reported() -> None:
    seen: list[quorate.Progress] = []
    quorate.train(Toy(), quorate.FullSync(), quorate.Simulated(2), updates=10, on_progress=seen.append)
    assert [progress.updates for progress in seen] == list(range(1, 11))
    assert seen[-1].share == 1.0
    assert seen[-1].loss is not None


@pytest.mark.parametrize(
    ("until", "key", "low"), [("accuracy>=0.7", "accuracy", 0.7), ("seconds>=5", None, 0), ("loss<=0.9", None, 0)]
)
def test_until_ends_a_run(until: str, key: str | None, low: float) -> None:
    result = quorate.train(Toy(), quorate.FullSync(), quorate.Simulated(2), until=until, updates=5000, evaluate_every=5)
    assert result.summary["updates"] < 5000
    if key:
        assert result.evaluation[key] >= low


def test_a_broken_off_run_keeps_its_trace(tmp_path: Path) -> None:
    class Stops(Recorder):
        def applied(self, time: float, update: Update) -> None:
            if update.version == 5:
                raise KeyboardInterrupt

    engine = quorate.Simulated(2)
    with pytest.raises(KeyboardInterrupt):
        quorate.train(Toy(), quorate.FullSync(), engine, updates=9, out=tmp_path / "run", recorders=(Stops(),))
    assert '"event":"start"' in (tmp_path / "run" / "trace.jsonl").read_text()
