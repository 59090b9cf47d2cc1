"""The optimiser optimises: known problems over a hundred seeds, and the control with permuted losses does not."""

import pytest
import torch

import espalier

RUNS = 100


def optimise(space, loss_of, updates, *, permuted=False, runs=RUNS, seed=0, **keywords):
    """A hundred independent runs in one batch. permuted: the losses of an update are shuffled among its masks."""
    search = espalier.Search(space, batch=(runs,), seed=seed, **keywords)
    generator = torch.Generator().manual_seed(seed + 1)
    for _ in range(updates):
        masks = search.ask()
        losses = loss_of(masks)
        if permuted:
            order = torch.rand(losses.shape, generator=generator).argsort(-1)
            losses = losses.gather(-1, order)
        search.tell(masks, losses)
    search.check()
    return search


def one_max(masks):
    return -masks.sum(-1)


def leading_ones(masks):
    return -masks.cumprod(-1).sum(-1)


def noisy_one_max():
    """Noise of twice a bit's worth on every loss."""
    generator = torch.Generator().manual_seed(5)
    return lambda masks: -masks.sum(-1) + 2.0 * torch.randn(masks.shape[:-1], generator=generator)


def all_open(search):
    return search.mode().all(-1).double().mean().item()


PROBLEMS = {
    # bits, loss, updates, settings of the plain and of the adaptive search
    "one max": (20, lambda: one_max, 1200, {}, {}),
    "noisy one max": (20, noisy_one_max, 2000, {}, {}),
    "leading ones": (10, lambda: leading_ones, 2500, {"learning_rate": 0.04}, {"margin": 0.02}),
}


@pytest.mark.parametrize("adaptive", [False, True], ids=["plain", "adaptive"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_bits_are_found(name, adaptive):
    d, make_loss, updates, plain, adapted = PROBLEMS[name]
    keywords = adapted if adaptive else plain
    search = optimise(d, make_loss(), updates, adaptive=adaptive, **keywords)
    assert all_open(search) >= 0.95
    assert search.theta.mean().item() > 0.85


@pytest.mark.parametrize("adaptive", [False, True], ids=["plain", "adaptive"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_permuted_losses_find_nothing(name, adaptive):
    """The control: same masks, same losses, but not each its own."""
    d, make_loss, updates, plain, adapted = PROBLEMS[name]
    keywords = adapted if adaptive else plain
    search = optimise(d, make_loss(), updates, permuted=True, adaptive=adaptive, **keywords)
    assert all_open(search) <= 0.02
    assert search.mode().mean().item() == pytest.approx(0.5, abs=0.08)


def test_more_samples_find_it_too():
    for samples in (3, 4, 8):
        search = optimise(20, one_max, 800, samples=samples, runs=50)
        assert all_open(search) >= 0.95


def test_any_optimum_is_found_not_only_all_ones():
    """A hidden mask for each run: no bias towards open or closed."""
    hidden = (torch.rand(RUNS, 1, 16, generator=torch.Generator().manual_seed(0)) < 0.5).float()
    search = optimise(16, lambda masks: (masks != hidden).float().sum(-1), 1200)
    assert (search.mode() == hidden.squeeze(1)).all(-1).double().mean().item() >= 0.95


OPTIONS = espalier.Space([espalier.Choice(f"c{i}", size) for i, size in enumerate([4, 3, 5, 2, 4, 6])])


def categorical(masks):
    """How many choices are wrong, where the right option of each depends on the run."""
    wrong = 0
    for i, (group, where) in enumerate(OPTIONS.choices):
        right = (torch.arange(len(masks)) * (i + 1)) % group.size
        taken = masks[..., where].argmax(-1)
        wrong = wrong + (taken != right.unsqueeze(-1)).float()
    return wrong


@pytest.mark.parametrize(("adaptive", "samples", "updates"), [(False, 2, 1500), (True, 4, 700)])
def test_options_are_found(adaptive, samples, updates):
    search = optimise(OPTIONS, categorical, updates, adaptive=adaptive, samples=samples)
    assert (categorical(search.mode().unsqueeze(1)) == 0).double().mean().item() >= 0.95
    control = optimise(OPTIONS, categorical, updates, adaptive=adaptive, samples=samples, permuted=True)
    assert (categorical(control.mode().unsqueeze(1)) == 0).double().mean().item() <= 0.02


def test_bits_and_options_together():
    """The right option opens what the bits are worth: parity between the two kinds in one space."""
    space = espalier.Space([espalier.Bits("a", 6), espalier.Choice("b", 3), espalier.Bits("c", 6)])

    def loss(masks):
        worth = masks[..., :6].sum(-1) + (1 - masks[..., 9:]).sum(-1)
        return -worth - 4 * masks[..., 7]

    search = optimise(space, loss, 1500)
    expected = torch.tensor([1.0] * 6 + [0, 1, 0] + [0.0] * 6)
    assert (search.mode() == expected).all(-1).double().mean().item() >= 0.95


@pytest.mark.parametrize("keywords", [{}, {"adaptive": True, "margin": 0.02}], ids=["plain", "adaptive"])
def test_a_penalty_closes_what_does_not_help_and_a_negative_one_opens_it(keywords):
    """Bits 0 to 4 help, 5 to 14 do nothing: the penalty alone decides these (the paper's eps' < 0 grows)."""
    strength = 0.5 if keywords else 0.2  # normalised steps are longer, and noisier
    runs = {"penalty": torch.tensor([strength, -strength]).repeat_interleave(RUNS // 2), **keywords}
    mode = optimise(15, lambda masks: -masks[..., :5].sum(-1), 1500, **runs).mode()
    assert mode[:, :5].mean().item() >= 0.98
    assert mode[: RUNS // 2, 5:].mean().item() <= 0.02
    assert mode[RUNS // 2 :, 5:].mean().item() >= 0.98
