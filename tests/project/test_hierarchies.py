"""Class hierarchies of the packages are flat: a base and its classes. Settings are a base, groups, and lists of groups."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATHS = [path for package in ("align", "annotation_ui") for path in sorted((ROOT / package).rglob("*.py"))]


def names_of_modules():
    """Module -> the classes that it defines or imports: the name in it -> the module and the name there."""
    found = {}
    for path in PATHS:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        names = found[module] = {}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.ClassDef):
                names[node.name] = (module, node.name, [ast.unparse(base).split("[")[0] for base in node.bases])
    return found


def classes():
    """(module, class) -> its bases in the packages, as (module, class)."""
    names = names_of_modules()

    def place(module, name):
        """The module that defines a class which another one names, and its name there; None for a class from elsewhere."""
        while name in names.get(module, {}):
            if len(names[module][name]) == 3:
                return module, name
            module, name = names[module][name]
        return None

    defined = [(module, name, *rest) for found in names.values() for module, name, *rest in found.values() if rest]
    return {(module, name): list(filter(None, (place(module, base) for base in bases))) for module, name, bases in defined}


def longest_chain(name, bases):
    """A class and the longest chain of its bases in the packages, the first base first."""
    chains = [longest_chain(base, bases) for base in bases[name] if base in bases]
    return [*max(chains, key=len, default=[]), name]


def is_too_deep(chain):
    """Whether a class is more than one below its base; a command's settings may be two below `Settings`."""
    return len(chain) > (3 if chain[0] == ("align.core.settings", "Settings") else 2)


def test_a_class_is_at_most_one_below_its_base():
    bases = classes()
    chains = [longest_chain(name, bases) for name in bases]
    assert len(chains) > 300
    deep = [" <- ".join(name for _, name in chain) for chain in chains if is_too_deep(chain)]
    assert deep == []


def test_a_group_of_settings_derives_from_no_group():
    """A class that others derive from is a group, or `Settings` itself."""
    bases = classes()
    settings = ("align.core.settings", "Settings")
    derived = {name: found for name, found in bases.items() if longest_chain(name, bases)[0] == settings}
    groups = {base for found in derived.values() for base in found} - {settings}
    assert len(groups) > 10
    assert {name: bases[name] for name in groups if bases[name] != [settings]} == {}


def test_deeper_chains_are_found():
    bases = {("m", "A"): [], ("m", "B"): [("m", "A")], ("m", "C"): [("other", "X"), ("m", "B")]}
    assert longest_chain(("m", "C"), bases) == [("m", "A"), ("m", "B"), ("m", "C")]
    assert is_too_deep(longest_chain(("m", "C"), bases))
    assert not is_too_deep(longest_chain(("m", "B"), bases))
