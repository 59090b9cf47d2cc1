"""What a mask leaves of a network, against the network itself: its gates, its canonical masks, its weights."""

import doctest
import json
import random
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import drawn_masks
import pytest
import torch
from torch import nn

import espalier
from espalier import picture
from espalier.models import DenseNet
from espalier.picture import describe
from espalier.picture.describe import share_label
from espalier.report import read

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "results" / "unit-selection"


@pytest.fixture(scope="module")
def gated():
    return {d: espalier.attach(DenseNet(depth=d), torch.rand(1, 3, 8, 8), check=False) for d in (10, 40)}


def random_mask(seed, count):
    draw = random.Random(seed)
    share = draw.choice([0.15, 0.3, 0.5, 0.8])
    return [int(draw.random() < share) for _ in range(count)]


def test_gates_are_in_the_order_of_the_models_mask(gated):
    gates = picture.connections()
    for name, where in gated[40].space.slices.items():
        parts = name.split(".")
        if parts[0] == "blocks":
            block, layer = int(parts[1]), int(parts[2])
            reader = 2 + 13 * block + layer
        else:
            block = int(parts[1]) if parts[0] == "transitions" else 2
            reader = 14 + 13 * block
        mine = gates[where]
        assert {gate.reader for gate in mine} == {reader}
        assert {gate.block for gate in mine} == {block}
        assert [gate.source for gate in mine] == [1 + 13 * block + i for i in range(len(mine))]


@pytest.mark.parametrize("depth", [10, 40])
def test_weights_are_the_models(gated, depth):
    gates = picture.connections(layers=(depth - 4) // 3)
    gradient = gated[depth].cost("weights").gradient(torch.zeros(len(gates)))
    assert gradient.tolist() == [gate.weights for gate in gates]


@pytest.mark.parametrize("depth", [10, 40])
def test_what_is_drawn_is_the_canonical_mask(gated, depth):
    gates = picture.connections(layers=(depth - 4) // 3)
    masks = [random_mask(seed, len(gates)) for seed in range(60)] + [[0] * len(gates), [1] * len(gates)]
    expected = gated[depth].canonical(torch.tensor(masks, dtype=torch.float32)).int().tolist()
    assert [[int(bit) for bit in describe.living(gates, m)] for m in masks] == expected
    assert sum(0 < sum(row) < sum(m) for row, m in zip(expected, masks)) > 10  # some are cut, but not through


def longest(edges, start, end):
    """Over all paths, one by one."""
    if start == end:
        return 1
    return max((1 + longest(edges, b, end) for a, b in edges if a == start), default=-1000)


def test_columns_are_longest_paths():
    seen = set()
    for seed in range(80):
        drawing = picture.densenet(random_mask(seed, 30), layers=3)
        edges = [(edge["from"], edge["to"]) for edge in drawing["edges"]]
        for cell in drawing["cells"]:
            assert cell["column"] == longest(edges, 1, cell["id"])
        if edges:
            assert drawing["summary"]["depth"] == longest(edges, 1, 13)
            seen.add(drawing["summary"]["depth"])
    assert len(seen) > 3


def test_a_hand_made_network():
    """Two layers a block: 1 | 2 3 | 4 | 5 6 | 7 | 8 9 | 10. Layer 3 reads nothing, 6 is read by none."""
    kept = {(1, 2), (2, 4), (3, 4), (4, 5), (5, 6), (5, 7), (7, 8), (8, 9), (9, 10)}
    mask = [int((gate.source, gate.reader) in kept) for gate in picture.connections(layers=2)]
    drawing = picture.densenet(mask, layers=2, title="mine")
    assert drawing["title"] == "mine"
    assert {cell["id"]: cell["column"] for cell in drawing["cells"]} == {
        1: 1,
        2: 2,
        4: 3,
        5: 4,
        7: 5,
        8: 6,
        9: 7,
        10: 8,
    }
    assert {(edge["from"], edge["to"]) for edge in drawing["edges"]} == kept - {(3, 4), (5, 6)}
    assert drawing["summary"]["dead"] == [3, 6]
    assert [cell["name"] for cell in drawing["cells"] if cell["role"] != "layer"] == [
        "first conv",
        "transition 1",
        "transition 2",
        "classifier",
    ]
    assert [band["fact"] for band in drawing["bands"]] == [
        "2 of 6 connections",
        "2 of 6 connections",
        "3 of 6 connections",
    ]
    reads = {cell["id"]: (cell["kept"], cell["total"]) for cell in drawing["cells"]}
    assert reads[1] == (0, 0)
    assert reads[4] == (1, 3)
    assert "Dead layers, not drawn: 3, 6." in drawing["notes"]
    assert any(note.startswith("2 further open gates lead nowhere") for note in drawing["notes"])


def test_table_2_counts_and_shares():
    drawing = picture.densenet(drawn_masks.TABLE_2["2^-4"])
    assert [band["fact"].split()[0] for band in drawing["bands"]] == ["57", "39", "67"]
    opened = [gate.weights for gate, bit in zip(picture.connections(), drawn_masks.TABLE_2["2^-4"]) if bit]
    assert drawing["summary"]["weight_share"] == sum(opened) / 1_001_184
    assert drawing["facts"][1] == "163 of 273 connections"


def test_a_severed_network_has_nothing_to_draw():
    drawing = picture.densenet(drawn_masks.SEVERED)
    assert (drawing["cells"], drawing["edges"], drawing["summary"]["depth"]) == ([], [], 0)
    assert drawing["facts"] == ["nothing leads from the image to the classifier"]


def test_drawings_are_json():
    drawing = picture.densenet(drawn_masks.RANDOM)
    assert json.loads(json.dumps(drawing)) == drawing


def test_masks_are_read_from_numbers_tensors_and_hexadecimal_digits():
    bits = drawn_masks.RANDOM
    text = f"{int(''.join(map(str, bits)) + '000', 2):069x}"  # 273 gates and 3 signs to fill up
    assert picture.densenet(text) == picture.densenet(bits) == picture.densenet(torch.tensor(bits, dtype=torch.float32))


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([1] * 272, "273 entries, not 272"),
        ([1] * 272 + [0.5], "0 and 1 only, not 0.5"),
        ("f" * 68, "69 hexadecimal digits, not 68"),
        ("f" * 69, "no open bit beyond"),
        ("g" + "f" * 68, "other signs"),
    ],
)
def test_a_wrong_mask_is_refused(mask, words):
    with pytest.raises(espalier.BadMask, match=words):
        picture.densenet(mask)


def test_a_network_without_layers_is_refused():
    with pytest.raises(espalier.BadInput, match="at least one block of one layer, not 3 of 0"):
        picture.densenet([], layers=0)


def test_a_perceptron():
    drawing = picture.mlp([784, 784, 784, 784, 10], [92, 31, 24])
    assert [(cell["label"], cell["kept"], cell["total"]) for cell in drawing["cells"]] == [
        ("inputs", 784, 784),
        ("layer 1", 92, 784),
        ("layer 2", 31, 784),
        ("layer 3", 24, 784),
        ("outputs", 10, 10),
    ]
    share = (784 * 92 + 92 * 31 + 31 * 24 + 24 * 10) / (3 * 784 * 784 + 7840)
    assert drawing["facts"] == ["147 of 2352 units (6.2%)", f"{share:.1%} of the weights"]
    with pytest.raises(espalier.BadInput, match="4 widths"):
        picture.mlp([784, 784, 784, 10], [92, 31, 24])
    with pytest.raises(espalier.BadInput, match="785 of 784"):
        picture.mlp([784, 784, 10], [785])


def test_any_attached_model():
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    gated = espalier.attach(model, torch.rand(2, 1, 8, 8))
    mask = gated.canonical(torch.tensor([1.0, 0, 1, 0, 0, 0, 1, 1, 0, 1]))
    drawing = picture.of_space(gated.space, mask, title="mine")
    assert [(cell["kept"], cell["total"]) for cell in drawing["cells"]] == [(2, 6), (3, 4)]
    assert [cell["label"] for cell in drawing["cells"]] == [group.name for group in gated.space.groups]
    assert drawing["facts"] == ["5 of 10 gates (50.0%)"]


def test_a_choice_says_which_option():
    space = espalier.Space([espalier.Bits("units", 3), espalier.Choice("act", 4)])
    cells = picture.of_space(space, [1, 1, 0, 0, 0, 1, 0])["cells"]
    assert cells[1]["note"] == "option 3 of 4"
    assert "note" not in cells[0]


def words_of(path):
    """What a picture says, wherever its lines run: connections and words."""
    svg = ET.fromstring(path.read_text(encoding="utf-8"))
    ends = sorted((int(e.get("data-from")), int(e.get("data-to"))) for e in svg.iter() if e.get("data-from"))
    return ends, [e.text for e in svg.iter() if e.tag.endswith("}text") and not e.get("data-cell")]


def test_the_pictures_of_the_docs_are_what_they_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = doctest.testfile(str(ROOT / "docs" / "pictures.md"), module_relative=False)
    assert ran.attempted > 5
    assert words_of(tmp_path / "densenet.svg") == words_of(ROOT / "docs" / "pictures" / "densenet.svg")
    text = (ROOT / "docs" / "pictures.md").read_text(encoding="utf-8")
    code = next(part for part in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "report.read" in part)
    exec(code.replace("results/unit-selection", str(STUDY)), {})
    assert words_of(tmp_path / "perceptron.svg") == words_of(ROOT / "docs" / "pictures" / "perceptron.svg")


def test_no_group_is_refused():
    with pytest.raises(espalier.BadInput, match="no group"):
        picture.layers({})


def test_every_committed_run_can_be_drawn():
    records = [run.record for run in read(STUDY).runs]
    assert len(records) > 50
    for record in records:
        drawing = picture.of_run(record)
        kept = [cell["kept"] for cell in drawing["cells"][1:-1]]
        assert kept == record["result"]["canonical"]["units"]
        share = share_label(record["result"]["canonical"]["weight_share"])
        assert drawing["facts"][1] == f"{share} of the weights"
    titles = [describe.run_title(record) for record in records]
    assert "mnist, search, penalty -2⁻³, seed 0" in titles


def test_runs_of_connection_selection_and_of_fit():
    bits = drawn_masks.TABLE_2["2^-2"]
    record = {
        "run": {"method": "search", "variant": "search", "seed": 3, "penalty": 0.25},
        "settings": {"dataset": "cifar10", "network": "DenseNet", "depth": 40, "growth": 12},
        "result": {"mask": f"{int(''.join(map(str, bits)) + '000', 2):069x}"},
    }
    title = "cifar10, search, penalty 2⁻², seed 3"
    assert picture.of_run(record) == picture.densenet(bits, title=title)
    x = torch.rand(8, 5)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))
    result = espalier.fit(model, (x, (x[:, 0] > 0.5).long()), loss=nn.functional.cross_entropy, epochs=1, batch_size=4)
    (cell,) = picture.of_run(result.summary())["cells"]
    assert (cell["kept"], cell["total"]) == (int(result.mask.sum()), 6)
    with pytest.raises(espalier.BadInput, match="it has none"):
        picture.of_run({"result": {"test_error": 0.1}})
