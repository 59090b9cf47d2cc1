"""The documentation: what is generated is made from its source, tutorials run, reference and site are complete."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "docs"))
pytest.importorskip("typer")
import pages as site  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = (
    "espalier", "espalier.compact", "espalier.cost", "espalier.data", "espalier.gates", "espalier.models",
    "espalier.paper", "espalier.picture", "espalier.report", "espalier.search", "espalier.ship", "espalier.space",
    "espalier.train", "espalier.train.batched",
)  # fmt: skip


def test_the_readme_is_short_and_its_lines_too():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 120


def test_the_page_of_commands_is_that_of_the_commands():
    assert site.COMMANDS.read_text(encoding="utf-8") == site.commands(), "make it anew: make tables"


def numbers(text):
    """A text as its words, and its numbers; a bar of a table is its length."""
    text = re.sub(r"#+", lambda bar: str(len(bar[0])), text)
    found = re.findall(r"-?\d+(?:\.\d+)?", text)
    return re.sub(r"-?\d+(?:\.\d+)?", "0", text).split(), [float(number) for number in found]


def close(printed, shown):
    """The same words, and numbers nearly the same: other processors round otherwise, and runs then part."""
    words, values = numbers(printed)
    expected_words, expected = numbers(shown)
    return words == expected_words and all(abs(a - b) <= max(4, 0.3 * abs(b)) for a, b in zip(values, expected))


def test_outputs_are_compared_by_words_and_numbers():
    assert close("kept 20 of 64 ###", "kept 19 of  64 ####\n")
    assert not close("kept 20 of 64", "left 20 of 64")
    assert not close("kept 40 of 64", "kept 19 of 64")
    assert not close("kept 19", "kept 19 of 64")


@pytest.mark.parametrize("page", site.TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_from_top_to_bottom_and_its_notebook_is_the_same(page):
    text = page.read_text(encoding="utf-8")
    kept = page.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert kept == site.notebook(text), "make it anew: python docs/pages.py"
    code = [cell for cell in json.loads(kept)["cells"] if cell["cell_type"] == "code"]
    assert len(code) >= 3
    shown = ["".join("".join(output["text"]) for output in cell["outputs"]) for cell in code]
    state = torch.get_rng_state()
    try:
        for printed, expected in zip(site.printed(text), shown, strict=True):
            assert close(printed, expected), printed
    finally:
        torch.set_rng_state(state)


def test_cells_are_the_blocks_of_a_page():
    page = "# A\n\nb\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\nc\n\n```console\n$ x\n```\n"
    cells = site.cells(page)
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", "markdown", "markdown"]
    assert cells[1]["source"] == ["print(1)"]
    assert cells[1]["outputs"][0]["text"] == ["1\n"]
    assert site.rerun(page.replace("\n1\n", "\n2\n")) == page
    assert site.printed(page) == ["1\n"]


def shown():
    """The objects that the reference has, by the paths it names; `make docs` looks at those of other libraries."""
    found = {}
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for path in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            module, _, name = path.rpartition(".")
            if module.startswith("espalier.integrations."):
                continue
            found[path] = getattr(sys.modules.get(module) or importlib.import_module(module), name)
    return found


def test_every_public_name_is_in_the_reference():
    there = {id(value) for value in shown().values()}
    for package in PACKAGES:
        module = importlib.import_module(package)
        missing = [name for name in module.__all__ if id(getattr(module, name)) not in there]
        assert not missing, f"{package}: {missing} belong on a page of docs/reference"


def test_the_keys_of_a_row_are_those_that_a_run_writes(tmp_path):
    from espalier import fit

    x, y = torch.randn(64, 4), torch.randint(2, (64,))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    fit(model, (x, y), epochs=4, target=0.5, validation=(x, y), checkpoint=tmp_path / "run", quiet=True)
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    page = (ROOT / "docs" / "reference" / "formats.md").read_text(encoding="utf-8")
    table = page[page.index("### A row of") : page.index("## Runs of a study")]
    keys = {key for line in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for key in re.findall(r"`(\w+)`", line)}
    assert keys == set(row)
    named = {re.split(r"[./-]", name)[0] for name in re.findall(r"^\| `([\w./*-]+)` \|", page, re.MULTILINE)}
    assert {re.split(r"[.-]", path.name)[0] for path in (tmp_path / "run").iterdir()} - {"lock"} <= named


def nav():
    """The pages that the site's navigation leads to."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return re.findall(r": (\S+\.md)$", text[text.index("\nnav:") :], re.MULTILINE)


def test_the_navigation_has_every_page_once():
    pages = nav()
    assert len(pages) == len(set(pages))
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")} <= set(pages)
    assert all((ROOT / page).exists() for page in pages)


def test_docstrings_become_markdown():
    pytest.importorskip("griffe")
    from docstrings import markdown

    text = "Cut.\n\n``a``: one, see :func:`p.f`. ``b``: two.\nc: three\n    and docs/gates.md\n\n>>> 1 + 1\n2\n\nEnd."
    assert markdown(text, {"p.f": "p.f.f"}).splitlines() == [
        "Cut.", "", "- **a**: one, see [`p.f`][p.f.f].", "- **b**: two.", "- **c**: three",
        "    and [gates](../gates.md)", "", "```pycon", ">>> 1 + 1", "2", "```", "", "End.",
    ]  # fmt: skip


def test_the_version_is_the_same_everywhere():
    import espalier

    names = ("pyproject.toml", "CITATION.cff", "CHANGELOG.md")
    text = {name: (ROOT / name).read_text(encoding="utf-8") for name in names}
    version = espalier.__version__
    assert f'version = "{version}"' in text["pyproject.toml"]
    assert f"version: {version}" in text["CITATION.cff"]
    assert f"## {version}" in text["CHANGELOG.md"]


def unprompted(page):
    """The blocks of code on a page that no doctest runs."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [block for block in blocks if not block.startswith(">>> ")]


def test_code_on_pages_is_run():
    """As a doctest, as a tutorial, or by the test that names the page."""
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for page in sorted((ROOT / "docs").rglob("*.md")):
        if page not in site.TUTORIALS and unprompted(page):
            assert f'"{page.name}"' in tests, page.name


def test_the_code_of_gates_and_pictures(tmp_path, monkeypatch, capsys):
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    x, y = torch.rand(4, 8), torch.tensor([0, 1, 0, 1])
    names = {"espalier": importlib.import_module("espalier"), "model": model, "example_inputs": x, "x": x, "y": y}
    names |= {"criterion": torch.nn.functional.cross_entropy, "mask": torch.tensor([1.0, 0, 1, 1, 0, 0])}
    (code,) = unprompted(ROOT / "docs" / "gates.md")
    exec(code, names)
    assert names["small"][0].out_features == 3
    (code,) = unprompted(ROOT / "docs" / "pictures.md")
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert (tmp_path / "perceptron.svg").read_text() == (ROOT / "docs" / "pictures" / "perceptron.svg").read_text()
