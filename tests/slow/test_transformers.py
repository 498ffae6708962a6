"""Architectures of the transformers library with random weights: quantized, exported, run in ONNX Runtime."""

from __future__ import annotations

import pytest
import torch

import chipfit
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


def detr():
    backbone = T.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    return T.DetrForObjectDetection(
        T.DetrConfig(
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=backbone,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_queries=7,
        )
    )


MODELS = {
    "vit": (lambda: T.ViTForImageClassification(T.ViTConfig(**SMALL, image_size=64, patch_size=16)), image),
    "deit": (lambda: T.DeiTForImageClassification(T.DeiTConfig(**SMALL, image_size=64, patch_size=16)), image),
    "swin": (
        lambda: T.SwinForImageClassification(
            T.SwinConfig(image_size=64, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
        ),
        image,
    ),
    "convnext": (
        lambda: T.ConvNextForImageClassification(
            T.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], image_size=64)
        ),
        image,
    ),
    "resnet": (
        lambda: T.ResNetForImageClassification(
            T.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic")
        ),
        image,
    ),
    "mobilenetv2": (
        lambda: T.MobileNetV2ForImageClassification(T.MobileNetV2Config(depth_multiplier=0.35, image_size=64)),
        image,
    ),
    "segformer": (
        lambda: T.SegformerForSemanticSegmentation(
            T.SegformerConfig(
                hidden_sizes=[8, 16, 24, 32],
                depths=[1, 1, 1, 1],
                num_attention_heads=[1, 2, 2, 4],
                decoder_hidden_size=32,
            )
        ),
        image,
    ),
    "yolos": (
        lambda: T.YolosForObjectDetection(
            T.YolosConfig(**SMALL, image_size=[64, 64], patch_size=16, num_detection_tokens=5)
        ),
        image,
    ),
    "detr": (detr, image),
    "distilbert": (
        lambda: T.DistilBertForSequenceClassification(
            T.DistilBertConfig(vocab_size=100, dim=32, n_layers=2, n_heads=4, hidden_dim=64)
        ),
        text,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_quantized_exported_and_computes_what_was_simulated(name, tmp_path):
    torch.manual_seed(0)
    factory, batch = MODELS[name]
    model, x = factory().eval(), batch()
    result = chipfit.quantize(model, [x], platform="ort_cpu", progress=False)
    with torch.no_grad():
        assert type(result.model(**x)) is type(model(**x))
    found = result.verify([x], path=result.export(tmp_path / "m.onnx"))
    assert found.integers > 0
    assert found.sound, found.summary()


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
