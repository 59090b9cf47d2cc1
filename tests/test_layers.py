"""The architecture, read from the source: imports point down, files stay short, nothing is loaded by pickle."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "espalier"
FILES = sorted(SRC.rglob("*.py"))
OURS = [path for folder in ("src", "tests", "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]

# Rows of docs/design.md from the bottom. A folder may import itself and any row below its own.
ROWS = [
    {"space", "files", "records", "schema"},
    {"cost"},
    {"search"},
    {"compact"},
    {"gates"},
    {"train"},
    {"integrations", "models", "picture"},
    {"ship"},
    {"report", "study"},
    {"paper"},
    {"cli"},
]
BESIDE = {
    "compact",
    "gates",
}  # one row that is one idea in two folders: their files may import each other's, in no circle
LOOSE = {"files", "records", "schema", "space"}  # files of the bottom layer; they import each other, nothing else
HEIGHT = {layer: height for height, row in enumerate(ROWS) for layer in row}


def name(path):
    return str(path.relative_to(ROOT))


def imports(path):
    """Every module a file imports, anywhere in it: (dotted name, imported names, line)."""
    package = path.relative_to(ROOT / "src").parent.parts if path.is_relative_to(ROOT / "src") else ()
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, (), node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = tuple(alias.name for alias in node.names)
            if (
                module == "espalier"
            ):  # `from espalier import search` names a layer, `from espalier import Cost` the root
                found += [(f"espalier.{n}" if n in {*HEIGHT, "data"} else "espalier", (n,), node.lineno) for n in names]
            else:
                found.append((module, names, node.lineno))
    return found


def layer_of(path):
    """The folder directly under the package, a file that is a layer by itself, or None for the package's __init__."""
    parts = path.relative_to(SRC).parts
    return parts[0] if len(parts) > 1 else path.stem if path.stem in LOOSE else None


def test_every_folder_is_a_layer_and_every_file_is_in_one():
    folders = {path.name for path in SRC.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders <= {*HEIGHT, "data"}, "a new folder needs its row in docs/design.md and here"
    assert {"cost", "search"} <= folders
    loose = {path.stem for path in SRC.glob("*.py")} - {"__init__", "__main__"}
    assert loose == LOOSE


def upward(path, layer):
    """What a file of a layer imports that it may not: one line of text each."""
    wrong = []
    for module, names, line in imports(path):
        if module.split(".")[0] != "espalier" or layer is None:
            continue
        target = module.split(".")[1] if "." in module else None
        where = f"{path.name}:{line} of {layer} imports {module}"
        if target == layer:
            continue
        if target is None:
            if layer != "cli" and names != ("__version__",):
                wrong.append(f"{where}: the root re-exports every layer, so it is above all of them")
        elif layer in {"data", *LOOSE}:
            if target not in LOOSE:
                wrong.append(f"{where}: {layer} imports no layer but the bottom one")
        elif target in LOOSE:
            continue
        elif target == "data":
            if layer in {"space", "cost", "search"}:
                wrong.append(f"{where}: the lowest layers know no data")
        elif {layer, target} == BESIDE:
            continue
        elif target not in HEIGHT or HEIGHT[target] >= HEIGHT[layer]:
            wrong.append(f"{where}: imports point down only")
    return wrong


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_point_down(path):
    assert upward(path, layer_of(path)) == []


@pytest.mark.parametrize(
    ("layer", "code"),
    [
        ("space", "from espalier.cost import Cost"),
        ("cost", "def late():\n    import espalier.search.search"),
        ("search", "from espalier import Space"),
        ("search", "import espalier"),
        ("gates", "from espalier import train"),
        ("report", "from espalier.study import study"),
        ("data", "from espalier.cost import Cost"),
        ("search", "from espalier.data import digits"),
        ("files", "from espalier.cost import Cost"),
    ],
)
def test_the_layer_test_can_fail(layer, code, tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(code, encoding="utf-8")
    assert upward(path, layer)
    path.write_text("from espalier.space import Space\nimport torch, json\n", encoding="utf-8")
    assert layer == "space" or not upward(path, layer)


def circle(graph):
    """The modules of one circle of imports, or None. graph: which modules each module imports."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return None
        path.append(module)
        found = next((c for c in map(visit, sorted(graph.get(module, ()))) if c), None)
        path.pop()
        done.add(module)
        return found

    return next((c for c in map(visit, sorted(graph)) if c), None)


def test_no_file_imports_itself_in_a_circle():
    """File by file, for the imports that run when a module is loaded."""
    modules = {".".join(path.relative_to(ROOT / "src").with_suffix("").parts): path for path in FILES}
    graph = {module: set() for module in modules if not module.endswith("__init__")}
    for module in graph:
        for node in ast.parse(modules[module].read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                named = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[module] |= {target for target in (named | {node.module}) if target in graph}
            elif isinstance(node, ast.Import):
                graph[module] |= {alias.name for alias in node.names if alias.name in graph}
    assert any(graph.values())
    assert circle(graph) is None
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def repeated(paths):
    """File names that several of the paths have, with these paths; every package has its own __init__."""
    by_name = {}
    for path in paths:
        by_name.setdefault(path.name, []).append(path)
    return {file: same for file, same in by_name.items() if len(same) > 1 and file != "__init__.py"}


def test_no_file_name_occurs_twice():
    assert repeated(FILES) == {}
    assert list(repeated([SRC / "a" / "plan.py", SRC / "b" / "plan.py", SRC / "b" / "costs.py"])) == ["plan.py"]
    assert not repeated([SRC / "a" / "__init__.py", SRC / "b" / "__init__.py"])


REGISTERING = ("rule", "command", "callback")  # decorators that enter a function in a table


def unreferenced(trees, users):
    """Top-level functions and classes that nothing refers to, and modules that nothing imports: dotted names.

    trees: the modules of the library, by dotted name; users: other modules that may use them. A reference inside a
    definition's own body does not count. What a package names in ``__all__`` is public, and what a decorator registers
    is used by that.
    """
    used, imported = set(), set()
    for module, tree in [*trees.items(), *((None, tree) for tree in users)]:
        aliases = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module)
                for alias in node.names:
                    used.add(f"{node.module}.{alias.name}")
                    aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
                used.add(f"{aliases[node.value.id]}.{node.attr}")
        for node in tree.body if module else ():
            own = node.name if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else None
            names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)} - {own}
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names |= set(ast.literal_eval(node.value))
            used |= {f"{module}.{n}" for n in names}
    left = []
    for module, tree in trees.items():
        has_parts = any(other.startswith(f"{module}.") for other in trees)
        if module not in imported | used and not has_parts and not module.endswith("__main__"):
            left.append(module)
        for node in tree.body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or f"{module}.{node.name}" in used:
                continue
            calls = [decorator.func for decorator in node.decorator_list if isinstance(decorator, ast.Call)]
            if not any(ast.unparse(function).rpartition(".")[2] in REGISTERING for function in calls):
                left.append(f"{module}.{node.name}")
    return left


# Only tests use it, and it goes with the roads of training that are being made one.
LEAVING = {"espalier.train.batched.grouped", "espalier.train.batched.grouped.Grouped"}
# Stands ready for what train/ and study/ each have of their own.
COMING: set[str] = set()


def test_nothing_is_there_for_tests_alone():
    def parsed(path):
        return ast.parse(path.read_text(encoding="utf-8"))

    def dotted(path):
        return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")

    trees = {dotted(path): parsed(path) for path in FILES}
    users = [parsed(path) for path in OURS if path.parts[len(ROOT.parts)] in ("benchmarks", "examples")]
    assert set(unreferenced(trees, users)) <= LEAVING | COMING


def test_the_test_of_what_is_used_can_fail():
    library = {
        "p": "from p.a import shown\n__all__ = ['shown']",
        "p.a": "def shown(): return _helper()\ndef _helper(): pass\ndef _alone(): return _alone()\n"
        "@dataclass(frozen=True)\nclass Lost: pass",
        "p.b": "@rule('add')\ndef add(): pass",
        "p.c": "from p import b\nb.add",
    }
    trees = {module: ast.parse(code) for module, code in library.items()}
    assert unreferenced(trees, []) == ["p.a._alone", "p.a.Lost", "p.c"]
    assert unreferenced(trees, [ast.parse("from p.a import Lost\nimport p.c")]) == ["p.a._alone"]


@pytest.mark.parametrize("path", sorted((SRC / "search").glob("*.py")), ids=name)
def test_the_search_knows_no_network(path):
    for module, names, line in imports(path):
        top = module.split(".")[0]
        where = f"{name(path)}:{line} imports {module}"
        if top == "espalier":
            assert module.split(".")[1] in {"search", "cost", "space"}, where
        else:
            assert top == "torch" or top in sys.stdlib_module_names, where
            assert not module.startswith(("torch.nn", "torch.optim")), where
            assert top != "torch" or not {"nn", "optim"} & set(names), where


@pytest.mark.parametrize("path", [p for p in FILES if layer_of(p) in ("files", "report", "picture")], ids=name)
def test_reports_and_pictures_need_no_torch(path):
    assert not [line for module, _, line in imports(path) if module.split(".")[0] == "torch"]


def test_the_root_holds_the_public_names_and_nothing_else():
    tree = ast.parse((SRC / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body[1:]:
        dunder = isinstance(node, ast.Assign) and all(
            isinstance(t, ast.Name) and t.id.startswith("__") for t in node.targets
        )
        assert dunder or isinstance(node, ast.ImportFrom), f"line {node.lineno}: {ast.unparse(node)[:60]}"
    import espalier

    assert sorted(espalier.__all__) == list(espalier.__all__)
    assert len(set(espalier.__all__)) == len(espalier.__all__)
    for public in espalier.__all__:
        assert hasattr(espalier, public), public


def test_importing_espalier_brings_nothing_optional():
    """Beyond torch, numpy and safetensors (and what they load themselves) only the standard library comes in."""
    program = (
        "import sys, torch, numpy, safetensors, safetensors.torch\n"
        "before = {m.split('.')[0] for m in sys.modules}\n"
        "import espalier\n"
        "after = {m.split('.')[0] for m in sys.modules}\n"
        "print(sorted(after - before - set(sys.stdlib_module_names)))\n"
        "print(sorted(m for m in sys.modules if m.split('.')[:2] in (['espalier', 'cli'], ['espalier', 'report'])))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=SRC.parent)
    assert done.stdout.splitlines() == ["['espalier']", "[]"]


@pytest.mark.parametrize("path", OURS, ids=name)
def test_a_file_is_one_idea(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 700, f"{len(lines)} lines: past 700 it is two ideas"
    if path.is_relative_to(SRC):
        assert ast.get_docstring(ast.parse("\n".join(lines))), "the first line says what the file is"


PICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
LOADERS = {"torch.load", "torch.save", "torch.serialization.load", "torch.serialization.save", "pandas.read_pickle"}


def pickling(path):
    """Lines of a file that pickle or could unpickle."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for module, names, line in imports(path):
        if module.split(".")[0] in PICKLERS or any(f"{module}.{n}" in LOADERS for n in names):
            found.append((line, module))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in LOADERS:
            found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                found.append((node.value.lineno, "allow_pickle"))
        elif isinstance(node, ast.Attribute) and node.attr in {"read_pickle", "to_pickle"}:
            found.append((node.lineno, node.attr))
    return found


@pytest.mark.parametrize("path", [p for p in OURS if not p.is_relative_to(ROOT / "tests")], ids=name)
def test_nothing_is_pickled(path):
    assert pickling(path) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import save",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "def late():\n    import joblib",
    ],
)
def test_the_pickle_test_can_fail(code, tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(code, encoding="utf-8")
    assert pickling(path)
