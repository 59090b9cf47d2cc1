"""On a GPU: no host synchronisation in ask and tell, capture in a CUDA graph, the same update as on the CPU."""

import pytest
import torch

import espalier

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SPACE = espalier.Space(
    [espalier.Bits("a", 300), espalier.Choice("b", 3), espalier.Bits("c", 50), espalier.Choice("d", 5)]
)
COST = espalier.Cost.product([espalier.Form.run(0, 300), espalier.Form.run(303, 353) + 2.0], d=SPACE.d)
STAIRS = espalier.Cost.of_widths(SPACE, {"a": lambda width: -(-width // 8), "c": lambda width: 2 + -(-width // 16)})
KINDS = {
    "penalty": {"penalty": 0.1},
    "target": {"target": 0.2, "horizon": 100},
    "adaptive": {"penalty": 0.1, "adaptive": True},
    "adaptive target": {"target": 0.2, "horizon": 100, "adaptive": True},
    "ramp": {"target": 0.2, "horizon": 100, "ramp": lambda progress: progress**2},
    "widths": {"target": 0.3, "horizon": 100, "cost": STAIRS + 0.01 * COST},
}


def make(kind, device, space=SPACE, **more):
    given = {"cost": COST} | KINDS[kind] if space is SPACE else {**KINDS[kind], "cost": None}
    return espalier.Search(space, batch=(4,), samples=3, device=device, seed=5, **given, **more)


def value(masks):
    return -(masks * torch.linspace(-0.3, 1, masks.shape[-1], device=masks.device)).sum(-1)


@pytest.mark.parametrize("space", [SPACE, espalier.Space([espalier.Bits("bits", 1000)])], ids=["mixed", "bits"])
@pytest.mark.parametrize("kind", KINDS)
def test_ask_and_tell_never_wait_for_the_device(kind, space):
    search = make(kind, "cuda", space)
    masks = search.ask()
    search.tell(masks, value(masks))  # the first call may allocate
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            masks = search.ask()
            search.tell(masks, value(masks))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_update_as_on_the_cpu(kind):
    there, here = make(kind, "cuda"), make(kind, "cpu")
    for _ in range(50):
        masks = here.ask()
        losses = value(masks)
        here.tell(masks, losses)
        there.tell(masks.cuda(), losses.cuda())
    torch.testing.assert_close(there.theta.cpu(), here.theta, rtol=0, atol=1e-12)
    # last digits decide between gates that are worth the same: the selections are compared from equal ones
    there.load_state_dict(here.state_dict() | {"generator": there.generator.get_state()})
    assert torch.equal(there.select().cpu(), here.select())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_graph_goes_on_as_the_plain_loop_does(kind, compiled):
    plain, captured = make(kind, "cuda"), make(kind, "cuda")
    if compiled:
        captured.compile()

    def update(search):
        masks = search.ask()
        search.tell(masks, value(masks))

    state = captured.state_dict()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        update(captured)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(captured.generator)
    with torch.cuda.graph(graph):
        update(captured)
    captured.load_state_dict(state)  # in place: the graph goes on from the restored tensors
    for _ in range(40):
        update(plain)
        graph.replay()
    assert captured.updates.tolist() == [40] * 4
    torch.testing.assert_close(captured.theta, plain.theta, rtol=0, atol=1e-10)


def test_a_state_restores_exactly():
    first = make("adaptive target", "cuda")
    for _ in range(10):
        masks = first.ask()
        first.tell(masks, value(masks))
    second = make("adaptive target", "cuda")
    second.load_state_dict(first.state_dict())
    for _ in range(10):
        masks, again = first.ask(), second.ask()
        assert torch.equal(masks, again)
        first.tell(masks, value(masks))
        second.tell(again, value(again))
    assert torch.equal(first.theta, second.theta)


def test_a_diverged_run_is_flagged_without_stopping_the_others():
    search = make("penalty", "cuda")
    masks = search.ask()
    losses = value(masks)
    losses[2] = torch.nan
    before = search.theta.clone()
    search.tell(masks, losses)
    assert search.diverged.tolist() == [False, False, True, False]
    assert torch.equal(search.theta[2], before[2])
    assert not torch.equal(search.theta[0], before[0])
    with pytest.raises(espalier.Diverged, match="2"):
        search.check()
