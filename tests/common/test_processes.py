"""Nothing in the working directory is code: files beside a study that are called as modules are not imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from surgeon.common.processes import leave_out_working_folder, start_python
from tests.plugin.test_plugin import install

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("typer", "click", "rich", "yaml", "pydantic", "pydantic_core", "torch", "transformers", "numpy")
PLUGIN = (
    "[surgeon.operations]\nplanted = surgeon_planted:Planted\n[surgeon.families]\nplanted = surgeon_planted:Planted\n"
)
# The command `surgeon`, as installing it makes the file.
SCRIPT = "import sys\nfrom surgeon.__main__ import main\nif __name__ == '__main__':\n    sys.exit(main())\n"


def plant(folder: Path, but: tuple[str, ...]) -> None:
    """A file for every module that could be asked for, and a distribution with plugins."""
    folder.mkdir()
    for name in {*sys.stdlib_module_names, *LIBRARIES} - {*but}:
        (folder / f"{name}.py").write_text(f"raise SystemExit('planted: {name}')\n", encoding="utf-8")
    install(folder, name="surgeon_planted", entry_points=PLUGIN, code="raise SystemExit('planted: plugin')\n")


def modules_of(*command: str, folder: Path) -> tuple[str, ...]:
    ran = subprocess.run([sys.executable, *command], cwd=folder, env=environment(), capture_output=True, check=True)
    return tuple(ran.stdout.decode().split())


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | {"PYTHONDONTWRITEBYTECODE": "1"} | more


def test_the_command_and_the_module_import_none_of_it(tmp_path: Path) -> None:
    """`schema` reads the registry of operations, plugins among them.

    What Python imports before the first line of surgeon's is left out; where PYTHONPATH has an empty entry, also what
    surgeon imports until it is gone.
    """
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "surgeon").write_text(SCRIPT, encoding="utf-8")
    path = str(ROOT)
    (tmp_path / "probe.py").write_text("import sys\nprint(*sys.modules)\n", encoding="utf-8")
    plant(tmp_path / "m", modules_of("-m", "probe", folder=tmp_path))
    begun = modules_of("-c", "import surgeon.common.processes, sys; print(*sys.modules)", folder=ROOT)
    plant(tmp_path / "empty", (*begun, "re", "sitecustomize", "usercustomize"))
    started = [
        subprocess.Popen(
            [sys.executable, *command, "schema"],
            cwd=tmp_path / folder,
            env=environment(PYTHONPATH=pythonpath),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, folder, pythonpath in (
            (["-m", "surgeon"], "m", path),
            ([str(tmp_path / "bin" / "surgeon")], "empty", f":{path}"),
        )
    ]
    for process in started:
        told, said = process.communicate()
        assert process.returncode == 0, said[-2000:]
        assert '"insert_layers"' in told and "planted" not in told + said


PRINTS = (
    "import os, sys; print(*sys.path, sep='\\n'); print(os.environ.get('PYTHONPATH'), os.environ['PYTHONSAFEPATH'])"
)


@pytest.mark.parametrize("given", [None, "", ":", "/a::/b", "/a:"])
def test_what_the_package_starts_has_it_nowhere(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = {} if given is None else {"PYTHONPATH": given}
    started = start_python(
        ["-S", "-c", PRINTS], python=[sys.executable], environment=environment(**more), stdout=subprocess.PIPE
    )
    *path, last = started.communicate()[0].decode().splitlines()
    assert path and not {"", ".", str(tmp_path)} & {*path}
    named = None if given is None else ":".join(filter(None, given.split(":")))
    assert last == f"{named} 1"


def test_a_folder_that_is_named_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given, kept in {":/a": False, f"{tmp_path}:": True, ".::/a": True, "/a": True}.items():
        monkeypatch.setenv("PYTHONPATH", given)
        monkeypatch.setenv("PYTHONSAFEPATH", "")
        monkeypatch.setattr(sys, "path", ["/a", str(tmp_path), "/b"])
        leave_out_working_folder()
        assert (str(tmp_path) in sys.path) == kept, given
        assert os.environ["PYTHONPATH"] == ":".join(filter(None, given.split(":")))
        assert os.environ["PYTHONSAFEPATH"] == "1"
