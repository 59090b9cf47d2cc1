"""Torch-Pruning in the evidence: its cuts meet the cost, and are its own pruner's where that one can make them."""

import json
from importlib.util import find_spec

import pytest
import torch
from test_evidence import SHAPE, check, command
from torch import nn

from evidence_networks import build, count, count_widths, whole_widths, widths_of

tp = pytest.importorskip("torch_pruning")
peers = pytest.importorskip("evidence_peers")
THEIRS = "ignore:.*:Warning"  # of other libraries, which are no part of the development environment


@pytest.mark.parametrize(
    ("methods", "network"), [("pruned,pruned-steps", "resnet20"), ("pruned-local,pruned-bn,pruned-through", "vgg16")]
)
def test_a_pruned_network_meets_the_target(methods, network, tmp_path):
    lines = command(tmp_path, methods=methods, network=network)
    assert [line["method"] for line in lines] == methods.split(",")
    for line in lines:
        check(line)
        assert line["shares"]["weights"] > 0.25


@pytest.mark.parametrize("name", ["vgg16", "resnet20"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_the_channels_are_those_of_its_own_pruner(name, everywhere):
    torch.manual_seed(0)
    model, example = build(name, whole_widths(name, 4)), torch.rand(2, *SHAPE)
    groups = peers.groups_of(model, example)
    scores = [peers.CRITERIA["l2"]()(group) for group in groups]
    theirs = build(name, whole_widths(name, 4))
    theirs.load_state_dict(model.state_dict())
    pruner = tp.pruner.BasePruner(
        theirs,
        example,
        peers.CRITERIA["l2"](),
        global_pruning=everywhere,
        pruning_ratio=0.5,
        ignored_layers=[theirs.head],
        root_module_types=[nn.Conv2d, nn.Linear],
    )
    pruner.step()
    limit = count(theirs, SHAPE)["weights"]
    kept = peers.kept_channels(
        scores,
        limit,
        lambda widths: count_widths(name, widths, SHAPE)["weights"],
        everywhere=everywhere,
        least=0.0,
    )
    assert [len(channels) for channels in kept] == widths_of(theirs)
    for group, score, channels in zip(groups, scores, kept):
        group.prune(sorted(set(range(len(score))) - set(channels.tolist())))
    for mine, other in zip(model.state_dict().values(), theirs.state_dict().values()):
        torch.testing.assert_close(mine, other)


def test_a_layer_always_keeps_its_share():
    scores = [torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([5.0, 6.0, 7.0, 8.0])]
    kept = peers.kept_channels(scores, 5, sum, everywhere=True, least=0.0)
    assert [channels.tolist() for channels in kept] == [[3], [0, 1, 2, 3]]
    kept = peers.kept_channels(scores, 5, sum, everywhere=True, least=0.5)
    assert [channels.tolist() for channels in kept] == [[2, 3], [1, 2, 3]]
    kept = peers.kept_channels(scores, 4, sum, everywhere=False, least=0.0)
    assert [channels.tolist() for channels in kept] == [[2, 3], [2, 3]]
    with pytest.raises(ValueError, match="always stays"):
        peers.kept_channels(scores, 1, sum, everywhere=True, least=0.0)


@pytest.mark.skipif(find_spec("only_train_once") is None, reason="needs only-train-once")
@pytest.mark.filterwarnings(THEIRS)
@pytest.mark.parametrize("periods", [1, 2])
def test_oto_ends_at_the_cost_and_ours_no_larger(tmp_path, periods):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"oto-fours": {"divisible": 1, "start": 0, "span": 0.8, "periods": periods}}))
    words = ["--batch", "6", "--costs", "macs", "--settings", str(file)]
    theirs, ours = command(tmp_path, *words, methods="oto-fours,ours-oto-fours")
    assert theirs["shares"]["macs"] <= 0.3
    assert theirs["shares"]["macs"] > 0.15
    for line in (theirs, ours):
        assert line["counts"] == count_widths("resnet20", line["widths"], SHAPE)
    assert all(ours["counts"][kind] <= theirs["counts"][kind] for kind in ("macs", "weights"))


@pytest.mark.skipif(find_spec("modelopt") is None, reason="needs nvidia-modelopt")
@pytest.mark.filterwarnings(THEIRS)
def test_modelopt_ends_within_the_cost(tmp_path):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"fastnas": {"divisor": 1, "batches": 3}}))
    (line,) = command(tmp_path, "--costs", "macs", "--settings", str(file), methods="fastnas")
    check(line)
