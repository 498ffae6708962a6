"""Platform files: everything that is not understood is refused with file, line and key."""

import json
import math
from importlib import resources
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from docs.generate import PAGES
from docs.generate import page as generated
from rich.console import Console

from chipfit.errors import ChipfitError, ModelingError, PlatformError, UnknownNameError
from chipfit.import_by_name import load_target
from chipfit.plan.record import provenance_of
from chipfit.platform.load import check, check_consistent, load, names
from chipfit.platform.match import fusions, resolve
from chipfit.platform.schema import Format, Platform
from chipfit.platform.show import show
from chipfit.target_platform import load_target_platform_capabilities
from tests.build import graph_of, platform_file, platform_of

GOOD = Path(__file__).with_name("tiny_npu.yaml").read_text()

#: parts of GOOD
TIE = "{tie: [ins, out]}"
USE = "{in: a8, out: a8}"
ZERO = "zero: any"
A8 = "bits: 8, zero: any"
ADD = "match: [Add]"
CHAIN = '{chain: [["@conv"], [Relu, Relu6]]'
TITLE = "title:"
PRODUCT = "{mono: {b: 1, in0: -1, w: -1}, eq: 1}"
ACC = "acc: [{bits: 32}]"
CONV = "match: [Conv2D]"

#: a mistake -> the part of GOOD that is replaced, by what, and words of the message
BAD = {
    "an unknown key": (TITLE, "titel:", "titel | unknown | title"),
    "a format without bits": ("a8: {bits: 8, zero: any}", "a8: {zero: any}", "formats.a8.bits | required"),
    "an undefined format": (USE, "{in: a9, out: a8}", "ops.1.use.0.in | 'a9' | 'a8'"),
    "the word of a result where something is read": (USE, "{in: same, out: a8}", "ops.1.use.0.in | 'same'"),
    "the word of an operand where something is written": (USE, "{in: a8, out: any}", "0.out | 'any'"),
    "a place for the word of a result": ("math: ", "place: {io_out: [same]}\nmath: ", "place.io_out | 'same'"),
    "a least scale that no float32 is": (A8, "bits: 8, zero: any, scale_min: 1.0e-60", "scale_min"),
    "a multiple of nothing": ("min: 1, max: 3", "multiple: 0", "where.stride | a number above 0"),
    "a word for a bound": ("min: 1, max: 3", "min: one", "where.stride | 'min' needs a number | 'one'"),
    "bounds that nothing satisfies": ("min: 1, max: 3", "min: 4, max: 3", "where.stride can never hold"),
    "a list that is none": ("min: 1, max: 3", "in: 5", "where.stride | needs a list"),
    "a format without a name": (USE, '{in: "", out: a8}', "ops.1.use.0.in | '' | 'a8'"),
    "an unknown operator": (ADD, "match: [Ad]", "ops.1.match | 'Ad' | 'Add'"),
    "an unknown group": ('"@conv"', '"@convs"', "fuse.0.chain | '@conv'"),
    "an unknown source": ("src: [M], conf: V}\nfuse", "src: [X], conf: V}\nfuse", "ops.1.src | 'X'"),
    "a rule without head": (TIE, "{eq: 1}", "exactly one of"),
    "a rule with two heads": (TIE, "{tie: [ins, out], zero: out, eq: 0}", "exactly one of | tie, zero"),
    "an unknown slot": (TIE, "{tie: [inz, out]}", "'inz' | outs"),
    "a bound that can never hold": (TIE, "{mono: {in0: 1}, min: 4, max: 2}", "can never hold"),
    "eq together with a bound": (TIE, "{mono: {in0: 1}, eq: 4, max: 2}", "eq and a bound"),
    "a slot fixed twice": (TIE, "{fix: out, scale: 1, zp: 0}, {fix: out, scale: 2, zp: 0}", "two different scales"),
    "a tie of different widths": (PRODUCT, "{tie: [in0, b]}", "different bits | [8, 32]"),
    "a missing parent": (TITLE, "extends: nowhere\ntitle:", "'nowhere' | does not exist"),
    "itself as parent": (TITLE, "extends: tiny_npu\ntitle:", "extends itself"),
    "a fusion of one": ('[["@conv"], [Relu, Relu6]]', '[["@conv"]]', "at least two"),
    "broken YAML": ("formats:", "formats: [", "not valid YAML"),
    "a key twice": (TITLE, "name:", "'name' is given twice"),
    "a mistyped key": ("q_round:", "q_rund:", "math.q_rund | Try: 'q_round'"),
    "a word for a width": (A8, "bits: eight, zero: any", "formats.a8.bits | must be an integer | 'eight'"),
    "an unknown word": (ZERO, "zero: anny", "formats.a8.zero | 'any', or an integer, or a list"),
    "a range beyond the width": (ZERO, "range: [-500, 500]", "-128..127"),
    "a zero point beyond the codes": (ZERO, "zero: 300", "300 | -128..127"),
    "narrow unsigned codes": (ZERO, "signed: false, range: narrow", "range narrow"),
    "one word for a list": (ADD, "match: Add", "ops.1.match | must be a list"),
    "an unknown attribute": ("stride: {min", "strides: {min", "ops.0.where.strides | 'stride'"),
    "an unknown test": ("stride: {min", "stride: {mini", "ops.0.where.stride.mini | 'min'"),
    "an unknown gate": (CONV, "match: [Conv2D]\n    when: {arhc: A}", "ops.0.when.arhc | Try: 'arch'"),
    "a gate of an unknown revision": (USE, '{in: a8, when: {arch: ">=B"}}', "use.0.when.arch | 'B'"),
    "a revision twice": (TITLE, "arch: [A, A]\ntitle:", "'A' is listed twice"),
    "a number without meaning": (TIE, "{tie: [ins, out], max: 3}", "'max' has no meaning in a tie rule"),
    "two exclusive bounds": (TIE, "{mono: {in0: 1}, max: 1}, {mono: {in0: 1}, min: 2}", "at least 2 and at most 1"),
    "an infinite product": (TIE, "{mono: {in0: 1}, eq: .inf}", "can never hold | inf"),
    "a zero point of many bits": (TIE, "{zero: out, eq: [0, 1099511627776]}", "32 bits | [0, 10"),
    "a word for a zero point": (TIE, "{zero: out, eq: [x]}", "an integer | 'x'"),
    "a fixed scale without zero point": (TIE, "{fix: out, scale: 1}", "zp of 32 bits | zp None"),
    "a fixed zero point of many bits": (TIE, "{fix: out, scale: 1, zp: 1099511627776}", "32 bits"),
    "a zero rule without zero": (TIE, "{zero: out}", "zero needs eq"),
    "integers without formats": ("use: [{in: a8, out: a8}]", "exec: int", "exec int needs use"),
    "an unknown form of requantization": ("form: float", "form: flaot", "math.requant | 'flaot' | q31"),
    "an accumulator without width": (ACC, "acc: [{bit: 32}]", "math.acc | bits"),
    "an alias without end": ("title: TinyNPU rev C", "title: &t [*t]", "aliases"),
    "a fusion of an unknown node": (CHAIN, "{graph: {nodes: {c: Add, r: Relu}, edges: [[c, x]]}", "of the nodes c, r"),
    "fusions in a circle": (CHAIN, "{graph: {nodes: {c: Conv2D, r: Relu}, edges: [[c, r], [r, c]]}", "cycle"),
    "another schema version": ("name: tiny_npu", "name: tiny_npu\nschema: 7", "version 7"),
    "an unknown key of a table": (ZERO, "kind: lut, lut: {entry: 16}", "formats.a8.lut.entry | Try: 'entries'"),
    "a fusion of nothing": (CHAIN, "{graph: {nodes: {c: null}, edges: []}", "fuse.0.graph.nodes.c | text, or a list"),
    "a rule for nothing": (ADD, "match: []", "ops.1.match | 'match' must be a list that is not empty"),
    "a list inside a list": (ADD, "match: [[Add]]", "'match.0' must be text"),
    "an unknown key of a set": (TITLE, "sets: {s: [{typ: Conv2d}]}\ntitle:", "sets.s.0.typ | Try: 'type'"),
    "a revision chosen by the file": (TITLE, "arch_selected: A\ntitle:", "'arch_selected' is unknown"),
    "a gate of the wrong type": (CONV, "match: [Conv2D]\n    when: {bits: wide}", "ops.0.when.bits | integer"),
    "a fusion in no phase": ("V}]\nmath", "V, when: {phase: qaat}}]\nmath", "phase | qat"),
    "an unknown rounding": ("q_round: half_even", "w_round: half_odd", "math.w_round | half_away"),
    "a base without logarithm": (ZERO, "base: 2.0", "'base' has a meaning only in a format of kind log"),
    "a key that is a list": (TITLE, "? [title]\n:", "a key must be one word"),
}


def write(tmp_path, text):
    return platform_file(tmp_path, text, "tiny_npu.yaml")


def test_the_example_of_the_guide_loads(tmp_path):
    p = load(write(tmp_path, GOOD))
    assert [o.in_ for o in p.ops[0].use] == ["a8", "a8"]
    assert str(p.formats["w8"]) == "s8n sym /channel"
    assert p.formats["w4"].grid().qmin == -7


@pytest.mark.parametrize("case", BAD)
def test_a_file_with_a_mistake_is_refused_by_line_and_key(case, tmp_path):
    old, new, words = BAD[case]
    assert old in GOOD
    with pytest.raises(PlatformError) as e:
        load(write(tmp_path, GOOD.replace(old, new)))
    assert all(word in str(e.value) for word in ["tiny_npu.yaml:", *words.split(" | ")])


def test_the_line_is_the_line_of_the_mistake(tmp_path):
    with pytest.raises(PlatformError, match=r"tiny_npu.yaml:5, key formats.w8.rang"):
        load(write(tmp_path, GOOD.replace("w8: {bits: 8, range", "w8: {bits: 8, rang")))


WORDS_OF_TITLES = ("onnxruntime", "Try: 'ort_cpu'"), ("tensorflow-lite", "tflite_int8"), ("STM32", "st_edge_ai")
ALIKE = ("ort_cpy", "ort_cpu"), ("ort_cpu@VNN", "VNNI"), ("", "named ''")


@pytest.mark.parametrize("name, near", [*ALIKE, *WORDS_OF_TITLES])
def test_an_unknown_platform_or_revision_lists_near_names(name, near):
    with pytest.raises(UnknownNameError, match=near):
        load(name)


def test_check_lists_every_problem_at_once(tmp_path):
    text = GOOD.replace("src: [M], conf: V}\nfuse", "src: [X], conf: V}\nfuse").replace(USE, "{in: a9, out: a8}")
    file = write(tmp_path, text)
    assert [str(e.where).rpartition(" ")[2] for e in check(file)] == ["ops.1.src", "ops.1.use.0.in"]
    assert check(write(tmp_path, GOOD)) == []


def test_check_looks_up_names_in_malformed_entries_too(tmp_path):
    """One error for each of the 25 slips, and none because of another one."""
    wrong = """
        formats.a8.colour formats.w8.bits
        ops.0.match.2 ops.0.use.0.speed ops.0.rules.0.mono ops.0.match.1 ops.0.src ops.0.use.0.out
        ops.1.exec ops.1.conf ops.1.match.0 ops.1.use.0.out ops.1.use.0.when.arch ops.2
        fuse.0.chain.1.0 fuse.0.src fuse.0.chain.0 fuse.0.chain.2 fuse.0.when.arch fuse.1 fuse.1.graph.nodes.c
        place.at place.io_in math.acc.0.bits math.acc.0.when.arch
    """
    assert [str(e.where).rpartition(" ")[2] for e in check(Path(__file__).with_name("malformed.yaml"))] == wrong.split()


@pytest.mark.parametrize("table", ["formats", "sources", "arch", "ops", "fuse", "sets", "place", "math", "deploy"])
def test_names_of_a_malformed_table_are_not_called_unknown(tmp_path, table):
    found = check(write(tmp_path, f"name: npu\n{table}: 3\nextends: tflite_int8\n"))
    assert [str(e.where).rpartition(" ")[2] for e in found] == [table]


@pytest.mark.parametrize("key, typo", [("formats", "formts"), ("sources", "source")])
def test_names_of_a_mistyped_table_are_not_called_unknown(tmp_path, key, typo):
    (found,) = check(write(tmp_path, GOOD.replace(f"{key}:", f"{typo}:")))
    assert found.what == f"Key '{typo}' is unknown" and f"'{key}'" in found.hint


def test_every_fault_of_an_entry_is_named(tmp_path):
    double = GOOD.replace("bits: 8, zero: any", "bits: 8, range: [5, 3], zero: 300")
    assert [e.what.partition(" ")[0] for e in check(write(tmp_path, double))] == ["range", "zero"]


def test_the_first_problem_is_the_first_of_the_file(tmp_path):
    text = GOOD.replace(ZERO, "zero: 300").replace("name: tiny_npu", "math: {acc: 3}\nname: tiny_npu")
    file = write(tmp_path, text.replace("math: {q_round", "unlisted: {q_round"))
    with pytest.raises(PlatformError, match=r"tiny_npu.yaml:1, key math.acc.*lists 2 more"):
        load(file)
    assert [e.where.partition(":")[2].partition(",")[0] for e in check(file)] == ["1", "5", "18"]


def test_platforms_that_extend_each_other_are_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("name: a\nextends: b\n")
    (tmp_path / "b.yaml").write_text("name: b\nextends: a\n")
    with pytest.raises(PlatformError, match="extends itself"):
        load(tmp_path / "a.yaml")


def test_a_revision_opens_its_gates():
    for name, weights in (("ort_cpu@VNNI", "w8"), ("ort_cpu@AVX2", "wp8"), ("ort_cpu", "wp8")):
        assert resolve(load(name), "Conv2D", {}).options[0].w == weights


def test_a_child_overrides_its_parent_and_its_rules_come_first(tmp_path):
    child = "name: mine\nextends: ort_cpu\nops: [{match: [Add], exec: float, src: [A], conf: I}]\nsources: {A: me}\n"
    p = load(write(tmp_path, child))
    assert resolve(p, "Add", {}).exec == "float"
    assert resolve(p, "Mul", {}).exec == "int"


@pytest.mark.parametrize("name", names())
def test_every_built_in_names_the_source_of_every_fact(name):
    p = load(name)
    assert p.sources
    assert p.hash == load(name).hash
    for o in p.ops:
        assert set(o.src) <= set(p.sources) or p.extends
    fusions(p)


def test_signedness_that_is_decided_by_data_needs_the_data():
    f = Format(bits=8, signed="auto")
    assert (f.grid(signed=True).qmin, f.grid(signed=False).qmax) == (-128, 255)
    assert Format(bits=3, kind="lut").grid().entries == 8
    with pytest.raises(ValueError, match="signed"):
        f.grid()


def test_notes_and_conditions_of_rules_are_shown_and_brackets_as_they_stand(tmp_path):
    text = GOOD.replace("conf: V}\nfuse", "conf: V, note: even sizes}\nfuse").replace("TinyNPU rev C", "'[/x] [bold]'")
    text = text.replace("[Relu, Relu6]]", "[Relu, Relu6]], note: in place").replace("section 4.2", "[/y]")
    Console(file=(out := StringIO()), width=200).print(show(load(write(tmp_path, text))))
    shown = "even sizes", "in place", "where kernel", "[/x] [bold]", "[/y]"
    assert [t for t in shown if t not in out.getvalue()] == []


def test_a_platform_in_the_record_of_a_plan_is_read_back():
    chip = load("ort_cpu").model_copy(update={"metadata": True})
    kept = provenance_of(graph_of("y = Relu(x)"), chip, "")["platform"]
    assert Platform.model_validate(json.loads(json.dumps(kept))).model_dump() == chip.model_dump()


@pytest.mark.parametrize("page", PAGES)
def test_generated_pages_are_up_to_date(page, request):
    assert (request.config.rootpath / "docs" / page).read_text() == generated(page)


def test_near_names_are_looked_for_among_names_of_any_type():
    assert "'word'" in str(UnknownNameError("revision", "wort", [None, "word", 3]))


# ---------------------------------------------------------------- files that attack, and garbage


@pytest.mark.parametrize(
    "content, words",
    [
        ("name: café".encode("latin-1"), "not text in UTF-8.*byte 0xe9 at position 9"),
        (b"", "table of keys"),
        (b"- a list", "table of keys"),
        (b"name: x\n\tformats: {}", "not valid YAML"),
        (b"3: 4", "Key 'name' is missing"),
        (b"a: b\n---\nc: d", "another document"),
        (bytes(range(256)), "not text in UTF-8"),
        (b"\0\0", "not valid YAML"),
        (b"name: " + b"[" * 100_000, "nests deeper than 40 levels"),
        (b"a: &a [1]\nb: *a", "aliases"),
        (b"a: &a [*a]", "aliases"),
        (b"name: 2001-99-99", "nor a number nor a date"),
        (b"name: " + b"9" * 5000, "nor a number"),
        (b"name: !!python/name:os.system x", "not valid YAML"),
        (b"name: x\nformats: {a: {bits: .nan}}", "a.bits"),
        (b"name: x\nformats: {a: {bits: 8, scale_min: .nan}}", "scale_min"),
        (b"name: x\nmath: {act_table: {kind: pwl, segments: .nan}}", "segments"),
        (b"name: x\nformats: {a: {bits: 8, grid: .inf}}", "grid"),
        (b"name: x\nformats: {a: {bits: 17, kind: log}}", "at most 16 bits"),
        (b"name: x\nformats: {a: {bits: 17, kind: lut}}", "at most 16 bits"),
        (
            b"name: x\nformats: {a: {bits: 1" + b"0" * 400 + b"}}",
            "bits must fit 64 bits, and is an.*1329 bits.*key formats.a",
        ),
        (b"name: x\nextends: x", "extends itself"),
        (b'name: "\\ud800"', "surrogates not allowed|invalid Unicode character"),  # PyYAML's words, libyaml's
    ],
)
def test_a_platform_file_of_garbage_is_refused(tmp_path, content, words):
    (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(PlatformError, match=words):
        load(tmp_path / "x.yaml")


@pytest.mark.parametrize("name", [5, 1.5, b"AVX2", ("AVX2",), []], ids=repr)
def test_a_revision_that_is_not_text_is_unknown(name):
    with pytest.raises(UnknownNameError, match="no revision of 'ort_cpu'"):
        load("ort_cpu", name)


@pytest.mark.parametrize("gives", [lambda: None, lambda: "ort_cpu", lambda: 3])
def test_an_object_that_returns_no_platform_is_refused(gives):
    with pytest.raises(PlatformError, match="platform must be given by name, path or record"):
        load(SimpleNamespace(to_platform=gives))


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:trap.touch [1]", "!!python/name:trap.touch", "!!python/module:trap"]
)
def test_a_platform_file_makes_no_objects(tmp_path, trap, tag):
    (tmp_path / "p.yaml").write_text(f"name: p\ntitle: {tag}\n")
    with pytest.raises(PlatformError):
        load(tmp_path / "p.yaml")
    (tmp_path / "p.json").write_text(json.dumps({"schema_version": 1, "name": tag}))
    with pytest.raises(ChipfitError):
        load_target(str(tmp_path / "p.json"))
    assert not trap.exists()


@pytest.mark.parametrize(
    "platform, change, words",
    [
        ("k210", lambda d: d["formats"]["w8"].update(zero=[]), "zero is an empty set"),
        ("inc_tensorflow", lambda d: d["math"].update(acc=[{"bits": 32}, {"bits": -32}]), "at least 1"),
        ("axis_artpec9", lambda d: d["ops"][0].update(where={"channels": {"min": math.nan}}), "where.channels is nan"),
        ("qnn_htp", lambda d: d["ops"][0]["rules"][0].update(eq=10**400), "an integer of 1329 bits"),
        ("xnnpack", lambda d: d["ops"][0]["rules"][0]["mono"].update(in0=10**400), "at most 8"),
        ("coreml", lambda d: d["formats"]["p4q"]["lut"].update(value_bits=-1), "value_bits"),
    ],
)
def test_a_format_that_holds_nothing_is_refused(tmp_path, platform, change, words):
    builtin = resources.files("chipfit.platform") / "builtin"
    data = yaml.safe_load((builtin / f"{platform}.yaml").read_text())
    change(data)
    (tmp_path / "chip.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(PlatformError, match=words):
        load(tmp_path / "chip.yaml")


def test_a_saved_platform_without_a_revision_that_it_uses_is_refused():
    platform = load("ort_cpu")
    check_consistent(platform, "platform.json")
    with pytest.raises(PlatformError, match="no revision named .VNNI."):
        check_consistent(platform.model_copy(update={"arch": ("AVX2", "V")}), "platform.json")
    with pytest.raises(ChipfitError, match="named 'V'"):
        check_consistent(platform.model_copy(update={"arch_selected": "V"}), "platform.json")


def test_a_folder_and_a_name_that_no_disk_can_have_are_no_platforms(tmp_path):
    with pytest.raises(PlatformError):
        load(f"{'a' * 5000}.yaml")
    (tmp_path / "chip.yaml").write_text(yaml.safe_dump({"name": "chip", "extends": "a" * 5000}))
    with pytest.raises(PlatformError, match="does not exist"):
        load(tmp_path / "chip.yaml")
    with pytest.raises(PlatformError, match="is a folder"):
        load(tmp_path.rename(tmp_path.with_suffix(".yaml")))
    with pytest.raises(ModelingError):
        load_target_platform_capabilities(f"{'a' * 5000}.json")


@pytest.mark.parametrize("kind", ["log", "lut"])
def test_a_table_may_have_16_bits(kind):
    assert platform_of(formats={"wide": {"bits": 16, "kind": kind}}).formats["wide"].bits == 16
