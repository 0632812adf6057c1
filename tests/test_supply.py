"""What is installed, built and released: pinned versions, every file by its hash, the tested wheel and no other."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
TORCH = "--index-url https://download.pytorch.org/whl/cpu"

# Each lock file with what it must at least pin.
LOCKS = {
    "audit": ["pip-audit"],
    "build": [*PYPROJECT["build-system"]["requires"], "editables", "setuptools"],
    "docs": EXTRAS["docs"],
    "package": PROJECT["dependencies"],
    "tests": [*PROJECT["dependencies"], *EXTRAS["dev"]],
    "torch": ["torch"],
}
# It needs CUDA's compiler, which no job installs.
WITHOUT_LOCK = {"liger-kernel"}
# versions.yml looks at versions that nothing pins.
WORKFLOWS = ("audit", "ci", "release")


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def locked(name: str) -> dict[str, tuple[str, list[str]]]:
    """The packages of a lock file, each with its version and hashes; nothing else may stand there."""
    found: dict[str, tuple[str, list[str]]] = {}
    for line in text_of(f"requirements/{name}.txt").replace("\\\n", "").splitlines():
        if line.startswith("#"):
            continue
        pin = re.fullmatch(r"([\w.-]+)==(\S+)(?: ; [^-]+?)?((?: +--hash=sha256:[0-9a-f]{64})+) *", line)
        assert pin, f"{name}: {line[:100]}"
        package = canonicalize_name(pin[1])
        assert package not in found, f"{name}: {package} twice"
        found[package] = (pin[2], re.findall(r"sha256:(\w+)", pin[3]))
    return found


def pinned() -> dict[str, str]:
    pins = re.findall(r"^([\w.-]+)==(\S+)$", text_of("constraints.txt"), re.M)
    return {canonicalize_name(name): version for name, version in pins}


def jobs(workflow: str) -> dict[str, Any]:
    return yaml.safe_load(text_of(f".github/workflows/{workflow}.yml"))["jobs"]


def runs(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def commands(text: str) -> list[str]:
    """The single commands of a script, a step or a Dockerfile, without comments."""
    joined = re.sub(r"(?m)^\s*#.*\n", "", text).replace("\\\n", " ")
    return [" ".join(command.split()) for command in re.split(r"\n|&&|\|\||;", joined)]


def test_the_locks_are_constraints_with_hashes() -> None:
    assert sorted(LOCKS) == sorted(file.stem for file in (ROOT / "requirements").iterdir())
    versions = pinned() | {"torch": pinned()["torch"] + "+cpu"}
    everywhere: set[str] = set()
    for name in LOCKS:
        assert {package: version for package, (version, _) in locked(name).items()} == {
            package: versions.get(package, "not in constraints.txt") for package in locked(name)
        }, name
        everywhere |= set(locked(name))
    assert everywhere == set(versions) - WITHOUT_LOCK


def test_torch_has_a_wheel_for_each_python_and_processor() -> None:
    hashes = locked("torch")["torch"][1]
    pythons = [c for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert len(hashes) == len(set(hashes)) == 2 * len(pythons)


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_what_pyproject_asks_for(name: str) -> None:
    found = locked(name)
    for text in LOCKS[name]:
        asked = Requirement(text)
        package = canonicalize_name(asked.name)
        if package == "torch" and name != "torch":
            # It comes from an index of its own, whose files have other hashes.
            assert package not in found
        else:
            assert asked.specifier.contains(found[package][0]), text


def test_nothing_is_installed_without_hashes() -> None:
    """Neither by the workflows, by .ci/install nor in the image."""
    scripts = {name: "\n".join(run for job in jobs(name).values() for run in runs(job)) for name in WORKFLOWS}
    scripts |= {name: text_of(name) for name in (".ci/install", "Dockerfile")}
    installing = [
        (name, command)
        for name, script in scripts.items()
        for command in commands(script.replace("RUN ", ""))
        if re.search(r"\bpip (-q )?(install|download|wheel)\b|\buv\b|\bpipx?\b run", command)
    ]
    assert len(installing) > 6
    for name, command in installing:
        assert "--no-deps" in command, (name, command)
        assert "--require-hashes" in command or "--no-index" in command, (name, command)


def test_torch_alone_comes_from_its_own_index() -> None:
    """A second index beside PyPI could give any package of any name, were its version higher."""
    files = [*(ROOT / ".github" / "workflows").iterdir(), *(ROOT / ".ci").iterdir(), ROOT / "Dockerfile"]
    for file in [*files, *(ROOT / "requirements").iterdir()]:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"extra[-_]index|trusted[-_]host|PIP_INDEX", text, re.I), file.name
        for command in commands(text):
            if "index-url" in command and "pip install" in command:
                assert command.endswith("torch.txt") and TORCH in command, command
    cases = re.findall(r"^ +(\S+)\) from\+=\((.*)\) ;;$", text_of(".ci/install"), re.M)
    assert [name for name, options in cases if TORCH in options] == ["torch"]
    assert "index" not in dict(cases)["tests"]


def test_the_released_wheel_is_the_tested_one() -> None:
    release = jobs("release")
    assert release["tests"]["needs"] == "build"
    assert release["publish"]["needs"] == ["build", "tests"]
    assert release["publish"]["permissions"] == {"id-token": "write"}
    # What builds it runs nothing of others but the backend.
    installs = [run for run in runs(release["build"]) if "install" in run]
    assert installs == ['.ci/install "$RUNNER_TEMP/build" build']
    # What was built is what is tested, published and shown.
    assert "sha256sum dist/*" in " ".join(runs(release["build"]))
    for name in ("tests", "publish", "page"):
        assert runs(release[name])[0] == 'sha256sum --check --strict <<< "$DIGESTS"'
        assert release[name]["env"]["DIGESTS"] == "${{ needs.build.outputs.digests }}"
    # The checkout's own package is gone before the tests run.
    tests = commands("\n".join(runs(release["tests"])))
    (wheel,) = [at for at, command in enumerate(tests) if command.startswith(".venv/bin/python -m pip install")]
    (run,) = [at for at, command in enumerate(tests) if ".venv/bin/python -m pytest" in command]
    assert tests[wheel].endswith("--no-index --no-deps dist/*.whl")
    assert wheel < tests.index("rm -r surgeon") < run
    assert release["tests"]["strategy"]["matrix"] == jobs("ci")["tests"]["strategy"]["matrix"]


def test_known_vulnerabilities_are_looked_for() -> None:
    workflow = yaml.safe_load(text_of(".github/workflows/audit.yml"))
    # YAML reads the key `on` as true.
    assert {"schedule", "pull_request"} <= set(workflow[True])
    assert runs(workflow["jobs"]["audit"])[-1] == (
        ".venv/bin/python -m pip_audit --strict --disable-pip --no-deps -r constraints.txt"
    )
    renewed = yaml.safe_load(text_of(".github/dependabot.yml"))["updates"]
    assert {entry["package-ecosystem"] for entry in renewed} == {"github-actions", "pip", "docker"}


def built(folder: Path, name: str = "model_surgeon", version: str = "9.8.7") -> Path:
    """A wheel that can be installed, with one empty module."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},"
        for path, text in files.items()
    ]
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": "\n".join([*record, f"{info}/RECORD,,"])}.items():
            archive.writestr(path, text)
    return wheel


def test_a_file_with_another_hash_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "install").write_text(text_of(".ci/install"), encoding="utf-8")
    (tmp_path / "requirements").mkdir()
    for name in ("listed", "planted"):
        wheel = built(tmp_path, name)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        pin = f"{name}==9.8.7 --hash=sha256:{digest}\n"
        (tmp_path / "requirements" / f"{name}.txt").write_text(pin, encoding="utf-8")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("more.py", "")
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    ran = subprocess.run(
        ["bash", ".ci/install", "made", "listed", "planted"],
        cwd=tmp_path,
        env=outside
        | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
        | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1 and "DO NOT MATCH THE HASHES" in ran.stderr and "planted" in ran.stderr, ran.stderr
    (site,) = (tmp_path / "made" / "lib").glob("python*/site-packages")
    assert (site / "listed.py").is_file() and not (site / "planted.py").exists()


def test_the_bill_of_materials_lists_what_is_released_and_locked(tmp_path: Path) -> None:
    wheel = built(tmp_path)
    (tmp_path / "surgeon-9.8.7.tar.gz").write_bytes(b"sources")
    files = sorted(tmp_path.iterdir())
    printed = subprocess.run(
        [sys.executable, ROOT / ".ci" / "sbom", *files], capture_output=True, text=True, check=True
    )
    bill = json.loads(printed.stdout)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")

    def listed(component: dict[str, Any]) -> tuple[str, str, list[str]]:
        hashes = [entry["content"] for entry in component["externalReferences"][0]["hashes"]]
        assert component["purl"].startswith(f"pkg:pypi/{canonicalize_name(component['name'])}@"), component["purl"]
        return canonicalize_name(component["name"]), component["version"], sorted(hashes)

    digests = sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    assert wheel in files and listed(bill["metadata"]["component"]) == ("model-surgeon", "9.8.7", digests)
    assert sorted(map(listed, bill["components"])) == sorted(
        (name, version, sorted(hashes))
        for lock in ("package", "torch")
        for name, (version, hashes) in locked(lock).items()
    )
