"""SavedModels of TensorFlow, against TensorFlow itself."""

import numpy as np
import pytest
import torch

import chipfit
from chipfit.engine.run import run
from chipfit.errors import CaptureError


@pytest.mark.filterwarnings("ignore")
def test_a_saved_model_is_quantized_through_its_default_signature(tmp_path):
    tf = pytest.importorskip("tensorflow")
    draw = np.random.default_rng(0)

    class Network(tf.Module):
        def __init__(self):
            self.kernel = tf.Variable(draw.normal(size=(3, 3, 3, 8)).astype("f4"))
            self.weight = tf.Variable(draw.normal(size=(8, 4)).astype("f4"))

        @tf.function(input_signature=[tf.TensorSpec([None, 12, 12, 3], tf.float32)])
        def __call__(self, x):
            y = tf.nn.relu6(tf.nn.conv2d(x, self.kernel, 2, "SAME"))
            return {"logits": tf.matmul(tf.reduce_mean(y, [1, 2]), self.weight)}

    net, x = Network(), torch.from_numpy(draw.normal(size=(4, 12, 12, 3)).astype("f4"))
    tf.saved_model.save(net, str(tmp_path / "net"), signatures=net.__call__)
    result = chipfit.quantize(str(tmp_path / "net"), [x], platform="tflite_int8", progress=False)
    want = net(tf.constant(x.numpy()))["logits"].numpy()
    np.testing.assert_allclose(run(result.graph, [x])[result.graph.outputs[0]].numpy(), want, atol=1e-4)
    result.export(tmp_path / "net.tflite")
    assert result.verify([x]).exact


@pytest.mark.filterwarnings("ignore")
def test_a_saved_model_that_tensorflow_cannot_convert_is_refused_by_name(tmp_path):
    pytest.importorskip("tensorflow")
    (tmp_path / "saved_model.pb").write_bytes(b"nothing")
    with pytest.raises(CaptureError, match=r"cannot convert the SavedModel.*Where: .*serving_default"):
        chipfit.load_model(str(tmp_path))
