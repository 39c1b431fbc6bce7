"""The shape of the house: what may import what, and what the core needs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parent.parent / "src" / "quorate"

# From left to right, as in the design. A part may import itself and what stands before it.
FLOW = [
    ("errors", "machine", "seeds", "number_format"),
    ("measuring",),  # stands alone: it is for scripts that do not train with quorate
    ("events", "noise", "schema"),
    ("policies",),
    ("user_code",),
    ("flat", "faults", "network", "latency", "task", "tasks", "ledger", "tensor_state"),
    ("checkpoint",),
    ("learner",),
    ("trace",),
    ("out_folder", "stopping"),
    ("engines",),
    ("coordinator", "metrics"),
    ("checkpoint_schedule",),
    ("run",),
    ("training",),
    ("trace_replay",),
    ("planning",),
    ("reporting",),
    ("data_parallel",),
    ("_public", "__init__"),
    ("cli", "__main__"),
]
PLACE = {name: index for index, names in enumerate(FLOW) for name in names}


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found.add(node.module or "")
    return found


def part(name: str) -> str:
    return name.split(".")[1] if "." in name else "__init__"


FILES = sorted(SOURCE.rglob("*.py"))


def test_nothing_imports_what_stands_to_its_right() -> None:
    for file in FILES:
        own = file.relative_to(SOURCE).parts[0].removesuffix(".py")
        for name in imports(file):
            if name == "quorate" or name.startswith("quorate."):
                assert PLACE[part(name)] <= PLACE[own], f"{file.relative_to(SOURCE)} imports {name}"


@pytest.mark.parametrize("folder", ["policies", "latency"])
def test_policies_and_latencies_know_neither_torch_nor_a_clock(folder: str) -> None:
    for file in (SOURCE / folder).rglob("*.py"):
        foreign = {name.split(".")[0] for name in imports(file)} - {"quorate"}
        assert foreign <= set(sys.stdlib_module_names), f"{file.name} imports {foreign}"
        if folder == "policies":
            assert not foreign & {"time", "datetime", "os", "io", "socket", "threading", "random", "pathlib"}


#: Inside engines/, likewise: engines know what they share, and not each other.
ENGINES = [("base",), ("shared",), ("simulated", "local", "ray"), ("__init__",)]
ENGINE_PLACE = {name: index for index, names in enumerate(ENGINES) for name in names}


def test_engines_do_not_import_each_other() -> None:
    for file in (SOURCE / "engines").rglob("*.py"):
        own = file.relative_to(SOURCE / "engines").parts[0].removesuffix(".py")
        for name in imports(file):
            if name.startswith("quorate.engines."):
                other = name.split(".")[2]
                assert other == own or ENGINE_PLACE[other] < ENGINE_PLACE[own], f"{file}: imports {name}"


def modules() -> dict[str, Path]:
    names = {file: ".".join(("quorate", *file.relative_to(SOURCE).with_suffix("").parts)) for file in FILES}
    return {name.removesuffix(".__init__"): file for file, name in names.items()}


def importers() -> dict[str, set[str]]:
    """By module, the modules that import it or a name of it."""
    known = modules()
    found: dict[str, set[str]] = {name: set() for name in known}
    for own, file in known.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                named = [one if one in known else str(node.module) for one in inside]
            else:
                continue
            for one in named:
                if one in known and one != own:
                    found[one].add(own)
    return found


#: Loaded by name: the entry point, ready tasks, modules that users import.
BY_NAME = {"quorate.__main__"}
FOR_USERS = ("quorate.tasks.", "quorate.data_parallel.integrations.")


def test_every_module_is_imported_by_somebody() -> None:
    packages = {name for name, file in modules().items() if file.name == "__init__.py"}
    idle = {name for name, by in importers().items() if not by and not name.startswith(FOR_USERS)}
    assert idle - BY_NAME - packages == set()


def test_no_public_class_name_is_used_twice() -> None:
    places: dict[str, list[str]] = {}
    for name, file in modules().items():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


# ------------------------------------------------------------ size: a reader's time

MOST_LINES_IN_A_FILE = 600
SHORT_LINES = 60
#: The project's own promise. Lower a limit when the code allows it; raise one only with a reason in the commit message.
MOST_FILES = 175
MOST_LINES = 36_500
MOST_WITH_ONE_IMPORTER = 25
MOST_SHORT_FILES = 9
#: One file a policy and one file a command, however short, and imported where they are listed.
ONE_FILE_EACH = ("quorate.policies.", "quorate.cli.")


def line_counts() -> dict[str, int]:
    """By file, relative to src/quorate."""
    return {str(file.relative_to(SOURCE)): len(file.read_text().splitlines()) for file in FILES}


def test_no_file_is_too_long_to_read_in_one_sitting() -> None:
    long = {name: lines for name, lines in line_counts().items() if lines > MOST_LINES_IN_A_FILE}
    assert not long, f"longer than {MOST_LINES_IN_A_FILE} lines; cut along a seam that a reader would look for"


def test_the_library_does_not_grow_unnoticed() -> None:
    counts = line_counts()
    assert len(counts) <= MOST_FILES, (
        f"src/quorate has {len(counts)} files, and promises {MOST_FILES} at most: put new code where a reader would "
        f"look for it first, or fold a small file into the one that uses it"
    )
    lines = sum(counts.values())
    assert lines <= MOST_LINES, (
        f"src/quorate has {lines:,} lines, and promises {MOST_LINES:,} at most: look for code that nobody calls and "
        f"for what is there twice; if all lines are worth reading, raise MOST_LINES and say why in the commit message"
    )


def test_few_modules_serve_only_one_other() -> None:
    """A file of its own should be worth the jump. Packages list what they hold, and are not counted as readers."""
    packages = {name for name, file in modules().items() if file.name == "__init__.py"}
    alone = {}
    for name, by in importers().items():
        is_listed = name in packages or by & packages or name.startswith((*ONE_FILE_EACH, *FOR_USERS))
        if len(by) == 1 and not is_listed:
            alone[name] = min(by)
    assert len(alone) <= MOST_WITH_ONE_IMPORTER, (
        f"{len(alone)} modules are imported by one other only, {MOST_WITH_ONE_IMPORTER} at most are promised: fold one "
        f"into its importer, if both are one thought and have less than {MOST_LINES_IN_A_FILE} lines together: {alone}"
    )


def test_few_files_are_too_short_to_stand_alone() -> None:
    short = {}
    for name, file in modules().items():
        lines = len(file.read_text().splitlines())
        if lines < SHORT_LINES and not file.name.startswith("__") and not name.startswith(ONE_FILE_EACH):
            short[name] = lines
    assert len(short) <= MOST_SHORT_FILES, (
        f"{len(short)} files have less than {SHORT_LINES} lines, {MOST_SHORT_FILES} at most are promised: put one "
        f"where its readers are: {short}"
    )


# ------------------------------------------------------------ what the core needs


TORCH_AND_ITS_OWN = [
    "torch",
    "torchgen",
    "functorch",
    "typing_extensions.py",
    "filelock",
    "fsspec",
    "jinja2",
    "markupsafe",
    "mpmath",
    "networkx",
    "sympy",
]

SMALL_RUN = """
import importlib.util, pathlib, sys, warnings
warnings.simplefilter("ignore")  # torch misses numpy aloud
import quorate
for name in ("numpy", "rich", "typer", "matplotlib", "safetensors"):
    assert importlib.util.find_spec(name) is None, f"{name} is there after all"
out = pathlib.Path(sys.argv[1])
engine = quorate.Simulated(4, "shifted-exp:1,1")
result = quorate.train("digits", quorate.BackupSync(3, 1), engine, updates=3, out=out)
assert quorate.replay(out).result.digest == result.digest
assert sorted(file.name for file in out.iterdir()) == ["summary.json", "trace.jsonl"]
print("fine")
"""


def test_the_core_runs_with_torch_and_the_standard_library_alone(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    installed = Path(torch.__file__).parent.parent
    for name in TORCH_AND_ITS_OWN:
        (packages / name).symlink_to(installed / name)
    command = [sys.executable, "-S", "-c", SMALL_RUN, str(tmp_path / "run")]
    paths = f"{packages}:{SOURCE.parent}"
    environment = {"PYTHONPATH": paths, "PATH": "", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.stdout.strip() == "fine", done.stderr
