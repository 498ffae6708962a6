"""Configurations of experiments: YAML files with MQBench's keys, over a base that several experiments share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from chipfit.errors import ChipfitError, ConfigError, UnknownNameError
from chipfit.mqbench.settings import get_backend_params, get_qconfig
from chipfit.platform.builtin import DEFAULT
from chipfit.platform.load import load as load_platform
from chipfit.platform.yaml_file import YamlFile, merged
from chipfit.ranges import rule_of
from chipfit.search.limits import Limits
from chipfit.settings import Settings
from chipfit.validation import problems_of

Count = Annotated[int, Field(ge=1, le=1 << 40)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(ge=0, le=1e3)]
Device = Annotated[str, Field(pattern=r"^(auto|[a-z]+(:[0-9]{1,4})?)$")]

#: keys in which experiments of one unified training setting may differ
COMPARED_KEYS = frozenset("extends qparams ptq backend bnfold freeze_step deploy device model seed study".split())

#: keys that do not affect results
_IRRELEVANT_KEYS: Any = {
    "study": True,
    "unified": True,
    "device": True,  # see `Config.key`
    "data": {"root": True, "num_workers": True, "train": {"root"}, "test": {"root"}},
    "saver": {"print_freq": True, "save_many": True, "pretrain": {"path"}},
}


class Record(BaseModel):
    """A table of keys; unknown keys raise an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


R = TypeVar("R", bound=Record)


class Model(Record):
    """The network, see `chipfit.bench.networks`."""

    type: str  #: a registered name, "timm:NAME", "torchvision:NAME", "transformers:NAME" or "module:factory"
    kwargs: dict[str, Any] = {}


class QParams(Record):
    """Quantization in training, see `chipfit.quantize_fx.get_qconfig`."""

    w_method: str = "lsq"  #: a registered name, or "module:Class"
    a_method: str = "lsq"
    bit: int = 8
    w_observer: str | None = None
    a_observer: str | None = None


class Backend(Record):
    """A custom hardware setting, see `chipfit.quantize_fx.get_qconfig`."""

    name: str
    ada_sign: bool
    symmetry: bool
    per_channel: bool
    pot_scale: bool
    graph: Literal[1, 2, 3] | None = None


class Ptq(Record):
    """Quantization without training, by `chipfit.quantize`."""

    platform: str = DEFAULT
    bit: Annotated[int, Field(ge=1, le=16)] | None = None  #: bits of weights; None: the platform's preferred width
    a_bit: Annotated[int, Field(ge=1, le=16)] | None = None  #: bits of activations, if the platform leaves them free
    rule: str = "mse"
    weight_rule: str = "mse"
    settings: dict[str, Any] = {}  #: of `chipfit.Settings`
    limits: dict[str, float | str] = {}  #: of `chipfit.Limits`

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `chipfit.quantize`.

        Raises:
            ChipfitError, TypeError: a name does not exist, or a value is invalid.
        """
        load_platform(self.platform)
        for rule in (self.rule, self.weight_rule):
            rule_of(rule)
        widths = {k: v for k, v in (("bits", self.bit), ("activation_bits", self.a_bit)) if v is not None}
        return {
            **self.model_dump(include={"platform", "rule", "weight_rule"}),
            "overrides": {"*": widths} if widths else None,
            "settings": Settings(**self.settings),
            "limits": Limits(**dict[str, Any](self.limits)) if self.limits else None,
        }


class Optimizer(Record):
    """An optimizer of torch.optim, by name."""

    type: Literal["SGD", "Adam", "AdamW"] = "SGD"
    kwargs: dict[str, bool | float] = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
    no_wd: bool = False  #: no weight decay for parameters with at most one axis (norms, biases, scales)


class Rates(Record):
    """Learning rates: linear warm-up from `warmup_lr` to `base_lr` in `warmup_steps`, then cosine decay to `min_lr`."""

    base_lr: Rate
    warmup_lr: Rate = 1e-4
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    max_iter: Annotated[int, Field(ge=0, le=1 << 40)]  #: 0: test the calibrated ranges without training
    min_lr: Rate = 0.0

    @model_validator(mode="after")
    def _in_order(self) -> Rates:
        if self.warmup_steps >= max(self.max_iter, 1):
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be less than max_iter ({self.max_iter})")
        return self


class Schedule(Record):
    """The schedule of the learning rate."""

    type: Literal["Cosine"] = "Cosine"
    kwargs: Rates


class Decay(Record):
    """Options of the moving average."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.9999


class Ema(Record):
    """An exponential moving average of the parameters, which is tested and deployed."""

    enable: bool = False
    kwargs: Decay = Decay()


class Dist(Record):
    """Options of training with several processes under torchrun, which share every batch."""

    sync: bool = False  #: synchronize batch norms over processes
    amp: bool = False  #: automatic mixed precision, in bfloat16
    accumulate: Count = 1  #: number of batches whose gradients are added for one step


class Transforms(Record):
    """The transforms of an image to a tensor."""

    type: Literal["STANDARD", "ONECROP", "PLAIN"] = "PLAIN"


class Split(Record):
    """One half of the data."""

    transforms: Transforms = Transforms()
    root: str | None = None  #: folder of this half; `data.root` when omitted
    images: Count | None = None  #: use this number of first images


class Data(Record):
    """The images, see `chipfit.bench.data`."""

    type: str = "imagenet"  #: a registered name, or "module:function"
    root: str | None = None
    batch_size: Count = 64  #: images per batch and process
    num_workers: Annotated[int, Field(ge=0, le=256)] = 0
    input_size: Annotated[int, Field(ge=1, le=1 << 12)] = 224
    test_resize: Annotated[int, Field(ge=1, le=1 << 12)] = 256
    calibration: Count = 256  #: number of training images for calibration
    corrupted: Share = 0.01  #: greatest share of unreadable images; they are skipped and counted
    train: Split = Split(transforms=Transforms(type="STANDARD"))
    test: Split = Split(transforms=Transforms(type="ONECROP"))


class Pretrain(Record):
    """The source of the float network."""

    path: str | None = None  #: safetensors
    #: or train it first: number of passes over the data, and learning rate; all experiments with equal options share it
    epochs: Count | None = None
    lr: Rate = 0.1


class Saver(Record):
    """Output during training."""

    print_freq: Count = 100  #: steps between two points of the loss curve
    val_freq: Count = 5000  #: steps between two tests, each with a checkpoint
    save_many: bool = False  #: keep every checkpoint
    pretrain: Pretrain = Pretrain()


class Config(Record):
    """One experiment: training in a hardware setting (`qparams`, `backend`), or quantization without (`ptq`)."""

    model: Model
    data: Data = Data()
    qparams: QParams | None = None
    backend: str | Backend | None = None  #: one of `chipfit.quantize_fx`, or flags
    bnfold: int | None = None
    freeze_step: Count | None = None  #: step at which statistics of batch norms are frozen
    ptq: Ptq | None = None
    deploy: tuple[str, ...] | None = None  #: platforms; when omitted all that support the setting and have a runtime
    optimizer: Optimizer = Optimizer()
    lr_scheduler: Schedule | None = None
    label_smooth: Share = 0.0
    ema: Ema = Ema()
    dist: Dist = Dist()
    saver: Saver = Saver()
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 1000
    device: Device = "auto"  #: "cpu", "cuda", "cuda:1", "mps", "xpu" ..., or "auto": the accelerator of the machine
    study: str = ""  #: study that it belongs to
    unified: bool = False  #: it differs from its base in `COMPARED_KEYS` only

    @model_validator(mode="after")
    def _is_consistent(self) -> Config:
        if (self.qparams is None) == (self.ptq is None):
            raise ValueError("give one of 'qparams' (training) and 'ptq' (without training)")
        if self.qparams is not None:
            if self.backend is None:
                raise ValueError("'qparams' require 'backend', the hardware setting")
            if self.lr_scheduler is None:
                raise ValueError("training requires 'lr_scheduler'")
        elif self.backend is not None or self.bnfold is not None:
            raise ValueError("'backend' and 'bnfold' are for training; use 'ptq.platform' without training")
        if self.saver.pretrain.path is not None and self.saver.pretrain.epochs is not None:
            raise ValueError("'saver.pretrain' must have either 'path' or 'epochs'")
        try:
            _ = self.setting() if self.ptq is None else self.ptq.options
            for name in self.deploy or ():
                load_platform(name)
        except (ChipfitError, TypeError) as e:
            raise ValueError(str(e)) from None
        return self

    def on(self, device: str | None) -> Config:
        """Return the experiment on another device; itself for None.

        Raises:
            ConfigError: the name has not the form of a device.
        """
        return self if device is None else validated(Config, {**self.resolved, "device": device})

    def setting(self) -> Any:
        """Return the QConfig of the hardware setting.

        Raises:
            ValueError, ChipfitError: its parts contradict each other.
        """
        assert self.qparams is not None and self.backend is not None  # for mypy: see `_is_consistent`
        if isinstance(self.backend, Backend):
            flags: dict[str, Any] = self.backend.model_dump(exclude={"name"}) | {"bnfold": self.bnfold}
            with suppress(UnknownNameError):
                known = {**flags, **get_backend_params(self.backend.name)}
                other = [k for k, v in flags.items() if k != "bnfold" and v not in (None, known[k])]
                if other:
                    raise ValueError(f"'{self.backend.name}' is a setting with another {', '.join(other)}")
        else:
            flags = get_backend_params(self.backend)
            if self.bnfold is not None and not self._keeps_batch_norms:
                flags["bnfold"] = self.bnfold
        return get_qconfig(**self.qparams.model_dump(), **flags, allow_code=True)  # `model.type` may load code as well

    @property
    def _keeps_batch_norms(self) -> bool:
        """True if batch norms stay in spite of `bnfold`, as in MQBench's academic setting."""
        return isinstance(self.backend, str) and get_backend_params(self.backend)["ada_sign"]

    @property
    def setting_name(self) -> str:
        """The name of the hardware setting; "" without training."""
        return self.backend.name if isinstance(self.backend, Backend) else self.backend or ""

    @property
    def notes(self) -> list[str]:
        """Options of the file without effect."""
        has_none = self.bnfold is not None and self._keeps_batch_norms
        if has_none:
            return [f"bnfold has no effect: '{self.backend}' leaves batch norms as they are"]
        if self.qparams is None or not self.setting().keeps_batch_norms:
            return []
        return [f"bnfold 4 keeps batch norms: weights of {self.qparams.w_method} have no scale that they could follow"]

    @property
    def resolved(self) -> dict[str, Any]:
        """The whole configuration as JSON data."""
        return self.model_dump(mode="json")

    @property
    def key(self) -> str:
        """A hash of everything that the result may depend on; places of files and indices of devices have no effect."""
        relevant = self.model_dump(mode="json", exclude=_IRRELEVANT_KEYS)
        relevant |= {"device": self.device.partition(":")[0]} if self.device != "auto" else {}
        return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """A readable name: model, method, width, setting."""
        if self.qparams is not None:
            w, a = self.qparams.w_method, self.qparams.a_method
            fold = "" if self.bnfold is None else f"_bn{self.bnfold}"
            return f"{self.model.type}_{w if w == a else f'{w}-{a}'}_{self.qparams.bit}bit_{self.setting_name}{fold}"
        assert self.ptq is not None  # for mypy
        bits = f"{self.ptq.bit or ''}" + (f"a{self.ptq.a_bit}" if self.ptq.a_bit else "")
        return f"{self.model.type}_{self.ptq.rule}_{bits or 'default'}bit_{self.ptq.platform}"


def load(path: str | Path) -> Config:
    """Load an experiment from a YAML file, merged over the file that it extends.

    Raises:
        ConfigError: the file is malformed or contradictory; names file, line and key.
    """
    data, source, unified = _with_base(Path(path), ())
    return validated(Config, {**data, "unified": unified}, source)


def of(data: Mapping[str, Any]) -> Config:
    """Return the experiment that data describe.

    Raises:
        ConfigError: the data are malformed or contradictory; names the key.
    """
    return validated(Config, {**data, "unified": False})


def validated(kind: type[R], data: Any, source: YamlFile | None = None) -> R:
    """Return the record of data, perhaps those of a file.

    Raises:
        ConfigError: the data are malformed or contradictory; names file, line and key.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as e:
        path, what, facts = next(problems_of(e.errors(), data, kind))
    raise source.error(path, what, **facts) if source else ConfigError(what, where=".".join(map(str, path)), **facts)


def _with_base(path: Path, extended_by: tuple[Path, ...]) -> tuple[dict[str, Any], YamlFile, bool]:
    """Return the data of a file merged over its base, its source, and whether it keeps the base's training setting."""
    source = YamlFile(path, str(path), ConfigError)
    base = source.data.pop("extends", None)
    if base is None:
        return source.data, source, False
    if not isinstance(base, str):
        raise source.error(("extends",), "extends is the path of one file", got=repr(base))
    there = (path.parent / base).resolve()
    if there in extended_by:
        raise source.error(("extends",), f"'{base}' extends itself", hint="remove the cycle")
    if not there.is_file():
        raise source.error(("extends",), "The file that this one extends does not exist", got=base)
    under, source.under, _ = _with_base(there, (*extended_by, path.resolve()))
    return merged(under, source.data), source, set(source.data) <= COMPARED_KEYS
