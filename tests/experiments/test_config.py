"""Descriptions of experiments and runs: presets, assignments, errors, ids."""

import inspect
import itertools
import math
import os
import pickle
import subprocess
import sys
from collections import Counter

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from orthoworld.errors import ConfigError
from orthoworld.experiments import build, config
from orthoworld.experiments.config import (
    RunSpec,
    experiment_description,
    experiment_names,
    load_experiment,
    load_yaml,
    preset_names,
)

PRESETS = ["quick", "paper", "best"]

REGISTRIES = [
    config.SOURCES,
    config.TRANSITIONS,
    config.MIXINGS,
    config.ENCODERS,
    config.OBJECTIVES,
    config.OPTIMIZERS,
    config.SCHEDULES,
]
CHOICES = [pytest.param(name, choice, id=name) for registry in REGISTRIES for name, choice in registry.items()]


def runs_with(*assignments, preset="quick"):
    return load_experiment("two-d", preset).overridden(assignments).runs()


def value_at(spec, path):
    value = spec.resolved()
    for key in path.split("."):
        value = value[key]
    return value


@pytest.mark.parametrize(("preset", "count"), [("quick", 8), ("paper", 24), ("best", 12)])
def test_preset_resolves_to_distinct_runs(preset, count):
    specs = runs_with(preset=preset)
    assert len(specs) == count
    assert len({spec.run_id for spec in specs}) == count


def test_every_experiment_has_a_description_and_presets():
    for name in experiment_names():
        assert experiment_description(name).strip()
        assert preset_names(name) in (PRESETS, ["quick", "best"])


def test_paper_preset_is_as_published():
    specs = runs_with(preset="paper")
    assert {spec.world.pairs for spec in specs} == {"shared-parent"}
    assert {spec.world.transition.rho for spec in specs} == {0.95}
    assert {(spec.train.steps, spec.train.batch) for spec in specs} == {(20000, 256)}
    assert Counter(spec.seed for spec in specs) == {1337: 8, 1338: 8, 1339: 8}
    assert {(spec.train.optimizer.name, spec.train.optimizer.weight_decay) for spec in specs} == {("adamw", 0.01)}
    assert Counter(spec.world.mixing.name for spec in specs) == {"spiral": 6, "banana": 6, "sinusoid": 6, "coupling": 6}
    assert Counter(spec.objective.name for spec in specs) == {"lejepa": 12, "whitening": 12}


def test_paper_preset_uses_the_matched_encoder_for_the_coupling_only():
    encoders = {(spec.world.mixing.name, spec.encoder.name) for spec in runs_with(preset="paper")}
    assert encoders == {("spiral", "mlp"), ("banana", "mlp"), ("sinusoid", "mlp"), ("coupling", "inverse-coupling")}


def test_best_preset_is_small_and_direct():
    specs = runs_with(preset="best")
    assert all(spec.train.steps <= 5000 and spec.train.batch <= 1024 for spec in specs)
    assert {spec.world.pairs for spec in specs} == {"direct"}
    assert {spec.encoder.name for spec in specs} == {"mlp"}


@pytest.mark.parametrize(
    ("assignments", "mixings", "seeds"),
    [
        (["mixings=spiral"], ["spiral"], [0]),
        (["mixings=[spiral]"], ["spiral"], [0]),
        (["mixings=[sinusoid, banana]"], ["sinusoid", "banana"], [0]),
        (["mixings=coupling", "seeds=7"], ["coupling"], [7]),
        (["mixings=spiral", "seeds=[0,1,2]"], ["spiral"] * 3, [0, 1, 2]),
    ],
)
def test_axes_and_seeds_are_selected(assignments, mixings, seeds):
    specs = runs_with("objectives=lejepa", *assignments)
    assert [spec.world.mixing.name for spec in specs] == mixings
    assert [spec.seed for spec in specs] == seeds * (len(specs) // len(seeds))


@pytest.mark.parametrize(
    ("assignment", "path", "expected"),
    [
        ("train.steps=2000", "train.steps", 2000),
        ("train.optimizer.lr=1e-3", "train.optimizer.lr", 0.001),
        ("train={steps: 5, batch: 32}", "train.batch", 32),
        ("world.transition.rho=0", "world.transition.rho", 0.0),
        ("world.transition.rho=[0.9, 0.5]", "world.transition.rho", [0.9, 0.5]),
        ("world.transition={name: laplace-ar, rho: 0.9}", "world.transition", {"name": "laplace-ar", "rho": 0.9}),
        ("world.source=laplace", "world.source", {"name": "laplace"}),
        ("world.source={name: generalized-normal, alpha: 4}", "world.source.alpha", 4.0),
        ("world.mixing=banana", "world.mixing", {"name": "banana", "curvature": 1.0}),
        ("world={mixing: banana}", "world.mixing.name", "banana"),
        ("world.mixing={rate: 3}", "world.mixing", {"name": "spiral", "rate": 3.0}),
        ("objective.name=vicreg", "objective.name", "vicreg"),
        ("objective.lam=0.5", "objective.lam", 0.5),
        ("objective.pooled=false", "objective.pooled", False),
        ("objective=infonce", "objective.name", "infonce"),
        ("train.schedule=warmup-cosine", "train.schedule.name", "warmup-cosine"),
        ("train.optimizer={name: muon}", "train.optimizer.name", "muon"),
        ("encoder.width=16", "encoder.width", 16),
        ("out_dim=3", "out_dim", 3),
        ("out_dim=null", "out_dim", None),
    ],
)
def test_assignment_sets_a_value(assignment, path, expected):
    (spec,) = runs_with(assignment, "mixings=spiral", "objectives=lejepa")
    assert value_at(spec, path) == expected


def test_choice_of_the_same_name_keeps_its_options():
    (spec,) = runs_with("mixings=coupling", "objectives=lejepa", "encoder=mlp", "objective=lejepa")
    assert (spec.world.mixing.layers, spec.encoder.width, spec.objective.lam) == (8, 256, 0.001)


def test_choice_of_another_name_drops_the_old_options():
    (spec,) = runs_with("mixings=coupling", "objectives=lejepa", "world.mixing=affine-coupling")
    assert spec.world.mixing.options() == {"layers": 4}


@pytest.mark.parametrize(
    ("assignments", "path", "expected"),
    [
        (["train.steps=3", "train.steps=4"], "train.steps", 4),
        (["seeds=3", "seeds=4"], "seed", 4),
        (["mixings=spiral", "mixings=banana"], "world.mixing.name", "banana"),
    ],
)
def test_later_assignment_wins(assignments, path, expected):
    specs = runs_with("objectives=lejepa", *assignments)
    assert {value_at(spec, path) for spec in specs} == {expected}


def test_assignment_is_applied_or_refused_whatever_the_order():
    for assignments in itertools.permutations(["train.optimizer.lr=0.25", "train.optimizer=adamw"]):
        try:
            specs = runs_with(*assignments, "mixings=spiral")
        except ConfigError:
            continue
        assert {spec.train.optimizer.lr for spec in specs} == {0.25}


def test_assignments_leave_the_experiment_as_it_was():
    experiment = load_experiment("two-d")
    before = [spec.run_id for spec in experiment.runs()]
    experiment.overridden(["mixings=spiral", "seeds=9", "train.steps=1"])
    assert [spec.run_id for spec in experiment.runs()] == before


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("train.stpes=3", ["train.stpes", "did you mean steps?", "batch"]),
        ("encoder.widht=3", ["encoder.widht", "did you mean width?"]),
        ("wrld.dim=3", ["wrld", "did you mean world?", "train"]),
        ("mixing=spiral", ["mixing", "did you mean mixings?"]),
        ("seed=3", ["seed", "did you mean seeds?"]),
        ("mixings=spirall", ["mixings", "'spirall'", "did you mean spiral?", "banana"]),
        ("mixings=[spiral, bannana]", ["mixings", "'bannana'", "did you mean banana?"]),
        ("mixings=[]", ["mixings", "banana"]),
        ("mixings=[[spiral]]", ["mixings", "banana"]),
        ("mixings={spiral: 1}", ["mixings", "banana"]),
        ("objective=lejeppa", ["objective.name", "'lejeppa'", "did you mean lejepa?", "infonce"]),
        ("objective={name: 3}", ["objective.name", "lejepa"]),
        ("world.mixing=[spiral]", ["world.mixing.name", "spiral"]),
        ("world.mixing.layers=3", ["world.mixing.layers", "rate"]),
        ("train.optimizer.lr=abc", ["train.optimizer.lr", "'abc'", "number"]),
        ("train.optimizer.momentum=0.9", ["train.optimizer.momentum", "weight_decay"]),
        ("train.steps=1e3", ["train.steps", "1000.0", "integer"]),
        ("train.steps=0", ["train.steps", "greater than or equal to 1"]),
        ("train.steps=", ["train.steps", "None", "integer"]),
        ("train.steps=true", ["train.steps", "True", "integer"]),
        ("train=5", ["train", "5", "steps"]),
        ("train={1: 2}", ["train.1", "steps"]),
        ("world.transition.rho=abc", ["world.transition.rho", "'abc'", "number"]),
        ("world.transition.rho=[a]", ["world.transition.rho", "'a'", "number"]),
        ("world.pairs=parent", ["world.pairs", "'parent'", "shared-parent"]),
        ("objective.pooled=on", ["objective.pooled", "'on'", "boolean"]),
        ("out_dim=0", ["out_dim", "0", "greater than or equal to 1"]),
        ("seeds=0,1", ["seeds", "'0,1'", "integer"]),
        ("seeds=[]", ["seeds", "at least 1"]),
        ("seeds=-1", ["seed", "-1", "greater than or equal to 0"]),
        ("seeds=true", ["seeds", "True", "integer"]),
        ("seeds=[0, x]", ["seeds.1", "'x'", "integer"]),
        ("train.steps", ["train.steps", "key=value"]),
        ("=3", ["=3", "key=value"]),
        ("train.steps=[1", ["train.steps=[1"]),
    ],
)
def test_bad_assignment_is_refused_by_its_full_name(assignment, told):
    with pytest.raises(ConfigError) as caught:
        runs_with(assignment, "objectives=lejepa", *([] if assignment.startswith("mixings") else ["mixings=spiral"]))
    for part in told:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: load_experiment("two-dd"), ["two-dd", "did you mean two-d?"]),
        (lambda: load_experiment("zzz"), ["zzz", "two-d"]),
        (lambda: load_experiment("two-d", "papre"), ["papre", "did you mean paper?", "quick", "best"]),
    ],
)
def test_unknown_experiment_or_preset_lists_the_valid_ones(call, told):
    with pytest.raises(ConfigError) as caught:
        call()
    for part in told:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("assignment", "missing"),
    [
        ("objective=lejepa", "objective.lam"),
        ("objective={name: whitening}", "objective.lam"),
        ("world.source=student-t", "world.source.df"),
        ("world.transition=laplace-ar", "world.transition.rho"),
    ],
)
def test_another_choice_without_its_required_option_is_refused(assignment, missing):
    with pytest.raises(ConfigError, match=f"^{missing} is missing"):
        runs_with(assignment, "objectives=whitened-lejepa")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data.pop("seed"), "seed is missing"),
        (lambda data: data["world"].pop("mixing"), "world.mixing is missing"),
        (lambda data: data["train"].pop("batch"), "train.batch is missing"),
        (lambda data: data.update(colour="red"), "unknown key colour"),
        (lambda data: data["world"]["mixing"].update(colour="red"), "unknown key world.mixing.colour"),
        (lambda data: data.update(world=[1]), "world=[1]"),
    ],
)
def test_spec_from_wrong_data_names_the_key(change, told):
    data = runs_with()[0].resolved()
    change(data)
    with pytest.raises(ConfigError) as caught:
        RunSpec.from_data(data)
    assert told in str(caught.value)


@pytest.mark.parametrize("preset", PRESETS)
def test_spec_survives_yaml_and_pickle(preset):
    for spec in runs_with(preset=preset):
        text = yaml.safe_dump(spec.resolved(), sort_keys=False)
        for copy in (RunSpec.from_data(load_yaml(text, "spec")), pickle.loads(pickle.dumps(spec))):
            assert copy == spec
            assert copy.run_id == spec.run_id


def test_spec_cannot_be_changed():
    spec = runs_with()[0]
    with pytest.raises(ValidationError, match="frozen"):
        spec.seed = 5
    with pytest.raises(ValidationError, match="frozen"):
        spec.world.mixing.name = "banana"


def test_run_id_is_the_same_in_every_process():
    script = (
        "from orthoworld.experiments.config import load_experiment\n"
        "print(*(spec.run_id for spec in load_experiment('two-d', 'paper').runs()))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    answer = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == [spec.run_id for spec in runs_with(preset="paper")]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["objective.lam=1"], ["objective.lam=1.0"]),
        (["train.optimizer.lr=1e-3"], ["train.optimizer.lr=0.001"]),
        (["train={steps: 7}"], ["train.steps=7"]),
        (["world.source=gaussian"], []),
        (["world.mixing={name: spiral}"], ["mixings=spiral"]),
        (["objective=vicreg"], ["objective={name: vicreg, variance: 25}"]),
        (["train.restarts=1", "train.threads=1"], []),
    ],
)
def test_two_ways_to_say_one_run_give_one_id(one, other):
    first, second = (runs_with("mixings=spiral", "objectives=lejepa", *assignments)[0] for assignments in (one, other))
    assert first == second
    assert first.run_id == second.run_id


def test_every_change_gives_another_id():
    changes = [
        "seeds=1",
        "world.dim=3",
        "world.source=laplace",
        "world.transition.rho=0.9",
        "world.pairs=shared-parent",
        "world.mixing.rate=3",
        "world.mixing=banana",
        "encoder.width=255",
        "out_dim=2",
        "objective.lam=0.0010000001",
        "objective.pooled=false",
        "train.steps=999",
        "train.batch=511",
        "train.optimizer.lr=0.0031",
        "train.schedule=warmup-cosine",
        "train.evaluate_every=99",
        "train.evaluation_samples=9999",
        "train.whitener_samples=262143",
        "train.restarts=2",
        "train.threads=2",
    ]
    specs = [runs_with("mixings=spiral", "objectives=lejepa", *change)[0] for change in ([], *([c] for c in changes))]
    assert len({spec.run_id for spec in specs}) == len(changes) + 1


def test_run_id_begins_with_what_a_reader_looks_for():
    (spec,) = runs_with("mixings=banana", "objectives=lejepa", "seeds=12")
    assert spec.run_id.startswith("banana-lejepa-s12-")


@pytest.mark.parametrize(("name", "choice"), CHOICES)
def test_options_and_defaults_are_those_of_the_class(name, choice):
    parameters = inspect.signature(choice.target).parameters
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    configured = {
        key: value for key, value in parameters.items() if key not in config.CONTEXT and value.kind not in variadic
    }
    fields = {key: field for key, field in choice.model_fields.items() if key != "name"}
    assert set(fields) == set(configured)
    for key, field in fields.items():
        if field.is_required():
            assert configured[key].default is inspect.Parameter.empty
        else:
            assert configured[key].default == field.default


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-3", 0.001),
        ("1E5", 100000.0),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("+3", 3),
        ("-3", -3),
        ("007", 7),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("no", "no"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("0x10", "0x10"),
        ("1e", "1e"),
        ("abc", "abc"),
        ("'1e-3'", "1e-3"),
        ("[0, 1e1, on]", [0, 10.0, "on"]),
        ("{a: 1e-3}", {"a": 0.001}),
    ],
)
def test_yaml_scalars_follow_the_core_schema(text, expected):
    found = load_yaml(text, "here")
    assert found == expected
    assert type(found) is type(expected)


@given(st.floats(allow_nan=False))
def test_every_float_is_read_back(value):
    written = repr(value) if math.isfinite(value) else yaml.safe_dump(value).split("\n")[0]
    assert load_yaml(written, "here") == value


def test_text_that_is_no_yaml_is_refused_by_its_place():
    with pytest.raises(ConfigError, match=r"^here: "):
        load_yaml("[1, 2", "here")


def test_yaml_cannot_build_python_objects():
    with pytest.raises(ConfigError, match="could not determine a constructor"):
        load_yaml("!!python/object/apply:os.getcwd []", "here")


EXPERIMENTS = [(name, preset) for name in experiment_names() for preset in preset_names(name)]


@pytest.mark.parametrize(("name", "preset"), EXPERIMENTS)
def test_every_preset_has_runs_that_can_be_built(name, preset):
    specs = load_experiment(name, preset).runs()
    assert len({spec.run_id for spec in specs}) == len(specs) > 0
    for spec in specs[:: max(1, len(specs) // 10)]:
        if spec.world.dim <= 64:
            build.build_encoder(spec, build.build_run_world(spec))
        build.build_objective(spec)
        build.build_recipes(spec)


@pytest.mark.parametrize("name", ["scaling", "gennorm", "grid", "ablation", "two-d"])
def test_the_papers_experiments_have_all_three_presets(name):
    assert preset_names(name) == ["quick", "paper", "best"]


@pytest.mark.parametrize(("name", "count"), [("two-d", 24), ("scaling", 150), ("gennorm", 324), ("grid", 189)])
def test_the_published_numbers_of_runs(name, count):
    assert len(load_experiment(name, "paper").runs()) == count


def test_a_label_may_be_a_number():
    specs = load_experiment("scaling", "paper").overridden(["dims=[2, 64]", "seeds=0"]).runs()
    assert [spec.world.dim for spec in specs] == [2] * 3 + [64] * 3
    assert [(spec.train.restarts, spec.train.restart_worlds) for spec in specs] == [(3, "redrawn")] * 3 + [
        (1, "same")
    ] * 3


def test_an_axis_of_values_takes_any_value():
    experiment = load_experiment("gennorm").overridden(["alphas=[.5, 3]", "objectives=whitened-lejepa"])
    assert [spec.world.source.alpha for spec in experiment.runs()] == [0.5, 3.0]
    with pytest.raises(ConfigError, match=r"world.source.alpha='wide'"):
        load_experiment("gennorm").overridden(["alphas=wide"]).runs()
    with pytest.raises(ConfigError, match=r"alphas=\[\]: expected some of 0.5, 1, 2"):
        load_experiment("gennorm").overridden(["alphas=[]"])


def test_a_value_of_an_axis_may_be_a_list():
    specs = load_experiment("anisotropy").overridden(["rhos=[[.95, .6]]"]).runs()
    assert [spec.world.transition.rho for spec in specs] == [[0.95, 0.6]] * 3


def test_excluded_combinations_are_left_out():
    specs = load_experiment("scaling", "best").runs()
    dims = {
        name: {spec.world.dim for spec in specs if spec.encoder.name == name} for name in ("mlp", "inverse-coupling")
    }
    assert dims["mlp"] == {2, 4, 8, 16, 32}
    assert dims["inverse-coupling"] == {2**k for k in range(1, 11)}
    with pytest.raises(ConfigError, match="has no run with this choice"):
        load_experiment("scaling", "best").overridden(["dims=64", "encoders=mlp"]).runs()
