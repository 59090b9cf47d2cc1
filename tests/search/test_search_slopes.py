"""Learning from slopes: exact where it should be, blind to scale, runs apart, and what is not finite left out."""

import copy
import math

import numpy as np
import pytest
import torch

from espalier import BadInput, Bits, Choice, Cost, Diverged, EspalierError, Form, Search, Space
from espalier.search.distribution import Distribution
from espalier.search.signal import SLOPES
from oracle.bridge import cost_over, random_terms, random_theta, space_of
from oracle.slopes import SlopeMethod
from oracle.structures import all_masks, entries, natural_gradient_of_mean, probability, sample

NAN, INF = math.nan, math.inf
SIGNALS = ("first-order", "slopes")
MIXED = Space([Bits("a", 4, least=1), Choice("b", 3), Bits("c", 2)])
D = MIXED.d


def told(search, seed, spreads=True):
    """Random masks of this search, and losses, slopes and spreads for them."""
    g = torch.Generator().manual_seed(seed)
    masks = search.ask()
    slopes = torch.randn(masks.shape, generator=g, dtype=torch.float64)
    losses = torch.randn(masks.shape[:-1], generator=g, dtype=torch.float64)
    sizes = slopes.abs() + torch.rand(masks.shape, generator=g, dtype=torch.float64)
    return (masks, losses, slopes, sizes) if spreads else (masks, losses, slopes)


# Where the first-order worth is exact


def multilinear(variables, rng):
    """A random sum of products of distinct variables, at most one option of each choice, as a function of a mask."""
    owned = entries(variables)
    products = []
    for _ in range(12):
        chosen = rng.choice(len(owned), rng.integers(1, min(len(owned), 4) + 1), replace=False)
        products.append((rng.normal(), [int(rng.choice(owned[v])) for v in chosen]))

    def function(mask):
        return sum(c * mask[..., torch.tensor(where)].prod(-1) for c, where in products)

    return function


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("variables", [[1], [1] * 5, [1] * 8, [3], [2, 4], [1, 3, 1, 2, 1]], ids=str)
def test_first_order_is_the_natural_gradient_of_a_multilinear_loss(variables, seed):
    rng = np.random.default_rng([seed, len(variables)])
    function, theta = multilinear(variables, rng), random_theta(variables, rng)
    masks = torch.from_numpy(np.stack(all_masks(variables))).requires_grad_()
    losses = function(masks)
    (slopes,) = torch.autograd.grad(losses.sum(), masks)
    exact = -natural_gradient_of_mean(variables, theta, lambda mask: function(torch.from_numpy(mask)).item())

    p = torch.tensor([probability(variables, theta, mask.numpy()) for mask in masks.detach()], dtype=torch.float64)
    worth = (p.unsqueeze(-1) * SLOPES["first-order"](slopes, slopes.abs())).sum(0)
    space, start = space_of(variables), torch.from_numpy(theta)
    natural = Distribution(space, 0.0, torch.device("cpu")).natural(start, worth)
    np.testing.assert_allclose(natural.numpy(), exact, rtol=0, atol=1e-12)

    # The same through the search: a run for each mask, its step brought back to the scale of its slopes.
    search = Search(
        space, initial=start, margin=0.0, samples=1, signal="first-order", learning_rate=1e-4, batch=len(masks)
    )
    before = search.theta.clone()
    search.tell(masks.detach().float().unsqueeze(1), losses.detach().unsqueeze(1), slopes.unsqueeze(1))
    size = torch.zeros(len(slopes), 1, dtype=torch.float64)  # a choice by the slopes less their mean by theta
    for owned in entries(variables):
        own = slopes[:, owned]
        own = own if len(owned) == 1 else own - (own * before[0, owned]).sum(-1, keepdim=True)
        size += own.abs().sum(-1, keepdim=True) / space.freedom
    steps = (search.theta - before) / 1e-4 * size
    np.testing.assert_allclose((p.unsqueeze(-1) * steps).sum(0).numpy(), exact, rtol=0, atol=1e-10)


# Against the oracle


@pytest.mark.parametrize("penalty", [0.0, 0.3, -0.1])
@pytest.mark.parametrize("variables", [[1] * 6, [3, 2], [1, 4, 1, 1, 2]], ids=str)
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("signal", SIGNALS)
def test_fifty_updates_follow_the_oracle(signal, spread, variables, penalty):
    rng = np.random.default_rng([len(variables), int(spread)])
    d, samples = sum(variables), 3
    terms, theta = random_terms(d, rng), random_theta(variables, rng)
    search = Search(
        space_of(variables), cost=cost_over(variables, terms), penalty=penalty, samples=samples, signal=signal,
        initial=torch.from_numpy(theta), learning_rate=0.05, margin=0.02,
    )  # fmt: skip
    method = SlopeMethod(
        variables, signal, terms=terms, penalty=penalty, learning_rate=0.05, margin=0.02, initial=search.theta.numpy()
    )
    for update in range(50):
        masks = [sample(variables, method.theta, rng.random(len(variables))) for _ in range(samples)]
        losses, slopes = rng.normal(size=samples), rng.normal(size=(samples, d)) * 10 ** rng.uniform(-3, 3)
        spreads = np.abs(slopes) + rng.random((samples, d)) if spread else None
        lost = rng.random(samples) < rng.choice([0.0, 0.0, 0.5])
        losses[lost & (rng.random(samples) < 0.5)] = rng.choice([NAN, INF])
        slopes[lost, rng.integers(d)] = rng.choice([NAN, -INF])
        method.update(masks, losses, slopes, spreads)
        values = [torch.from_numpy(np.stack(masks)).float(), torch.from_numpy(losses), torch.from_numpy(slopes)]
        values += [] if spreads is None else [torch.from_numpy(spreads)]
        if (np.isfinite(losses) & np.isfinite(slopes).all(-1)).any():
            search.tell(*values)
        else:
            with pytest.raises(Diverged):
                search.tell(*values)
        np.testing.assert_allclose(search.theta.numpy(), method.theta, rtol=0, atol=1e-12, err_msg=f"update {update}")
    assert bool(search.diverged) == method.diverged
    assert search.updates.item() == method.updates


# Choices


@pytest.mark.parametrize(
    "keywords", [{}, {"penalty": 0.2}, {"target": 0.4, "horizon": 60, "even": 0.5}, {"adaptive": True}], ids=str
)
@pytest.mark.parametrize("spreads", [False, True])
@pytest.mark.parametrize("signal", SIGNALS)
def test_a_choice_of_two_options_is_a_bit(signal, spreads, keywords):
    """Also where a slope is far too steep, and beside a bit in the same space."""
    cost = torch.arange(1.0, 7)
    pairs = Space([*(Choice(f"c{i}", 2) for i in range(5)), Bits("b", 1)])
    first = torch.tensor([0, 2, 4, 6, 8, 10])
    both = torch.zeros(11).index_copy(0, first, cost)
    bits = Search(6, cost=cost, signal=signal, samples=2, seed=4, **keywords)
    choices = Search(pairs, cost=both, signal=signal, samples=2, seed=4, **keywords)
    for update in range(60):
        masks, losses, *told_of = told(bits, update, spreads)
        if update % 20 == 19:
            told_of[0][0, 2] *= 1e5
        wide = [torch.zeros(2, 11, dtype=torch.float64).index_copy(1, first, one) for one in told_of]
        asked = choices.ask()
        assert torch.equal(asked[:, first], masks)
        bits.tell(masks, losses, *told_of)
        choices.tell(asked, losses, *wide)
        torch.testing.assert_close(choices.theta[first], bits.theta, rtol=0, atol=1e-11)


@pytest.mark.parametrize("signal", SIGNALS)
def test_what_all_options_of_a_choice_share_drops_out(signal):
    """A constant in the slopes of a first order, or in the sizes: the mask of a choice always adds up to 1."""
    plain, shifted = (Search(MIXED, signal=signal, seed=3) for _ in range(2))
    for update in range(30):
        masks, losses, slopes, spreads = told(plain, update)
        plain.tell(masks, losses, slopes, spreads)
        part = slopes if signal == "first-order" else spreads
        part = part.clone()
        part[:, 4:7] += 100.0
        shifted.tell(masks, losses, *((part, spreads) if signal == "first-order" else (slopes, part)))
    torch.testing.assert_close(shifted.theta, plain.theta, rtol=0, atol=1e-11)


# Scale, sign, nothing to learn


@pytest.mark.parametrize(
    "keywords", [{}, {"penalty": 0.2}, {"target": 0.6, "horizon": 30}, {"adaptive": True}], ids=str
)
@pytest.mark.parametrize("spreads", [False, True])
@pytest.mark.parametrize("signal", SIGNALS)
def test_a_loss_times_ten_gives_the_same_theta(signal, spreads, keywords):
    one, ten = (Search(MIXED, cost=[1.0] * D, signal=signal, seed=3, **keywords) for _ in range(2))
    for update in range(20):
        masks, *values = told(one, update, spreads)
        one.tell(masks, *values)
        ten.tell(masks, *(10 * value for value in values))
    torch.testing.assert_close(one.theta, ten.theta, rtol=0, atol=1e-12)


@pytest.mark.parametrize("signal", SIGNALS)
def test_a_power_of_two_changes_no_bit(signal):
    one, four = (Search(MIXED, signal=signal, seed=3) for _ in range(2))
    for update in range(20):
        masks, *values = told(one, update)
        one.tell(masks, *values)
        four.tell(masks, *(4 * value for value in values))
    assert torch.equal(one.theta, four.theta)


def test_signs():
    """A loss that falls with a gate opens it; a gate of strong slopes of both signs opens, a weak one follows."""
    mask = torch.ones(1, 2)
    loss = torch.zeros(1, dtype=torch.float64)
    for signal in SIGNALS:
        search = Search(2, samples=1, signal=signal)
        search.tell(mask, loss, torch.tensor([[-1.0, 0.5]]))
        assert search.theta[0] > 0.5
        assert (search.theta[1] < 0.5) == (signal == "first-order")
    search = Search(2, samples=1, signal="slopes")
    search.tell(torch.zeros(1, 2), loss, torch.tensor([[1.0, -1.0]]))  # closed ones are judged alike
    assert 0.5 < search.theta[0] < search.theta[1]
    search = Search(2, samples=1, signal="slopes")
    search.tell(mask, loss, torch.zeros(1, 2), torch.tensor([[2.0, 1.0]]))
    assert search.theta[0] > search.theta[1] > 0.5


@pytest.mark.parametrize("keywords", [{}, {"penalty": 0.0}, {"adaptive": True}], ids=str)
@pytest.mark.parametrize("signal", SIGNALS)
def test_slopes_of_zero_leave_theta_as_it_is(signal, keywords):
    search = Search(MIXED, signal=signal, cost=[1.0] * D, initial=0.7, **keywords)
    for _ in range(3):
        masks, before = search.ask(), search.theta.clone()
        search.tell(masks, torch.randn(2), torch.zeros(2, D))
        torch.testing.assert_close(search.theta, before, rtol=0, atol=1e-15)
    assert search.updates.item() == 3


def test_ranked_losses_ignore_slopes():
    plain, other = (Search(MIXED, seed=1, penalty=0.1, cost=[1.0] * D) for _ in range(2))
    for update in range(20):
        masks, losses, slopes, spreads = told(plain, update)
        plain.tell(masks, losses)
        slopes[0, 0] = NAN
        other.tell(masks, losses, slopes, spreads)
    assert torch.equal(plain.theta, other.theta)
    assert plain.state_dict().keys() == other.state_dict().keys()
    assert not plain.reads_slopes


# Runs as a batch


@pytest.mark.parametrize("space", [MIXED, Space.of(40)], ids=["mixed", "bits"])
@pytest.mark.parametrize("keywords", [{"penalty": 0.2}, {"target": 0.5, "horizon": 15}, {"adaptive": True}], ids=str)
@pytest.mark.parametrize("signal", SIGNALS)
def test_a_batch_is_as_many_single_runs(signal, keywords, space):
    runs, cost = 4, torch.arange(1.0, space.d + 1)
    batch = Search(space, cost=cost, batch=runs, signal=signal, **keywords)
    singles = [Search(space, cost=cost, signal=signal, **keywords) for _ in range(runs)]
    for update in range(15):
        masks, losses, slopes, spreads = told(batch, update)
        if update >= 6:
            slopes[1, 0, 2], losses[2, 1], spreads[2, 0, 0] = NAN, INF, -INF  # run 1 keeps a mask, run 2 none
        batch.tell(masks, losses, slopes, spreads)
        for r, single in enumerate(singles):
            if r == 2 and update >= 6:
                with pytest.raises(Diverged):
                    single.tell(masks[r], losses[r], slopes[r], spreads[r])
            else:
                single.tell(masks[r], losses[r], slopes[r], spreads[r])
    for r, single in enumerate(singles):
        torch.testing.assert_close(batch.theta[r], single.theta, rtol=0, atol=1e-12)
        assert batch.updates[r] == single.updates == (6 if r == 2 else 15)
    assert batch.diverged.tolist() == [False, False, True, False]
    with pytest.raises(Diverged, match="2"):
        batch.check()


# What is not finite


@pytest.mark.parametrize("where", ["losses", "slopes", "spreads"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("signal", SIGNALS)
def test_a_mask_that_is_not_finite_is_left_out(signal, value, where):
    search = Search(MIXED, samples=3, signal=signal)
    given = dict(zip(("masks", "losses", "slopes", "spreads"), told(search, 0)))
    others = Search(MIXED, samples=2, signal=signal)
    others.tell(*(tensor[1:].clone() for tensor in given.values()))
    given[where][0] = value if where == "losses" else torch.tensor([0.0] * (D - 1) + [value])
    search.tell(**given)
    torch.testing.assert_close(search.theta, others.theta, rtol=0, atol=1e-12)
    assert not search.diverged


@pytest.mark.parametrize("where", ["losses", "slopes", "spreads"])
@pytest.mark.parametrize("signal", SIGNALS)
def test_without_a_finite_mask_the_run_has_diverged(signal, where):
    search = Search(MIXED, signal=signal, adaptive=True)
    search.tell(*told(search, 0))
    given = dict(zip(("masks", "losses", "slopes", "spreads"), told(search, 1)))
    before = search.state_dict()
    given[where][..., :] = NAN
    with pytest.raises(Diverged):
        search.tell(**given)
    after = search.state_dict()
    assert after["diverged"].item() is True
    for name in before.keys() - {"diverged", "space"}:
        assert torch.equal(before[name], after[name]), name
    search.tell(*told(search, 2))  # and it goes on
    assert search.updates.item() == 2


# State


@pytest.mark.parametrize("keywords", [{}, {"target": 0.5, "horizon": 40}, {"adaptive": True, "batch": 2}], ids=str)
@pytest.mark.parametrize("signal", SIGNALS)
def test_a_round_trip_goes_on_identically(signal, keywords):
    one, two = (Search(MIXED, cost=[1.0] * D, signal=signal, seed=s, **keywords) for s in (5, 6))
    for update in range(12):
        one.tell(*told(one, update))
    two.load_state_dict(one.state_dict())
    for update in range(12, 24):
        first, second = told(one, update), told(two, update)
        assert torch.equal(first[0], second[0])
        one.tell(*first)
        two.tell(*second)
        assert torch.equal(one.theta, two.theta)
    one_state, two_state = one.state_dict(), two.state_dict()
    assert all(torch.equal(one_state[k], two_state[k]) for k in one_state if k != "space")


@pytest.mark.parametrize("ours", ["ranked", *SIGNALS])
@pytest.mark.parametrize("theirs", ["ranked", *SIGNALS])
def test_a_state_of_another_signal_is_refused(ours, theirs):
    mine, other = Search(MIXED, signal=ours), Search(MIXED, signal=theirs)
    if ours == theirs:
        mine.load_state_dict(other.state_dict())
        return
    with pytest.raises(BadInput, match="signal"):
        mine.load_state_dict(other.state_dict())


# Bad input


def test_one_mask_is_enough_for_slopes_alone():
    for signal in SIGNALS:
        search = Search(MIXED, samples=1, signal=signal)
        search.tell(*told(search, 0))
        assert search.updates.item() == 1
    with pytest.raises(BadInput, match="at least 2"):
        Search(MIXED, samples=1)
    with pytest.raises(BadInput, match="at least 1"):
        Search(MIXED, samples=0, signal="slopes")


@pytest.mark.parametrize(
    ("signal", "kind"),
    [("slope", ValueError), ("", ValueError), (None, TypeError), (1, TypeError), (["slopes"], TypeError)],
)
def test_signals_that_do_not_exist(signal, kind):
    with pytest.raises(kind, match="ranked, first-order, slopes") as caught:
        Search(MIXED, signal=signal)
    assert isinstance(caught.value, EspalierError)


WRONG = {
    "missing": (lambda g: None, ValueError, "learns from slopes"),
    "list": (lambda g: g.tolist(), TypeError, "list"),
    "integers": (lambda g: g.long(), TypeError, "int64"),
    "bool": (lambda g: g > 0, TypeError, "bool"),
    "complex": (lambda g: g.to(torch.complex64), TypeError, "complex"),
    "one mask": (lambda g: g[0], ValueError, r"\(9,\)"),
    "one gate short": (lambda g: g[:, :-1], ValueError, r"\(2, 8\)"),
    "deep": (lambda g: g[None], ValueError, r"\(1, 2, 9\)"),
    "elsewhere": (lambda g: g.to("meta"), ValueError, "meta"),
}


@pytest.mark.parametrize("name", ["slopes", "spreads"])
@pytest.mark.parametrize("wrong", WRONG)
def test_slopes_that_cannot_be_told(wrong, name):
    make, kind, text = WRONG[wrong]
    search = Search(MIXED, signal="slopes")
    masks, losses, slopes, spreads = told(search, 0)
    before = search.state_dict()
    given = {"slopes": slopes, "spreads": spreads}
    given[name] = make(given[name])
    if (wrong, name) == ("missing", "spreads"):  # these may be missing
        search.tell(masks, losses, **given)
        return
    with pytest.raises(kind, match=text) as caught:
        search.tell(masks, losses, **given)
    assert isinstance(caught.value, EspalierError)
    assert wrong == "missing" or name in str(caught.value)
    assert all(torch.equal(before[k], v) for k, v in search.state_dict().items() if k != "space")
    search.tell(masks, losses, slopes, spreads)


@pytest.mark.parametrize("signal", ["ranked", *SIGNALS])
def test_sizes_are_not_negative(signal):
    search = Search(MIXED, signal=signal)
    masks, losses, slopes, spreads = told(search, 0)
    spreads[1, 3] = -0.25
    before = search.state_dict()
    if signal == "ranked":  # which leaves them alone
        search.tell(masks, losses, slopes, spreads)
        return
    with pytest.raises(BadInput, match=r"spreads.*-0\.25"):
        search.tell(masks, losses, slopes, spreads)
    assert all(torch.equal(before[k], v) for k, v in search.state_dict().items() if k != "space")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_slopes_of_any_precision_and_with_a_graph(dtype):
    one, two = Search(MIXED, signal="slopes"), Search(MIXED, signal="slopes")
    for update in range(3):
        masks, losses, *slopes = told(one, update)
        slopes = [s.to(dtype) for s in slopes]
        one.tell(masks, losses, *(s.double() for s in slopes))
        two.tell(masks, losses.requires_grad_(), *(s.clone().requires_grad_() * 1 for s in slopes))
    assert torch.equal(one.theta, two.theta)
    assert not any(v.requires_grad for k, v in two.state_dict().items() if k != "space")


# A target


@pytest.mark.parametrize("seed", range(6))
def test_the_expected_cost_follows_the_ramp_and_the_selection_stays_below(seed):
    rng = np.random.default_rng(seed)
    space = [Space.of(30), Space([Bits("a", 12), Choice("b", 3), Bits("c", 9)])][seed % 2]
    d, target, horizon = space.d, float(rng.uniform(0.35, 0.8)), 400
    cost = Cost.linear(torch.from_numpy(rng.uniform(0.5, 2.0, d)))
    if seed % 3 == 0:
        cost = cost + Cost.product([Form.run(0, d // 2), Form.run(d - 5, d) + 1.0], d=d)
    search = Search(
        space, cost=cost, target=target, horizon=horizon, signal="slopes", even=seed / 5, initial=0.9, seed=seed,
        learning_rate=0.02, samples=1,
    )  # fmt: skip
    values, full = torch.from_numpy(rng.normal(size=d)), search.full_cost.item()
    begin = search.expected_cost().item()
    for update in range(1, horizon + 1):
        masks = search.ask()
        noise = torch.from_numpy(rng.normal(size=(1, d)))
        search.tell(masks, torch.zeros(1), values + noise, (values + noise).abs())
        wanted = begin + (target * full - begin) * min(update / (horizon / 2), 1.0)
        assert abs(search.expected_cost().item() - wanted) < 0.02 * full, update
        if update % 50 == 0:
            assert cost.over(space)(search.select()).item() <= target * full * (1 + 1e-12)
    assert search.usage().item() <= target


def test_a_compiled_update_is_the_eager_one():
    eager, compiled = (Search(MIXED, cost=[1.0] * D, signal="slopes", penalty=0.1, batch=2) for _ in range(2))
    compiled.compile()
    for update in range(2):
        values = told(eager, update)
        eager.tell(*values)
        compiled.tell(*values)
        torch.testing.assert_close(compiled.theta, eager.theta, rtol=0, atol=1e-5)


def test_a_copy_of_a_compiled_search_moves_its_own_theta():
    search = Search(MIXED, cost=[1.0] * D, signal="slopes", penalty=0.1, batch=2)
    search.compile()
    twin, before = copy.deepcopy(search), search.theta
    twin.tell(*told(twin, 0))
    assert search.theta.equal(before)
    assert not twin.theta.equal(before)


def test_what_torch_cannot_compile_stays_as_it_is(monkeypatch):
    def refusing(function, **settings):
        def form(*given):
            raise torch._dynamo.exc.Unsupported("no such operation\nand more of it")

        return form

    monkeypatch.setattr(torch, "compile", refusing)
    plain, refused = (Search(MIXED, cost=[1.0] * D, signal="slopes", penalty=0.1, batch=2) for _ in range(2))
    refused.compile()
    values = told(plain, 0)
    plain.tell(*values)
    with pytest.warns(UserWarning, match="theta is updated uncompiled: torch.compile says no such operation"):
        refused.tell(*values)
    assert refused.theta.equal(plain.theta)
