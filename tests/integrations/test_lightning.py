"""Lightning: an ordinary module shaped by a callback, to the last bit what an own loop gives; killed and resumed."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from espalier import BadInput, load, save, shape
from espalier.data.load import digits

lightning = pytest.importorskip("lightning.pytorch")
from espalier.integrations.lightning import Shaping  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),  # Lightning's, of torch
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

(X, Y), (U, V) = (pair := digits().flatten().as_floats()).train, pair.test
X, Y = X[:320], Y[:320]


class Digits(lightning.LightningModule):
    """With BatchNorm and, where asked for, dropout: state, and random numbers."""

    def __init__(self, dropout: float = 0.0, scheduled: bool = False, normed: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(24) if normed else nn.Identity()
        self.body = nn.Sequential(nn.Linear(64, 24), norm, nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 10))
        self.scheduled = scheduled
        self.layers = [self.body, self.head]  # held twice, once outside of torch's sight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        if not self.scheduled:
            return torch.optim.AdamW(self.parameters(), 1e-2)
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def loader(shuffle: bool = False, batch: int = 32) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch, shuffle=shuffle)


def trainer(folder: Path, shaping: Any, **settings: Any) -> Any:
    usual: dict[str, Any] = {
        "max_epochs": 4, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "callbacks": [shaping],
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder,
    }  # fmt: skip
    return lightning.Trainer(**usual | settings)


def shaped(folder: Path, module: Any, train: Any = None, **settings: Any) -> Any:
    shaping = Shaping(target=0.4, **settings)
    torch.manual_seed(5)
    trainer(folder, shaping).fit(module, train or loader())
    return shaping.result


def same(ours: Any, theirs: Any) -> None:
    assert ours.theta.equal(theirs.theta)
    assert ours.mask.equal(theirs.mask)
    state, expected = ours.model.state_dict(), theirs.model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert tensor.equal(expected[name]), name


@pytest.mark.parametrize("how", ["module", "scheduled", "recipe", "ranked"])
def test_it_is_an_own_loop_to_the_last_bit(how: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "recipe": {"optimizer": "recipe"}, "ranked": {"recipe": "ranked", "optimizer": "recipe"},
    }.get(how, {})  # fmt: skip
    result = shaped(tmp_path, Digits(scheduled=how == "scheduled"), **settings)

    model = Digits(scheduled=how == "scheduled")
    given = model.configure_optimizers()
    optimizer, steps = (given[0][0], given[1]) if how == "scheduled" else (given, [])
    settings["optimizer"] = None if how in ("recipe", "ranked") else optimizer
    shaping = shape(model, X[:4], updates=40, target=0.4, **settings)

    def closure(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(shaping.network(x), y)
        loss.backward()
        return loss

    model.train()
    for _ in range(4):
        for x, y in loader():
            shaping.step(closure, x, y)
        for scheduler in steps:
            scheduler.step()
    same(result, shaping.finish(loader()))
    assert result.finished
    assert [row["epoch"] for row in result.history] == [1, 2, 3, 4]
    assert [row["settled"] for row in result.history] == [False, False, True, True]
    assert result.history[-1]["loss"] < result.history[0]["loss"]


def test_the_module_is_what_ships_in_the_end(tmp_path: Path) -> None:
    shaping, module = Shaping(target=0.4, cost="units"), Digits()
    training = trainer(tmp_path, shaping)
    training.fit(module, loader(), DataLoader(TensorDataset(U, V), 64))
    assert module.body[0].out_features + module.head[0].out_features <= 16
    with torch.no_grad():
        assert module(U).equal(shaping.result.model(U))
    (score,) = training.validate(module, DataLoader(TensorDataset(U, V), len(U)), verbose=False)
    assert score["accuracy"] == pytest.approx(float((shaping.result.model(U).argmax(1) == V).float().mean()))
    assert shaping.result.history[-1]["accuracy"] > 0.4
    assert "espalier" not in str(vars(module.body[0]))


@pytest.mark.parametrize("killed", [1, 3])  # while it searches, and once it is settled
def test_killed_and_resumed_it_is_the_same_run(killed: int, tmp_path: Path) -> None:
    expected = shaped(tmp_path, Digits(dropout=0.1), loader(shuffle=True))

    class Killed(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if trainer.current_epoch == killed and index == 4:
                raise ZeroDivisionError

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            trainer.save_checkpoint(tmp_path / "dying.ckpt")

    kept = lightning.callbacks.ModelCheckpoint(tmp_path, "last", save_on_train_epoch_end=True)
    first, second = Shaping(target=0.4), Shaping(target=0.4)
    module = Digits(dropout=0.1)
    torch.manual_seed(5)
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, first, enable_checkpointing=True, callbacks=[first, kept, Killed()]).fit(
            module, loader(shuffle=True)
        )
    assert first.result is None
    last = torch.load(tmp_path / "dying.ckpt", weights_only=True)  # what is saved on the way out is whole too
    assert last["state_dict"]["body.0.weight"].shape == module.body[0].weight.shape == (24, 64)
    assert last["espalier"]["history"] == torch.load(tmp_path / "last.ckpt", weights_only=True)["espalier"]["history"]
    torch.manual_seed(99)
    again = lightning.callbacks.ModelCheckpoint(tmp_path, "last", save_on_train_epoch_end=True)
    trainer(tmp_path, second, enable_checkpointing=True, callbacks=[second, again]).fit(
        Digits(dropout=0.1), loader(shuffle=True), ckpt_path=tmp_path / "last.ckpt"
    )
    same(second.result, expected)
    assert [row["update"] for row in second.result.history] == [10, 20, 30, 40]


def test_a_checkpoint_holds_the_whole_network(tmp_path: Path) -> None:
    shaping = Shaping(target=0.4)
    kept = lightning.callbacks.ModelCheckpoint(tmp_path, "last", every_n_train_steps=100, save_last=True)
    trainer(tmp_path, shaping, enable_checkpointing=True, callbacks=[shaping, kept]).fit(Digits(), loader())
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    module = Digits()
    module.load_state_dict(state)
    rows = shaping.result.mask[:24].bool()  # of the first layer, what ships is a part of it
    assert module.body[0].weight[rows].equal(shaping.result.model.body[0].weight)


def two_processes(folder: Path) -> None:
    class Noted(lightning.Callback):
        def on_fit_end(self, trainer: Any, module: Any) -> None:
            result = shaping.result
            torch.save((result.theta, result.mask, result.model.state_dict()), folder / f"{trainer.global_rank}.pt")

    shaping = Shaping(target=0.4)
    training = trainer(folder, shaping, strategy="ddp_fork", devices=2, callbacks=[shaping, Noted()])
    training.fit(Digits(normed=False), loader(batch=16))


def test_two_processes_are_one_that_reads_both_halves(tmp_path: Path) -> None:
    two_processes(tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    model = Digits(normed=False)
    shaping = shape(model, X[:4], model.configure_optimizers(), updates=40, samples=1, target=0.4)
    assert shaping.phases is not None

    def closure() -> Tensor:  # the halves that two processes read, one after the other
        halves = [F.cross_entropy(model(x), y) / 2 for x, y in parts]
        for half in halves:
            half.backward()
        return halves[0].detach() + halves[1].detach()

    orders = [DistributedSampler(X, 2, rank) for rank in (0, 1)]  # as Lightning puts them in
    for epoch in range(4):
        for order in orders:
            order.set_epoch(epoch)
        for halves in zip(*(torch.tensor(list(order)).split(16) for order in orders)):
            parts = [(X[half], Y[half]) for half in halves]
            if shaping.update == shaping.phases.settle:
                shaping.search.settle()  # several processes go on masked
            shaping.step(closure)
    result = shaping.finish((X, Y))
    for theta, mask, state in (first, second):
        assert theta.equal(result.theta)
        assert mask.equal(result.mask)
        for name, tensor in result.model.state_dict().items():
            assert tensor.equal(state[name]), name


class Recurrent(Digits):
    """An LSTM, whose weights no hook of a layer reaches: they are masked when the module is called."""

    def __init__(self, called: bool) -> None:
        super().__init__()
        self.lstm, self.called = nn.LSTM(8, 12, batch_first=True), called
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.reshape(-1, 8, 8))[0][:, -1])

    def training_step(self, batch: Any, _: int) -> Tensor:
        return F.cross_entropy(self(batch[0]) if self.called else self.forward(batch[0]), batch[1])


def test_weights_that_are_masked_by_a_call_of_the_module(tmp_path: Path) -> None:
    assert shaped(tmp_path, Recurrent(called=True)).share_after <= 0.4
    with pytest.raises(BadInput, match="call self"):
        shaped(tmp_path, Recurrent(called=False))


class Manual(Digits):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "settings", "said"),
    [
        (Manual, {}, "automatic optimisation"),
        (Digits, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        (Digits, {"max_epochs": -1}, "how long the run is"),
        (Digits, {"strategy": "fsdp"}, "FSDP"),
    ],
)
def test_what_it_cannot_do_is_named(module: Any, settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises((BadInput, ValueError), match=said):
        trainer(tmp_path, Shaping(target=0.4), **settings).fit(module(), loader())
    with pytest.raises(BadInput, match="replaces the module's"):
        shaped(tmp_path, Digits(scheduled=True), optimizer="recipe")


@pytest.mark.parametrize(
    "name", [n for n in ("EMAWeightAveraging", "StochasticWeightAveraging") if hasattr(lightning.callbacks, n)]
)
def test_an_average_of_the_whole_network_is_refused(name: str, tmp_path: Path) -> None:
    arguments = {"swa_lrs": 1e-2} if name.startswith("Stochastic") else {}
    average = getattr(lightning.callbacks, name)(**arguments)
    with pytest.raises(BadInput, match=f"{name} averages the weights of the whole network"):
        trainer(tmp_path, Shaping(target=0.4), callbacks=[Shaping(target=0.4), average]).fit(Digits(), loader())


def test_a_number_of_steps_says_how_long_the_run_is(tmp_path: Path) -> None:
    shaping = Shaping(target=0.4)
    trainer(tmp_path, shaping, max_epochs=-1, max_steps=25).fit(Digits(), loader())
    assert shaping.result is not None
    assert shaping.result.updates == 25
    assert shaping.result.share_after <= 0.4


def test_a_module_that_was_cut_is_cut_again_and_kept(tmp_path: Path) -> None:
    """It holds its plan, so that it loads from the uncut one, after one fit and after two."""
    module = Digits()
    for _ in range(2):
        result = shaped(tmp_path, module)
        for small in (module, result.model):
            save(small, tmp_path / "small")
            assert load(tmp_path / "small", Digits).eval()(X).equal(result.model(X))
    first = module.body[0].weight  # type: ignore[union-attr]
    assert first.numel() < 0.3 * 24 * 64  # type: ignore[operator]


def test_the_example(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "with_lightning.py"), run_name="__main__")
    said = capsys.readouterr().out
    share, error = re.findall(r"([0-9.]+)% of the weights.*test error ([0-9.]+)%", said, re.DOTALL)[0]
    assert float(share) <= 30
    assert float(error) < 8


def test_the_snippet_of_the_page(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
    (code,) = re.findall(r"```python\n(from espalier\.integrations\.lightning.*?)```", page, re.DOTALL)
    shortened = {"max_epochs": 4}

    def quietly(callbacks: Any, **settings: Any) -> Any:
        return trainer(tmp_path, callbacks[0], **settings | shortened)

    names: dict[str, Any] = {"Trainer": quietly, "module": Digits(), "loader": loader()}
    exec(compile(code, "docs/frameworks.md", "exec"), names)
    assert names["shaping"].result.share_after <= 0.3
