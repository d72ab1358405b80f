import pytest

from nqflib.presets import ParameterError, declaration, preset_values, resolve


def cells(parameters, presets=""):
    return [
        {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": parameters},
        {"cell_type": "code", "metadata": {"tags": ["presets"]}, "source": presets},
    ]


PARAMETERS = """\
preset: str = "laptop"  # size of the run [smoke | laptop | paper]
sigma: float | None = None  # weight scale [1e-6 .. 1]
steps: int | None = None  # steps of gradient descent [1 .. 1_000_000]
seeds: list[int] = [0, 1]  # seeds [0 .. 99]
verbose: bool = False  # say more
"""
PRESETS = 'presets = {"smoke": {"sigma": 0.1, "steps": 10}, "laptop": {"steps": 1000}, "paper": {"sigma": 0.01}}'


@pytest.fixture
def declared():
    return declaration(cells(PARAMETERS, PRESETS))


def test_a_misspelt_name_is_refused_with_the_nearest_valid_one(declared):
    with pytest.raises(ParameterError, match=r"unknown parameter sgima: did you mean sigma\? Valid: preset, sigma"):
        declared.check({"sgima": 0.2})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sigma": "0.2"}, "sigma needs a value of type float, got '0.2'"),
        ({"sigma": True}, "sigma needs a value of type float"),
        ({"sigma": 2.0}, r"sigma must be from 1e-06 to 1, got 2\.0"),
        ({"sigma": float("nan")}, "sigma must be from 1e-06 to 1, got nan"),
        ({"steps": 1.5}, "steps needs a value of type int"),
        ({"steps": 0}, "steps must be from 1 to 1e"),
        ({"seeds": 3}, r"seeds needs a non-empty list\[int\], got 3"),
        ({"seeds": []}, "seeds needs a non-empty list"),
        ({"seeds": [0, 100]}, "seeds must be from 0 to 99, got 100"),
        ({"verbose": 1}, "verbose needs a value of type bool"),
        ({"preset": "huge"}, "preset must be one of smoke, laptop, paper, got 'huge'"),
    ],
)
def test_a_wrong_type_or_value_is_refused_with_what_is_valid(declared, given, message):
    with pytest.raises(ParameterError, match=message):
        declared.check(given)


def test_whole_numbers_pass_as_floats_and_floats_without_fraction_as_integers(declared):
    checked = declared.check({"sigma": 1, "steps": 1e3, "seeds": (4, 5)})
    assert checked == {"sigma": 1.0, "steps": 1000, "seeds": [4, 5]}
    assert isinstance(checked["sigma"], float)
    assert isinstance(checked["steps"], int)


def test_a_preset_takes_over_what_the_smaller_ones_set(declared):
    assert preset_values(declared.presets, "smoke") == {"sigma": 0.1, "steps": 10}
    assert preset_values(declared.presets, "workstation") == {"sigma": 0.1, "steps": 1000}
    assert preset_values(declared.presets, "paper") == {"sigma": 0.01, "steps": 1000}


def test_an_override_wins_over_the_preset_even_where_it_equals_a_default(declared):
    effective = declared.effective({"preset": "paper", "sigma": 0.1})
    assert (effective["sigma"], effective["steps"]) == (0.1, 1000)
    settings = resolve(declared.presets, "paper", sigma=0.1, steps=None)
    assert (settings.preset, settings.sigma, settings.steps) == ("paper", 0.1, 1000)
    with pytest.raises(AttributeError):
        settings.sigma = 0.3


def test_resolve_refuses_what_no_preset_knows(declared):
    with pytest.raises(ParameterError, match="unknown preset labtop: did you mean laptop"):
        resolve(declared.presets, "labtop")
    with pytest.raises(ParameterError, match="unknown parameter sgima: did you mean sigma"):
        resolve(declared.presets, "laptop", sgima=1.0)


def test_the_default_that_a_reader_sees_is_the_value_of_the_preset(declared):
    assert declared.default("sigma") == "0.1 in preset laptop"
    assert declared.default("steps", "smoke") == "10 in preset smoke"
    assert declared.default("verbose") == "False"
    assert declared.parameters["sigma"].help == "weight scale [1e-6 .. 1]"


@pytest.mark.parametrize(
    ("parameters", "presets", "message"),
    [
        ("x = 1", "", r"must read `name: type = value  # help`, got 'x = 1'"),
        ("x: dict = {}", "", "parameter x has type dict"),
        ("x: float = 2.0  # [0 .. 1]", "", "x must be from 0 to 1, got 2.0"),
        ("x: float | None = None", 'presets = {"smoke": {"x": 1.0}}', "needs the parameter `preset"),
        (PARAMETERS, 'presets = {"smoke": {"sigma": 0.1}}', "no preset sets steps"),
        (PARAMETERS, PRESETS.replace("0.1,", "7.0,"), "sigma must be from 1e-06 to 1, got 7.0"),
        (PARAMETERS, PRESETS.replace('"sigma": 0.1', '"sgima": 0.1'), "did you mean sigma"),
        (PARAMETERS, PRESETS.replace('"steps": 1000', '"verbose": True'), "needs the default None"),
        (PARAMETERS, "presets = dict(smoke={})", "literal dictionary"),
        (PARAMETERS, PRESETS.replace("paper", "papper"), "unknown preset papper: did you mean paper"),
        (PARAMETERS, "other = {}", "must assign"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(parameters, presets, message):
    with pytest.raises(ParameterError, match=message):
        declaration(cells(parameters, presets))
