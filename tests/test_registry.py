"""What is dropped in declares itself completely, under a name of its own; and is loaded only when it is asked for."""

import re
from dataclasses import dataclass
from functools import partial

import pytest

from chipfit import registry
from chipfit.errors import ConfigError, ExportError, RegistrationError, UnknownNameError
from chipfit.ranges import rule_of
from chipfit.registry import Setting, ordered, register
from tests.processes import python

pytestmark = pytest.mark.usefixtures("drop_ins")


def nothing(graph):
    return graph, []


@pytest.mark.parametrize(
    ("kind", "declared", "message"),
    [
        ("pass", {}, r"The pass 'mine' does not declare 'stage'.*Allowed: stage, after, setting"),
        ("pass", {"stage": "rewrite", "befor": ("equalize",)}, "The pass 'mine' declares the unknown 'befor'"),
        ("format", {}, "The file format 'mine' does not declare 'suffixes'"),
        ("runtime", {"suffix": ".onnx"}, "The runtime 'mine' has no 'run', 'executed'"),
    ],
)
def test_an_incomplete_or_unknown_declaration_is_refused(kind, declared, message):
    with pytest.raises(RegistrationError, match=message):
        register(kind, "mine", **declared)(nothing)


def test_a_name_that_is_taken_is_refused_with_both_homes():
    message = r"The range rule 'mse' exists already.*Where: .*Mine.*Got: another one in chipfit\.ranges\.mse\.MseRange"
    registry.lookup("range", "mse")
    with pytest.raises(RegistrationError, match=message):

        @register("range", "mse")
        @dataclass(frozen=True)
        class Mine:
            def __call__(self, sample, grid):
                raise NotImplementedError


@dataclass(frozen=True)
class Mine:
    """A range rule from outside of the package."""

    def __call__(self, sample, grid):
        raise NotImplementedError


def test_a_name_of_the_package_is_taken_before_anything_is_looked_up():
    code = "from chipfit.registry import register\nfrom tests.test_registry import Mine\n"
    code += "try: register('range', 'mse')(Mine)\nexcept Exception as e: print(e)\n"
    code += "register('range', 'KLDObserver')(Mine)"
    done = python(code)
    taken = "The range rule '{}' exists already.*Got:.*{}"
    assert re.search(taken.format("mse", r"chipfit\.ranges\.mse\.MseRange"), done.stdout, re.DOTALL)
    assert re.search(f"RegistrationError: {taken.format('KLDObserver', 'another name of .kl')}", done.stderr, re.DOTALL)


@pytest.mark.parametrize("name", ["off", "lp(p=3)", "gptq + mine", "", "a b", None])
def test_a_name_that_a_text_cannot_name_is_refused(name):
    with pytest.raises(RegistrationError, match="The name of a range rule must be a word"):
        register("range", name)(Mine)


def test_a_suffix_a_step_or_a_setting_of_something_else_is_refused():
    with pytest.raises(RegistrationError, match=r"The suffix '\.onnx' of the file format 'mine' exists.*one of 'onnx'"):
        register("format", "mine", suffixes=(".onnx",))(nothing)
    with pytest.raises(RegistrationError, match=r"The correction 'equalize' exists already.*chipfit\.passes"):
        register("correction", "equalize", stage="correct")(nothing)
    taken = Setting("equalize", None, "doc")
    with pytest.raises(RegistrationError, match=r"The setting 'equalize' of the pass 'mine' exists.*one of 'equalize'"):
        register("pass", "mine", stage="rewrite", setting=taken)(nothing)


def test_the_same_object_may_register_again():
    from chipfit.ranges.mse import MseRange

    assert register("range", "mse")(MseRange) is MseRange


def test_an_unknown_kind_lists_the_kinds():
    with pytest.raises(UnknownNameError, match=r"no kind of addition named 'passes'.*Try: 'pass'"):
        register("passes", "mine")


def test_an_unknown_name_lists_near_ones():
    with pytest.raises(UnknownNameError, match=r"There is no range rule named 'mes'.*'mse'"):
        registry.lookup("range", "mes")


def test_a_step_after_one_that_does_not_exist_is_refused():
    register("pass", "mine", stage="rewrite", after=("equalise",))(nothing)
    with pytest.raises(
        RegistrationError, match=r"The step 'mine' must run after 'equalise', which does not exist.*equalize"
    ):
        ordered("rewrite")


def test_steps_after_each_other_are_refused():
    register("pass", "one", stage="rewrite", after=("two",))(nothing)
    register("pass", "two", stage="rewrite", after=("one",))(nothing)
    with pytest.raises(
        RegistrationError, match=r"The order of steps has a cycle.*Got: (one -> two -> one|two -> one -> two)"
    ):
        ordered("rewrite")


def test_a_step_stands_behind_those_that_it_names_and_its_setting_is_known():
    from chipfit.settings import Settings, known_settings

    register("pass", "mine", stage="rewrite", after=("channels_last",), setting=Setting("mine", None, "doc", "by"))(
        nothing
    )
    assert [e.name for e in ordered("rewrite")][-2:] == ["channels_last", "mine"]
    assert "mine" in known_settings() and Settings(mine=0.5).mine == 0.5 and Settings().mine is None


def test_a_missing_library_names_the_extra():
    register("format", "mine", suffixes=(".mine",), libraries=("no_such_library",), extra="mine")(nothing)
    with pytest.raises(ExportError, match=r"'mine' needs no_such_library, which is not installed.*'chipfit\[mine\]'"):
        registry.require_libraries(registry.entry("format", "mine"), ExportError)


def test_looking_up_one_entry_loads_its_file_alone():
    code = (
        "import sys\nfrom chipfit.registry import lookup\nlookup('range', 'mse')\n"
        "print([m for m in ('chipfit.ranges.kl', 'chipfit.ranges.mse', 'onnx', 'keras') if m in sys.modules])"
    )
    assert python(code).stdout == "['chipfit.ranges.mse']\n"


@pytest.mark.parametrize(
    "rule, setting",
    [("lp(p='x')", "p"), ("lp(p=1e999)", "p"), ("kl(steps=999999999)", "steps"), ("percentile(share=2)", "share")],
)
def test_a_setting_out_of_its_range_is_refused_by_its_name(rule, setting):
    with pytest.raises(ConfigError, match=f"'{setting}'"):
        rule_of(rule)


def test_what_is_made_of_a_function_comes_from_where_the_function_does():
    assert registry.origin_of(partial(partial(rule_of, 1), 2)) == "chipfit.ranges.rule_of"
