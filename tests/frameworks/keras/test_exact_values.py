"""Values that stay exact in a Keras model: ids, masks, integers, norms of zeros; compared with Keras itself."""

import numpy as np
import pytest
import torch

keras = pytest.importorskip("keras")
from keras import layers, ops  # noqa: E402

import chipfit  # noqa: E402

PLATFORMS = ("ort_cpu", "tflite_int8")


def outputs(model, inputs):
    out = model(inputs)
    return [ops.convert_to_numpy(y).astype(np.float64) for y in keras.tree.flatten(out)]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_rows_are_chosen_by_the_ids_themselves(platform):
    keras.utils.set_random_seed(0)
    given = keras.Input((40,))
    rows = layers.Embedding(1000, 16, embeddings_initializer="normal")(layers.Rescaling(2.0)(given / 2))
    model = keras.Model(given, layers.Dense(4)(rows))
    ids = torch.randint(0, 1000, (8, 40)).float()
    result = chipfit.quantize(model, [ids], platform=platform, progress=False)
    (want,), (got,) = outputs(model, ids), outputs(result.model, ids)
    assert np.abs(want - got).max() < 0.05 * np.abs(want).max()
    assert result.verify([ids]).exact


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("way", ["added", "where"])
def test_a_mask_does_not_set_the_grid_of_the_scores(way, platform):
    keras.utils.set_random_seed(0)
    x, keep = keras.Input((12, 32)), keras.Input((12,))
    q, k, v = (layers.Dense(32)(x) for _ in range(3))
    s = ops.matmul(q, ops.transpose(k, (0, 2, 1))) * 0.3
    off = keep[:, None, :]
    s = s + (1.0 - off) * -3.4e38 if way == "added" else ops.where(off > 0.5, s, -1e9)
    model = keras.Model([x, keep], layers.Dense(8)(ops.matmul(ops.softmax(s), v)))
    masks = torch.ones(4, 12)
    masks[:, 8:] = 0
    result = chipfit.quantize(model, [(torch.randn(4, 12, 32), masks)], platform=platform, progress=False)
    fresh = [torch.randn(4, 12, 32), masks]
    (want,), (got,) = outputs(model, fresh), outputs(result.model, fresh)
    assert (want * got).sum() / np.linalg.norm(want) / np.linalg.norm(got) > 0.99
    assert result.verify([tuple(fresh)]).sound


def test_arithmetic_of_integers_stays_what_it_is():
    given = keras.Input((10,))
    j = ops.clip(ops.cumsum(ops.cast(given > 0, "int32"), axis=1), 0, 3)
    outs = [j, j * 2 + 1, j // 2, j / 3, j * 1.5, j % 2, ops.cast(j > 1.5, "float32"), ops.power(j, 2), -j]
    model = keras.Model(given, [layers.Dense(3)(given), *outs])
    x = torch.randn(4, 10)
    result = chipfit.quantize(model, [x], progress=False)
    values, wanted = outputs(result.model, x), model(x)
    for want, got in zip(outputs(model, x)[1:], values[1:], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    kinds = [result.graph.values[o].dtype for o in result.graph.outputs]
    assert kinds == [keras.backend.standardize_dtype(y.dtype) for y in wanted]


@pytest.mark.parametrize("axis", [-1, 1, (1, 2)])
def test_normalize_is_right_for_zeros_too(axis):
    keras.utils.set_random_seed(0)
    given = keras.Input((6, 8))
    model = keras.Model(given, layers.Dense(8)(ops.normalize(layers.Dense(8, use_bias=False)(given), axis=axis)))
    x = torch.randn(4, 6, 8)
    x[0] = 0
    result = chipfit.quantize(model, [x], progress=False)
    (want,), (got,) = outputs(model, x), outputs(result.model, x)
    assert np.isfinite(got).all() and np.abs(want - got).max() < 0.1 * np.abs(want).max()


@pytest.mark.parametrize("platform", ["imx500", "ort_cpu"])
def test_numbers_come_back_from_a_model_whose_layout_was_changed(platform):
    given = keras.Input((8, 8, 3))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(4, 3)(given)))
    model = keras.Model(given, layers.Dense(3)(layers.Flatten()(layers.DepthwiseConv2D(3)(x))))
    result = chipfit.quantize(model, [torch.randn(4, 8, 8, 3)], platform=platform, progress=False)
    again = result.trained()
    for name, t in result.plan.tensors.items():
        if t.quantized:
            assert torch.equal(again.plan[name].scale, t.scale), name
    holder = next(x for x in result.model.layers if x.name.endswith("_holder"))
    holder.activation_holder_quantizer.scale.assign(holder.activation_holder_quantizer.scale * 2)
    doubled = result.trained().plan
    first = result.graph.inputs[0]
    assert torch.equal(doubled[first].scale, result.plan[first].scale * 2)
    moved = [n.output for n in result.graph.nodes if n.op == "Transpose" and n.data == first]
    assert moved and all(torch.equal(doubled[m].scale, doubled[first].scale) for m in moved)


def test_old_weights_are_not_exported_in_silence(tmp_path):
    given = keras.Input((6,))
    model = keras.Model(given, layers.Dense(3)(layers.Dense(8, activation="relu")(given)))
    result = chipfit.quantize(model, [torch.randn(8, 6)], progress=False)
    result.model(torch.randn(8, 6))
    result.export(tmp_path / "net.onnx")
    kernel = next(w for w in result.model.weights if w.path.endswith("kernel"))
    kernel.assign(kernel + 0.5)
    with pytest.raises(chipfit.errors.PlanError, match=r"result.trained\(\)"):
        result.export(tmp_path / "net.onnx")
    result.trained().export(tmp_path / "net.onnx")
    result.as_calibrated().export(tmp_path / "net.onnx")


WIDE = pytest.param("float64", marks=pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX has no float64"))


@pytest.mark.parametrize("policy", ["mixed_float16", "float16", "bfloat16", WIDE])
def test_a_model_of_another_float_type_is_read_in_float32_and_the_report_says_so(policy):
    given = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, activation="relu", dtype=policy)(given)
    x = layers.BatchNormalization(dtype=policy)(x)
    model = keras.Model(given, layers.Dense(3, dtype=policy)(layers.Flatten(dtype=policy)(x)))
    x = torch.randn(4, 8, 8, 3)
    result = chipfit.quantize(model, [x], progress=False)
    kind = policy.removeprefix("mixed_")
    assert any(kind in w and "float32" in w for w in result.report.warnings)
    (want,), (got,) = outputs(model, x), outputs(result.model, x)
    assert np.abs(want - got).max() < 0.05 * np.abs(want).max()
    assert result.verify([x]).exact
    assert model.layers[1].compute_dtype == kind
