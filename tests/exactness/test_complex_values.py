"""Complex numbers between operators: spectra of a network are written to ONNX with what makes real numbers of them."""

import pytest
import torch
from torch import nn

from chipfit.errors import UnsupportedError
from tests.build import model_of, quantized

WINDOW = torch.hann_window(16)


def spectrogram(x):
    return torch.stft(x, 16, 8, window=WINDOW.to(x), return_complex=True)


SPECTRA = {
    "magnitudes": lambda x: spectrogram(x).abs(),
    "powers": lambda x: torch.view_as_real(spectrogram(x)).square().sum(-1),
    "a spectrum": lambda x: torch.fft.rfft(x).abs().unflatten(1, (13, 5)),
}


def behind(spectrum):
    return model_of(
        lambda m, x: m.linear(spectrum(x).mean(-1)), linear=nn.Linear(len(spectrum(torch.zeros(1, 128))[0]), 3)
    )


@pytest.mark.parametrize("name", SPECTRA)
def test_a_spectrum_is_in_the_file(name, tmp_path):
    model = behind(SPECTRA[name])
    data = [torch.randn(4, 128, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    result = quantized(model, data[:2])
    path = result.export(tmp_path / "m.onnx")
    check = result.verify(data[2:], path=path)
    assert check.sound and check.integers > 0
    want = model(data[2])
    assert ((result.device_model(data[2]) - want).square().sum() / want.square().sum()).sqrt() < 0.05


def test_a_complex_result_is_refused_by_name(tmp_path):
    model = model_of(lambda m, x: torch.fft.rfft(m.linear(x)), linear=nn.Linear(16, 16))
    result = quantized(model, torch.randn(4, 16))
    with pytest.raises(UnsupportedError, match="complex64"):
        result.export(tmp_path / "m.onnx")


def test_a_complex_value_has_no_tensorflow_lite_form(tmp_path):
    result = quantized(behind(SPECTRA["magnitudes"]), torch.randn(4, 128), "tflite_int8")
    with pytest.raises(UnsupportedError, match="value 'stft': the file has no type complex64"):
        result.export(tmp_path / "m.tflite")
