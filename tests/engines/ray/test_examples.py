"""The cluster files in examples/ray are such as Ray takes, and say what docs/ray.md promises of them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

EXAMPLES = Path(__file__).parents[3] / "examples" / "ray"


def test_ray_accepts_the_virtual_machines() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((EXAMPLES / "cluster.yaml").read_text())
    validate_config(prepare_config(config))
    starts = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    assert all("RAY_AUTH_MODE=token" in start for start in starts if "ray start" in start)
    assert "--dashboard-host=127.0.0.1" in config["head_start_ray_commands"][-1]


def test_the_kubernetes_job_has_a_token_and_only_its_own_pods_reach_it() -> None:
    job, policy, _ = yaml.safe_load_all((EXAMPLES / "rayjob.yaml").read_text())
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    assert policy["spec"]["policyTypes"] == ["Ingress"] and all("from" in one for one in policy["spec"]["ingress"])


def test_their_commands_are_ones_that_quorate_takes() -> None:
    job, *_ = yaml.safe_load_all((EXAMPLES / "rayjob.yaml").read_text())
    _check_command(shlex.split(job["spec"]["entrypoint"]))
    comments = [line.lstrip("# ").rstrip("\\\n ") for line in (EXAMPLES / "cluster.yaml").read_text().splitlines()]
    first = next(at for at, line in enumerate(comments) if line.startswith("quorate train"))
    _check_command(shlex.split(" ".join(comments[first : first + 2])))


def _check_command(words: list[str]) -> None:
    from quorate.cli.app import app

    known: Any = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).output
    assert words[:2] == ["quorate", "train"]
    missing = [word for word in words if word.startswith("--") and word not in known]
    assert not missing
