import json
import sys
import traceback

import pytest

from zmqrl.errors import ConfigError
from zmqrl.imports import import_object


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current directory of its own, with the import state put back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_a_name_in_an_installed_module_is_found():
    assert import_object("json:dumps") is json.dumps


def test_a_module_of_the_current_directory_is_found(here):
    (here / "local_policy.py").write_text("def make(): return 7\n")
    assert import_object("local_policy:make")() == 7


def test_a_name_in_a_file_is_found(here):
    (here / "sub").mkdir()
    (here / "sub" / "policy.py").write_text("def make(): return 8\n")
    assert import_object("sub/policy.py:make")() == 8
    assert import_object(f"{here}/sub/policy.py:make")() == 8


def test_a_file_is_run_once(here):
    (here / "policy.py").write_text("class Policy: pass\n")
    assert import_object("policy.py:Policy") is import_object("./policy.py:Policy")


def test_files_of_one_name_do_not_meet(here):
    for folder in ("a", "b"):
        (here / folder).mkdir()
        (here / folder / "policy.py").write_text(f"NAME = {folder!r}\n")
    assert import_object("a/policy.py:NAME") == "a"
    assert import_object("b/policy.py:NAME") == "b"


def test_a_file_may_import_its_neighbour(here):
    (here / "sub").mkdir()
    (here / "sub" / "neighbour_network.py").write_text("SIZE = 3\n")
    (here / "sub" / "policy.py").write_text("from neighbour_network import SIZE\n")
    assert import_object("sub/policy.py:SIZE") == 3


@pytest.mark.parametrize("reference", ["json", "json:", ":dumps", "json:not a name", "", "json.dumps"])
def test_a_malformed_reference_names_the_two_forms(reference):
    with pytest.raises(ConfigError, match=r"expected module:name or path/to/file\.py:name"):
        import_object(reference)


def test_a_missing_name_is_answered_with_the_near_ones():
    with pytest.raises(ConfigError, match=r"json has no 'dump5'; did you mean 'dump' or 'dumps'"):
        import_object("json:dump5")


@pytest.mark.parametrize("module", ["no_such_module_x", "json.no_such_part", "no_such_x.part"])
def test_a_missing_module_is_named(module):
    with pytest.raises(ConfigError, match=f"there is no module '{module}'"):
        import_object(f"{module}:make")


def test_a_missing_file_is_named_with_the_place_looked_in(here):
    with pytest.raises(ConfigError, match=rf"there is no file policy\.py \(looked for {here}"):
        import_object("policy.py:make")


@pytest.mark.parametrize("source", ["broken_inside", "broken_inside.py"])
def test_an_error_inside_the_import_is_shown_with_its_place_and_cause(here, source):
    (here / "broken_inside.py").write_text("x = 1\nraise RuntimeError('no licence')\n")
    with pytest.raises(ConfigError, match=r"RuntimeError: no licence .*broken_inside.py, line 2") as e:
        import_object(f"{source}:make")
    assert "raise RuntimeError('no licence')" in "".join(traceback.format_exception(e.value))


def test_a_module_missing_inside_the_import_is_not_mistaken_for_the_one_asked_for(here):
    (here / "needs_more.py").write_text("import no_such_module_x\n")
    with pytest.raises(ConfigError, match=r"importing needs_more raised .*'no_such_module_x'.*line 1"):
        import_object("needs_more:make")


def test_a_file_that_failed_is_run_again_the_next_time(here):
    path = here / "policy.py"
    path.write_text("raise SystemExit(3)\n")
    with pytest.raises(ConfigError, match="SystemExit: 3"):
        import_object("policy.py:make")
    path.write_text("make = 'a good one'\n")
    assert import_object("policy.py:make") == "a good one"


def test_an_error_of_many_lines_is_told_in_one_with_its_beginning_and_its_end(here):
    (here / "wordy.py").write_text("raise OSError('begin\\n\\n' + 'code\\n' * 1000 + 'the reason')\n")
    with pytest.raises(ConfigError, match=r"raised OSError: begin code .* … .* the reason \(") as error:
        import_object("wordy:make")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000
