"""The architectures of the zoo: small configurations and their inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

#: folder in which `make zoo` installs timm, apart from other packages
TIMM = Path(sys.prefix) / "zoo"

Batch = Any


@dataclass(frozen=True, slots=True)
class Entry:
    """An architecture of the zoo."""

    source: str  #: the library that defines it
    model: Callable[[], Any]
    batch: Callable[[], Batch]  #: other samples at each call; 4 of them


ENTRIES: dict[str, Entry] = {}


# ---------------------------------------------------------------- inputs


def pixels(side: int = 64, *frames: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(4, *frames, 3, side, side)}


def words(length: int = 12, vocabulary: int = 100) -> dict[str, torch.Tensor]:
    """Return token ids and a mask; the last sample is padded."""
    mask = torch.ones(4, length, dtype=torch.long)
    mask[-1, -3:] = 0
    return {"input_ids": torch.randint(1, vocabulary, (4, length)), "attention_mask": mask}


def tokens(length: int = 12) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(1, 100, (4, length))}


def both(length: int = 12) -> dict[str, torch.Tensor]:
    return {**words(length), "decoder_input_ids": torch.randint(1, 100, (4, 7))}


def sound(length: int = 800) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(4, length)}


# ---------------------------------------------------------------- transformers

WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {**WIDE, "vocab_size": 100, "max_position_embeddings": 64}
PATCHES = {**WIDE, "image_size": 64, "patch_size": 16}
DECODER = {**TEXT, "use_cache": False, "num_key_value_heads": 2, "pad_token_id": 0}
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}


def hugging(
    name: str, model: str, config: dict[str, Any], batch: Callable[[], Batch], config_name: str = "", **parts: Any
) -> None:
    """Return an entry of transformers; its configuration has the model's name without "For...", "Model" ..."""

    def make() -> Any:
        import transformers

        transformers.logging.set_verbosity_error()
        kind = getattr(transformers, model)
        nested = {k: getattr(transformers, c)(**v) for k, (c, v) in parts.items()}
        of = getattr(transformers, config_name) if config_name else kind.config_class
        return kind(of(**config, **nested))

    ENTRIES[name] = Entry("transformers", make, batch)


hugging("bert", "BertForSequenceClassification", TEXT, words)
hugging(
    "distilbert",
    "DistilBertForSequenceClassification",
    {"vocab_size": 100, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    words,
)
hugging("roberta", "RobertaForTokenClassification", TEXT, words)
hugging("electra", "ElectraForSequenceClassification", {**TEXT, "embedding_size": 16}, words)
hugging("albert", "AlbertForSequenceClassification", {**TEXT, "embedding_size": 16}, words)
hugging("mpnet", "MPNetModel", TEXT, words)
hugging(
    "mobilebert",
    "MobileBertModel",
    {**TEXT, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    words,
)
hugging(
    "deberta_v2",
    "DebertaV2Model",
    {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    words,
)
hugging("modernbert", "ModernBertModel", {**TEXT, "pad_token_id": 0, "reference_compile": False}, words)
hugging(
    "gpt2",
    "GPT2LMHeadModel",
    {"vocab_size": 100, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False},
    words,
)
hugging("opt", "OPTForCausalLM", {**DECODER, "ffn_dim": 64, "word_embed_proj_dim": 32}, words)
hugging("llama", "LlamaForCausalLM", DECODER, words)
hugging("mistral", "MistralForCausalLM", DECODER, tokens)
hugging("qwen2", "Qwen2ForCausalLM", DECODER, words)
hugging("qwen3", "Qwen3ForCausalLM", {**DECODER, "head_dim": 8}, words)
hugging("gemma", "GemmaForCausalLM", {**DECODER, "head_dim": 8}, words)
hugging("phi", "PhiForCausalLM", DECODER, words)
hugging("gpt_neox", "GPTNeoXForCausalLM", {**TEXT, "use_cache": False}, words)
hugging(
    "bloom",
    "BloomForCausalLM",
    {"vocab_size": 100, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False},
    words,
)
hugging(
    "t5_encoder",
    "T5EncoderModel",
    {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    words,
)
hugging(
    "t5",
    "T5ForConditionalGeneration",
    {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "use_cache": False},
    both,
)
hugging(
    "bart",
    "BartModel",
    {
        "vocab_size": 100,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 64,
        "use_cache": False,
    },
    both,
)
hugging("vit", "ViTForImageClassification", PATCHES, pixels)
hugging("deit", "DeiTForImageClassification", PATCHES, pixels)
hugging("beit", "BeitForImageClassification", {**PATCHES, "use_relative_position_bias": True}, pixels)
hugging("dinov2", "Dinov2ForImageClassification", {**PATCHES}, pixels)
hugging(
    "swin",
    "SwinForImageClassification",
    {"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    pixels,
)
hugging(
    "swinv2",
    "Swinv2ForImageClassification",
    {"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    pixels,
)
hugging("convnext", "ConvNextForImageClassification", {**STAGES, "image_size": 64}, pixels)
hugging("convnextv2", "ConvNextV2ForImageClassification", {**STAGES, "image_size": 64}, pixels)
hugging(
    "resnet",
    "ResNetForImageClassification",
    {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "bottleneck"},
    pixels,
)
hugging(
    "regnet",
    "RegNetForImageClassification",
    {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "groups_width": 8},
    pixels,
)
hugging(
    "bit",
    "BitForImageClassification",
    {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_groups": 4},
    pixels,
)
hugging("mobilenet_v1", "MobileNetV1ForImageClassification", {"depth_multiplier": 0.25, "image_size": 64}, pixels)
hugging("mobilenet_v2", "MobileNetV2ForImageClassification", {"depth_multiplier": 0.35, "image_size": 64}, pixels)
hugging(
    "mobilevit",
    "MobileViTForImageClassification",
    {
        "image_size": 64,
        "hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64],
        "num_attention_heads": 4,
    },
    pixels,
)
hugging("mobilevitv2", "MobileViTV2ForImageClassification", {"image_size": 64, "width_multiplier": 0.25}, pixels)
hugging(
    "segformer",
    "SegformerForSemanticSegmentation",
    {**STAGES, "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 32},
    pixels,
)
hugging(
    "glpn", "GLPNForDepthEstimation", {**STAGES, "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16}, pixels
)
hugging("pvt", "PvtForImageClassification", {**STAGES, "image_size": 64, "num_attention_heads": [1, 2, 2, 4]}, pixels)
hugging(
    "pvt_v2", "PvtV2ForImageClassification", {**STAGES, "image_size": 64, "num_attention_heads": [1, 2, 2, 4]}, pixels
)
hugging("poolformer", "PoolFormerForImageClassification", STAGES, pixels)
hugging(
    "levit",
    "LevitForImageClassification",
    {
        "image_size": 64,
        "hidden_sizes": [16, 24, 32],
        "num_attention_heads": [2, 3, 4],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
        "down_ops": [["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 3, 4, 2, 2]],
    },
    pixels,
)
hugging(
    "cvt", "CvtForImageClassification", {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}, pixels
)
hugging(
    "focalnet",
    "FocalNetForImageClassification",
    {
        "image_size": 64,
        "embed_dim": 16,
        "depths": [1, 1],
        "focal_levels": [2, 2],
        "focal_windows": [3, 3],
        "hidden_sizes": [16, 32],
    },
    pixels,
)
hugging(
    "hiera",
    "HieraForImageClassification",
    {
        "image_size": [64, 64],
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "query_stride": [2, 2],
        "masked_unit_size": [4, 4],
        "masked_unit_attention": [True, False],
        "num_query_pool": 1,
    },
    pixels,
)
hugging(
    "yolos",
    "YolosForObjectDetection",
    {**WIDE, "image_size": [64, 64], "patch_size": 16, "num_detection_tokens": 5},
    pixels,
)
hugging(
    "detr",
    "DetrForObjectDetection",
    {
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_queries": 7,
    },
    pixels,
    backbone_config=(
        "ResNetConfig",
        {
            "embedding_size": 16,
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "layer_type": "basic",
            "out_features": ["stage2"],
        },
    ),
)
hugging(
    "dpt",
    "DPTForDepthEstimation",
    {
        **PATCHES,
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8, 8, 16, 16],
        "fusion_hidden_size": 16,
        "is_hybrid": False,
    },
    pixels,
)
hugging(
    "clip",
    "CLIPModel",
    {"projection_dim": 16},
    lambda: {**words(), **pixels()},
    text_config=("CLIPTextConfig", {**TEXT, "eos_token_id": 2, "projection_dim": 16}),
    vision_config=("CLIPVisionConfig", {**PATCHES, "projection_dim": 16}),
)
hugging("siglip_vision", "SiglipVisionModel", PATCHES, pixels)
hugging(
    "videomae", "VideoMAEForVideoClassification", {**PATCHES, "num_frames": 4, "tubelet_size": 2}, lambda: pixels(64, 4)
)
hugging(
    "wav2vec2",
    "Wav2Vec2ForCTC",
    {
        **WIDE,
        "vocab_size": 20,
        "conv_dim": [16] * 3,
        "conv_stride": [5, 4, 2],
        "conv_kernel": [10, 8, 4],
        "num_feat_extract_layers": 3,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
    },
    sound,
)
hugging(
    "whisper_encoder",
    "WhisperModel",
    {
        "vocab_size": 100,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_mel_bins": 16,
        "max_source_positions": 30,
        "max_target_positions": 16,
        "use_cache": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
    lambda: {"input_features": torch.randn(4, 16, 60), "decoder_input_ids": torch.randint(1, 100, (4, 5))},
)
hugging(
    "ast",
    "ASTForAudioClassification",
    {**WIDE, "patch_size": 8, "max_length": 64, "num_mel_bins": 32},
    lambda: {"input_values": torch.randn(4, 64, 32)},
)
hugging(
    "patchtst",
    "PatchTSTForPrediction",
    {
        "num_input_channels": 3,
        "context_length": 32,
        "patch_length": 8,
        "patch_stride": 8,
        "prediction_length": 4,
        "d_model": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 32,
        "loss": "mse",
    },
    lambda: {"past_values": torch.randn(4, 32, 3)},
)


# ---------------------------------------------------------------- timm


def timm(name: str, side: int = 64, **how: Any) -> None:
    """Return an entry of timm."""

    def make() -> Any:
        from benchmarks.zoo import stand_in

        stand_in.install()
        sys.path.append(str(TIMM))
        import timm as library

        return library.create_model(name, pretrained=False, num_classes=10, **how)

    ENTRIES[f"timm/{name}"] = Entry("timm", make, lambda: torch.randn(4, 3, side, side))


SIZED = {"img_size": 64}
for _name in (
    "resnet18 seresnet18 resnest14d skresnet18 densenet121 ese_vovnet19b_dw mobilenetv3_small_050 "
    "mobilenetv4_conv_small efficientnet_lite0 ghostnet_050 regnetx_002 repvgg_a0 lcnet_050 convnextv2_atto "
    "poolformer_s12 nf_regnet_b0 edgenext_xx_small mobilevitv2_050 efficientvit_b0 starnet_s1 xcit_nano_12_p16_224"
).split():
    timm(_name)
timm("resmlp_12_224", **SIZED)
timm("cait_xxs24_224", depth=2, **SIZED)
timm("vit_tiny_patch16_224", depth=2, **SIZED)
timm("deit_tiny_distilled_patch16_224", depth=2, **SIZED)
timm("eva02_tiny_patch14_224", 56, depth=2, img_size=56)
timm("swin_tiny_patch4_window7_224", 56, depths=(1, 1, 2, 1), img_size=56)
timm("pit_ti_224", **SIZED)
timm("levit_128s", **SIZED)
timm("coatnet_pico_rw_224", **SIZED)


# ---------------------------------------------------------------- keras.applications


def keras(name: str, side: int = 64, **how: Any) -> None:
    """Return an entry of keras.applications, with random statistics of batch norms so that folding changes weights."""

    def make() -> Any:
        import keras as library

        library.utils.set_random_seed(0)
        model = getattr(library.applications, name)(weights=None, input_shape=(side, side, 3), classes=10, **how)
        for v in model.non_trainable_variables:
            low, high = (0.5, 2.0) if "variance" in v.name else (-0.2, 0.2)
            v.assign(library.random.uniform(v.shape, low, high, seed=0))
        return model

    def batch() -> np.ndarray:
        return torch.rand(4, side, side, 3).mul(2).sub(1).numpy()

    ENTRIES[f"keras/{name}"] = Entry("keras.applications", make, batch)


for _name in "ResNet50V2 EfficientNetB0 EfficientNetV2B0 MobileNet MobileNetV2".split():
    keras(_name)
keras("MobileNetV3Small", include_preprocessing=False)
keras("ConvNeXtTiny", include_preprocessing=False)


# ---------------------------------------------------------------- our own


def own(name: str, batch: Callable[[], Batch]) -> None:
    def make() -> Any:
        from benchmarks.zoo import own as definitions

        return getattr(definitions, name)()

    ENTRIES[f"own/{name.lower()}"] = Entry("own", make, batch)


own("Detector", lambda: torch.randn(4, 3, 64, 64))
own("Diffusion", lambda: (torch.randn(4, 3, 16, 16), torch.rand(4) * 10))
own("Rotary", lambda: torch.randint(0, 50, (4, 12)))
own("Conformer", lambda: torch.randn(4, 32, 16))
own("Vocoder", lambda: torch.randn(4, 20, 12))
own("Recommender", lambda: (torch.randn(4, 6), torch.randint(0, 10, (4, 3))))
own("Tagger", lambda: torch.randint(0, 50, (4, 9)))
own("Matcher", lambda: (torch.randn(4, 3, 32, 32), torch.randn(4, 3, 32, 32)))
own("Odds", lambda: torch.randn(4, 3, 32, 32))
