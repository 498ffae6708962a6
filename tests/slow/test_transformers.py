"""Architectures of the transformers library are quantized, exported and run, and fuse attention written by hand."""

import pytest
import torch
from benchmarks.zoo import one

from chipfit.engine.run import run
from chipfit.frameworks.torch.capture import capture
from chipfit.passes.attention import attention
from chipfit.passes.fold_constants import fold_constants

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # their warnings are not ours

T = transformers
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def image(side=64):
    return {"pixel_values": torch.randn(2, 3, side, side)}


def text():
    return {"input_ids": torch.randint(0, 99, (2, 12)), "attention_mask": torch.ones(2, 12, dtype=torch.long)}


NAMES = "vit deit swin convnext resnet mobilenet_v2 segformer yolos detr distilbert"


@pytest.mark.parametrize("name", NAMES.split())
def test_it_is_quantized_exported_and_computes_what_was_simulated(name):
    for end in one.tried(name).values():
        assert (end["stage"], end["error"], end["outside"], end["departures"]) == ("run", "", 0, [])
        assert end["integers"] > 0


TINY = {**SMALL, "vocab_size": 99}
OTHER = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64}
#: configuration, model, and what it reads, of models that are written with attention in both ways
TWO_WAYS = {
    "bert": (lambda **how: T.BertModel(T.BertConfig(**TINY, **how)), text),
    "llama": (lambda **how: T.LlamaModel(T.LlamaConfig(**TINY, num_key_value_heads=2, use_cache=False, **how)), text),
    "gpt2": (lambda **how: T.GPT2Model(T.GPT2Config(**OTHER, use_cache=False, **how)), text),
    "vit": (lambda **how: T.ViTModel(T.ViTConfig(**SMALL, image_size=64, patch_size=16, **how)), image),
}


@pytest.mark.parametrize("name", TWO_WAYS)
def test_eager_attention_becomes_what_is_read_of_fused_attention(name):
    factory, batch = TWO_WAYS[name]
    x = batch()
    graphs, wanted = {}, {}
    for how in ("eager", "sdpa"):
        torch.manual_seed(0)
        model = factory(attn_implementation=how).eval()
        graph = fold_constants(capture(model, (), x))[0]
        graphs[how] = attention(graph, lambda graph, node: True)[0]
        with torch.no_grad():
            wanted[how] = model(**x)[0]
        got = run(graphs[how], list(x.values()))[graphs[how].outputs[0]]
        torch.testing.assert_close(got, wanted[how], atol=2e-5, rtol=1e-4)
    parts = ("SDPA", "Softmax", "MatMul", "Linear", "Dropout")
    eager, fused = ([n.op for n in g.nodes if n.op in parts] for g in (graphs["eager"], graphs["sdpa"]))
    assert eager == fused and eager.count("SDPA") == 2 and "Softmax" not in eager
    scales = [[n.attrs["scale"] for n in g.nodes if n.op == "SDPA"] for g in graphs.values()]
    assert scales[0] == pytest.approx(scales[1])
