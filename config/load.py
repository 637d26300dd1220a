"""From overrides to a checked `GovernorConfig`; the only user of Hydra's compose and OmegaConf.

Two passes, each of which reports all that it finds at once: the overrides' keys before Hydra composes, then the
composed values. Either raises `ConfigFaults` before anything of the run exists.
"""

import dataclasses
import difflib
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

import pydantic
import yaml
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.faults import Fault, shown
from config.foreign_keys import reason_for
from config.rules import check_rules
from config.schema import GovernorConfig

GROUPS = ("data", "model", "actor", "ref", "rollout", "critic", "optim", "engine", "algorithm", "reward", "trainer")
CHOICE_GROUPS = ("experiment", "ablation")
CONFIG_DIR = Path(__file__).parent
# Bounds that may be infinite, which switches them off.
UNBOUNDED = (
    "actor_rollout_ref.actor.grad_clip",
    "actor_rollout_ref.actor.clip_ratio_high",
    "critic.grad_clip",
    "critic.cliprange_value",
)


class ConfigFaults(ValueError):
    """All faults of a configuration, one text."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = faults
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
    """The composed and resolved values as plain Python. `config_dir` is a folder with files of the user's own.

    Raises:
        ConfigFaults: an override that is not one, an unknown key, or a file that Hydra cannot compose.
    """
    folders = [CONFIG_DIR, *([Path(config_dir).resolve()] if config_dir else [])]
    faults = [*_folder_faults(folders[1:]), *check_override_keys(overrides)]
    if faults:
        raise ConfigFaults(faults)
    # Hydra looks for the main file only where it starts, and for all other files in hydra.searchpath too.
    if config_dir and (folders[1] / f"{config_name}.yaml").is_file():
        start, other = initialize_config_dir(str(folders[1]), version_base="1.3"), "pkg://config"
    else:
        start, other = initialize_config_module("config", version_base="1.3"), f"file://{folders[-1]}"
    search = [f"hydra.searchpath=[{quoted(other)}]"] if config_dir else []
    try:
        with start:
            composed = compose(config_name, overrides=[*search, *_for_hydra(overrides, folders)])
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigFaults([_compose_fault(error, folders)]) from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _folder_faults(folders: Sequence[Path]) -> Iterator[Fault]:
    """A folder of the user's that is not one, or files in it that would be passed over for those that come along."""
    for folder in folders:
        if not folder.is_dir():
            yield Fault("--config-dir", folder, "no such folder")
        elif folder != CONFIG_DIR:
            for group in ("", *GROUPS, *CHOICE_GROUPS):
                for path in sorted((folder / group).glob("*.yaml")):
                    if (CONFIG_DIR / group / path.name).exists():
                        yield Fault("--config-dir", path, "has the name of a file of Governor's: rename it")


def quoted(text: str) -> str:
    """A text as a value of Hydra's override grammar, whatever it holds; `${` keeps its meaning."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda part: part[1] * 2 + ("\\'" if part[2] else ""), text) + "'"


def _for_hydra(overrides: Sequence[str], folders: Sequence[Path]) -> Iterator[str]:
    """Checked overrides as Hydra wants them: `++` for keys of open mappings, `~` for a choice of nothing."""
    for text in overrides:
        override = OverridesParser.create().parse_override(text)
        key = override.key_or_group
        if key in CHOICE_GROUPS and not override.is_delete() and override.value() is None:
            if any((folder / key).is_dir() for folder in folders):
                yield f"~{key}"
        elif _is_open(key) and not override.is_delete():
            yield f"++{text.lstrip('+')}"
        else:
            yield text


def _compose_fault(error: Exception, folders: Sequence[Path]) -> Fault:
    """A fault from an error of Hydra, OmegaConf or YAML, with the choices that there are where a file is missing."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return Fault(f"{mark.name} line {mark.line + 1}", None, f"is not YAML: {error.problem}")
    if isinstance(error, UnicodeDecodeError):
        return Fault("--config-dir", folders[-1], f"holds a file that is not UTF-8: {error}")
    text = " ".join(str(error).split())
    if missing := re.search(r"Could not (?:find|load) '(\w+)/([^']*)'", text):
        group, wanted = missing.groups()
        names = sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})
        return Fault(group, wanted, f"no such file; there are {', '.join(names) or 'none'}")
    if missing := re.search(r"Cannot find primary config '([^']*)'", text):
        names = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
        return Fault("--config-name", missing[1], f"no such file; there are {', '.join(names)}")
    # What Hydra advises after these words, a leading + or its web page, does not hold here.
    text = re.split(r" (?:To append to your|Config search path|See https|full_key:)", text)[0]
    if (named := re.match(r"Could not override '([^']+)'", text)) and named[1] in CHOICE_GROUPS:
        return Fault(named[1], None, "no such file; there are none")
    return Fault(getattr(error, "full_key", None) or (named[1] if named else "hydra"), None, text)


def check_values(values: dict[str, Any]) -> GovernorConfig:
    """The typed configuration from plain values.

    Raises:
        ConfigFaults: with every fault found; rules over several keys are checked once all types are right.
    """
    faults = [Fault(key, value, unknown_key_text(key)) for key, value in _unknown_keys(values)]
    faults += _infinite_faults(values)
    try:
        # Through JSON, since in strict mode pydantic builds dataclasses from JSON objects but not from dicts.
        text = json.dumps(values, default=repr)
        config = _adapter().validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        faults += _type_faults(error)
        raise ConfigFaults(_unique(faults)) from error
    faults += check_rules(config)
    if faults:
        raise ConfigFaults(faults)
    return config


@cache
def _adapter() -> pydantic.TypeAdapter[GovernorConfig]:
    return pydantic.TypeAdapter(GovernorConfig)


def _infinite_faults(values: dict[str, Any]) -> Iterator[Fault]:
    """Numbers that are NaN, or infinite where that means nothing."""
    for key, value in flatten(values).items():
        items = {f"{key}.{i}": item for i, item in enumerate(value)} if isinstance(value, list) else {key: value}
        for name, number in items.items():
            if not isinstance(number, float) or math.isfinite(number) or _is_open(key):
                continue
            if math.isnan(number) or key not in UNBOUNDED:
                yield Fault(name, number, "must be a finite number")


def _type_faults(error: pydantic.ValidationError) -> Iterator[Fault]:
    """One fault for each of pydantic's, under the full key, without the members of unions that its path names too."""
    known = set(walk_keys())
    for item in error.errors():
        key = ""
        for part in item["loc"]:
            longer = f"{key}.{part}" if key else str(part)
            if longer in known or isinstance(part, int) or _in_typed_mapping(longer):
                key = longer
        if item["type"] == "missing":
            yield Fault(key, None, "has no value")
        else:
            yield Fault(key, shown(item["input"]), _type_text(item["type"], item["msg"], key, item["input"]))


def _type_text(kind: str, message: str, key: str, value: Any) -> str:
    """The rule that a value breaks, in the words of the overrides that a user writes."""
    match kind:
        case "string_type":
            quoted = isinstance(value, bool | int | float) and key in set(walk_keys())
            return "must be a text" + (f"; with quotes it is one: '{key}=\"{shown(value)}\"'" if quoted else "")
        case "int_type":
            return "must be a whole number"
        case "float_type":
            return "must be a number"
        case "bool_type":
            return "must be true or false"
        case "list_type":
            return f"must be a list, as in [{value if isinstance(value, str) else 'a,b'}]"
        case "dict_type":
            return "must be a mapping, as in {name:value}"
        case "dataclass_type":
            member = next(_members(key))
            return f"is a group of keys; set them one by one, as in {member}=…"
        case _:
            return message.replace("Input should be", "must be")


def _unique(faults: list[Fault]) -> list[Fault]:
    return list({fault.key: fault for fault in reversed(faults)}.values())[::-1]


# --- keys ------------------------------------------------------------------------------------------------------------


def walk_keys(cls: type = GovernorConfig, prefix: str = "") -> Iterator[str]:
    """Full keys of all fields of the schema, groups and leaves."""
    for field in dataclasses.fields(cls):
        key = f"{prefix}{field.name}"
        yield key
        inner = field_type(cls, field.name)
        if _is_group(inner):
            yield from walk_keys(inner, f"{key}.")


def _is_group(kind: Any) -> TypeGuard[type]:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


@cache
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
        if _is_group(inner):
            yield from open_mappings(inner, f"{prefix}{field.name}.")
        elif typing.get_origin(inner) is dict:
            yield f"{prefix}{field.name}"


@cache
def _leaf_keys() -> tuple[str, ...]:
    known = sorted(walk_keys())
    return tuple(key for key in known if not any(other.startswith(f"{key}.") for other in known))


@cache
def _open_keys() -> tuple[str, ...]:
    return tuple(open_mappings())


@cache
def _typed_mappings() -> dict[str, type]:
    """Open mappings from names of the user's to a group of keys, and that group's type."""
    groups = {name: typing.get_args(_type_of(name))[1] for name in _open_keys()}
    return {name: group for name, group in groups.items() if _is_group(group)}


def _type_of(key: str) -> Any:
    cls: Any = GovernorConfig
    for part in key.split("."):
        cls = field_type(cls, part)
    return cls


def _in_typed_mapping(key: str) -> bool:
    """Whether the key is an entry of such a mapping, or a key of its group."""
    for name, group in _typed_mappings().items():
        if key.startswith(f"{name}."):
            entry = key.removeprefix(f"{name}.").split(".")
            return len(entry) == 1 or (len(entry) == 2 and entry[1] in group.__dataclass_fields__)
    return False


def _members(key: str) -> Iterator[str]:
    """Full keys of a group, or of an entry of a mapping of groups."""
    yield from (name for name in walk_keys() if name.startswith(f"{key}."))
    group = _typed_mappings().get(key.rpartition(".")[0])
    if group is not None:
        yield from (f"{key}.{field.name}" for field in dataclasses.fields(group))


def _is_open(key: str) -> bool:
    """Whether the key is an open mapping or lies below one."""
    return any(key == name or key.startswith(f"{name}.") for name in _open_keys())


def check_override_keys(overrides: Sequence[str]) -> Iterator[Fault]:
    """Faults of override strings, seen before Hydra composes: their form, and keys that the schema does not have."""
    known = set(walk_keys())
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            first = str(error).strip().splitlines()[0]
            yield Fault(
                text, None, f"is not an override of the form key=value (special signs in a value need quotes): {first}"
            )
            continue
        yield from _override_faults(text, override, known)


def _override_faults(text: str, override: Override, known: set[str]) -> Iterator[Fault]:
    key, value, sign = override.key_or_group, override.value(), text[: len(text) - len(text.lstrip("+~"))]
    if not key:
        yield Fault(text, None, "is not an override of the form key=value")
    elif key.split(".")[0] == "hydra":
        yield Fault(key, value, "Hydra's own settings have no effect here; for files of your own use --config-dir")
    elif override.is_sweep_override():
        yield Fault(key, text.split("=", 1)[1], "is several values; give one, a list as in [a,b], or a text in quotes")
    elif key in (*GROUPS, *CHOICE_GROUPS) and not isinstance(value, dict):
        yield from _choice_faults(key, value, sign)
    elif _is_open(key):
        if override.is_delete() and key in _open_keys():
            yield Fault(key, None, f"is a key of the schema: write {key}=…, without the leading ~")
    elif key not in known:
        yield Fault(key, value, unknown_key_text(key))
    elif sign:
        yield Fault(key, None, f"is a key of the schema: write {key}=…, without the leading {sign}")
    elif isinstance(value, dict):
        nested: Any = value
        for part in reversed(key.split(".")):
            nested = {part: nested}
        yield from (Fault(name, inner, unknown_key_text(name)) for name, inner in _unknown_keys(nested))


def _choice_faults(group: str, value: Any, sign: str) -> Iterator[Fault]:
    """Faults of an override that chooses a group's file; only the groups of whole runs can be switched off."""
    if "+" in sign or (sign and group not in CHOICE_GROUPS):
        yield Fault(group, None, f"write {group}=…, without the leading {sign}")
    elif not sign and not isinstance(value, str) and not (group in CHOICE_GROUPS and value is None):
        yield Fault(group, shown(value), f"must be the name of a file of config/{group}/")


def unknown_key_text(key: str) -> str:
    """Why a key is refused: the reason for a key of verl's, else the nearest known one."""
    reason = reason_for(key)
    if reason:
        return reason
    if key in CHOICE_GROUPS:
        return "its file does not begin with the line '# @package _global_', without which its keys are not the run's"
    for name, group in _typed_mappings().items():
        if key.startswith(f"{name}."):
            return f"no such key; each of {name} has {' and '.join(group.__dataclass_fields__)}"
    near = _nearest_key(key)
    return f"no such key; did you mean {near}?" if near else "no such key; `governor config` prints all keys"


def _nearest_key(key: str) -> str | None:
    """The key that was likely meant: one of the same name elsewhere, a neighbour, any close name, any close key."""
    leaves = _leaf_keys()
    group, _, name = key.rpartition(".")
    names = {leaf.rpartition(".")[2] for leaf in leaves}
    by_name = [leaf for leaf in leaves if leaf.rpartition(".")[2] == name]
    if by_name:
        return difflib.get_close_matches(key, by_name, n=1, cutoff=0.0)[0]
    neighbours = [leaf.rpartition(".")[2] for leaf in leaves if leaf.rpartition(".")[0] == group]
    if near := difflib.get_close_matches(name, neighbours, n=1):
        return f"{group}.{near[0]}" if group else near[0]
    if near := difflib.get_close_matches(name, names, n=1, cutoff=0.8):
        by_name = [leaf for leaf in leaves if leaf.rpartition(".")[2] == near[0]]
        return difflib.get_close_matches(key, by_name, n=1, cutoff=0.0)[0]
    near = difflib.get_close_matches(key, leaves, n=1, cutoff=0.85)
    return near[0] if near else None


def _unknown_keys(values: Any, cls: type = GovernorConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Full keys that the schema does not have, with their values."""
    if not isinstance(values, dict):
        return
    fields = {field.name for field in dataclasses.fields(cls)}
    for name, value in values.items():
        if name not in fields:
            yield f"{prefix}{name}", value
            continue
        inner = field_type(cls, name)
        if _is_group(inner):
            yield from _unknown_keys(value, inner, f"{prefix}{name}.")
        elif (group := _typed_mappings().get(f"{prefix}{name}")) and isinstance(value, dict):
            for entry, keys in value.items():
                yield from _unknown_keys(keys, group, f"{prefix}{name}.{entry}.")


# --- plain forms -----------------------------------------------------------------------------------------------------


def to_plain(config: GovernorConfig) -> dict[str, Any]:
    """The configuration as nested dicts and lists, for `config.yaml` and the trackers."""
    return dataclasses.asdict(config)


def to_yaml(config: GovernorConfig) -> str:
    """The configuration as YAML that loads back equal: what reads as an interpolation is escaped."""
    return OmegaConf.to_yaml(OmegaConf.create(_map_texts(to_plain(config), _escaped)))


def _escaped(text: str) -> str:
    """The text for OmegaConf, to which `${` begins an interpolation."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", text)


def overrides_of(values: dict[str, Any]) -> list[str]:
    """Overrides that compose to these values. A key that follows another one and has its value is left to follow it."""
    with initialize_config_module("config", version_base="1.3"):
        raw = OmegaConf.to_container(compose("ppo_trainer", overrides=["~experiment", "~ablation"]), resolve=False)
    assert isinstance(raw, dict)
    following = {key for key, value in flatten(raw).items() if isinstance(value, str) and "${" in value}  # pyright: ignore
    wanted = flatten(values)

    def differing(overrides: Sequence[str]) -> list[str]:
        now = flatten(compose_values(overrides))
        return [key for key, value in wanted.items() if now.get(key) != value and value != {}]

    bare = ["experiment=null"]
    overrides = bare + [_override(key, wanted[key]) for key in differing(bare) if key not in following]
    return overrides + [_override(key, wanted[key]) for key in differing(overrides)]


def _override(key: str, value: Any) -> str:
    return f"{key}={_literal(value)}"


def _literal(value: Any) -> str:
    match value:
        case str():
            return quoted(_escaped(value))
        case list():
            return f"[{','.join(map(_literal, value))}]"
        case float() if not math.isfinite(value):
            return str(value)
        case _:
            return json.dumps(value)


def read_yaml(path: Path) -> dict[str, Any]:
    """A configuration that a run wrote, as plain Python; nothing in it is interpolated."""
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    assert isinstance(values, dict)
    escaped = re.compile(r"(\\*)\\\$\{")
    values = _map_texts(values, lambda text: escaped.sub(lambda match: match[1][::2] + "${", text))
    return {str(key): value for key, value in values.items()}


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A plain value with all texts in it changed; the keys of mappings stay."""
    match value:
        case str():
            return change(value)
        case dict():
            return {key: _map_texts(item, change) for key, item in value.items()}
        case list():
            return [_map_texts(item, change) for item in value]
        case _:
            return value


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict of full keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
