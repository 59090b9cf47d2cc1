"""Every example of the docstrings, the README and the docs runs and prints what it says."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = [path for path in sorted(SRC.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]
PAGES = [p for p in sorted((ROOT / "docs").rglob("*.md")) if ">>> " in p.read_text(encoding="utf-8")]


def name(path):
    return str(path.relative_to(ROOT))


def module_name(path):
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def run(tests):
    """How many examples ran; fails with doctest's own account of what differs."""
    runner, report = doctest.DocTestRunner(optionflags=FLAGS, verbose=False), []
    for test in tests:
        runner.run(test, out=report.append)
    assert not runner.summarize(verbose=False).failed, "".join(report)
    return runner.tries


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_docstring_examples(path):
    try:
        module = importlib.import_module(module_name(path))
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "espalier":
            raise
        pytest.skip(f"{name(path)} needs {error.name}, an extra that is not installed")
    assert run(doctest.DocTestFinder(exclude_empty=True).find(module)) > 0


def python_blocks(page):
    """The page with everything outside its python blocks blanked, so that line numbers stay true."""
    kept, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = re.match(r"\s*```(\w*)", line)
        if fence:
            inside = not inside and fence.group(1) in {"python", "pycon", "py"}
            kept.append("")
        else:
            kept.append(line if inside else "")
    return "\n".join(kept) + "\n"


def page_test(page):
    return doctest.DocTestParser().get_doctest(python_blocks(page), {}, name(page), str(page), 0)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=name)
def test_page_examples(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what an example writes
    assert run([page_test(page)]) > 0, "an example that runs is a ```python block with >>> prompts"


def test_a_wrong_example_is_caught(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n```python\n>>> 1 + 1\n3\n```\n```\n>>> not python\n```\n", encoding="utf-8")
    test = doctest.DocTestParser().get_doctest(python_blocks(page), {}, "page", str(page), 0)
    assert [example.lineno for example in test.examples] == [2]
    with pytest.raises(AssertionError, match="Expected"):
        run([test])
