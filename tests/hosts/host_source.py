"""Reads an unpacked SGLang wheel as source: what the contract tests ask without importing it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LEFT_OUT = ("multimodal_gen", "test")  # a second product and the host's own tests; no server runs them
FIELD = "speculative_algorithm"
ENUM = "SpeculativeAlgorithm"


@dataclass(frozen=True)
class Comparison:
    """One place where the host compares the algorithm's name: path under sglang/, function around it, names."""

    path: str
    function: str
    names: frozenset[str]


@functools.cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8-sig"), filename=str(file))


def modules(package: Path) -> Iterator[Path]:
    """Every Python file of the package that a server can run."""
    for file in sorted(package.rglob("*.py")):
        if file.relative_to(package).parts[0] not in LEFT_OUT:
            yield file


def module_file(package: Path, dotted: str) -> Path:
    """The file of `sglang.a.b`, as module or as package."""
    base = package.parent / Path(*dotted.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def mentions_field(node: ast.AST) -> bool:
    """The expression holds the field, under its own name or as an attribute."""
    return any(
        (isinstance(part, ast.Attribute) and part.attr == FIELD) or (isinstance(part, ast.Name) and part.id == FIELD)
        for part in ast.walk(node)
    )


def literals(node: ast.AST) -> frozenset[str]:
    """Strings, and members of the host's enum, that an operand names."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value:
            found.add(part.value)
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == ENUM:
            found.add(part.attr)
    return frozenset(found)


@dataclass
class NameScan(ast.NodeVisitor):
    """Collects comparisons of the algorithm's name in one file.

    An operand counts as the name when it mentions the field, or is a local that was assigned from it. Comparisons with
    a member of the enum count as well. Membership tests, `startswith` and `match` are included.
    """

    path: str
    lines: list[str]
    found: set[Comparison] = field(default_factory=set)
    scopes: list[str] = field(default_factory=list)
    aliases: list[set[str]] = field(default_factory=lambda: [set()])

    def inside(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, name: str) -> None:
        text = "\n".join(self.lines[node.lineno - 1 : node.end_lineno])
        if FIELD not in text and ENUM not in text and not self.aliases[-1]:
            return  # most of the host; walking it takes the time
        self.scopes.append(name)
        self.aliases.append(set(self.aliases[-1]))
        self.generic_visit(node)
        self.aliases.pop()
        self.scopes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.inside(node, node.name)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.inside(node, node.name)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.inside(node, node.name)

    def visit_Assign(self, node: ast.Assign) -> None:
        plain = not any(isinstance(part, ast.Compare) for part in ast.walk(node.value))
        calls = [part for part in ast.walk(node.value) if isinstance(part, ast.Call)]
        looked_up = any(ast.unparse(call.func).endswith("from_string") for call in calls)  # no longer the name
        if plain and not looked_up and mentions_field(node.value):
            self.aliases[-1].update(target.id for target in node.targets if isinstance(target, ast.Name))
        self.generic_visit(node)

    def is_name(self, node: ast.AST) -> bool:
        return mentions_field(node) or any(
            isinstance(part, ast.Name) and part.id in self.aliases[-1] for part in ast.walk(node)
        )

    def add(self, names: frozenset[str]) -> None:
        if names:
            self.found.add(Comparison(self.path, ".".join(self.scopes) or "<module>", names))

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        named = [operand for operand in operands if self.is_name(operand)]
        enum_members = frozenset().union(*(
            literals(operand) for operand in operands
            if any(isinstance(part, ast.Name) and part.id == ENUM for part in ast.walk(operand))
        )) if operands else frozenset()
        if named:
            self.add(frozenset().union(*(literals(operand) for operand in operands if operand not in named)))
        elif enum_members:
            self.add(enum_members)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        method = node.func if isinstance(node.func, ast.Attribute) else None
        if method and method.attr in ("startswith", "endswith") and self.is_name(method.value):
            self.add(frozenset().union(*(literals(argument) for argument in node.args)))
        self.generic_visit(node)

    def visit_Match(self, node: ast.Match) -> None:
        if self.is_name(node.subject):
            self.add(frozenset().union(*(literals(case.pattern) for case in node.cases)))
        self.generic_visit(node)


@functools.cache
def name_comparisons(package: Path) -> frozenset[Comparison]:
    """All comparisons of the algorithm's name in the package."""
    found: set[Comparison] = set()
    for file in modules(package):
        text = file.read_text(encoding="utf-8-sig")
        if FIELD not in text and ENUM not in text:
            continue
        scan = NameScan(str(file.relative_to(package)), text.splitlines())
        scan.visit(parse(file))
        found |= scan.found
    return frozenset(found)


def class_def(package: Path, dotted: str, name: str) -> ast.ClassDef:
    for node in parse(module_file(package, dotted)).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise LookupError(f"{dotted} has no class {name}")


def methods(owner: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in owner.body if isinstance(node, ast.FunctionDef)}


def members(owner: ast.ClassDef) -> set[str]:
    """Methods, class attributes, and attributes that a method sets on `self`."""
    found = set(methods(owner))
    for node in owner.body:
        targets: list[ast.expr] = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found | {
        node.attr
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names of the parameters in order; one with a default ends in `=`, keyword-only ones follow `*`."""
    spec = function.args
    positional = [argument.arg for argument in (*spec.posonlyargs, *spec.args)]
    first_default = len(positional) - len(spec.defaults)
    names = [name + "=" * (number >= first_default) for number, name in enumerate(positional)]
    if spec.vararg:
        names.append("*" + spec.vararg.arg)
    elif spec.kwonlyargs:
        names.append("*")
    keyword_only = zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    names += [argument.arg + "=" * (default is not None) for argument, default in keyword_only]
    return names + (["**" + spec.kwarg.arg] if spec.kwarg else [])


def defined_names(module: ast.Module) -> set[str]:
    """Names that a module binds at its top level, imports included."""
    found: set[str] = set()
    for node in module.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name) for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def attributes_of(tree: ast.AST, base: str) -> set[str]:
    """Attributes read from or set on a name (`batch.x` for base `batch`) or an attribute (`self.x.y` for `self.x`)."""
    return {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == base
    }
