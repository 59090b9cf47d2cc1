"""Torch-Pruning in the evidence: its cuts meet the cost, and are its own pruner's where that one can make them."""

import pytest
import torch
from test_evidence import SHAPE, check, command
from torch import nn

from evidence_networks import build, count, count_widths, whole_widths, widths_of

tp = pytest.importorskip("torch_pruning")
peers = pytest.importorskip("evidence_peers")


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
