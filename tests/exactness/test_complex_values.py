"""Complex numbers between operators: spectra of a network are written to ONNX with what makes real numbers of them."""

import pytest
import torch
from torch import nn

from chipfit import load
from chipfit.errors import UnsupportedError
from tests.build import model_of, quantized

WINDOW = torch.hann_window(16)


def spectrogram(x):
    return torch.stft(x, 16, 8, window=WINDOW.to(x), return_complex=True)


SPECTRA = {
    "magnitudes": lambda x: spectrogram(x).abs(),
    "powers": lambda x: torch.view_as_real(spectrogram(x)).square().sum(-1),
    "one frequency of two": lambda x: torch.stack(
        [t.abs() for t in spectrogram(x).split(5, 1)[0][:, 2:4].unbind(1)], 1
    ),
    "rows of a batch of one": lambda x: spectrogram(x)[:, None].expand(-1, 2, -1, -1)[:, 1].abs(),
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


def with_modes(x, modes, *, zeros, select):
    """A Fourier layer: some frequencies of a signal, times complex weights, in a spectrum that is otherwise zero."""
    f = torch.fft.rfft(x)
    shape = (x.shape[0], x.shape[1], f.shape[-1])
    out = torch.zeros(shape, dtype=f.dtype) if zeros else torch.zeros_like(f)
    out[..., :4] = torch.einsum("bim,iom->bom", f[..., :4], modes)
    if select:
        out[..., -1] = modes.sum((1, 2))
    return torch.fft.irfft(out, n=x.shape[-1])


@pytest.mark.parametrize("select", (False, True))
@pytest.mark.parametrize("zeros", (False, True))
def test_a_fourier_layer_is_written_trained_and_saved(zeros, select, tmp_path):
    modes = nn.Parameter(torch.randn(4, 4, 4, dtype=torch.cfloat))

    def forward(m, x):
        y = with_modes(m.first(x), m.modes, zeros=zeros, select=select)
        return m.last(y + x)

    model = model_of(forward, first=nn.Conv1d(4, 4, 1), last=nn.Conv1d(4, 2, 1), modes=modes)
    data = [torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    result = quantized(model, data[:2])
    check = result.verify(data[2:], path=result.export(tmp_path / "m.onnx"))
    assert check.sound and check.integers > 0
    assert result.sensitivity(data[2:]).rows()
    result.save(tmp_path / "saved")
    assert torch.equal(load(tmp_path / "saved").model(data[2]), result.model(data[2]))
    result.model.train()(data[2]).square().mean().backward()
    grads = {name: p.grad for name, p in result.model.named_parameters() if p.requires_grad}
    assert not [name for name, g in grads.items() if g is None or not g.abs().sum()]


def test_a_complex_result_is_refused_by_name(tmp_path):
    model = model_of(lambda m, x: torch.fft.rfft(m.linear(x)), linear=nn.Linear(16, 16))
    result = quantized(model, torch.randn(4, 16))
    with pytest.raises(UnsupportedError, match="complex64"):
        result.export(tmp_path / "m.onnx")


def test_a_complex_value_has_no_tensorflow_lite_form(tmp_path):
    result = quantized(behind(SPECTRA["magnitudes"]), torch.randn(4, 128), "tflite_int8")
    with pytest.raises(UnsupportedError, match="value 'stft': the file has no type complex64"):
        result.export(tmp_path / "m.tflite")
