"""Gates on the networks of other libraries: one small member of each family, tried in a process of its own.

    python benchmarks/libraries.py timm                        # every family that has no line yet
    python benchmarks/libraries.py timm --only swin            # those whose label has this in it
    python benchmarks/libraries.py timm --into docs/gates.md   # the table of all lines, and try nothing

A library is one entry of ``LIBRARIES``: a function that gives the label and a builder of each network, which gives the
module and its example inputs. It imports its package when it is called. Networks are built from their configuration,
with random weights. Each line of ``results/gates/libraries.jsonl`` says what ``attach`` found, how far masked
and cut outputs are apart, and whether the costs are what an independent counter sees. The measures are those of the
proving ground (``tests/zoo/checks.py``), in float64. What fails has a line, too, with its error.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import Pipe, get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the measures are those of the proving ground

from tests.zoo.checks import (
    Subject,
    compact_output,
    masked_output,
    masks,
    relative,
    reload_mismatch,
    roads,
    smallest_share,
)
from tests.zoo.entry import Entry, call, flat

import espalier
from espalier.report.tables import put_between

RESULTS = Path(__file__).resolve().parents[1] / "results" / "gates" / "libraries.jsonl"
MARKS = ("<!-- generated: libraries -->", "<!-- end of generated: libraries -->")
MASKS, SECONDS, TOLERANCE = 3, 300, 1e-9

Build = Callable[[], tuple[nn.Module, Any]]  # a network and its example inputs
Networks = Iterator[tuple[str, Build]]  # a label and a builder of each network

# ---- the libraries ---------------------------------------------------------------------------------------------------

SMALL: dict[str, dict[str, Any]] = {  # of families whose smallest member is large: the same code, narrower
    "beit_base_patch16_224": {"embed_dim": 96, "depth": 3, "num_heads": 3},
    "naflexvit_base_patch16_parfac_gap": {"embed_dim": 96, "depth": 3, "num_heads": 3},
    "samvit_base_patch16_224": {"embed_dim": 96, "depth": 3, "num_heads": 3},
    "deepseek_vit_412m": {"embed_dim": 96, "depth": 3, "num_heads": 3},
    "qwen3_vit_88m": {"embed_dim": 96, "depth": 3, "num_heads": 3},
    "gemma4_vit_167m_enc": {"embed_dim": 96, "depth": 3, "num_heads": 3},
}
TIMM = """
beit_base_patch16_224 halonet_h1 test_byobnet cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32 test_convnext
cpubone_nano crossvit_tiny_240 csatv2 cs3darknet_focus_s cspnext_tiny davit_tiny deepseek_vit_412m deit_tiny_patch16_224
densenet121 dla46x_c dpn48b edgenext_xx_small efficientformer_l1 efficientformerv2_s0 test_efficientnet efficientvim_m1
efficientvit_b0 efficientvit_m0 vit_tiny_patch16_dinov3_qkvb fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny
gemma4_vit_167m_enc ghostnet_050 hardcorenas_b hgnetv2_b0 hiera_tiny_224 sam2_hiera_tiny hrnet_w18_small iformer_t
inception_next_atto inception_resnet_v2 inception_v3 inception_v4 lcnetv2_small levit_128s lowformer_b0 test_mambaout
test_coatnet poolformerv2_s12 gmlp_ti16_224 lcnet_035 mobilenetv5_base mobilevit_xxs mvitv2_tiny
naflexvit_base_patch16_parfac_gap nasnetalarge nest_tiny nextvit_small test_nfnet pit_ti_224 pnasnet5large pvt_v2_b0
qwen3_vit_88m rdnet_tiny regnetx_002 repghostnet_050 repvit_m1 res2next50 resnest14d test_resnet resnetv2_18 rexnet_100
selecsls42 legacy_seresnet18 sequencer2d_s shvit_s1 skresnet18 starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224
swinv2_tiny_window8_256 swinv2_cr_tiny_224 tiny_vit_5m_224 tnt_s_legacy_patch16_224 tresnet_m twins_svt_small vgg11
visformer_tiny test_vit vit_tiny_r_s16_p8_224 test_vit_relpos samvit_base_patch16_224 vitamin_small_224 volo_d1_224
ese_vovnet19b_slim_dw legacy_xception xception41p xcit_nano_12_p8_224
"""  # the smallest of each file of timm.models, by parameters


def timm() -> Networks:
    for name in TIMM.split():
        yield name, functools.partial(_timm, name)


def _timm(name: str) -> tuple[nn.Module, Any]:
    """On the smallest images that it takes."""
    import timm

    sizes = (64, 96, 128, 160, 192, 224, 256)
    for size in (*sizes, None):
        for given in ({"img_size": size}, {}) if size else ({},):
            try:
                model = timm.create_model(name, num_classes=10, **given, **SMALL.get(name, {}))
                image = torch.randn(2, 3, *((size, size) if size else model.default_cfg["input_size"][1:]))
                with torch.no_grad():
                    model.eval()(image)
            except Exception:
                if size is None:
                    raise
                continue
            return model.train(), torch.randn(3, *image.shape[1:], dtype=torch.float64)
    raise AssertionError


def segmentation_models() -> Networks:
    """Every decoder, on small encoders of timm."""
    import segmentation_models_pytorch as smp

    for name in ("Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "DeepLabV3", "DeepLabV3Plus", "PAN",
                 "UPerNet", "Segformer", "DPT"):  # fmt: skip
        encoder = "tu-test_vit" if name == "DPT" else "tu-test_resnet"
        yield f"{name} {encoder}", functools.partial(_segmentation, getattr(smp, name), encoder)


def _segmentation(kind: Any, encoder: str) -> tuple[nn.Module, Any]:
    size = 160 if "vit" in encoder else 256 if kind.__name__ == "PAN" else 64
    return kind(encoder, encoder_weights=None, classes=3), torch.randn(3, 3, size, size, dtype=torch.float64)


def efficientnet_pytorch() -> Networks:
    yield "efficientnet-b0", _efficientnet


def _efficientnet() -> tuple[nn.Module, Any]:
    from efficientnet_pytorch import EfficientNet

    model = EfficientNet.from_name("efficientnet-b0", num_classes=10, image_size=64)
    return model, torch.randn(3, 3, 64, 64, dtype=torch.float64)


# Networks written as calls, which are their labels, apart by semicolons, by what they are given.

GRAPHS = {  # 20 nodes of 16 numbers, 60 edges; each stands between two linear layers
    "nodes, edges": """
        GCN(16, 32, 3, 16, norm="batch_norm"); GraphSAGE(16, 32, 3, 16, jk="cat"); GIN(16, 32, 3, 16);
        GAT(16, 32, 2, 16, heads=4); GAT(16, 32, 2, 16, v2=True); EdgeCNN(16, 32, 2, 16); GCN(16, 32, 2, 16, jk="lstm");
        PNA(16, 32, 2, 16, aggregators=["mean", "std"], scalers=["identity", "amplification"], deg=tensor([1, 5, 9]));
        ChebConv(16, 16, 3); ARMAConv(16, 16); TAGConv(16, 16); ClusterGCNConv(16, 16); LEConv(16, 16);
        MFConv(16, 16); GENConv(16, 16); ResGatedGraphConv(16, 16); TransformerConv(16, 4, heads=4); FiLMConv(16, 16);
        EGConv(16, 16); MixHopConv(16, 16); FeaStConv(16, 16); GatedGraphConv(16, 3); AntiSymmetricConv(16);
        SuperGATConv(16, 16); GraphUNet(16, 32, 16, 2); LINKX(20, 16, 32, 16, 2)""",
    "nodes, edges, kinds": "RGCNConv(16, 16, 3); RGCNConv(16, 16, 3, num_bases=2); RGATConv(16, 16, 3)",
    "nodes, edges, attributes": """
        GATConv(16, 16, edge_dim=4); CGConv(16, 4); GMMConv(16, 16, 4, 3); PDNConv(16, 16, 4, 6);
        GINEConv(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)), edge_dim=4)""",
    "nodes, edges, graph": """
        GPSConv(16, GCNConv(16, 16), heads=4); models.SGFormer(16, 32, 16); models.Polynormer(16, 32, 16)""",
    "nodes, graph": """
        Set2Set(16, 3); SortAggregation(5); AttentionalAggregation(nn.Linear(16, 1));
        aggr.SoftmaxAggregation(learn=True); aggr.SetTransformerAggregation(16, heads=4)""",
}
LANGUAGE = {  # stacks of two blocks of width 48 and 4 heads, on 50 tokens
    "tokens": """
        Decoder(); Encoder(); Decoder(attn_flash=True); Encoder(attn_num_mem_kv=4); Decoder(use_rmsnorm=True);
        Decoder(ff_glu=True, ff_swish=True); Decoder(ff_post_act_ln=True); Encoder(macaron=True);
        Decoder(attn_kv_heads=2); Decoder(attn_one_kv_head=True); Decoder(attn_sparse_topk=4);
        Encoder(attn_on_attn=True); Encoder(attn_gate_values=True); Decoder(attn_selective=True);
        Decoder(attn_pre_talking_heads=True); Decoder(attn_head_scale=True); Encoder(weight_tie_layers=True);
        Decoder(attn_qk_norm=True, attn_qk_norm_dim_scale=True); Encoder(pre_norm=False, residual_attn=True);
        Encoder(rel_pos_bias=True); Decoder(alibi_pos_bias=True, alibi_num_heads=2); Decoder(rotary_pos_emb=True);
        Decoder(dynamic_pos_bias=True); Decoder(gate_residual=True); Decoder(shift_tokens=1);
        Decoder(use_dynamic_tanh=True); Decoder(num_residual_streams=4)"""
}
MEDICAL = {
    "randn(2, 1, 32, 32)": """
        UNet(2, 1, 2, (8, 16, 32), (2, 2), num_res_units=2); BasicUNet(2, 1, 2, (8, 8, 16, 16, 32, 8));
        BasicUNetPlusPlus(2, 1, 2, (8, 8, 16, 16, 32, 8)); SegResNet(2, 8, 1, 2); VNet(2, 1, 2); HighResNet(2, 1, 2);
        DynUNet(2, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], [8, 16, 32]); AttentionUnet(2, 1, 2, (8, 16, 32), (2, 2));
        DenseNet(2, 1, 2, 8, 8, (2, 2)); SEResNet50(layers=(1, 1, 1, 1), spatial_dims=2, in_channels=1, num_classes=2);
        UNETR(1, 2, 32, 8, 48, 64, 4, spatial_dims=2); ViT(1, (32, 32), (8, 8), 48, 64, 2, 4, spatial_dims=2);
        MedNeXt(2, 8, 1, 2, blocks_down=(1, 1, 1, 1), blocks_bottleneck=1, blocks_up=(1, 1, 1, 1));
        RegUNet(2, 1, 8, 2, out_channels=2)""",
    "randn(2, 1, 32, 32), tensor([3, 7])": """
        DiffusionModelUNet(2, 1, 1, (1, 1), (8, 16), (False, True), 4, num_head_channels=8)""",
}
DIFFUSION = {
    "dict(hidden_states=image, timestep=times, class_labels=times)": """
        diffusers.DiTTransformer2DModel(4, 8, 4, 8, 2, norm_num_groups=4, sample_size=8, num_embeds_ada_norm=10)""",
    "dict(hidden_states=image, timestep=times, encoder_hidden_states=text, pooled_projections=pooled)": """
        diffusers.SD3Transformer2DModel(8, 1, 4, 2, 8, 4, 12, 32, 16, 4, 16, qk_norm="rms_norm")""",
    "dict(hidden_states=image.flatten(2).mT, timestep=times, encoder_hidden_states=text, pooled_projections=pooled, "
    "img_ids=randn(64, 3), txt_ids=randn(5, 3))": """
        diffusers.FluxTransformer2DModel(1, 4, 4, 1, 2, 16, 2, 12, 16, False, [4, 4, 8])""",
    "dict(sample=image, timestep=times)": """
        diffusers.UNet2DModel(8, 4, 4, down_block_types=("DownBlock2D", "AttnDownBlock2D"), norm_num_groups=4,
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), block_out_channels=(8, 16), layers_per_block=1)""",
}


class Between(nn.Module):
    """A layer of graphs between two linear layers, so that its own widths may go."""

    def __init__(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        with torch.no_grad():  # it may keep what it saw
            width = layer.double()(*inputs).shape[-1]
        self.first, self.layer, self.last = nn.Linear(16, 16), layer, nn.Linear(width, 3)

    def forward(self, nodes: torch.Tensor, *rest: Any) -> Any:
        return self.last(self.layer(self.first(nodes).relu(), *rest))


def graphs() -> dict[str, Any]:
    import torch_geometric.nn

    where = {"edges": torch.randint(20, (2, 60)), "graph": torch.arange(20) // 10, "kinds": torch.randint(3, (60,))}
    given = {"nodes": torch.randn(20, 16).double(), "attributes": torch.randn(60, 4).double()}
    return vars(torch_geometric.nn) | where | given | {"wrap": Between}


def language() -> dict[str, Any]:
    import x_transformers as xt

    small = {"dim": 48, "depth": 2, "heads": 4, "attn_dim_head": 12}
    stacks = {name: functools.partial(getattr(xt, name), **small) for name in ("Encoder", "Decoder")}
    wrapped = {"wrap": lambda stack, _: xt.TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=stack)}
    return stacks | wrapped | {"tokens": torch.randint(50, (2, 12))}


def medical() -> dict[str, Any]:
    from monai.networks import nets

    return vars(nets)


def diffusion() -> dict[str, Any]:
    import diffusers.utils.import_utils

    diffusers.utils.import_utils._transformers_available = False  # else it insists on torchvision
    given = {"image": torch.randn(2, 4, 8, 8), "text": torch.randn(2, 5, 12), "pooled": torch.randn(2, 16)}
    doubles = {name: value.double() for name, value in given.items()}
    return doubles | {"times": torch.tensor([3, 5]), "diffusers": diffusers}


def called(names: Callable[[], dict[str, Any]], networks: dict[str, str]) -> Networks:
    """Networks written as calls; names: what calls and inputs are written with."""
    for inputs, calls in networks.items():
        for network in (" ".join(text.split()) for text in calls.split(";")):
            yield network, functools.partial(_called, names, network, inputs)


def _called(names: Callable[[], dict[str, Any]], network: str, inputs: str) -> tuple[nn.Module, Any]:
    known = {"nn": nn, "tensor": torch.tensor} | names()
    known["randn"] = functools.partial(torch.randn, dtype=torch.float64)
    given, module = eval(inputs, known), eval(network, known)
    return known["wrap"](module, given) if "wrap" in known else module, given


LIBRARIES: dict[str, Callable[[], Networks]] = {
    "timm": timm,
    "segmentation_models_pytorch": segmentation_models,
    "efficientnet_pytorch": efficientnet_pytorch,
    "torch_geometric": functools.partial(called, graphs, GRAPHS),
    "x_transformers": functools.partial(called, language, LANGUAGE),
    "monai": functools.partial(called, medical, MEDICAL),
    "diffusers": functools.partial(called, diffusion, DIFFUSION),
}

# ---- one network -----------------------------------------------------------------------------------------------------


def examine(build: Build) -> dict[str, Any]:
    """Everything a line says of one network."""
    torch.manual_seed(20191)
    inputs = build()[1]
    entry = Entry("", "cnn", lambda: build()[0], lambda: inputs)
    model = entry.build()
    row: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    with torch.no_grad():
        flat(call(model, inputs))  # does it run at all?
    start = time.process_time()
    try:
        gated = espalier.attach(model, inputs)
    except espalier.NoGates as refusal:
        return row | {"attach_s": round(time.process_time() - start, 1), "no_gates": str(refusal)}
    row["attach_s"] = round(time.process_time() - start, 1)
    it = Subject(entry, model, gated, inputs)
    drawn = masks(gated, MASKS)
    errors = [apart(it, mask) for mask in drawn]
    costs = [roads(it, mask) for mask in (it.ones, *drawn)]
    return row | {
        "gates": gated.d,
        "groups": len(gated.space.groups),
        "refused": {name: why[:100] for name, why in list(gated.refused.items())[:4]},
        "smallest_share": round(smallest_share(it), 4),
        "error_eval": max(error for error, _ in errors),
        "error_train": max(error for _, error in errors),
        "error_reload": reload_mismatch(it, drawn[0]),
        "cost_difference": max(abs(said - seen) / max(seen, 1) for cost in costs for said, *_, seen in cost.values()),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def apart(it: Subject, mask: torch.Tensor) -> list[float]:
    """How far masked and cut outputs are apart in eval and in train mode, with the same random numbers."""
    canonical, small, found = it.gated.canonical(mask), it.gated.compact(mask), []
    for train in (False, True):
        torch.manual_seed(7)
        expected = masked_output(it, canonical, it.inputs, train)
        torch.manual_seed(7)
        found.append(relative(compact_output(small, it.inputs, train), expected))
    return found


def alone(build: Build, seconds: int) -> dict[str, Any]:
    """``examine`` in a process of its own, which may fail, hang or grow without harm; seconds: of processor time."""
    here, there = Pipe(duplex=False)
    process = get_context("fork").Process(target=_examine_into, args=(there, build, seconds))
    process.start()
    there.close()
    try:
        row: dict[str, Any] = here.recv()
    except EOFError:
        row = {}
    process.join()
    late = process.exitcode == -signal.SIGXCPU
    return row or {"error": f"not done after {seconds} s" if late else f"ended with exit code {process.exitcode}"}


def _examine_into(pipe: Any, build: Build, seconds: int) -> None:
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 9))
    try:
        row = examine(build)
    except Exception as error:
        traceback.print_exc()
        row = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
    pipe.send(row)


def versions(library: str) -> dict[str, str]:
    from importlib.metadata import version

    return {"python": platform.python_version(), "torch": torch.__version__, library: version(library)}


# ---- the table -------------------------------------------------------------------------------------------------------


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(lines: list[dict[str, Any]]) -> str:
    """A row for each library."""
    rows = [
        "| library | networks | not done | with gates | masked and cut agree | costs agree | 5% | 25% |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for library in sorted({line["library"] for line in lines}):
        tried = [line for line in lines if line["library"] == library]
        gated = [line for line in tried if "gates" in line]
        agree = [line for line in gated if max(line["error_eval"], line["error_train"]) < TOLERANCE]
        equal = [line for line in gated if line["cost_difference"] == 0]
        small = [sum(line["smallest_share"] <= share for line in gated) for share in (0.05, 0.25)]
        numbers = (len(tried), sum("error" in line for line in tried), len(gated), len(agree), len(equal), *small)
        rows.append(f"| {library} {tried[0]['versions'][library]} | {' | '.join(map(str, numbers))} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--only", default="", help="labels that hold this")
    parser.add_argument("--again", action="store_true", help="try what has a line already, too")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of processor time, for each network")
    parser.add_argument("--out", type=Path, help=f"the file of lines, else {RESULTS.name}")
    parser.add_argument("--into", type=Path, help="write the table of all lines into this page, and try nothing")
    given = parser.parse_args()
    if given.into:
        put_between(given.into, [(MARKS, table(lines_of(RESULTS)))])
        return
    networks = dict(LIBRARIES[given.library]())
    torch.set_num_threads(1)
    path = given.out or RESULTS
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {(line["library"], line["network"]): line for line in lines_of(path)}
    for label, build in networks.items():
        own = (given.library, label)
        if given.only not in label or (own in kept and not given.again):
            continue
        row = {"library": given.library, "network": label} | alone(build, given.seconds)
        kept[own] = row | {"versions": versions(given.library)}
        path.write_text("".join(json.dumps(kept[key]) + "\n" for key in sorted(kept)))
        print(json.dumps(kept[own]), flush=True)


if __name__ == "__main__":
    main()
