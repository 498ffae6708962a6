"""The files of built-in modelled chips: every word in them means something, and versions differ in what they say."""

from __future__ import annotations

import pytest

from chipfit.facade.target_platform.layers import layer_table
from chipfit.facade.target_platform.targets import chip_descriptions, get_target_platform_capabilities
from chipfit.platform.load import names

FILES = sorted(set(chip_descriptions()) - {"default"})


def tables(data):
    """The chip's own tables, and those of every version."""
    return [data, *data["versions"].values()]


@pytest.mark.parametrize("name", FILES)
def test_everything_that_a_file_defines_is_used(name):
    data = chip_descriptions()[name]
    text = " ".join(str(v) for part in tables(data) for k, v in part.items() if k != "versions")
    for kind in ("weights", "configs", "options"):
        for word in {w for part in tables(data) for w in part.get(kind, {})}:
            assert text.count(word) > 1, f"'{word}' of {kind} is never used"


@pytest.mark.parametrize("name", FILES)
def test_every_operator_set_has_layers_in_both_frameworks(name):
    for framework in ("pytorch", "keras"):
        pytest.importorskip("keras")
        tpc = get_target_platform_capabilities(framework, name)
        assert all(tpc.get_layers_by_opset_name(o.name) for o in tpc.tp_model.operator_set), framework
    rows = {
        row
        for part in tables(chip_descriptions()[name])
        for rows in part.get("layers", {}).values()
        for row in rows.split()
    }
    assert rows <= set(layer_table()["layers"])


def test_one_file_says_that_it_is_the_default():
    assert [name for name in FILES if chip_descriptions()[name].get("also") == "default"] == ["imx500"]
    assert get_target_platform_capabilities("pytorch") == get_target_platform_capabilities("pytorch", "imx500", "v1")


def test_modelled_chips_are_no_platform_files():
    assert "modelled" not in names()
    assert not [n for n in names() if "/" in n]
    assert get_target_platform_capabilities("pytorch", "imx500").source is None
    assert get_target_platform_capabilities("pytorch", "imx500", "file").source is not None


def test_a_version_changes_what_it_says_and_nothing_else():
    one, pot = (get_target_platform_capabilities("pytorch", "imx500", v).to_platform() for v in ("v1", "v1_pot"))
    changed = {k for k in type(one).model_fields if getattr(one, k) != getattr(pot, k)}
    assert changed == {"name", "title", "file", "formats", "ops"}
    assert {f for f in one.formats if f not in pot.formats} == {"w8_sym_ch", "w4_sym_ch", "w2_sym_ch"}
    assert {f for f in pot.formats if f not in one.formats} == {"w8_pot_ch", "w4_pot_ch", "w2_pot_ch"}
