"""From the overrides of a sweep to its members: ablation files (config/ablation/*.yaml), and Hydra's sweep syntax.

A member is one configuration with one seed. An ablation file names its members one by one, so that "none, each limiter
alone, all of them" can be said, which a grid cannot; several values on the command line make a grid, over the file's
members too.
"""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException

from config.faults import Fault, shown
from config.load import CONFIG_DIR, ConfigFaults, check_override_keys, quoted
from config.rules import NAME_PATTERN

SEED_KEY, NAME_KEY, FOLDER_KEY = "data.seed", "trainer.experiment_name", "trainer.default_local_dir"
SWEEP_FOLDER_KEY, LAUNCHER_KEY = "hydra.sweep.dir", "hydra/launcher"
FILE_KEYS = ("seeds", "base", "members")
# A name of a folder holds at most 255 bytes; the rest is for what stands behind it.
MAX_NAME_LENGTH = 150
HASH_LENGTH = 8


@dataclass(frozen=True, slots=True)
class Member:
    """One configuration with one seed. `overrides` is all that it differs in from the main file, its folder excepted."""

    name: str  # of its folder: its name in the ablation file, and its overrides as in Hydra's override_dirname
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """The members of a sweep in the order in which they run, and where and how."""

    name: str | None  # trainer.experiment_name where it is set, else the ablation's
    folder: str | None  # hydra.sweep.dir where it is set
    launcher: tuple[str, ...]  # hydra/launcher=NAME and its settings; empty: one after another on this machine
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Ablation:
    """The contents of config/ablation/NAME.yaml; all texts are overrides."""

    seeds: tuple[str, ...]
    base: tuple[str, ...]
    members: Mapping[str, tuple[str, ...]]


def plan_sweep(overrides: Sequence[str], *, config_dir: str | None = None) -> SweepPlan:
    """All members for the overrides of `governor train --multirun`, every seed of every one; seeds vary slowest.

    A key of the command line replaces the same one in the file's `base`; one in which the file's members differ is
    refused. `config_dir` is a folder whose ablation/*.yaml can be named too.

    Raises:
        ConfigFaults: an override or a file that cannot be read as a sweep. The members' own keys and values are not
            looked at here.
    """
    given = _parsed(overrides)
    settings = {key: override for key, override in given.items() if override.is_hydra_override()}
    rest = {key: override for key, override in given.items() if key not in (*settings, "ablation")}
    faults = [*_setting_faults(settings), *_range_faults(rest)]
    if FOLDER_KEY in rest:
        faults.append(Fault(FOLDER_KEY, None, f"is set for each member: use {SWEEP_FOLDER_KEY}=FOLDER for all of them"))
    if NAME_KEY in rest and rest[NAME_KEY].is_sweep_override():
        faults.append(Fault(NAME_KEY, None, "names the whole sweep: give one"))
    if faults:
        raise ConfigFaults(faults)
    file_name = _file_name(given["ablation"]) if "ablation" in given else None
    ablation = None if file_name is None else _read_ablation(file_name, config_dir)
    name_override = rest.pop(NAME_KEY, None)
    return SweepPlan(
        name=file_name if name_override is None else str(name_override.value()),
        folder=str(settings[SWEEP_FOLDER_KEY].value()) if SWEEP_FOLDER_KEY in settings else None,
        launcher=tuple(str(override.input_line) for key, override in settings.items() if key != SWEEP_FOLDER_KEY),
        members=tuple(_members(rest, ablation, file_name)),
    )


def safe_name(text: str, *, signs: str = "._=,+-", max_length: int = MAX_NAME_LENGTH) -> str:
    """A text as the name of a file: letters, digits and some signs, no dot in front.

    A text that had to be changed ends in a hash of it, so that two texts never become one name.
    """
    name = re.sub(f"^\\.|[^A-Za-z0-9{re.escape(signs)}]", "_", text)
    if name == text and len(name) <= max_length:
        return name
    return f"{name[: max_length - HASH_LENGTH - 1]}-{hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]}"


def quoted_override(key: str, text: str) -> str:
    """`key='text'` in Hydra's grammar, whatever stands in the text; `${` keeps its meaning."""
    return f"{key}={quoted(text)}"


def grid_of(overrides: Sequence[str]) -> list[tuple[str, ...]]:
    """All combinations of the overrides' values, each a tuple of plain overrides.

    Raises:
        ConfigFaults: an override that cannot be read.
    """
    faults = [*_range_faults(given := _parsed(overrides))]
    if faults:
        raise ConfigFaults(faults)
    choices = [
        [f"{o.get_key_element()}={value}" for value in _values(o)] if o.is_sweep_override() else [str(o.input_line)]
        for o in given.values()
    ]
    return list(itertools.product(*choices))


# --- members ---------------------------------------------------------------------------------------------------------


def _members(given: Mapping[str, Override], ablation: Ablation | None, file_name: str | None) -> Iterator[Member]:
    """The file's members (one without a name where there is no file) x the grid of the command line x seeds."""
    constants = [str(override.input_line) for override in given.values() if not override.is_sweep_override()]
    swept = [override for key, override in given.items() if override.is_sweep_override() and key != SEED_KEY]
    if ablation is None:
        ablation = Ablation(seeds=(), base=(), members={"": ()})
        named = [text for text in constants if not text.lstrip("+~").startswith(("trainer.", "ray_kwargs.", SEED_KEY))]
    else:
        named = []
        _refuse_keys_of_members(given, ablation, str(file_name))
    seeds: Sequence[str | None] = ablation.seeds or (None,)
    if SEED_KEY in given:
        override = given[SEED_KEY]
        seeds = list(_values(override)) if override.is_sweep_override() else [override.get_value_string()]
    grid = list(itertools.product(*([f"{o.get_key_element()}={value}" for value in _values(o)] for o in swept)))
    for seed in seeds:
        for (name, texts), point in itertools.product(ablation.members.items(), grid):
            parts = ",".join(part for part in (name, *sorted([*named, *point])) if part)
            merged = _merged(ablation.base, texts, constants, point, () if seed is None else (f"{SEED_KEY}={seed}",))
            yield Member(safe_name(parts or "default"), merged)


def _values(override: Override) -> Iterable[str]:
    """The values of a sweep in Hydra's grammar, each once."""
    return dict.fromkeys(override.sweep_string_iterator())


def _merged(*layers: Sequence[str]) -> tuple[str, ...]:
    """Overrides of which a later one replaces an earlier one of the same key, since Hydra takes one choice a group."""
    merged: dict[str, str] = {}
    for text in itertools.chain(*layers):
        key = _key(text)
        merged.pop(key, None)
        merged[key] = text
    return tuple(merged.values())


def _refuse_keys_of_members(given: Mapping[str, Override], ablation: Ablation, file_name: str) -> None:
    differing = {_key(text) for texts in ablation.members.values() for text in texts}
    faults = [
        Fault(
            key,
            None,
            f"is what the members of ablation={file_name} differ in; for other values write an ablation file of your own "
            "(--config-dir)",
        )
        for key in given
        if key in differing
    ]
    if faults:
        raise ConfigFaults(faults)


# --- overrides -------------------------------------------------------------------------------------------------------


def _parsed(overrides: Sequence[str]) -> dict[str, Override]:
    """Overrides by key; the last one of a key counts, as in Hydra."""
    faults: list[Fault] = []
    parsed: dict[str, Override] = {}
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException:
            faults.extend(check_override_keys([text]))
            continue
        parsed.pop(override.key_or_group, None)
        parsed[override.key_or_group] = override
    if faults:
        raise ConfigFaults(faults)
    return parsed


def _key(text: str) -> str:
    return OverridesParser.create().parse_override(text).key_or_group


def _setting_faults(settings: Mapping[str, Override]) -> Iterator[Fault]:
    """Faults of Hydra's own settings, of which a sweep has two."""
    for key, override in settings.items():
        known = key in (SWEEP_FOLDER_KEY, LAUNCHER_KEY) or key.startswith("hydra.launcher.")
        value = None if override.is_sweep_override() else override.value()
        if not known:
            yield Fault(key, value, f"has no effect here; a sweep takes {SWEEP_FOLDER_KEY} and {LAUNCHER_KEY}")
        elif override.is_sweep_override() or override.is_delete() or value is None:
            yield Fault(key, None, "takes one value")
        elif key == SWEEP_FOLDER_KEY and ("${" in str(value) or not str(value).strip()):
            yield Fault(key, value, "must be a plain folder, so that starting the sweep again finds it")
        elif "_target_" in str(override.input_line):
            yield Fault(key, value, f"names code to run: choose a launcher that is installed, with {LAUNCHER_KEY}=NAME")
        elif key.startswith("hydra.launcher.") and LAUNCHER_KEY not in settings:
            yield Fault(key, value, f"needs {LAUNCHER_KEY}=NAME")


def _range_faults(given: Mapping[str, Override]) -> Iterator[Fault]:
    for key, override in given.items():
        if override.value_type in (ValueType.INTERVAL_SWEEP, ValueType.GLOB_CHOICE_SWEEP):
            text = str(override.input_line).split("=", 1)[1]
            yield Fault(key, text, "cannot be enumerated: write the values out, as in a,b, choice(a,b) or range(1,4)")


# --- files -----------------------------------------------------------------------------------------------------------


def ablation_names(config_dir: str | None = None) -> list[str]:
    """The ablation files that there are, in config/ablation/ and below `config_dir`."""
    return sorted(path.stem for path in _ablation_files(config_dir))


def _ablation_files(config_dir: str | None) -> list[Path]:
    folders = [CONFIG_DIR, *([Path(config_dir)] if config_dir else [])]
    return [path for folder in folders for path in sorted((folder / "ablation").glob("*.yaml"))]


def _file_name(override: Override) -> str | None:
    """The ablation that `ablation=NAME` chooses; None for `ablation=null`."""
    if override.is_sweep_override() or not isinstance(override.value(), str | None):
        raise ConfigFaults([Fault("ablation", None, "takes the name of one file")])
    return None if override.value() is None else str(override.value())


def _read_ablation(name: str, config_dir: str | None) -> Ablation:
    """The ablation file of that name.

    Raises:
        ConfigFaults: no such file, or one that does not hold what the form asks for.
    """
    paths = [path for path in _ablation_files(config_dir) if path.stem == name]
    if not paths:
        names = ", ".join(ablation_names(config_dir)) or "none"
        raise ConfigFaults([Fault("ablation", name, f"no such file; there are {names}")])
    path = paths[-1]
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigFaults([Fault(str(path), None, f"is not YAML: {' '.join(str(error).split())}")]) from error
    faults = list(_form_faults(path, values))
    if faults:
        raise ConfigFaults(faults)
    ablation = Ablation(
        seeds=tuple(str(seed) for seed in values["seeds"]),
        base=tuple(values.get("base") or ()),
        members={member: tuple(texts or ()) for member, texts in values["members"].items()},
    )
    everything = [("base", ablation.base), *((f"members.{key}", texts) for key, texts in ablation.members.items())]
    faults = [fault for where, texts in everything for fault in _text_faults(path, where, texts)]
    if faults:
        raise ConfigFaults(faults)
    return ablation


def _form_faults(path: Path, values: Any) -> Iterator[Fault]:
    if not isinstance(values, dict):
        yield Fault(str(path), None, f"must be a mapping with the keys {', '.join(FILE_KEYS)}")
        return
    for key in values:
        if key not in FILE_KEYS:
            yield Fault(f"{path}: {key}", None, f"no such key; an ablation has {', '.join(FILE_KEYS)}")
    seeds, members = values.get("seeds"), values.get("members")
    whole = isinstance(seeds, list) and all(isinstance(seed, int) and not isinstance(seed, bool) for seed in seeds)
    if not seeds or not whole or len(set(seeds)) < len(seeds):
        yield Fault(f"{path}: seeds", shown(seeds), "must be a list of whole numbers, each once, as in [1, 2, 3]")
    if values.get("base") is not None and not _is_list_of_texts(values["base"]):
        yield Fault(f"{path}: base", None, "must be a list of overrides, as in [data.train_batch_size=8]")
    if not isinstance(members, dict) or not members:
        yield Fault(f"{path}: members", None, "must be a mapping from a name to a list of overrides")
        return
    for name, texts in members.items():
        if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
            yield Fault(
                f"{path}: members.{name}",
                None,
                "is not a name: at most 100 letters, digits, '.', '_' and '-', the first a letter or digit, and quotes "
                "around what YAML takes for something else",
            )
        if texts is not None and not _is_list_of_texts(texts):
            yield Fault(f"{path}: members.{name}", None, "must be a list of overrides, each a text; [] for none")


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _text_faults(path: Path, where: str, texts: Sequence[str]) -> Iterator[Fault]:
    """Overrides of a file that are not one, and keys that it cannot set; other keys are checked with the members."""
    for text in texts:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException:
            yield from (
                Fault(f"{path}: {where}: {fault.key}", None, fault.text) for fault in check_override_keys([text])
            )
            continue
        place = f"{path}: {where}: {text}"
        if override.is_sweep_override():
            yield Fault(place, None, "is several values; a member has one: make it two members")
        elif override.key_or_group in (NAME_KEY, FOLDER_KEY, "ablation") or override.is_hydra_override():
            yield Fault(place, None, "is set for each member by the sweep; drop it")
        elif override.key_or_group == SEED_KEY:
            yield Fault(place, None, "stands under seeds")
