"""A compact model is a plain module: no gate code, no hooks; it copies, exports, compiles and trains like any other."""

import copy
import functools

import pytest
import torch
import torch._dynamo.testing

import espalier

from .catalogue import BY_NAME
from .checks import TOLERANCE, compact_output, masks, mode, relative, subject
from .entry import call, flat

FEW = ["MLP", "ResNet-20", "MobileNet with squeeze-excite", "LSTM", "small GPT, tied embeddings", "BERT", "Llama"]
SOME = pytest.mark.parametrize("name", FEW)


@functools.cache
def cut(name: str):
    it = subject(name)
    mask = masks(it.gated, 3)[1]
    return it, it.gated.compact(mask).eval()


@SOME
def test_no_trace_of_gates_but_the_plan(name):
    it, small = cut(name)
    for path, module in small.named_modules():
        assert not isinstance(module, espalier.Gate), path
        assert not module._forward_hooks, path
        assert not module._forward_pre_hooks, path
        assert not hasattr(module, "parametrizations"), path
    traces = {name for module in small.modules() for name in vars(module) if "espalier" in name}
    assert traces <= {"espalier_plan"}
    assert type(small.espalier_plan) is dict
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in it.model.parameters())


@SOME
def test_deepcopy_and_state_dict(name):
    it, small = cut(name)
    twin = copy.deepcopy(small)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert relative(compact_output(twin, it.inputs, False), compact_output(small, it.inputs, False)) > 0
    twin.load_state_dict(small.state_dict())
    assert torch.equal(compact_output(twin, it.inputs, False), compact_output(small, it.inputs, False))


@pytest.mark.filterwarnings("ignore:The tensor attributes self.rnn._flat_weights")  # of any LSTM, cut or not
@SOME
def test_export(name):
    it, small = cut(name)
    inputs = it.inputs
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
    if name == "Llama":
        kwargs = {**kwargs, "use_cache": False}  # the cache it returns by default is no type that torch.export knows
    with torch.no_grad():
        program = torch.export.export(small, args, kwargs, strict=False)
        got = flat(program.module()(*args, **kwargs))
    assert relative(got, compact_output(small, inputs, False)) <= TOLERANCE


@SOME
def test_compile_in_one_graph(name):
    it, small = cut(name)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(small), backend="aot_eager", fullgraph=name != "LSTM")
    with torch.no_grad():
        got = flat(call(compiled, it.inputs))
    assert relative(got, compact_output(small, it.inputs, False)) <= TOLERANCE
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_generation_with_a_cache(name):
    """Keys and values kept between steps have the compact model's heads, and the tokens are those of the masked one."""
    it, small = cut(name)
    canonical = it.gated.canonical(masks(it.gated, 3)[1])
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "use_cache": True}
    with mode(it.model, False), it.gated.masked(canonical):
        expected = it.model.generate(**it.inputs, **settings)
    assert torch.equal(small.generate(**it.inputs, **settings), expected)


@pytest.mark.long
@SOME
def test_compile_with_the_default_backend(name):
    it, small = cut(name)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(small))
    with torch.no_grad():
        got = flat(call(compiled, it.inputs))
    assert relative(got, compact_output(small, it.inputs, False)) <= 1e-5  # the norms of Llama compute in float32
    torch._dynamo.reset()


@SOME
def test_trains_on(name):
    it, small = cut(name)
    twin = copy.deepcopy(small).train()
    optimizer = torch.optim.SGD(twin.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = flat(call(twin, it.inputs)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]


# Plain layers are in tests/gates/test_call.py; torch.compile steps over stock RNNs.
@pytest.mark.parametrize("name", ["MobileNet with squeeze-excite", "small GPT, tied embeddings", "Llama"])
def test_a_new_mask_causes_no_recompilation(name):
    it = subject(name)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(it.model, backend=counter)
    frames = []
    with mode(it.model, False), torch.no_grad():
        for mask in masks(it.gated, 3):
            canonical = it.gated.canonical(mask)
            with it.gated.masked(canonical):
                got = flat(call(compiled, it.inputs))
                expected = flat(call(it.model, it.inputs))
            assert relative(got, expected) <= TOLERANCE
            frames.append(counter.frame_count)
    torch._dynamo.reset()
    assert frames[0] > 0
    assert len(set(frames)) == 1, f"compiled again for a new mask: {frames}"


@pytest.mark.parametrize("name", ["MLP", "ResNet-20", "small GPT, tied embeddings", "Llama"])
def test_other_precisions(name):
    """Attached in float32, and under bfloat16 autocast: masked and compact agree as far as the format does."""
    entry = BY_NAME[name]
    model, inputs = entry.build().float().eval(), entry.inputs()
    if isinstance(inputs, torch.Tensor) and inputs.is_floating_point():
        inputs = inputs.float()
    gated = espalier.attach(model, inputs)
    mask = gated.canonical(masks(gated, 3)[0])
    small = gated.compact(mask)
    assert {p.dtype for p in small.parameters()} == {torch.float32}
    with torch.no_grad(), gated.masked(mask.double()):
        expected = flat(call(model, inputs))
        with torch.autocast("cpu", torch.bfloat16):
            rough = flat(call(model, inputs)).float()
    with torch.no_grad():
        assert relative(flat(call(small, inputs)), expected) < 1e-5
        with torch.autocast("cpu", torch.bfloat16):
            assert relative(flat(call(small, inputs)).float(), rough) < 0.05
