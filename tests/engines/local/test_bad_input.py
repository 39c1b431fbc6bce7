"""What a user may do wrong ends in a sentence that says what to do; what a disk does wrong does not end a run."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quorate
import quorate.checkpoint
import quorate.engines.base
import quorate.out_folder
from quorate.engines.local import engine as local_engine
from quorate.task import load_task
from tests.conftest import REPOSITORY
from tests.engines.local.checking import Watch, versions_saved
from tests.engines.local.scripts import GUARD, NO_GUARD, OWN_TASK, READS_ARGUMENTS
from tests.engines.local.tasks import Disturbed, Mark, Mishap
from tests.toy_tasks import Toy, adam, mlp

pytestmark = pytest.mark.timeout(60)


# ------------------------------------------------------------ what a task may be


def refused(task: Any, words: str, tmp_path: Path, **options: Any) -> None:
    """Refused with these words, before a process is left or a folder is made."""
    engine = options.pop("engine", None) or quorate.Local(2)
    with pytest.raises(quorate.BadInput, match=words):
        quorate.train(task, quorate.FullSync(), engine, **{"updates": 2, "out": tmp_path / "run", **options})
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("warm")
def test_a_class_that_cannot_be_sent(tmp_path: Path) -> None:
    class Mine(Toy):
        pass

    refused(Mine(), r"cannot be sent to a worker process: .*top level of a module, e\.g\. my_task\.py", tmp_path)
    refused(Toy(lambda: mlp()), "cannot be sent to a worker process: .*lambda", tmp_path)
    held = Toy()
    held.file = (REPOSITORY / "README.md").open()
    refused(held, "cannot be sent to a worker process: .*TextIOWrapper", tmp_path)
    held.file.close()


@pytest.mark.usefixtures("warm")
def test_a_task_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text("from tests.toy_tasks import Toy\nclass Mine(Toy):\n    pass\n")
    text = f"{tmp_path}/my_task.py:Mine"
    result = quorate.train(text, quorate.FullSync(), quorate.Local(2), epochs=1, out=tmp_path / "run")
    assert result.summary["samples"] == {"applied": 100, "distinct": 100}
    assert quorate.resume(tmp_path / "run", text, epochs=2).summary["samples"]["applied"] == 200


def versions(folder: Path) -> list[int]:
    return versions_saved(folder) if (folder / "run" / "checkpoints").exists() else []


@pytest.mark.usefixtures("warm")
def test_a_loaded_task_given_as_an_object_fails_with_a_reason(tmp_path: Path) -> None:
    """Its module has no name that a worker could import."""
    (tmp_path / "my_task.py").write_text("from tests.toy_tasks import Toy\nclass Mine(Toy):\n    pass\n")
    task = load_task(f"{tmp_path}/my_task.py:Mine")
    sys.modules.pop(type(task).__module__)
    with pytest.raises((quorate.WorkerFailed, quorate.BadInput), match="quorate_task_my_task"):
        quorate.train(task, quorate.FullSync(), quorate.Local(2), updates=2)


# ------------------------------------------------------------ room and places


@pytest.mark.usefixtures("warm")
def test_more_workers_than_memory_can_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_engine, "available_bytes", lambda: 100_000_000)
    words = r"1000 workers need about \d+ GB of memory .* but only 100 MB are free; take at most ([1-9])$"
    with pytest.raises(quorate.BadInput, match=words) as much:
        quorate.train(Toy(), quorate.Async(), quorate.Local(1000), updates=2, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    most = int(str(much.value)[-1])
    with pytest.raises(quorate.BadInput, match=f"take at most {most}$"):
        quorate.train(Toy(), quorate.FullSync(), quorate.Local(most + 1), updates=2)
    assert quorate.train(Toy(), quorate.FullSync(), quorate.Local(most), updates=2).summary["updates"] == 2
    monkeypatch.setattr(local_engine, "available_bytes", lambda: None)  # where nobody can say, it is tried
    assert quorate.train(Toy(), quorate.FullSync(), quorate.Local(most + 1), updates=2).summary["updates"] == 2


@pytest.mark.usefixtures("warm")
def test_the_number_of_workers_that_it_proposes_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bound on staleness, every worker may hold a version of its own."""
    monkeypatch.setattr(local_engine, "WORKER_BYTES", 0)
    monkeypatch.setattr(local_engine, "available_bytes", lambda: 11 * 4096)  # a version or a gradient of it has 4096
    proposed = -1
    try:
        quorate.train(Toy(), quorate.Async(), quorate.Local(50), updates=2)
    except quorate.BadInput as error:
        proposed = int(str(error).split()[-1])
    assert proposed == 5


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("place", ["file/run", "/proc/nothing/run"])
def test_a_folder_that_cannot_be_made(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    sentence = ""
    try:
        quorate.train(Toy(), quorate.FullSync(), quorate.Local(2), updates=2, out=tmp_path / place)
    except Exception as error:
        sentence = f"{type(error).__name__}: {error}"
    assert sentence.startswith(f"BadInput: the folder '{tmp_path / place}' cannot be written: ")


@pytest.mark.usefixtures("warm")
def test_a_model_of_bad_input_found_by_a_worker(tmp_path: Path) -> None:
    """It is told as it is, and not tried three times."""
    refused(Sparse(), "sparse gradients", tmp_path)
    refused(NotScalar(), r"loss\(\) gave a tensor of shape \(8,\)", tmp_path)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(3, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(x + self.table(torch.zeros(len(x), dtype=torch.int64)))
        return result


class Sparse(Toy):
    def __init__(self) -> None:
        super().__init__(Embedded)


class NotScalar(Toy):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).sum(1)


# ------------------------------------------------------------ resuming


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3), nn.Linear(3, 3))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ten updates, with checkpoints of versions 8 and 10."""
    folder = tmp_path_factory.mktemp("finished")
    watch = Watch()
    engine = quorate.Local(2)
    quorate.train(
        Toy(), quorate.FullSync(), engine, updates=10, out=folder / "run", checkpoint_every=4, recorders=(watch,)
    )
    assert versions_saved(folder)[-1] == 10
    return folder


def copy_of(finished: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(finished / "run", tmp_path / "run"))


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Toy(wide), r"another model: tensor '0\.weight' has shape \(16, 6\) there, \(20, 6\) here"),
        (Toy(deep), r"another model: tensor '3\.weight' is missing there"),
        (Toy(samples=90), "made with 100 samples, but the task has 90"),
    ],
    ids=["wider", "deeper", "other data"],
)
def test_resuming_with_another_task(finished: Path, tmp_path: Path, task: Toy, words: str) -> None:
    run = copy_of(finished, tmp_path)
    with pytest.raises(quorate.BadInput, match=words):
        quorate.resume(run, task, updates=20)
    assert quorate.resume(run, Toy(), updates=12).summary["updates"] == 12  # the attempt did no harm


@pytest.mark.usefixtures("warm")
def test_resuming_with_another_optimizer(finished: Path, tmp_path: Path) -> None:
    run = copy_of(finished, tmp_path)
    kind = None
    try:
        quorate.resume(run, Toy(optimizer=adam), updates=20)
    except Exception as error:
        kind = type(error)
    assert kind is quorate.BadInput


def test_resuming_what_is_finished_or_never_was(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(quorate.BadInput, match=r"has its 10 updates already; give more \(updates\)"):
        quorate.resume(finished / "run", Toy())
    with pytest.raises(quorate.BadInput, match=r"has its 9 updates already"):
        quorate.resume(finished / "run", Toy(), updates=9)
    with pytest.raises(quorate.BadInput, match="does not exist"):
        quorate.resume(tmp_path / "nowhere", Toy())
    with pytest.raises(quorate.BadInput, match="the run has 2 workers, but the engine given has 3"):
        quorate.resume(finished / "run", Toy(), quorate.Local(3), updates=20)
    with pytest.raises(quorate.BadInput, match="patience_s is -1"):
        quorate.resume(finished / "run", Toy(), patience_s=-1)


def test_a_trace_that_was_cut_after_the_run(finished: Path, tmp_path: Path) -> None:
    run = copy_of(finished, tmp_path)
    trace = run / "trace.jsonl"
    trace.write_bytes(trace.read_bytes()[:2000])
    with pytest.raises(quorate.BadInput, match="shorter than its checkpoint says"):
        quorate.resume(run, Toy(), updates=20)


@pytest.mark.usefixtures("warm")
def test_a_run_that_used_its_epochs_up_can_be_given_more(tmp_path: Path) -> None:
    quorate.train(Toy(), quorate.FullSync(), quorate.Local(2), epochs=2, out=tmp_path / "run")
    assert versions(tmp_path)[-1] == 14
    result = quorate.resume(tmp_path / "run", Toy(), epochs=3)
    assert result.summary["samples"] == {"applied": 300, "distinct": 100}


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_falls_back(finished: Path, tmp_path: Path, file: str) -> None:
    run = copy_of(finished, tmp_path)
    before, newest = versions_saved(tmp_path)
    damaged = run / "checkpoints" / f"{newest:08d}" / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with pytest.warns(RuntimeWarning, match=rf"checkpoint {newest:08d} is damaged .* fell back to {before:08d}"):
        result = quorate.resume(run, Toy(), updates=14)
    resumed = [record["version"] for record in quorate.read_trace(run) if record["event"] == "resume"]
    assert resumed == [before] and result.summary["updates"] == 14
    assert quorate.replay(run, Toy()).result.digest == result.digest
    assert versions_saved(tmp_path)[-1] == 14


# ------------------------------------------------------------ a disk that is full


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("step", ["_make_folders", "_write_bytes", "store", "_manifest", "_rename"])
def test_a_full_disk_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """However many checkpoints fail, one is mentioned; the end of the run is kept where there is room."""
    real, calls = getattr(quorate.checkpoint, step), []

    def full(path: Path, *arguments: Any) -> Any:
        if path.is_relative_to(tmp_path / "run") and versions(tmp_path) and versions(tmp_path)[-1] >= 4:
            calls.append(step)  # the first one fits
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *arguments)

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    policy = quorate.FullSync()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(quorate.checkpoint, step, full)
        with pytest.warns(RuntimeWarning) as warned:
            result = quorate.train(
                Disturbed(seconds=0.01), policy, quorate.Local(2), updates=20, out=tmp_path / "run", checkpoint_every=2
            )
    first, last = (str(one.message) for one in warned)
    assert re.fullmatch(
        r"checkpoint of version \d+ could not be written: No space left on device; .* mentioned\)", first
    )
    assert len(calls) > 2 and result.summary["updates"] == 20
    assert result.out is not None and result.out.parent == tmp_path / "here"
    words = f"the folder {str(tmp_path / 'run')!r} cannot be written (No space left on device); the whole run is in "
    assert last == result.problem and last.startswith(words + repr(str(result.out)))
    assert versions_saved(tmp_path)[-1] < 20, "what there was is still there"
    assert quorate.replay(result.out, Disturbed()).result.digest == result.digest
    again = quorate.resume(result.out, Disturbed(), updates=25)
    resumed = [record["version"] for record in quorate.read_trace(result.out) if record["event"] == "resume"]
    assert resumed == [20] and again.summary["updates"] == 25
    assert quorate.replay(result.out, Disturbed()).result.digest == again.digest


def small_disk(path: Path) -> bool:
    """Mount one of 256 kB; whether that can be done."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(path)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("engine", [quorate.Local(2), quorate.Simulated(2)], ids=["local", "simulated"])
def test_a_disk_that_is_really_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: quorate.Engine) -> None:
    disk, run = tmp_path / "disk", tmp_path / "disk" / "run"
    if not small_disk(disk):
        pytest.skip("no file system can be mounted here")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    watch = Watch()

    def fill(version: int) -> None:
        if version == 4:
            with contextlib.suppress(OSError), (disk / "fill").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(512))

    watch.on_update = fill
    try:
        with pytest.warns(RuntimeWarning) as warned:
            result = quorate.train(Disturbed(), quorate.FullSync(), engine, updates=400, out=run, recorders=(watch,))
        assert str(warned[-1].message) == result.problem and len(warned) <= 3
        assert "cannot be written (No space left on device); the whole run is in" in str(result.problem)
        assert result.out is not None and result.out.parent == tmp_path / "here"
        names = {"parameters.safetensors", "summary.json", "trace.jsonl"}
        assert {entry.name for entry in result.out.iterdir()} - {"checkpoints"} == names
        assert quorate.replay(result.out, Disturbed()).result.digest == result.digest
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("engine", [quorate.Local(2), quorate.Simulated(2)], ids=["local", "simulated"])
@pytest.mark.parametrize("every", [1, None])
def test_a_folder_that_is_deleted_during_the_run_is_made_again(
    tmp_path: Path, engine: quorate.Engine, every: int | None
) -> None:
    if every is not None and not engine.keeps_checkpoints:
        pytest.skip("it keeps no checkpoints")
    run, watch = tmp_path / "run", Watch()
    watch.on_update = lambda version: shutil.rmtree(run, ignore_errors=True) if version == 4 else None
    policy = quorate.FullSync()
    with pytest.warns(RuntimeWarning) as warned:
        result = quorate.train(
            Disturbed(), policy, engine, updates=12, out=run, recorders=(watch,), checkpoint_every=every
        )
    assert str(warned[-1].message) == result.problem and len(warned) <= 2  # one may have been written just then
    assert result.problem == f"the folder {str(run)!r} was deleted during the run; it was made again"
    assert result.out == run
    assert quorate.replay(run, Disturbed()).result.digest == result.digest
    if engine.keeps_checkpoints:
        assert quorate.resume(run, Disturbed(), updates=15).summary["updates"] == 15


def test_nowhere_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is all there is, and it is given."""
    monkeypatch.setattr(quorate.out_folder.tempfile, "mkdtemp", refuse)
    monkeypatch.setattr(quorate.engines.base, "save_parameters", refuse)
    with pytest.warns(RuntimeWarning, match="nor can all of the run be written anywhere else"):
        result = quorate.train(Toy(), quorate.FullSync(), quorate.Simulated(2), updates=3, out=tmp_path / "run")
    assert result.parameters and result.problem is not None


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_worker_that_was_never_hit_leaves_no_mark(tmp_path: Path) -> None:
    """The marks of these tests prove something: without a mishap there is none."""
    mark = Mark(tmp_path / "mark")
    assert not mark
    Mishap("load", "kill", str(mark.path)).meet("forward", [42])
    Mishap("load", "kill", str(mark.path)).meet("load", [41])
    Mishap("load", "kill", str(mark.path), after=str(tmp_path / "none*")).meet("load", [42])
    assert not mark


# ------------------------------------------------------------ where the task is defined

SCRIPTS = {
    "guarded": (OWN_TASK.format(guard=GUARD, top=""), []),
    "module": (OWN_TASK.format(guard=GUARD, top=""), ["-m", "module"]),
    "unguarded": (OWN_TASK.format(guard=NO_GUARD, top=""), []),
    "command": (OWN_TASK.format(guard=GUARD, top=""), ["-c"]),
    "input": (OWN_TASK.format(guard=GUARD, top=""), ["-"]),
    "arguments": (OWN_TASK.format(guard=GUARD, top=READS_ARGUMENTS), []),
    "data": (
        "import quorate\nfrom tests.toy_tasks import Toy\ntask = Toy()\ntask.text = 'if __name__ == \"__main__\":'\n"
        "print(quorate.train(task, quorate.FullSync(), quorate.Local(1), updates=2).summary['updates'])",
        ["-c"],
    ),
}


@pytest.fixture(scope="module", autouse=True)
def scripts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Those that the selected tests will ask for; they run while the other tests do, since each takes seconds."""
    folder, begun = tmp_path_factory.mktemp("scripts"), {}
    chosen = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    for name in (item.callspec.params.get("script") for item in chosen):
        if name is None:
            continue
        text, how = SCRIPTS[name]
        (folder / f"{name}.py").write_text(text)
        command = {"-c": ["-c", text], "-": ["-"]}.get(how[0] if how else "", how or [f"{name}.py"])
        begun[name] = subprocess.Popen(
            [sys.executable, "-W", "error", *command, "--batch", "4"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        process = begun[name]
        assert process.stdin is not None
        if how == ["-"]:
            process.stdin.write(text)
        process.stdin.close()
        process.stdin = None
    yield begun
    for process in begun.values():
        process.kill()
        process.communicate()


def ending(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=50)
    return process.returncode, output, errors


@pytest.mark.long  # a guard alone; the script below has one, too
@pytest.mark.parametrize("script", ["guarded", "module"])
def test_a_task_of_a_script_with_a_guard(scripts: dict[str, subprocess.Popen[str]], script: str) -> None:
    status, output, errors = ending(scripts[script])
    assert status == 0, errors
    assert output.startswith("{'applied': 80, 'distinct': 40}") and len(output.splitlines()) == 1


@pytest.mark.parametrize("script", ["unguarded"])
def test_a_script_without_a_guard_is_told_to_have_one(scripts: dict[str, subprocess.Popen[str]], script: str) -> None:
    status, output, errors = ending(scripts[script])
    assert (status, output) == (1, "")
    assert errors.splitlines()[-1] == (
        "quorate.errors.BadInput: the script starts a run when a worker process imports it; "
        'put what starts the run under: if __name__ == "__main__":'
    )


@pytest.mark.parametrize("script", ["command", pytest.param("input", marks=pytest.mark.long)])
def test_a_task_of_an_interactive_session(scripts: dict[str, subprocess.Popen[str]], script: str) -> None:
    status, output, errors = ending(scripts[script])
    assert (status, output) == (1, "")
    assert errors.splitlines()[-1] == (
        "quorate.errors.BadInput: task __main__:Mine is defined in an interactive session, which a worker process "
        "cannot import; move it into a module, e.g. my_task.py, and give 'my_task.py:Mine'"
    )


@pytest.mark.parametrize("script", ["arguments"])
def test_a_script_that_reads_its_arguments_above_the_guard(
    scripts: dict[str, subprocess.Popen[str]], script: str
) -> None:
    """As multiprocessing allows: there sys.argv is the same in every process."""
    status, output, errors = ending(scripts[script])
    assert status == 0, errors
    assert output.startswith("{'applied': 80, 'distinct': 40}") and len(output.splitlines()) == 1


@pytest.mark.parametrize("script", ["data"])
def test_a_task_whose_data_speaks_of_main(scripts: dict[str, subprocess.Popen[str]], script: str) -> None:
    """As a data set of Python programs does."""
    status, output, errors = ending(scripts[script])
    assert (status, output.strip()) == (0, "2"), errors
