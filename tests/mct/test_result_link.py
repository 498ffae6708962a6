"""Records of results that model files carry: damaged ones."""

import base64
import io
import zipfile

import pytest
from torch import nn

from chipfit.errors import PlanError
from chipfit.mct.result_link import unpacked


def packed(*entries):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"made": "x", "files": ""},
        {"made": 0, "files": None},
        {"made": 0, "files": "no base64"},
        {"made": 0, "files": base64.b64encode(b"no archive").decode()},
        {"made": 0, "files": packed(("../outside", "x"))},
        {"made": 0, "files": packed(("result/plan.json", "{}"))},
    ],
)
def test_a_damaged_record_in_a_model_file_is_a_plan_error(record):
    with pytest.raises(PlanError):
        unpacked(record, nn.Identity())
