"""The evidence: every method within its cost at an equal budget, lines that are resumed, rivals as large as allowed."""

import json

import pytest
import torch

import espalier
import evidence_data
from espalier.data import crop_flip, standardise
from espalier.train.compiling import Compiling, as_it_is
from evidence import Book, append, key_of, lines_of, main, parsed, plan
from evidence_data import Images, Loader, synthetic
from evidence_methods import SETTINGS, Budget, permuted, rate, resolved
from evidence_networks import NAMES, build, count, count_widths, uniform, whole_widths, widths_of

SHAPE = (3, 16, 16)
PLAIN = ["ours", "ranked", "control", "control-group", "uniform", "uniform-macs", "found", "dense"]


def command(tmp_path, *words, methods="ours", network="resnet20", jobs="0"):
    """The lines of the file after a small run of the command in this process."""
    out = tmp_path / "lines.jsonl"
    small = [
        "--epochs",
        "1",
        "--examples",
        "60",
        "--batch",
        "20",
        "--narrow",
        "8",
        "--device",
        "cpu",
        "--costs",
        "weights",
        "--targets",
        "0.3",
    ]
    asked = ["--networks", network, "--methods", methods, "--jobs", jobs]
    main(["--data-dir", "synthetic", "--out", str(out), *asked, *small, *words])
    return lines_of(out)


def check(line):
    """What every line says must agree with the network of its widths."""
    whole = count_widths(line["network"], whole_widths(line["network"], 8), SHAPE)
    assert line["counts"] == count_widths(line["network"], line["widths"], SHAPE)
    assert line["shares"] == {kind: line["counts"][kind] / whole[kind] for kind in whole}
    if line["cost"] is not None and line["method"] != "uniform-macs":
        assert line["shares"][line["cost"]] <= line["target"]
    assert 0 <= line["error"] <= 1
    assert line["updates"] == 3
    assert "lines.jsonl" not in json.dumps(line)


def test_every_method_ends_within_its_cost_and_is_not_run_twice(tmp_path, capsys):
    lines = command(tmp_path, methods=",".join(PLAIN))
    by = {line["method"]: line for line in lines}
    assert list(by) == PLAIN
    for line in lines:
        check(line)
    assert by["dense"]["cost"] is None
    assert by["dense"]["shares"]["weights"] == 1
    assert by["found"]["widths"] == by["ours"]["widths"]
    assert by["uniform-macs"]["counts"]["macs"] <= by["ours"]["counts"]["macs"]
    assert by["ours"]["setting"]["recipe"]["settle"] == 0.5
    assert command(tmp_path, methods=",".join(PLAIN)) == lines
    assert "0 runs to do" in capsys.readouterr().out
    more = command(tmp_path, "--seeds", "0,1", methods="uniform")
    assert [line["seed"] for line in more if line["method"] == "uniform"] == [0, 1]
    assert len({key_of(line) for line in more}) == len(lines) + 1


def test_another_network_cost_and_a_setting_of_ones_own(tmp_path):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"late": {"like": "ours", "recipe": {"begin": 0.4, "ramp": 0.1}, "lr": 0.01}}))
    words = ["--costs", "macs", "--held-out", "20", "--examples", "80", "--settings", str(file)]
    lines = command(tmp_path, *words, methods="late", network="vgg16")
    assert [(line["lr"], line["setting"]["recipe"]["begin"], line["updates"]) for line in lines] == [(0.01, 0.4, 3)]
    check(lines[0])
    file.write_text(json.dumps({"late": {"like": "ours", "lr": 0.01}}))
    with pytest.raises(SystemExit, match="another name"):
        command(tmp_path, *words, methods="late", network="vgg16")


def test_a_network_trained_once_is_finetuned_to_every_size_as_if_alone(tmp_path):
    def finetuned(name, targets):
        words = ["--epochs", "2", "--targets", targets]
        return command(tmp_path / name, *words, methods="finetuned")

    for folder in ("both", "one"):
        (tmp_path / folder).mkdir()
    both, alone = finetuned("both", "0.6,0.3"), finetuned("one", "0.3")
    differ = {"seconds", "argv"}
    assert {k: v for k, v in both[1].items() if k not in differ} == {
        k: v for k, v in alone[0].items() if k not in differ
    }
    assert [line["updates"] for line in both] == [6, 6]
    assert both[0]["widths"] != both[1]["widths"]


def test_a_run_that_fails_is_noted_and_the_others_go_on(tmp_path, capsys):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"odd": {"like": "ours", "recipe": {"no_such_field": 1}}}))
    lines = command(tmp_path, "--settings", str(file), methods="odd,dense", jobs="1")
    assert [line["method"] for line in lines] == ["dense"]
    assert "no_such_field" in (tmp_path / "lines.jsonl.errors.txt").read_text()
    assert "1 failed" in capsys.readouterr().out
    assert len(command(tmp_path, "--time-limit", "0", methods="uniform", jobs="1")) == 1


def test_a_run_is_begun_if_the_quickest_of_its_kind_would_end_in_time(tmp_path):
    """The first ones ran beside many others; what is left runs beside fewer."""
    given = parsed(
        ["--out", str(tmp_path / "lines.jsonl"), "--networks", "resnet20", "--seeds", "0,1,2,3", "--jobs", "3"]
    )
    given.methods, given.costs, given.targets = ["uniform"], ["macs"], [0.3]
    runs = plan(given, SETTINGS)
    for run, seconds in zip(runs, (300.0, 100.0, 200.0)):
        append(given.out, json.dumps(run | {"seconds": seconds, "jobs": 3}))
    for left, begun in ((150, True), (90, False)):
        given.time_limit = left
        taken = Book(given, runs).take()
        assert (taken is not None and taken[0] is runs[3]) == begun


@pytest.mark.parametrize("name", NAMES)
def test_the_networks_of_rivals_are_traced_whole_and_once(name):
    """Else their updates would not be recorded on a GPU, where those of ours are."""
    form = Compiling(backend=as_it_is).form(build(name, whole_widths(name, 8)))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(2):
        form(torch.rand(2, *SHAPE)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_updates_of_rivals_are_recorded_on_a_gpu(tmp_path):
    """A warning, which is an error here, says where they are not."""
    (line,) = command(tmp_path, "--device", "cuda", methods="uniform")
    check(line)


def test_a_line_cut_short_is_left_out_and_not_written_into(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"a": 1}\n{"b": ')
    append(file, '{"c": 2}')
    assert lines_of(file) == [{"a": 1}, {"c": 2}]


@pytest.mark.parametrize("name", ["vgg16", "resnet20", "densenet40"])
@pytest.mark.parametrize("kind", ["weights", "macs", "parameters"])
def test_uniform_widths_meet_the_cost_and_have_no_room_for_one_more(name, kind):
    whole = whole_widths(name, 2 if name == "densenet40" else 4)

    def cost(widths):
        return count_widths(name, widths, (3, 32, 32))[kind]

    for target in (0.05, 0.3, 1.0):
        widths = uniform(whole, target * cost(whole), cost)
        assert cost(widths) <= target * cost(whole)
        for i in range(len(widths)):
            larger = [*widths[:i], widths[i] + 1, *widths[i + 1 :]]
            assert widths[i] == whole[i] or cost(larger) > target * cost(whole)
        shares = [a / b for a, b in zip(widths, whole)]
        assert max(shares) - min(shares) <= 2 / min(whole)
    assert widths == whole
    with pytest.raises(ValueError, match="one unit in each layer"):
        uniform(whole, 1, cost)


@pytest.mark.parametrize("name", ["vgg16", "resnet20", "densenet40"])
def test_counts_agree_with_those_of_the_gates(name):
    torch.manual_seed(1)
    model = build(name, whole_widths(name, 4 if name == "densenet40" else 8))
    gated = espalier.attach(model, torch.rand(1, *SHAPE), check=False)
    for chance in (1.0, 0.6):
        mask = gated.canonical((torch.rand(gated.d) < chance).float())
        small = gated.compact(mask)
        counts = count(small, SHAPE)
        assert counts == {kind: float(gated.cost(kind)(mask)) for kind in counts}
        assert counts == count_widths(name, widths_of(small), SHAPE)


def test_schedules_are_functions_of_the_update_and_end_near_zero():
    for schedule in ("linear", "cosine"):
        rates = [rate(schedule, update, 100) for update in range(100)]
        assert rates[:6] == sorted(rates[:6])
        assert rates[5:] == sorted(rates[5:], reverse=True)
        assert max(rates) <= 1
        assert 0 < rates[-1] < 0.02
    assert [rate("steps", update, 20) for update in (0, 14, 15, 17, 18, 19)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01, 0.01]
    )
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = Budget(1, 1, 10, 0.5, 0.0, "linear").optimizer([weight])
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        weight.grad = torch.zeros(1)
        optimizer.step()
    assert rates == [0.5 * rate("linear", update, 10) for update in range(10)]


def test_images_are_cut_as_by_the_library_and_an_epoch_reads_each_once():
    data = synthetic(40)
    images = Images(data, torch.device("cpu"))
    index, flip = torch.tensor([3, 8, 21]), torch.tensor([True, False, True])
    top, left = torch.tensor([0, 3, 4]), torch.tensor([2, 4, 1])
    cut, labels = images.windows(index, top, left, flip)
    gain, shift = data.affine()
    expected = crop_flip(standardise(data.train_inputs[index], gain, shift), top, left, flip, pad=images.pad)
    inside = expected != 0
    torch.testing.assert_close(cut[inside], expected[inside])
    assert float(cut[~inside].abs().max()) <= 0.51 * float(gain.max())  # the mean colour, to a whole byte
    assert labels.tolist() == data.train_labels[index].tolist()
    loader, seen = Loader(images, 10, 4, 4, seed=2), []
    images.windows = lambda index, *_: (seen.append(index), index)
    next(iter(loader))  # a pass that is broken off goes on in the next
    assert len(list(loader)) == 4
    assert sorted(torch.cat(seen[:4]).tolist()) == list(range(40))
    assert (len(loader), loader.read) == (4, 50)


def test_grey_images_are_read_by_networks_of_one_channel_and_digits_are_not_mirrored(tmp_path, monkeypatch):
    data = evidence_data.read(str(tmp_path), 100, 60, "digits")
    assert (len(data.train_labels), len(data.test_labels), data.shape) == (60, 60, (1, 8, 8))
    images = Images(data, torch.device("cpu"))
    index, corner = torch.tensor([5, 9]), torch.tensor([1, 1])
    for flip in (False, True):
        seen, _ = images.windows(index, corner, corner, torch.tensor([flip, flip]))
        torch.testing.assert_close(seen, data.train_inputs[index] / 16)
    widths = whole_widths("resnet8", 4)
    assert count(build("resnet8", widths, 1), data.shape) == count_widths("resnet8", widths, data.shape)
    monkeypatch.setattr(evidence_data, "load", lambda *_, **named: synthetic(40))
    half = evidence_data.read(str(tmp_path), 0, None, "fashion-mnist-14")
    means = synthetic(40).train_inputs.double().unfold(2, 2, 2).unfold(3, 2, 2).mean((-2, -1))
    assert float((half.train_inputs - means).abs().max()) <= 0.5
    assert half.test_inputs.shape[1:] == half.shape == (3, 8, 8)


@pytest.mark.parametrize("among", ["group", "all"])
def test_a_blind_search_gets_what_belongs_to_others(among):
    space = espalier.Space([espalier.Bits("a", 6), espalier.Bits("b", 8)])
    search, given = espalier.Search(space, samples=4), []
    search.tell = lambda masks, losses, slopes=None, **more: given.append((losses, slopes, more))
    permuted(search, among, 3)
    masks, losses = search.ask(), torch.arange(4.0)
    slopes = torch.arange(14.0).expand(4, 14)
    for _ in range(20):
        search.tell(masks, losses, slopes, spreads=2 * slopes)
        search.tell(masks, losses)
    assert all(sorted(losses.tolist()) == [0, 1, 2, 3] for losses, _, _ in given)
    assert len({tuple(losses.tolist()) for losses, _, _ in given}) > 5
    orders = [slopes for _, slopes, _ in given if slopes is not None]
    assert len(orders) == 20
    assert all(torch.equal(more["spreads"], 2 * slopes) for _, slopes, more in given if more)
    crossing = any(bool((order[0, :6] >= 6).any()) for order in orders)
    assert crossing == (among == "all")
    assert all(sorted(order[2].tolist()) == list(range(14)) for order in orders)


def test_controls_follow_the_setting_of_ours():
    settings = SETTINGS | {"ours": {"method": "shaped", "samples": 4, "recipe": {"even": 0.5}, "permute": None}}
    control = resolved(settings, "control")
    assert (control["samples"], control["recipe"], control["permute"]) == (4, {"even": 0.5}, "all")
