"""Words that must not stand in the product's sources: ways in which a file or an answer could run as code."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [path for name in ("config", "trainer", "workers", "scripts") for path in sorted((ROOT / name).rglob("*.py"))]
FORBIDDEN = {
    "pickle": r"(?:\bimport |\bfrom |(?<![\w.]))(?:cloud)?(?:pickle|dill|joblib|shelve|marshal)(?: import|\.\w|$)",
    "eval": r"(?<![\w.])eval\(",  # model.eval() is another thing
    "exec": r"(?<![\w.])exec\(",
    "a shell": r"\bshell\s*=\s*True\b|\bos\.system\(|\bos\.popen\(",
    "torch.load of code": r"\bweights_only\s*=\s*False\b|\btorch\.load\(",
    "yaml with objects": r"\byaml\.(?:load|load_all|unsafe_load|full_load)\(",
    "instantiate": r"\binstantiate\(|_target_\s*:",
    "trust in a model's code": r"\btrust_remote_code\s*=\s*True\b",
    "breakpoint": r"(?<![\w.])breakpoint\(|\bpdb\b",
}


def found(pattern: str, text: str) -> list[str]:
    """Lines that a pattern hits, comments and docstrings too."""
    return [line.strip() for line in text.splitlines() if re.search(pattern, line)]


def test_there_are_sources() -> None:
    assert len(SOURCES) > 40


@pytest.mark.parametrize("what", FORBIDDEN)
def test_the_sources_have_no(what: str) -> None:
    hits = {str(path.relative_to(ROOT)): found(FORBIDDEN[what], path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {name: lines for name, lines in hits.items() if lines} == {}


def test_no_yaml_file_names_a_target() -> None:
    files = sorted((ROOT / "config").rglob("*.yaml"))
    assert len(files) > 10
    assert [path for path in files if "_target_" in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("pickle", "import pickle"),
        ("pickle", "from pickle import loads"),
        ("pickle", "state = cloudpickle.loads(x)"),
        ("eval", "x = eval(answer)"),
        ("exec", "exec(code)"),
        ("a shell", "run(command, shell = True)"),
        ("torch.load of code", "torch.load(path, weights_only=False)"),
        ("yaml with objects", "yaml.load(text)"),
        ("instantiate", "hydra.utils.instantiate(config)"),
        ("trust in a model's code", "from_pretrained(path, trust_remote_code=True)"),
        ("breakpoint", "    breakpoint()"),
    ],
)
def test_the_pattern_finds(what: str, line: str) -> None:
    assert found(FORBIDDEN[what], f"a\n{line}\nb") == [line.strip()]


@pytest.mark.parametrize(
    "line", ["model.eval()", "loader.exec_module(m)", "yaml.safe_load(x)", "# without pickle.", "'pickling'"]
)
def test_the_patterns_leave(line: str) -> None:
    assert [what for what, pattern in FORBIDDEN.items() if found(pattern, line)] == []
