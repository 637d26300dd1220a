"""From overrides to a checked `GovernorConfig`; the only user of Hydra's compose and OmegaConf.

Two passes, each of which reports all that it finds at once: the overrides' keys before Hydra composes, then the composed
values. Either raises `ConfigFaults` before anything of the run exists.
"""

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pydantic
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.foreign_keys import reason_for
from config.rules import Fault, check_rules
from config.schema import GovernorConfig

GROUPS = ("data", "model", "actor", "ref", "rollout", "critic", "optim", "engine", "algorithm", "reward", "trainer")
CHOICE_GROUPS = ("experiment", "ablation")
CONFIG_DIR = Path(__file__).parent


class ConfigFaults(ValueError):
    """All faults of a configuration, one text."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        lines = [f"  {fault}" for fault in faults]
        noun = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        super().__init__("\n".join([f"The configuration has {noun}; nothing was started.", *lines]))


def load_config(
    overrides: Sequence[str] = (), *, config_name: str = "ppo_trainer", config_dir: str | None = None
) -> GovernorConfig:
    """The checked configuration for Hydra overrides such as `experiment=copy_grpo` or `data.seed=3`.

    Raises:
        ConfigFaults: an unknown key, a value of the wrong type or outside its bounds, or keys that exclude each other.
    """
    return check_values(compose_values(overrides, config_name=config_name, config_dir=config_dir))


def compose_values(
    overrides: Sequence[str] = (), *, config_name: str = "ppo_trainer", config_dir: str | None = None
) -> dict[str, Any]:
    """The composed and resolved values as plain Python.

    Raises:
        ConfigFaults: an override that is not one, an unknown key, or a file that Hydra cannot compose.
    """
    faults = list(check_override_keys(overrides))
    if faults:
        raise ConfigFaults(faults)
    search = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    try:
        with initialize_config_module("config", version_base="1.3"):
            composed = compose(config_name, overrides=[*search, *overrides])
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigFaults([_compose_fault(error)]) from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _compose_fault(error: Exception) -> Fault:
    """A fault from Hydra's or OmegaConf's error, with the choices that there are where a group file is missing."""
    text = " ".join(str(error).split())
    for group in CHOICE_GROUPS:
        marker = f"Could not find '{group}/"
        if marker in text:
            wanted = text.split(marker, 1)[1].split("'", 1)[0]
            names = sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))
            return Fault(group, wanted, f"no such file; there are {', '.join(names) or 'none'}")
    return Fault("hydra", None, text)


def check_values(values: dict[str, Any]) -> GovernorConfig:
    """The typed configuration from plain values.

    Raises:
        ConfigFaults: with every fault found; rules over several keys are checked once all types are right.
    """
    known = set(walk_keys())
    faults = [Fault(key, None, unknown_key_text(key, known)) for key in _unknown_keys(values)]
    try:
        # Through JSON, since in strict mode pydantic builds dataclasses from JSON objects but not from dicts.
        config = pydantic.TypeAdapter(GovernorConfig).validate_json(json.dumps(values), strict=True)
    except pydantic.ValidationError as error:
        faults += _type_faults(error, known)
        raise ConfigFaults(_unique(faults)) from error
    faults += check_rules(config)
    if faults:
        raise ConfigFaults(faults)
    return config


def _type_faults(error: pydantic.ValidationError, known: set[str]) -> list[Fault]:
    """One fault for each of pydantic's, under the full key; its path also names the members of unions, left out here."""
    faults = []
    for item in error.errors():
        key = ""
        for part in item["loc"]:
            longer = f"{key}.{part}" if key else str(part)
            if longer in known or isinstance(part, int):
                key = longer
        text = item["msg"].replace("Input should be", "must be").replace("a valid array", "a list, as in [a,b]")
        faults.append(Fault(key, item["input"], text))
    return faults


def _unique(faults: list[Fault]) -> list[Fault]:
    return list({fault.key: fault for fault in reversed(faults)}.values())[::-1]


# --- keys ------------------------------------------------------------------------------------------------------------


def walk_keys(cls: type = GovernorConfig, prefix: str = "") -> Iterator[str]:
    """Full keys of all fields of the schema, groups and leaves."""
    for field in dataclasses.fields(cls):
        key = f"{prefix}{field.name}"
        yield key
        inner = field_type(cls, field.name)
        if dataclasses.is_dataclass(inner):
            yield from walk_keys(inner, f"{key}.")


def field_type(cls: type, name: str) -> Any:
    """The type of a field without `| None` and without its bounds."""
    hint = typing.get_type_hints(cls)[name]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def open_mappings(cls: type = GovernorConfig, prefix: str = "") -> Iterator[str]:
    """Full keys of the mappings below which any key is allowed."""
    for field in dataclasses.fields(cls):
        inner = field_type(cls, field.name)
        if dataclasses.is_dataclass(inner):
            yield from open_mappings(inner, f"{prefix}{field.name}.")
        elif typing.get_origin(inner) is dict:
            yield f"{prefix}{field.name}"


def check_override_keys(overrides: Sequence[str]) -> Iterator[Fault]:
    """Faults of override strings, seen before Hydra composes: their form, and keys that the schema does not have."""
    known, open_keys = set(walk_keys()), tuple(open_mappings())
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            first = str(error).strip().splitlines()[0]
            yield Fault(text, None, f"is not an override of the form key=value: {first}")
            continue
        key = override.key_or_group
        if key.split("@")[0] in (*GROUPS, *CHOICE_GROUPS) or key.split(".")[0] == "hydra":
            continue
        if any(key == name or key.startswith(f"{name}.") for name in open_keys):
            continue
        if key not in known:
            yield Fault(key, override.value(), unknown_key_text(key, known))
        elif override.is_add() or override.is_delete():
            sign = text[0]
            yield Fault(key, None, f"is a key of the schema: write {key}=…, without the leading {sign}")


def unknown_key_text(key: str, known: set[str]) -> str:
    """Why a key is refused: the reason for a key of verl's, else the nearest known one."""
    reason = reason_for(key)
    if reason:
        return reason
    leaf = key.rsplit(".", 1)[-1]
    same_leaf = [name for name in known if name.rsplit(".", 1)[-1] == leaf]
    near = difflib.get_close_matches(key, same_leaf, n=1, cutoff=0.0) or difflib.get_close_matches(key, known, n=1)
    return f"no such key; did you mean {near[0]}?" if near else "no such key; see config/ for all keys"


def _unknown_keys(values: Any, cls: type = GovernorConfig, prefix: str = "") -> Iterator[str]:
    if not isinstance(values, dict):
        return
    fields = {field.name for field in dataclasses.fields(cls)}
    for name, value in values.items():
        if name not in fields:
            yield f"{prefix}{name}"
            continue
        inner = field_type(cls, name)
        if dataclasses.is_dataclass(inner):
            yield from _unknown_keys(value, inner, f"{prefix}{name}.")


# --- plain forms -----------------------------------------------------------------------------------------------------


def to_plain(config: GovernorConfig) -> dict[str, Any]:
    """The configuration as nested dicts and lists, for `config.yaml` and the trackers."""
    return dataclasses.asdict(config)


def to_yaml(config: GovernorConfig) -> str:
    """The configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(to_plain(config)))


def read_yaml(path: Path) -> dict[str, Any]:
    """A configuration that a run wrote, as plain Python; nothing in it is interpolated."""
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict of full keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
