import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from align import cli
from align.eval import TASKS
from tests.project.markdown import ROOT

LAYERS = (
    {"core"},
    {"data", "runtime"},
    {"model_registry"},
    {"tokenization"},
    {"models"},
    {"batches"},
    {"training"},
    {"sampling", "reward", "sft"},
    {"dpo", "ppo"},
    {"eval", "trl"},
    {"commands"},
    {"extras"},
    {"cli"},
)
"""From the ground up: a module may import its own package and what stands in layers below it."""
APP_LAYERS = ("client", "rendering", "tasks", "store", "migrations", "reports", "server", "lead_tabs")
APP_LAYERS += ("app", "cli_common", "cli_users", "cli")
LEVEL = {f"align.{part}": level for level, parts in enumerate(LAYERS) for part in parts}
LEVEL |= {f"annotation_ui.{part}": level for level, part in enumerate(APP_LAYERS)}


def sources_of(package):
    """Module -> file."""
    paths = sorted((ROOT / package).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


SOURCES = sources_of("align") | sources_of("annotation_ui")


@cache  # not on import: every worker collects this file, and one needs it
def nodes_of(path):
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports_in(path):
    """Each import of a file, also inside functions: the module, and the names that are taken from it."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: launching a script breaks relative imports"
            yield node.module, [alias.name for alias in node.names]


@cache
def imports_of(name):
    """The modules of the packages that one imports, `from package import module` resolved to the module."""
    found = set()
    for module, names in imports_in(SOURCES[name]):
        nested = {f"{module}.{each}" for each in names}
        found |= nested if names and nested <= SOURCES.keys() else nested | {module}
    return found & SOURCES.keys()


def part_of(module):
    """The package and the file or folder right under it that a module stands in: align.core."""
    return ".".join(module.split(".")[:2])


def test_every_file_has_a_layer_and_every_layer_has_files():
    assert {part_of(name) for name in SOURCES} - {"align", "annotation_ui"} == LEVEL.keys()
    assert sum(len(imports_of(name)) for name in SOURCES) > 450


@pytest.mark.parametrize("part", sorted(LEVEL))
def test_imports_point_downwards(part):
    package = part.split(".")[0]
    for name in (name for name in SOURCES if part_of(name) == part):
        for imported in (each for each in imports_of(name) - {package} if each.startswith(f"{package}.")):
            below = part_of(imported) == part or LEVEL[part_of(imported)] < LEVEL[part]
            assert below, f"{name} imports {imported}, which stands above or beside it"


def test_no_circle():
    """A package's own `__init__` only gathers what its modules offer, so importing the package is not an import of it."""
    packages = {name for name, path in SOURCES.items() if path.name == "__init__.py"}
    graph = {name: imports_of(name) - packages for name in SOURCES.keys() - packages}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' -> '.join(error.args[1])}")


@cache
def classes():
    """(package, class) -> the names of its bases; a class of `align` has a name of its own there, but for those of TRL."""
    found, twice = {}, []
    for name, path in SOURCES.items():
        package = name.split(".")[0]
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and part_of(name) != "align.trl":
                twice += [node.name] if package == "align" and (package, node.name) in found else []
                bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
                found[package, node.name] = [base for base in bases if base != node.name]
    assert twice == []
    return found


def longest_chain(package, name):
    """A class and the longest chain of its bases in the packages, the first base first."""
    places = [
        (place, base) for base in classes()[package, name] for place in {package, "align"} if (place, base) in classes()
    ]
    return [*max((longest_chain(*place) for place in places), key=len, default=[]), name]


def test_a_class_is_at_most_one_below_its_base():
    """A command's settings may be two below `Settings`: a base, groups, and classes that list groups."""
    chains = [longest_chain(*place) for place in classes()]
    assert len(chains) > 300
    assert [chain for chain in chains if len(chain) > (3 if chain[0] == "Settings" else 2)] == []
    assert max(map(len, chains)) == 3, "settings are found"


def functions_of(path):
    return [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef)]


def taken_by(function):
    """The names in the annotations of a function's parameters."""
    given = function.args
    hints = (each.annotation for each in (*given.posonlyargs, *given.args, *given.kwonlyargs) if each.annotation)
    return {name.id for hint in hints for name in ast.walk(hint) if isinstance(name, ast.Name)}


READS_ALL_SETTINGS = {
    "align.ppo.train": {
        "PPOState.__init__",
        "collect_experience",
        "shape_rewards",
        "compute_advantages",
        "update_policy",
        "micro_batch_loss",
        "critic_loss",
    },
    "align.ppo.setup": {"prepare"},
    "align.commands.sample": {"sample_command", "sample_rows"},
    "align.extras.loop": {"Loop.__init__"},
    "align.extras.plan": {"plan_stages", "sft_work", "reward_work", "_learning", "ppo_work"},
}
"""Besides a command's function, its trainer and its `train`: the loops of PPO and of two commands, and plans of stages."""


def test_functions_receive_values_or_groups_of_settings():
    """A group of settings derives from `Settings` alone; the settings of a command list groups, and stay in its loop."""
    tables = (cli.TRAINING_STAGES, cli.OTHER_STAGES, TASKS)
    commands = {stage.path.split(":")[1] for table in tables for stage in table.values()}
    assert len(commands) > 15
    found = {}
    for name, path in SOURCES.items():
        methods = {id(each): node.name for node in nodes_of(path) if isinstance(node, ast.ClassDef) for each in node.body}
        for function in functions_of(path) if part_of(name) not in ("align.trl", "annotation_ui") else ():
            owner = methods.get(id(function), "")
            of_command = owner.endswith("Trainer") or function.name.startswith("run_") or function.name == "train"
            if commands & taken_by(function) and not of_command:
                found.setdefault(name, set()).add(f"{owner}.{function.name}".removeprefix("."))
    assert found == READS_ALL_SETTINGS


def test_no_function_returns_a_function_of_its_own():
    """A class, a method or `functools.partial` takes its place; the tables of data layouts are made of such functions."""
    found = set()
    for name, path in sources_of("align").items():
        for function in functions_of(path):
            inner = {node.name for node in ast.walk(function) if isinstance(node, ast.FunctionDef)} - {function.name}
            returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
            if any(isinstance(value, ast.Lambda) or getattr(value, "id", "") in inner for value in returned):
                found.add(name)
    assert found == {f"align.data.{name}" for name in ("answers", "formats", "layouts", "published")}


def test_functions_and_files_stay_short():
    assert [name for name, path in SOURCES.items() if len(path.read_text(encoding="utf-8").splitlines()) > 400] == []
    functions = [(name, each) for name, path in SOURCES.items() for each in functions_of(path)]
    assert len(functions) > 2000
    long = [f"{name}.{each.name}" for name, each in functions if (each.end_lineno or 0) - each.lineno >= 60]
    assert long == [], "functions of more than 60 lines"
