"""What fit takes: data of any form, any optimiser and scheduler, any cost, new and trained networks."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import espalier
from espalier import Search, fit
from espalier.data import from_arrays, load
from espalier.data.load import digits
from espalier.train import PRESETS, Recipe, compiling, deterministic, eager, evaluate, stochastic
from espalier.train.batched import SGD, Adam, AdamW
from espalier.train.gradients import Update

DATA, TEST = networks.digit_vectors()
SMALL, _ = networks.digit_vectors(256)


def short(model: nn.Module | None = None, data: object = SMALL, **settings):
    """A run of two epochs of eight updates."""
    settings = {"loss": F.cross_entropy, "epochs": 2, "batch_size": 32, "quiet": True} | settings
    return fit(networks.mlp() if model is None else model, data, **settings)


def test_the_forms_of_data_agree() -> None:
    x, y = SMALL
    dataset = from_arrays((x, y), (x[:10], y[:10]))
    runs = [
        short(data=(x, y), target=0.5),
        short(data=dataset, target=0.5),
    ]
    assert runs[0].theta.equal(runs[1].theta)
    batches = [(x[i : i + 32], y[i : i + 32]) for i in range(0, 256, 32)]
    listed = [short(data=source, target=0.5) for source in (batches, networks.loader(SMALL, 32, shuffle=False))]
    assert listed[0].theta.equal(listed[1].theta)

    class Unsized:
        def __iter__(self):
            return iter(batches)

    assert short(data=Unsized(), target=0.5).theta.equal(listed[0].theta)


DIGITS = digits().flatten()


@pytest.mark.parametrize("given", [DIGITS, DIGITS.test, DIGITS.as_floats().test, DIGITS.as_floats()])
def test_a_dataset_and_its_parts_are_read_by_its_own_scale(given: object) -> None:
    result = short(data=DIGITS, epochs=6, validation=given)
    true = evaluate(result.model, DIGITS.as_floats().test, loss=F.cross_entropy)
    assert result.validation == true
    assert true.error is not None
    assert true.error < 0.2
    assert evaluate(result.model, DIGITS, loss=F.cross_entropy) == true


def test_a_dataset_is_read_in_the_precision_of_the_model() -> None:
    assert short(networks.mlp().double(), DIGITS, epochs=1, validation=DIGITS).finished


def test_plain_bytes_are_never_scaled_in_silence() -> None:
    with pytest.raises(espalier.BadInput, match=r"uint8 is not converted: give the espalier.data.Dataset.*float"):
        short(data=DIGITS.train)
    with pytest.raises(espalier.BadInput, match="uint8 is not converted"):
        evaluate(networks.mlp(), DIGITS.test, loss=F.cross_entropy)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
def test_integers_reach_the_model_as_they_are(dtype: torch.dtype) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.mix, self.out = nn.Embedding(17, 4), nn.Linear(256, 12), nn.Linear(12, 10)
            self.seen: set[torch.dtype] = set()

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add(x.dtype)
            return self.out(self.mix(self.words(x.long()).flatten(1)).relu())

    x, y = DIGITS.train
    model = Words()
    short(model, (x[:128].to(dtype), y[:128]), epochs=1, validation=(x[:64].to(dtype), y[:64]))
    assert model.seen == {dtype}


class Frozen(nn.Sequential):
    """Keeps its first BatchNorm in eval mode, whatever it is told."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self[1].eval()
        return self


@pytest.mark.parametrize("overridden", [False, True])
def test_frozen_batch_norm_is_left_alone(overridden: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 16), nn.BatchNorm1d(16), nn.ReLU()]
    model = (Frozen if overridden else nn.Sequential)(*layers, nn.Linear(16, 10)).train()
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(1.0, 2.0)
    model[1].eval()
    mean, var, other = model[1].running_mean.clone(), model[1].running_var.clone(), model[4].running_mean.clone()
    gated = espalier.attach(model, SMALL[0][:4])
    seen = set()
    model[1].register_forward_hook(lambda module, *_: seen.add(module.training))
    result = short(gated, target=0.7, validation=SMALL)
    assert model[1].running_mean.equal(mean)
    assert model[1].running_var.equal(var)
    assert not model[4].running_mean.equal(other)
    assert seen == {False}
    assert model[1].track_running_stats
    assert [m.training for m in model] == [True, False, True, True, True, True, True]
    kept = result.mask[gated.space.slices["0"]].bool()
    assert result.model[1].running_mean.equal(mean[kept])
    with gated.masked(result.mask):
        masked = evaluate(model, SMALL, loss=F.cross_entropy)
    assert result.validation.error == masked.error
    assert result.validation.loss == pytest.approx(masked.loss, rel=1e-5)


def test_a_model_in_eval_mode_as_a_whole_is_trained_and_left_in_it() -> None:
    model = networks.mixed_network().eval()
    before = model[1].running_mean.clone()
    modes = set()
    model[3].register_forward_hook(lambda module, *_: modes.add(module.training))
    short(model)
    assert modes == {True, False}
    assert not model[1].running_mean.equal(before)
    assert not any(part.training for part in model.modules())


def tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("positions", [6, 12])
def test_a_class_for_every_position(positions: int) -> None:
    """Twelve classes at twelve positions: shapes do not say which is which, so no error is made up."""
    torch.manual_seed(0)
    x = torch.randint(0, 12, (256, positions))
    model = nn.Sequential(nn.Embedding(12, 16), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 12))
    result = short(model, (x, x), loss=tokens, epochs=8, validation=(x, x))
    assert result.validation.loss < 0.3
    assert result.validation.error == (0.0 if positions == 6 else None)
    assert (result.history[-1]["error"] is None) == (positions == 12)


def test_one_logit_has_no_error_of_classes() -> None:
    x, y = SMALL[0], SMALL[1] % 2
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1))
    result = short(
        model, (x, y), loss=lambda o, t: F.binary_cross_entropy_with_logits(o[:, 0], t.float()), validation=(x, y)
    )
    assert result.history[-1]["error"] is result.validation.error is None


@pytest.mark.parametrize("form", [tuple, dict])
def test_several_inputs(form: type) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(32, 10)
            self.norm = nn.BatchNorm1d(32)  # recalibrated with several inputs

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.out(self.norm(torch.cat([self.a(left).relu(), self.b(right).relu()], 1)))

    torch.manual_seed(0)
    x, y = SMALL
    parts = (x[:, :32], x[:, 32:])
    inputs = parts if form is tuple else dict(zip(("left", "right"), parts, strict=True))
    result = short(Two(), (inputs, y), target=0.5, epochs=3, validation=(inputs, y))
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert result.model(*parts).shape == (256, 10)


def test_a_regression_has_a_loss_and_no_error() -> None:
    x, y = SMALL
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 1))
    data = (x, y.float().unsqueeze(1) / 10)
    result = short(model, data, loss=F.mse_loss, epochs=4, penalty=0.0, validation=data)
    assert result.history[-1]["error"] is None
    assert result.validation is not None
    assert result.validation.error is None
    assert result.history[-1]["validation_loss"] < result.history[0]["validation_loss"]


def test_any_optimizer_and_scheduler() -> None:
    result = short(
        epochs=4,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    )
    assert [row["learning_rate"] for row in result.history] == pytest.approx([1e-2, 5e-3, 2.5e-3, 1.25e-3])
    constant = short(optimizer=lambda p: torch.optim.Adam(p, lr=1e-3))  # torch's own may move its rate by itself
    assert {row["learning_rate"] for row in constant.history} == {1e-3}
    falling = short(optimizer=Adam(lr=1e-3))  # by the recipe's schedule
    assert falling.history[0]["learning_rate"] > falling.history[-1]["learning_rate"]


def test_a_plateau_is_seen_also_in_a_run_that_is_kept(tmp_path: Path) -> None:
    """Its best loss so far is infinite at first, a number that a file of settings does not know."""

    def run(patience: int) -> Any:
        return short(
            epochs=6,
            optimizer=lambda p: torch.optim.SGD(p, lr=1e-4),
            scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=patience, threshold=1.0),
            checkpoint=tmp_path,
        )

    assert run(0).history[-1]["learning_rate"] < 1e-5
    assert run(0).updates == run(0).updates
    with pytest.raises(espalier.BadInput, match="patience"):
        run(1)


def test_a_cycle_of_the_rate_goes_by_updates() -> None:
    def rates(steps: int) -> list[float]:
        """After every epoch."""
        result = short(
            epochs=4,
            optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
            scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=steps),
        )
        return [row["learning_rate"] for row in result.history]

    updates = 32
    inner = torch.optim.SGD([torch.zeros(1)], 0.1, momentum=0.9)
    cycle, expected = torch.optim.lr_scheduler.OneCycleLR(inner, 0.2, total_steps=updates), []
    for _ in range(updates):
        inner.step()
        cycle.step()
        expected.append(inner.param_groups[0]["lr"])
    assert rates(updates) == expected[updates // 4 - 1 :: updates // 4]
    assert max(rates(4)) > 0.1  # by epochs, as it was made for them
    with pytest.raises(espalier.BadInput, match=r"ends after 31 steps, the run has 32 .*total_steps=32"):
        rates(updates - 1)


@pytest.mark.parametrize(
    ("settings", "factory"),
    [
        (SGD(0.1, 0.5, 1e-3, nesterov=False), lambda p: torch.optim.SGD(p, 0.1, 0.5, weight_decay=1e-3)),
        (Adam(1e-2, (0.8, 0.9)), lambda p: torch.optim.Adam(p, 1e-2, (0.8, 0.9))),
        (AdamW(1e-2), lambda p: torch.optim.AdamW(p, 1e-2)),
    ],
)
def test_fit_and_sweep_take_an_optimizer_by_the_same_words(settings: object, factory: object) -> None:
    ours, theirs = (short(optimizer=given, schedule="cosine") for given in (settings, factory))
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert a.equal(b)
    several = {"masks": torch.ones(1, 32), "epochs": 2, "batch_size": 32, "quiet": True, "schedule": "cosine"}
    ours, theirs = (espalier.sweep(networks.mlp, DATA, optimizer=given, **several)[0] for given in (settings, factory))
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert a.equal(b)


def test_a_dataset_is_judged_on_its_test_part_by_fit_as_by_sweep() -> None:
    data = load("digits").flatten()
    ours = espalier.fit(networks.mlp(), data, epochs=1, penalty=0.0, quiet=True)
    (theirs,) = espalier.sweep(networks.mlp, data, penalties=[0.0], epochs=1, quiet=True)
    assert ours.validation is not None
    assert theirs.validation is not None
    assert ours.validation.examples == theirs.validation.examples == 450
    assert ours.history[0].keys() == theirs.history[0].keys()


def test_part_of_the_parameters_may_be_left_to_rest() -> None:
    model = networks.mlp()
    before = model[0].weight.detach().clone()
    model[0].requires_grad_(False)
    short(model)
    assert model[0].weight.equal(before)


def test_clipping_by_a_hook() -> None:
    norms = []

    def clipped(parameters) -> torch.optim.Optimizer:
        parameters = list(parameters)
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: norms.append(nn.utils.clip_grad_norm_(parameters, 1e-3)))
        return optimizer

    short(optimizer=clipped)
    assert len(norms) == 16


def test_bf16_autocast_around_fit() -> None:
    """Weights cast once and kept, as an autocast region does, would never learn."""
    settings = {"epochs": 16, "settle": 0.5, "recipe": Recipe(initial=0.98, weights_learning_rate=0.1)}
    with torch.autocast("cpu", torch.bfloat16):
        result = short(**settings)
    exact = short(**settings)
    losses, exact_losses = [row["loss"] for row in result.history], [row["loss"] for row in exact.history]
    assert losses != exact_losses
    assert losses[-1] < 0.5 * losses[0]
    assert losses[-1] < 2 * exact_losses[-1]
    assert all(p.dtype == torch.float32 for p in result.model.parameters())
    assert result.theta.dtype == torch.float64


def test_a_double_network_stays_double() -> None:
    result = short(networks.mlp().double(), (SMALL[0].double(), SMALL[1]), target=0.5)
    assert all(p.dtype == torch.float64 for p in result.model.parameters())


@pytest.mark.parametrize("cost", ["weights", "macs", "units", "parameters"])
def test_a_target_of_any_cost(cost: str) -> None:
    assert short(cost=cost, target=0.5).share_after <= 0.5


def test_a_cost_of_one_s_own() -> None:
    gated = espalier.attach(networks.mlp(), DATA[0][:4])
    price = torch.linspace(1, 2, gated.d)
    result = fit(gated, SMALL, loss=F.cross_entropy, epochs=2, batch_size=32, cost=price, target=0.4, quiet=True)
    assert float((result.search.select() * price).sum() / price.sum()) <= 0.4


def test_a_trained_network_is_fine_tuned() -> None:
    """It starts as the trained one, and ends at half its weights about as good, where cutting alone is worse."""
    model = networks.mlp(32, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        index = torch.randint(len(DATA[0]), (64,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(DATA[0][index]), DATA[1][index]).backward()
        optimizer.step()
    trained = evaluate(model, TEST, loss=F.cross_entropy)
    gated = espalier.attach(model, DATA[0][:4])
    recipe = PRESETS["finetune"]
    start = Search(gated.space, initial=recipe.initial)
    assert deterministic(gated, start.mode(), TEST, loss=F.cross_entropy) == trained
    drawn = stochastic(gated, start.theta, TEST, loss=F.cross_entropy)
    assert drawn.error is not None
    assert trained.error is not None
    assert drawn.error < trained.error + 0.03
    result = fit(
        gated, DATA, loss=F.cross_entropy, epochs=8, target=0.5, recipe="finetune", validation=TEST, quiet=True
    )
    assert result.validation is not None
    assert result.validation.error is not None
    assert result.validation.error <= trained.error + 0.02
    assert result.share_after <= 0.5


def test_a_result_can_be_looked_at() -> None:
    result = short(target=0.5, validation=SMALL)
    assert len(repr(result)) < 300
    assert repr(result) == f"Result({result})"
    lines = result.table().splitlines()
    assert [line.split()[0] for line in lines] == ["0", "2"]
    assert "coupled: what is written and read together" in result.explain()  # though the gates are off again
    assert result.gated is None
    page = result._repr_html_()
    assert page.count("<tr>") == 2
    assert "target 50.00% of the weights" in page
    (swept,) = espalier.sweep(networks.mlp, SMALL, targets=[0.5], epochs=1, batch_size=32, quiet=True)
    assert swept.explain() == swept.table()


@pytest.mark.parametrize("settings", [{"precision": "bf16"}, {"precision": "tf32"}, {"channels_last": True}], ids=str)
def test_precision_and_layout_train_the_same_network(settings: dict[str, object]) -> None:
    x = torch.rand(256, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data = x, (x.mean((1, 2, 3)) > 0.5).long()

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(288, 2))

    switches = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    given: dict[str, object] = {"epochs": 16, "batch_size": 32, "target": 0.5, "validation": data, "quiet": True}
    expected, result = fit(network(), data, **given), fit(network(), data, **given, **settings)
    assert result.validation_loss < 0.4
    assert result.validation_loss == pytest.approx(expected.validation_loss, abs=0.1)
    assert all(p.dtype == torch.float32 for p in result.model.parameters())
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == switches
    with pytest.raises(espalier.BadInput, match="precision is"):
        fit(network(), data, **given, precision="float16")


def test_a_compiled_network_trains_as_it_does_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tracer and its derivatives alone: a C++ compiler is not what is tested here."""
    x = torch.rand(128, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data = x, (x.mean((1, 2, 3)) > 0.5).long()

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(144, 2)).double()

    graphs: list[object] = []

    def counted(graph: Any, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    given: dict[str, Any] = {"epochs": 4, "batch_size": 32, "target": 0.5, "quiet": True}
    doubles = data[0].double(), data[1]
    expected = fit(network(), doubles, **given)
    monkeypatch.setattr(eager, "Compiling", lambda: compiling.Compiling(backend=counted))
    result = fit(network(), doubles, **given, compile=True)
    # Of the whole network, the masked one and the compact one; not one for each mask.
    assert 2 <= len(graphs) <= 3
    torch.testing.assert_close(result.theta, expected.theta, rtol=1e-8, atol=1e-10)
    assert result.mask.equal(expected.mask)
    for mine, theirs in zip(result.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


def test_a_module_that_torch_compiled_is_shaped_as_itself() -> None:
    network = networks.mlp()
    result = short(torch.compile(network, backend="eager"), target=0.5)
    expected = short(networks.mlp(), target=0.5)
    assert type(result.model) is type(network)
    assert all(map(torch.equal, result.model.state_dict().values(), expected.model.state_dict().values()))
    with pytest.raises(espalier.BadInput, match=r"give model\.module"):
        short(nn.DataParallel(networks.mlp()), target=0.5)


def test_what_cannot_be_compiled_trains_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(graph: object, inputs: object) -> Any:
        raise NotImplementedError("no such kernel\nand more of it")

    monkeypatch.setattr(eager, "Compiling", lambda: compiling.Compiling(backend=refusing))
    given: dict[str, Any] = {"epochs": 2, "batch_size": 32, "target": 0.5, "quiet": True}
    with pytest.warns(UserWarning, match="trains uncompiled: torch.compile says .*no such kernel"):
        result = fit(networks.mlp(), SMALL, **given, compile=True)
    assert result.finished
    assert result.share_after <= 0.5


def test_a_compiled_pass_under_a_mask_is_the_eager_one_and_computes_each_layer_once() -> None:
    model, x = networks.resnet().double(), torch.randn(8, 1, 8, 8, dtype=torch.float64)
    gated = espalier.attach(model, x[:2])
    mask = (torch.rand(gated.d, generator=torch.Generator().manual_seed(3)) < 0.6).double()
    layers: list[int] = []

    def counted(graph: Any, inputs: object) -> Any:
        function = compiling.as_it_is(graph, inputs)
        layers.append(sum(node.target in compiling.LAYERS for node in graph.graph.nodes))
        return function

    def passed(network: Any, slopes: bool) -> list[torch.Tensor]:
        model.zero_grad()
        with gated.masked(mask, slopes=slopes) as read:
            outputs = network(x)
            outputs.square().mean().backward()
            given = [outputs.detach(), *(p.grad for p in model.parameters())]
            return [*given, read()] if slopes else given

    form = compiling.Compiling(backend=counted).form(model)
    for slopes in (False, True, False):  # what was compiled without slopes is not taken for them
        for mine, theirs in zip(passed(form, slopes), passed(model, slopes), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    of_torch = sum(isinstance(module, (nn.Conv2d, nn.Linear)) for module in model.modules())
    assert layers == [of_torch, of_torch]


def test_nothing_is_recorded_where_torch_compiles_nothing(monkeypatch):
    """Then nobody would see what a network decides in Python, and a recording would repeat it."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # builds without CUDA have none
    weight = nn.Parameter(torch.ones(3))

    def closure(part):
        loss = (weight * part).sum()
        weight.grad = None
        loss.backward()
        return loss

    recording = compiling.Recording(asked=False)
    for n in range(compiling.WARM + 1):
        assert recording.on == (n < compiling.WARM)
        recording(Update(None, torch.ones(1, 0), [(torch.ones(3),)], [weight], closure))
    assert torch.equal(weight.grad, torch.ones(3))


class Capture:
    """In the place of ``torch.cuda.graph``: a recording that is spoilt ends in an error of its own, as CUDA's does."""

    def __init__(self, graph, **settings):
        self.collecting = gc.isenabled()

    def __enter__(self):
        Capture.inside = True

    def __exit__(self, kind, *error):
        Capture.inside = False
        if kind is not None:
            raise RuntimeError("operation failed due to a previous error during capture")


class Drawn:
    """A generator of a GPU, as far as a recording knows it."""

    device = "cpu"

    def __init__(self):
        self.state = torch.Generator().get_state()

    def get_state(self):
        return self.state

    def graphsafe_set_state(self, other):
        self.put_back = other.get_state()


def test_what_cannot_be_recorded_says_why_and_runs_as_it_is(monkeypatch):
    """The first error counts, not the one that ends the recording, and random numbers go on where they were."""
    generator = Drawn()
    stands_in = {"graph": Capture, "CUDAGraph": object, "Stream": object, "default_generators": [generator]}
    stands_in |= {"current_device": lambda: 0, "current_stream": object, "set_stream": lambda stream: None}
    for name, value in stands_in.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(compiling, "_graphs", iter(range(1000)).__next__)  # torch compiles in every call
    monkeypatch.setattr(compiling, "_decided_in_python", lambda: ())
    Capture.inside, calls = False, []

    class Waits(Update):
        def one_at_a_time(self, masks=None, parts=None):
            calls.append((Capture.inside, gc.isenabled()))
            if Capture.inside:
                raise RuntimeError("operation not permitted when stream is capturing\nand more")
            return torch.full((1,), 7.0), None

    recording = compiling.Recording()
    update = Waits(None, torch.ones(1, 0), [(torch.ones(3),)], [torch.ones(3)], lambda part: part)
    with pytest.warns(UserWarning, match="not recorded") as warned:
        losses = [recording(update)[0].item() for _ in range(compiling.WARM + 2)]
    assert losses == [7.0] * (compiling.WARM + 2)
    assert calls == [(False, True)] * compiling.WARM + [(True, False), (False, True), (False, True)]
    assert len(warned) == 1
    said = str(warned[0].message)
    assert "operation not permitted when stream is capturing (test_fit_given.py, line " in said
    assert "torch compiled anew" in said
    assert torch.equal(generator.put_back, generator.state)


def test_what_was_recorded_is_let_go_with_its_phase(monkeypatch):
    """Each recording keeps the memory of an update, and that of a phase is not replayed in the next."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    class Known(Update):
        def one_at_a_time(self, masks=None, parts=None):
            return torch.zeros(1), None

    def update(size, slopes):
        return Known(None, torch.ones(1, 0), [(torch.ones(size),)], [weight], lambda part: part, slopes)

    weight, recording = nn.Parameter(torch.ones(3)), compiling.Recording()
    for phase, slopes in enumerate((False, True, False)):
        kept = [(recording(update(size, slopes)), len(recording.known))[1] for size in (3, 3, 4)]
        assert kept == [1, 1, 2], phase
    weight = nn.Parameter(torch.ones(2))  # of the compact network
    recording(update(3, False))
    assert len(recording.known) == 1
