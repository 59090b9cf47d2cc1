"""The wheel: built, installed into a fresh environment that has what its extras name and no more, and used there."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("build")
pytest.importorskip("typer")
if not list(metadata.distributions(name="pip")):  # importing it would turn off what setuptools does to distutils
    pytest.skip("needs pip", allow_module_level=True)
pytest.importorskip("packaging")
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


# The checkout is not on the path, and small networks train with one thread.
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


def run(*words, cwd=None):
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, cwd=cwd, env=CLEAN)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy, so that nothing is left in the checkout."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, copy / name)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", out, copy)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel):
    source = [path.relative_to(ROOT / "src") for path in (ROOT / "src" / "espalier").rglob("*") if path.is_file()]
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == {path.as_posix() for path in source if "__pycache__" not in path.parts}


def needed(requirement):
    """The distributions that a requirement of ours, such as espalier[cli], leads to."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ahead = [Requirement(text) for text in project["dependencies"]]
    ahead += [Requirement(text) for extra in requirement.extras for text in project["optional-dependencies"][extra]]
    found = {}
    while ahead:
        one = ahead.pop()
        name = canonicalize_name(one.name)
        if (name, *sorted(one.extras)) not in found:
            found[name, *sorted(one.extras)] = distribution = metadata.distribution(one.name)
            for inner in map(Requirement, distribution.requires or ()):
                if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in ("", *one.extras)):
                    ahead.append(inner)
    return list(found.values())


def link(distribution, packages):
    """Have an installed distribution in another folder of packages as well."""
    for file in distribution.files:
        top = file.parts[0]
        if top not in ("..", "__pycache__") and not (packages / top).exists():
            (packages / top).symlink_to(distribution.locate_file(top))


def test_a_fresh_environment_runs_the_demo_and_an_example(wheel, tmp_path):
    """Torch and the rest are linked, not installed again: what demo needs, so that an undeclared package is missed."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    for distribution in needed(Requirement("espalier[cli,report]")):
        link(distribution, packages)
    said = run(tmp_path / "env/bin/espalier", "demo", "--epochs", "1", "--seeds", "1", "--quiet", cwd=tmp_path)
    assert "report.html" in said
    assert (tmp_path / "espalier-demo" / "report.html").exists()
    both = "import sys, espalier, runpy; print(espalier.__file__); runpy.run_path(sys.argv[1])"
    where, said, _ = run(python, "-c", both, ROOT / "examples" / "placed_gates.py", cwd=tmp_path).splitlines()
    assert Path(where).is_relative_to(packages)
    assert said.startswith("filters kept")
