"""What holds for the project as a whole: its public names, its safety rules, its examples."""

from __future__ import annotations

import ast
import os
import re
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
from conftest import TESTS, Pool

import zmqrl

ROOT = TESTS.parent
SOURCES = sorted((ROOT / "zmqrl").rglob("*.py"))
THIN = {"numpy", "zmq", "msgpack", "msgpack_numpy", "zmqrl", "torch"}


def test_the_public_names_are_these() -> None:
    assert set(zmqrl.__all__) == {"AsyncPolicyClient", "Pending", "PolicyClient", "ZmqrlError"}
    assert all(hasattr(zmqrl, name) for name in zmqrl.__all__)


def test_no_part_of_the_package_unpickles_or_evaluates_what_it_receives() -> None:
    forbidden = {
        "pickle",
        "cloudpickle",
        "dill",
        "marshal",
        "shelve",
        "recv_pyobj",
        "send_pyobj",
        "eval",
    }
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = set()
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                module = getattr(node, "module", None) or ""
                names = {alias.name.split(".")[0] for alias in node.names} | {module.split(".")[0]}
            elif isinstance(node, ast.Call):
                function = node.func
                names = {getattr(function, "id", ""), getattr(function, "attr", "")} - {"eval"}
                if isinstance(function, ast.Name) and function.id in ("eval", "exec"):
                    names.add("eval")
                assert not any(k.arg == "allow_pickle" for k in node.keywords), path
            assert not names & forbidden, f"{path}: {names & forbidden}"


def test_no_socket_option_and_no_tracker_is_used_that_fails_in_silence() -> None:
    # The first two end the process when an identity is taken; a tracker knows the last frame only.
    for path in SOURCES:
        text = path.read_text()
        for name in ("CONNECT_ROUTING_ID", "CONNECT_RID", "track=", "zmq.REQ", "zmq.REP", "zmq.PUB"):
            assert not re.search(rf"{re.escape(name)}\b", text), f"{path} uses {name}"


def test_the_stock_decoder_never_sees_received_bytes() -> None:
    text = (ROOT / "zmqrl" / "transport" / "codec.py").read_text()
    used = set(re.findall(r"msgpack_numpy\.(\w+)", text))
    assert used == {"encode"}


def test_the_client_imports_only_its_four_dependencies() -> None:
    modules = {"errors", "spaces", "trajectory"}
    thin = [ROOT / "zmqrl" / f"{name}.py" for name in (*modules, "__init__")]
    rooms = {"client", "recording", "transport"}
    for room in rooms:
        thin += (ROOT / "zmqrl" / room).rglob("*.py")
    for path in thin:
        for node in ast.walk(ast.parse(path.read_text())):
            imported = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [node.module or ""]
            for module in imported:
                top = module.split(".")[0]
                assert top in THIN | set(sys.stdlib_module_names), f"{path} imports {module}"
                if top == "zmqrl":
                    assert module.split(".")[1] in modules | rooms


def test_a_room_imports_none_of_the_rooms_below_it() -> None:
    rooms = [
        "errors",
        "transport",
        "spaces",
        "trajectory",
        "recording",
        "client",
        "allocator",
        "process",
        "config",
        "imports",
        "telemetry",
        "broker",
    ]
    above = {room: set(rooms[:i]) for i, room in enumerate(rooms)}
    thin = {"errors", "transport", "spaces", "trajectory"}
    above["rollout"] = {*thin, "imports", "allocator"}
    above["env"] = {*thin, "recording", "client", "config", "imports", "telemetry", "process"}
    above["learner"] = {*thin, "config", "imports", "telemetry", "process", "rollout"}
    above["rlinf"] = {"errors", "config"}
    for path in SOURCES:
        room = path.relative_to(ROOT / "zmqrl").parts[0].removesuffix(".py")
        for imported in re.findall(r"^\s*from zmqrl\.([\w.]+) import", path.read_text(), re.M):
            if room in above and imported.split(".")[0] != room:
                allowed = {imported, imported.split(".")[0]} & above[room]
                assert allowed, f"{path} imports zmqrl.{imported}"


def test_the_readme_shows_the_example_as_it_is() -> None:
    example = (ROOT / "examples" / "thin_client.py").read_text()
    assert example in (ROOT / "README.md").read_text()


def test_the_example_steers_its_hands_to_the_goals(pool: Pool) -> None:
    pool.start_broker()
    pool.launcher.start(
        "rollout-0", ["start-rollout-worker", *pool.overrides, "--policy=zmqrl.demo:ReachPolicy"]
    )
    pool.wait_for_workers(1)
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "thin_client.py", pool.frontend],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.strip() == "distance to the goal: [0. 0. 0. 0.]"


@pytest.mark.timeout(300)
def test_the_base_install_runs_the_example_in_an_empty_environment(pool: Pool, tmp_path: Path) -> None:
    pool.start_broker()
    pool.launcher.start(
        "rollout-0", ["start-rollout-worker", *pool.overrides, "--policy=zmqrl.demo:ReachPolicy"]
    )
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "--quiet", ROOT, source], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", source], check=True, timeout=240)
    check = """
import importlib.util, sys
from zmqrl import PolicyClient
assert not any(importlib.util.find_spec(name) for name in ("torch", "gymnasium", "pydantic", "yaml"))
loaded = {name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
print(sorted(loaded))
"""
    subprocess.run([python, "-c", check], check=True, cwd=tmp_path)
    pool.wait_for_workers(1)
    done = subprocess.run(
        [python, ROOT / "examples" / "thin_client.py", pool.frontend],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=tmp_path,
    )
    assert done.stdout.strip() == "distance to the goal: [0. 0. 0. 0.]", done.stderr
    done = subprocess.run(
        [python, ROOT / "examples" / "own_asyncio.py", pool.frontend],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=tmp_path,
    )
    assert done.stdout.count("distance to the goal 0.000") == 8, done.stderr
    refused = subprocess.run(
        [python, "-m", "zmqrl", "start-broker"], capture_output=True, text=True, cwd=tmp_path
    )
    assert refused.returncode == 1
    assert "zmqrl[env]" in refused.stderr


@pytest.mark.alone
def test_importing_the_client_takes_little_more_than_numpy_and_zmq() -> None:
    # Compiled once, as an installed package is.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}

    def seconds(statement: str) -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True, env=environment)
        return time.perf_counter() - begin

    seconds("from zmqrl import PolicyClient")
    ratios = [seconds("from zmqrl import PolicyClient") / seconds("import numpy, zmq") for _ in range(9)]
    assert statistics.median(ratios) < 1.4


def test_the_page_of_configuration_keys_is_what_the_code_reads() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_configuration.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout == (ROOT / "docs" / "configuration.md").read_text()
