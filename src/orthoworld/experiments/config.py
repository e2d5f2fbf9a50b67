"""Typed descriptions of runs and experiments. Unknown keys are refused with a suggestion."""

import difflib
import hashlib
import inspect
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, ClassVar, Literal, TypeVar, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator

from orthoworld.devices import default_device
from orthoworld.encoders import MLP, InverseAffineCoupling, InverseCoupling
from orthoworld.errors import ConfigError
from orthoworld.objectives.lejepa import (
    ConstrainedLeJEPA,
    InfoNCE,
    LeJEPA,
    WhitenedAlignment,
    WhitenedLeJEPA,
    Whitening,
)
from orthoworld.objectives.vicreg import VICReg
from orthoworld.training.schedule import AdamW, HalfCosine, Muon, WarmupCosine
from orthoworld.worlds.langevin import Langevin
from orthoworld.worlds.latents import Gaussian, GeneralizedNormal, Laplace, StudentT, Uniform
from orthoworld.worlds.mixings import AffineCoupling, Banana, Coupling, Identity, Sinusoid, Spiral
from orthoworld.worlds.transitions import OU, LaplaceAR


class Spec(BaseModel):
    """A part of a configuration: typed, immutable, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)

    choices: ClassVar[Mapping[str, Mapping[str, type["Choice"]]]] = {}
    """Fields that hold one of several named parts, and the parts."""


S = TypeVar("S", bound=Spec)


class Choice(Spec):
    """A named part with the options of the class it builds; made by `_choice`."""

    name: str
    target: ClassVar[Callable[..., Any]]

    def options(self) -> dict[str, Any]:
        """Return the options without the name."""
        return {key: value for key, value in self if key != "name"}

    def build(self, **context: Any) -> Any:
        """Return the object described.

        Args:
            context: what the configuration does not hold (sizes, generators); of it the target gets what it takes.
        """
        target = type(self).target
        taken = inspect.signature(target).parameters
        return target(**self.options(), **{key: value for key, value in context.items() if key in taken})


CONTEXT = ("dim", "in_dim", "out_dim", "generator")
"""Parameters of constructors that are given when a run is built, not configured."""


def _choice(name: str, target: Callable[..., Any]) -> type[Choice]:
    """Return the model of the options of `target`: types and defaults are those of its signature, nowhere else."""
    hints = get_type_hints(target.__init__)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(target).parameters.values():
        if parameter.name not in CONTEXT and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (hints[parameter.name], default)
    model = create_model(f"{target.__name__}Choice", __base__=Choice, name=(str, name), **fields)
    model.target = staticmethod(target)
    return model


def _registry(**targets: Callable[..., Any]) -> dict[str, type[Choice]]:
    names = {name.replace("_", "-"): target for name, target in targets.items()}
    return {name: _choice(name, target) for name, target in names.items()}


SOURCES = _registry(
    gaussian=Gaussian, generalized_normal=GeneralizedNormal, laplace=Laplace, student_t=StudentT, uniform=Uniform
)
TRANSITIONS = _registry(langevin=Langevin, laplace_ar=LaplaceAR, ou=OU)
MIXINGS = _registry(
    affine_coupling=AffineCoupling,
    banana=Banana,
    coupling=Coupling,
    identity=Identity,
    sinusoid=Sinusoid,
    spiral=Spiral,
)
ENCODERS = _registry(inverse_affine_coupling=InverseAffineCoupling, inverse_coupling=InverseCoupling, mlp=MLP)
OBJECTIVES = _registry(
    constrained_lejepa=ConstrainedLeJEPA,
    infonce=InfoNCE,
    lejepa=LeJEPA,
    vicreg=VICReg,
    whitened_alignment=WhitenedAlignment,
    whitened_lejepa=WhitenedLeJEPA,
    whitening=Whitening,
)
OPTIMIZERS = _registry(adamw=AdamW, muon=Muon)
SCHEDULES = _registry(half_cosine=HalfCosine, warmup_cosine=WarmupCosine)


class WorldSpec(Spec):
    """The world of a run."""

    choices = {"source": SOURCES, "transition": TRANSITIONS, "mixing": MIXINGS}

    dim: int = Field(ge=1)
    source: Choice
    transition: Choice
    pairs: Literal["direct", "shared-parent"] = "direct"
    mixing: Choice


class TrainSpec(Spec):
    """The training of a run; see `orthoworld.train`.

    `device` is where the encoder is trained. `auto` stands for CUDA where there is one and the CPU elsewhere, and is
    replaced by what it stands for, since another device is another run; `mps` has to be asked for.

    Of several restarts the one with the least loss is kept: the mean over held-out batches, or that of one batch, as
    published. `restart_worlds: redrawn` gives each restart a mixing of its own, as published, so that the choice is
    among worlds, too. `bound_samples` is the number of pairs of the bound, where it needs more than other measures.
    """

    choices = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES}

    steps: int = Field(ge=1)
    batch: int = Field(ge=2)
    optimizer: Choice
    schedule: Choice
    evaluate_every: int = Field(ge=0)
    evaluation_samples: int = Field(ge=100)
    whitener_samples: int = Field(ge=100)
    bound_samples: int | None = Field(default=None, ge=100)
    restarts: int = Field(default=1, ge=1)
    restart_worlds: Literal["same", "redrawn"] = "same"
    selection: Literal["held-out", "one-batch"] = "held-out"
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    threads: int = Field(default=1, ge=1)

    @field_validator("device", mode="after")
    @classmethod
    def _resolve(cls, device: str) -> str:
        return default_device() if device == "auto" else device


class RunSpec(Spec):
    """Everything a run depends on. Two equal specs are the same run.

    `out_dim` is the size of the embedding; without one it has as many dimensions as the world has latents.
    """

    choices = {"encoder": ENCODERS, "objective": OBJECTIVES}

    experiment: str
    seed: int = Field(ge=0)
    world: WorldSpec
    encoder: Choice
    out_dim: int | None = Field(default=None, ge=1)
    objective: Choice
    train: TrainSpec

    def resolved(self) -> dict[str, Any]:
        """Return the full description as plain data, every default written out."""
        return self.model_dump(serialize_as_any=True)

    def __reduce__(self) -> tuple[Callable[..., "RunSpec"], tuple[dict[str, Any]]]:
        # The classes of the parts are made at import and have no importable name: a copy is rebuilt from plain data.
        return _rebuilt, (self.resolved(),)

    @property
    def run_id(self) -> str:
        """A readable name and the hash of the full description."""
        text = json.dumps(self.resolved(), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        return f"{self.world.mixing.name}-{self.objective.name}-s{self.seed}-{digest}"

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "RunSpec":
        """Check plain data and return the spec.

        Raises:
            ConfigError: a key is unknown or missing, or a value has the wrong type; the message names the key.
        """
        return parse(cls, data, "")


def _rebuilt(data: dict[str, Any]) -> RunSpec:
    """Return a copied run; a function, since cloudpickle takes a class method apart."""
    return RunSpec.from_data(data)


def parse(model: type[S], data: Any, path: str) -> S:
    """Check `data` against `model`, with errors that name the full path of a key."""
    if isinstance(data, str) and issubclass(model, Choice):
        data = {"name": data}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}={data!r}: expected keys {', '.join(model.model_fields)}")
    prefix = f"{path}." if path else ""
    checked = dict(data)
    for key, value in data.items():
        if key not in model.model_fields:
            raise ConfigError(f"unknown key {prefix}{key}{suggestion(key, model.model_fields)}")
        annotation = model.model_fields[key].annotation
        if key in model.choices:
            checked[key] = parse(_chosen(model.choices[key], value, prefix + key), value, prefix + key)
        elif isinstance(annotation, type) and issubclass(annotation, Spec):
            checked[key] = parse(annotation, value, prefix + key)
    try:
        return model.model_validate(checked)
    except ValidationError as error:
        first = error.errors()[0]
        key = prefix + ".".join(str(part) for part in first["loc"] if not _is_type_tag(part))
        if first["type"] == "missing":
            raise ConfigError(f"{key} is missing: expected a value") from None
        raise ConfigError(f"{key}={first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


def _is_type_tag(part: str | int) -> bool:
    """Whether pydantic added this part of a location to say which member of a union it tried."""
    return isinstance(part, str) and (part in ("int", "float", "str", "bool") or "[" in part)


def _chosen(registry: Mapping[str, type[Choice]], value: Any, path: str) -> type[Choice]:
    name = value.get("name") if isinstance(value, Mapping) else value
    if not isinstance(name, str):
        raise ConfigError(f"{path}.name is missing: expected one of {', '.join(registry)}")
    if name not in registry:
        raise ConfigError(f"{path}.name={name!r}{suggestion(name, registry)}")
    return registry[name]


def suggestion(name: str, valid: Sequence[str] | Mapping[str, Any]) -> str:
    """Return `: did you mean ...?` for a misspelt name, with the list of valid ones."""
    near = difflib.get_close_matches(name, list(valid), n=1)
    question = f"did you mean {near[0]}? " if near else ""
    return f": {question}valid are {', '.join(valid)}"


CONFIGURABLE = ("world", "encoder", "out_dim", "objective", "train")
"""Parts of a run that an assignment can change; the experiment and the seed are chosen otherwise."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema for scalars: `1e-3` is a number, `on` and `no` are strings."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag == "tag:yaml.org,2002:null"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$"),
    list("-+.0123456789"),
)


def load_yaml(text: str, where: str) -> Any:
    """Return the data of a YAML text by the core schema of YAML 1.2.

    Raises:
        ConfigError: the text is no YAML; the message names `where` it came from.
    """
    try:
        return _string_keys(yaml.load(text, Loader=_Loader))
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from None


def _string_keys(data: Any) -> Any:
    """Return `data` with every key as a string, so that a stray number is refused as any other unknown key is."""
    if isinstance(data, dict):
        return {str(key): _string_keys(value) for key, value in data.items()}
    return [_string_keys(value) for value in data] if isinstance(data, list) else data


class Experiment(Spec):
    """A family of runs: what they share, and the alternatives along each axis.

    Attributes:
        name: as on the command line.
        preset: which preset it came from.
        common: keys of `RunSpec` that all runs share, nested.
        axes: axis to label to keys of `RunSpec`, or to a `key` of `RunSpec` and its `values`, which may be replaced by
            any others; the runs are all combinations.
        exclude: combinations that are left out: axis to labels, all of which a combination has to match.
        seeds: each combination is run once for each.
        overrides: dotted keys that replace values in every run.
    """

    name: str
    preset: str
    common: dict[str, Any]
    axes: dict[str, dict[str, Any]]
    exclude: list[dict[str, list[str]]] = []
    seeds: list[int] = Field(min_length=1)
    overrides: dict[str, Any] = {}

    def runs(self) -> list[RunSpec]:
        """Return the specs of all runs, axes in order, seeds last; equal ones once.

        Raises:
            ConfigError: a key is unknown to some run, missing, or of the wrong type.
        """
        specs = []
        alternatives = [_alternatives(axis).items() for axis in self.axes.values()]
        for labelled in itertools.product(*alternatives):
            labels = dict(zip(self.axes, (label for label, _ in labelled), strict=True))
            if any(all(labels[axis] in out for axis, out in rule.items()) for rule in self.exclude):
                continue
            parts = [part for _, part in labelled]
            for seed in self.seeds:
                data: dict[str, Any] = {"experiment": self.name, "seed": seed}
                for part in (self.common, *parts):
                    data = _merged(data, part)
                # Shorter keys first: a part that is chosen anew must not wipe out an option set below it.
                for key, value in sorted(self.overrides.items(), key=lambda item: item[0].count(".")):
                    data = _merged(data, _nested(key, value))
                specs.append(RunSpec.from_data(data))
        if not specs:
            raise ConfigError(f"{self.name} --preset {self.preset} has no run with this choice: {self.exclude} are out")
        return list({spec.run_id: spec for spec in specs}.values())

    def overridden(self, assignments: Sequence[str]) -> "Experiment":
        """Return the experiment with `key=value` assignments applied.

        The key is an axis or `seeds`, which selects alternatives, or a dotted key of `RunSpec`, which sets a value in
        every run.

        Raises:
            ConfigError: an assignment has no `=`, or selects what does not exist.
        """
        axes, seeds, overrides = dict(self.axes), self.seeds, dict(self.overrides)
        for assignment in assignments:
            key, equals, text = assignment.partition("=")
            if not equals or not key:
                raise ConfigError(f"{assignment!r}: expected key=value, such as train.steps=2000 or seeds=[0,1]")
            value = load_yaml(text, assignment)
            if key in axes:
                axes[key] = _selected(key, self.axes[key], value)
            elif key == "seeds":
                seeds = value if isinstance(value, list) else [value]
            elif key.split(".")[0] in CONFIGURABLE:
                overrides[key] = value
            else:
                valid = [*axes, "seeds", *CONFIGURABLE]
                raise ConfigError(f"unknown key {key}{suggestion(key.split('.')[0], valid)}")
        data = self.model_dump() | {"axes": axes, "seeds": seeds, "overrides": overrides}
        return parse(Experiment, data, "")


def _merged(base: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `part` laid over it; a part that names another choice replaces the old one's options."""
    result = dict(base)
    for key, value in part.items():
        old = result.get(key)
        if isinstance(old, str) and isinstance(value, Mapping):
            old = {"name": old}
        if isinstance(value, str) and isinstance(old, Mapping) and "name" in old:
            value = {"name": value}
        replaces = isinstance(value, Mapping) and "name" in value and isinstance(old, Mapping) and "name" in old
        if isinstance(value, Mapping) and isinstance(old, Mapping) and not (replaces and value["name"] != old["name"]):
            result[key] = _merged(old, value)
        else:
            result[key] = value
    return result


def _nested(key: str, value: Any) -> dict[str, Any]:
    """Return `{"a": {"b": value}}` for the dotted key `a.b`."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _alternatives(axis: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return an axis as labels and the keys of `RunSpec` they stand for."""
    if axis.keys() == {"key", "values"}:
        return {str(value): _nested(axis["key"], value) for value in axis["values"]}
    return dict(axis)


def _selected(axis: str, alternatives: dict[str, Any], value: Any) -> dict[str, Any]:
    """Return the part of an axis that was chosen: labels, or any values of an axis that has values."""
    chosen = value if isinstance(value, list) else [value]
    if not chosen:
        raise ConfigError(f"{axis}=[]: expected some of {', '.join(_alternatives(alternatives))}")
    if alternatives.keys() == {"key", "values"}:
        return {**alternatives, "values": chosen}
    labels = [str(name) for name in chosen]  # a label such as 64 is read as a number
    for label in labels:
        if label not in alternatives:
            raise ConfigError(f"{axis}={label!r}{suggestion(label, alternatives)}")
    return {label: alternatives[label] for label in labels}


def experiment_names() -> list[str]:
    """Return the names of the experiments that come with the package."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _folder().iterdir() if entry.name.endswith(".yaml"))


def load_experiment(name: str, preset: str = "quick") -> Experiment:
    """Return an experiment that comes with the package.

    Raises:
        ConfigError: no experiment or preset has this name; the message lists those that exist.
    """
    presets = _file(name)["presets"]
    if preset not in presets:
        raise ConfigError(f"preset {preset!r}{suggestion(preset, presets)}")
    return parse(Experiment, {"name": name, "preset": preset, **presets[preset]}, "")


def preset_names(name: str) -> list[str]:
    """Return the presets of an experiment that comes with the package.

    Raises:
        ConfigError: no experiment has this name.
    """
    return list(_file(name)["presets"])


def _file(name: str) -> dict[str, Any]:
    if name not in experiment_names():
        raise ConfigError(f"experiment {name!r}{suggestion(name, experiment_names())}")
    data: dict[str, Any] = load_yaml(_folder().joinpath(f"{name}.yaml").read_text(encoding="utf-8"), f"{name}.yaml")
    return data


def experiment_description(name: str) -> str:
    """Return the sentence that says what an experiment shows; nothing for one that does not come with the package."""
    return str(_file(name)["description"]) if name in experiment_names() else ""


def _folder() -> Any:
    return resources.files("orthoworld.experiments").joinpath("paper")
