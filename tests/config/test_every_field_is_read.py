"""No key is accepted and ignored: for each field of the schema there is code in `trainer/`, `workers/` or `config/pools.py` that reads it.

The readers are found in the sources' syntax trees by following names from their annotations (`config: ActorConfig`)
through assignments, loops and `self`.
"""

import ast
import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import config.schema as schema
from config.load import field_type

ROOT = Path(__file__).parents[2]
CLASSES: dict[str, type] = {
    name: kind for name, kind in vars(schema).items() if isinstance(kind, type) and kind.__module__ == schema.__name__
}
# Fields whose value acts through the interpolation of others.
INTERPOLATED = {("ActorConfig", "clip_ratio"): ("config/actor/default.yaml", "clip_ratio_low: ${.clip_ratio}")}

Read = tuple[str, str]  # class and field
Names = dict[str, set[str]]  # variable, and the classes of the schema that it may hold or contain


def fields_of(cls: str) -> dict[str, Any]:
    """Its fields' types; of a mapping of groups the group's."""
    kinds = {field.name: field_type(CLASSES[cls], field.name) for field in dataclasses.fields(CLASSES[cls])}
    return {
        name: next((part for part in typing.get_args(kind) if part in CLASSES.values()), kind)
        for name, kind in kinds.items()
    }


def all_fields(cls: str = "GovernorConfig") -> Iterator[Read]:
    for name, kind in fields_of(cls).items():
        yield cls, name
        if getattr(kind, "__name__", "") in CLASSES:
            yield from all_fields(kind.__name__)


class Reader(ast.NodeVisitor):
    """Collects the fields that a module reads."""

    def __init__(self) -> None:
        self.reads: set[Read] = set()
        self.scopes: list[Names] = [{}]
        self.members: Names = {}  # of `self` in the class that is visited

    def holds(self, node: ast.AST | None) -> set[str]:
        """The classes that an expression may hold or contain."""
        match node:
            case ast.Name(id=name):
                return next((scope[name] for scope in reversed(self.scopes) if name in scope), set())
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return self.members.get(name, set())
            case ast.Attribute(value=value, attr=name):
                kinds = [fields_of(cls).get(name) for cls in self.holds(value)]
                return {getattr(kind, "__name__", "") for kind in kinds} & set(CLASSES)
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.BoolOp(values=parts):
                return set().union(*map(self.holds, parts))
            case ast.IfExp(body=one, orelse=two) | ast.BinOp(left=one, right=two):
                return self.holds(one) | self.holds(two)
            case _:
                return set()

    def bind(self, target: ast.expr, held: set[str]) -> None:
        match target:
            case ast.Name(id=name):
                self.scopes[-1][name] = held
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                self.members[name] = self.members.get(name, set()) | held
            case ast.Tuple(elts=parts):
                for part in parts:
                    self.bind(part, held)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self.members = self.members, {}
        for _ in range(2):  # members that __init__ sets are known to all methods the second time
            self.generic_visit(node)
        self.members = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self.scopes.append({argument.arg: annotated(argument.annotation) for argument in arguments})
        self.generic_visit(node)
        self.scopes.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for one, value in zip(target.elts, node.value.elts, strict=True):
                    self.bind(one, self.holds(value))
            else:
                self.bind(target, self.holds(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        self.bind(node.target, self.holds(node.target) | self.holds(node.value))

    def visit_For(self, node: ast.For) -> None:
        self.bind(node.target, self.holds(node.iter))
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.bind(node.target, self.holds(node.iter))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        self.reads |= {(cls, node.attr) for cls in self.holds(node.value) if node.attr in fields_of(cls)}


def annotated(annotation: ast.AST | None) -> set[str]:
    """The classes that an annotation names."""
    if annotation is None:
        return set()
    return {part.id for part in ast.walk(annotation) if isinstance(part, ast.Name) and part.id in CLASSES}


def reads_of(text: str) -> set[Read]:
    reader = Reader()
    reader.visit(ast.parse(text))
    return reader.reads


@pytest.fixture(scope="module")
def reads() -> set[Read]:
    found: set[Read] = set()
    paths = [path for folder in ("trainer", "workers") for path in (ROOT / folder).rglob("*.py")]
    for path in [*paths, ROOT / "config/pools.py"]:
        found |= reads_of(path.read_text(encoding="utf-8"))
    return found


def is_single_choice(read: Read) -> bool:
    """Whether a field has one legal value, so that no code need ask for it."""
    hint = fields_of(read[0])[read[1]]
    return typing.get_origin(hint) is typing.Literal and len(typing.get_args(hint)) == 1


@pytest.mark.parametrize("read", sorted(set(all_fields())), ids="{0[0]}.{0[1]}".format)
def test_every_field_of_the_schema_is_read(reads: set[Read], read: Read) -> None:
    assert read in reads or read in INTERPOLATED or is_single_choice(read)


@pytest.mark.parametrize("read", INTERPOLATED)
def test_the_listed_interpolations_are_still_there_and_needed(reads: set[Read], read: Read) -> None:
    file, text = INTERPOLATED[read]
    assert read not in reads
    assert text in (ROOT / file).read_text(encoding="utf-8")


def test_every_group_of_the_schema_is_walked() -> None:
    assert {cls for cls, _ in all_fields()} == set(CLASSES)


def test_readers_are_found_through_names_and_loops_and_self() -> None:
    text = """
class Worker:
    def __init__(self, config: ActorRolloutRefConfig, other):
        self.config = config
        roles = [("actor", config.actor)] + ([("x", other.critic)] if other else [])
        for name, role in roles:
            print(role.grad_clip)
    def run(self, count):
        actor, rollout = self.config.actor, self.config.rollout
        return lambda: actor.optim.lr * rollout.n
"""
    assert reads_of(text) == {
        ("ActorRolloutRefConfig", "actor"),
        ("ActorRolloutRefConfig", "rollout"),
        ("ActorConfig", "grad_clip"),
        ("ActorConfig", "optim"),
        ("OptimConfig", "lr"),
        ("RolloutConfig", "n"),
    }


@pytest.mark.parametrize(
    "text",
    [
        "def f(config): return config.grad_clip",
        "def f(config: ActorConfig): return config.gradclip",
        "def f(config: ActorConfig): return other.grad_clip",
        "def f(config: ActorConfig):\n    config = 3\n    return config.grad_clip",
        "# config.grad_clip\ndef f(config: ActorConfig): 'config.grad_clip'",
    ],
)
def test_a_name_alone_is_no_reader(text: str) -> None:
    assert reads_of(text) == set()
