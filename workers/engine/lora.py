"""LoRA (arXiv:2106.09685): the policy's weights are frozen, and a low-rank adapter on its linear layers is trained.

A layer computes W x + (alpha / rank) · B A x. An adapter lies in a folder in peft's format, and beside it a fingerprint
of the base's weights. peft (extra `lora`) is imported where it is used.
"""

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from config.schema import FSDPConfig, ModelConfig, OptimConfig
from trainer.errors import ConfigError, first_line
from workers.engine.fsdp import DeviceContext, FSDPEngine, full_value
from workers.engine.models import AdapterSpec, PolicyModel, weights_fingerprint

CONFIG_FILE, WEIGHTS_FILE, BASE_FILE = "adapter_config.json", "adapter_model.safetensors", "governor_base.json"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, BASE_FILE)
POLICY, REFERENCE = "default", "reference"  # names of the two adapters that a layer may have
KEY = "actor_rollout_ref.model"
# What an adapter's configuration may say freely; anything else must be as peft has it by default.
FREE_FIELDS = {
    "r", "lora_alpha", "target_modules", "exclude_modules", "lora_dropout", "base_model_name_or_path", "task_type",
    "peft_type", "inference_mode", "fan_in_fan_out", "revision", "auto_mapping", "peft_version",
}  # fmt: skip


def import_peft() -> Any:
    """The library.

    Raises:
        ConfigError: it is not installed; says which extra to install.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"{KEY}.lora_rank: LoRA needs peft, which cannot be imported ({error}): pip install 'governor-rl[lora]'"
        ) from None
    return peft


# --- the engine ------------------------------------------------------------------------------------------------------


class LoraEngine(FSDPEngine):
    """A policy whose adapter is trained. Its weights outwards are those of the merged model."""

    def __init__(
        self,
        policy: PolicyModel,
        adapter: AdapterSpec,
        *,
        base: str,
        context: DeviceContext,
        config: FSDPConfig,
        optim: OptimConfig | None,
    ) -> None:
        """Over a model from the folder `base` that `attach_adapters` has been called with."""
        self.reference_name = None if adapter.reference is None else REFERENCE
        self.layers = list(lora_layers(policy.model).values())
        config_text = (Path(adapter.path) / CONFIG_FILE).read_text()
        where = {"base_model_name_or_path": str(Path(base).resolve())}
        made_for = {"weights": weights_fingerprint(base)}
        if adapter.reference is not None:
            made_for["reference"] = weights_fingerprint(adapter.reference)
        self.about = {CONFIG_FILE: json.loads(config_text) | where, BASE_FILE: made_for}
        super().__init__(policy, context=context, config=config, optim=optim)

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """The policy at the start of the run in place of the trained one: the base, or the base with the first adapter.

        For forwards without gradient. peft's own switches also turn requires_grad off and on, after which the backward
        of an FSDP2 model that computes in bfloat16 raises.
        """
        for layer in self.layers:
            if self.reference_name is None:
                layer._disable_adapters = True
            else:
                layer._active_adapter = [self.reference_name]
        try:
            yield
        finally:
            for layer in self.layers:
                layer._disable_adapters, layer._active_adapter = False, [POLICY]

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The merged model's weights by their Hugging Face names. A collective: all ranks draw all."""
        with self.loaded():
            yield from merged_weights(self.hf_model)

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The adapter that is trained."""
        return ((name, p) for name, p in self.hf_model.named_parameters() if f".{POLICY}." in name)

    def write_model(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """The adapter alone, in peft's format."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in self.about.items():
            (folder / name).write_text(json.dumps(value, indent=2) + "\n")
        _write_weights(folder, weights)


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """The layers with an adapter, by name."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@torch.no_grad()
def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and full value of each parameter of the model with its adapter merged. A collective where it is sharded."""
    layers = {f"{name}.base_layer.weight": layer for name, layer in lora_layers(model).items()}
    for name, parameter in model.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            continue
        value = full_value(parameter.detach())
        if name in layers:
            layer = layers[name]
            a, b = (full_value(part[POLICY].weight.detach()) for part in (layer.lora_A, layer.lora_B))
            change = b @ a
            value = value + (change.T if layer.fan_in_fan_out else change) * layer.scaling[POLICY]
        yield name.replace(".base_layer.", "."), value


def attach_adapters(model: Any, adapter: AdapterSpec) -> None:
    """Put the adapter that is trained on a model, and the reference's where it has one."""
    attach(model, adapter.path, POLICY)
    if adapter.reference is not None:
        attach(model, adapter.reference, REFERENCE)
    for layer in lora_layers(model).values():
        layer.set_adapter(POLICY)  # which alone is trained


def attach(model: Any, folder: str | Path, name: str) -> None:
    """Put the adapter of a folder on a model, under a name, with the model's precision; draws no random number."""
    peft = import_peft()
    config = peft.LoraConfig.from_pretrained(str(folder))
    config.inference_mode, config.lora_dropout = False, 0.0
    peft.inject_adapter_in_model(config, model, adapter_name=name, low_cpu_mem_usage=True)
    dtype = next(model.parameters()).dtype
    weights = load_file(Path(folder) / WEIGHTS_FILE)
    named = {_name_in_model(key, name): value.to(dtype) for key, value in weights.items()}
    missing, unknown = model.load_state_dict(named, strict=False, assign=True)
    assert not unknown, unknown
    assert not [key for key in missing if f".{name}." in key], "the adapter has no weights for these layers"
    model.eval()


# --- the adapter that a run starts from ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class StartAdapter:
    """The adapter that a run starts from."""

    path: str
    num_trained: int
    num_base: int
    layers: tuple[str, ...]  # full names


class AdapterShape:
    """The adapter that the configuration asks for: its layers and weights' shapes, found on a model without memory."""

    def __init__(self, config: ModelConfig, base: str) -> None:
        """Look at the model in the folder `base`.

        Raises:
            ConfigError: peft is missing, or the modules that are named cannot have an adapter.
        """
        self.config, self.base = config, base
        peft = import_peft()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(base, trust_remote_code=config.trust_remote_code, **config.override_config),
                trust_remote_code=config.trust_remote_code,
            )
        self.num_base = sum(parameter.numel() for parameter in model.parameters())
        linear = _linear_layers(model)  # before peft puts its own there
        _check_names(config, model, linear)
        self.peft_config = peft.LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            target_modules=config.target_modules,
            exclude_modules=config.exclude_modules,
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
            base_model_name_or_path=str(Path(base).resolve()),
        )
        try:
            peft.inject_adapter_in_model(self.peft_config, model, adapter_name=POLICY, low_cpu_mem_usage=True)
        except ValueError as error:
            raise _wrong_targets(config, linear, first_line(error)) from None
        layers = lora_layers(model)
        for name, layer in layers.items():
            if not isinstance(layer.get_base_layer(), nn.Linear | Conv1D):
                raise _wrong_targets(config, linear, f"{name} is no linear layer")
            if layer is model.get_output_embeddings() and model.config.get_text_config().tie_word_embeddings:
                raise _wrong_targets(config, linear, f"{name} shares its weights with the embeddings")
        self.layers = tuple(layers)
        self.weights = {name: p.shape for name, p in model.named_parameters() if f".{POLICY}." in name}

    def describe(self, path: str) -> StartAdapter:
        """The adapter in a folder, with this one's figures."""
        count = sum(shape.numel() for shape in self.weights.values())
        return StartAdapter(path=path, num_trained=count, num_base=self.num_base, layers=self.layers)

    def write_fresh(self, folder: Path, seed: int) -> None:
        """An adapter that changes nothing yet: A uniform within ±1/sqrt(its input's width), B zero.

        A function of the seed alone. What is in the folder is replaced: it may be of an earlier configuration.
        """
        random = torch.Generator().manual_seed(seed)
        weights = {}
        for name, shape in self.weights.items():
            weights[name] = torch.zeros(shape)
            if ".lora_A." in name:
                bound = shape[1] ** -0.5
                weights[name].uniform_(-bound, bound, generator=random)
        aside = folder.with_name(f".tmp-{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        self.peft_config.target_modules = _as_written(self.peft_config.target_modules)
        self.peft_config.exclude_modules = _as_written(self.peft_config.exclude_modules)
        self.peft_config.inference_mode = True
        self.peft_config.save_pretrained(aside)
        (aside / BASE_FILE).write_text(json.dumps({"weights": weights_fingerprint(self.base)}) + "\n")
        _write_weights(aside, weights)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)

    def check(self, folder: str) -> None:
        """Hold a folder's adapter against this one.

        Raises:
            ConfigError: it is no adapter, of another rank, alpha, layers or base, or of a kind that is not trained here.
        """
        peft = import_peft()
        try:
            found = peft.PeftConfig.from_pretrained(folder)
            weights = load_file(Path(folder) / WEIGHTS_FILE)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{folder} holds no adapter in peft's format ({CONFIG_FILE}, {WEIGHTS_FILE}): {error}"
            ) from None
        if not isinstance(found, peft.LoraConfig):
            raise ConfigError(f"{folder} holds an adapter of type {found.peft_type}; only LORA is trained here")
        config = self.config
        for key, wanted, value in (
            ("lora_rank", config.lora_rank, found.r),
            ("lora_alpha", config.lora_alpha, found.lora_alpha),
        ):
            if wanted != value:
                raise ConfigError(f"{KEY}.{key}={wanted}: the adapter in {folder} has {value}; set {KEY}.{key}={value}")
        plain = peft.LoraConfig()
        for field, value in vars(found).items():
            if field == "init_lora_weights" and value == "gaussian":  # unlike others, which change the base too
                continue
            if field not in FREE_FIELDS and value != getattr(plain, field, None) and value:
                raise ConfigError(f"{folder}/{CONFIG_FILE}: {field}={value!r} is not supported; plain LoRA is")
        shapes = {_name_in_model(key, POLICY): value.shape for key, value in weights.items()}
        if shapes.keys() != self.weights.keys():
            raise ConfigError(
                f"{KEY}.target_modules={config.target_modules} and exclude_modules={config.exclude_modules}: the adapter in "
                f"{folder} is on other layers, by its target_modules={_as_written(found.target_modules)} and "
                f"exclude_modules={_as_written(found.exclude_modules)}; set these, or name the base that it was made for"
            )
        for name, shape in self.weights.items():
            if shapes[name] != shape:
                raise ConfigError(
                    f"{folder}: {name} is {list(shapes[name])}, and {self.base} needs {list(shape)}: the adapter was made for "
                    f"another base, {found.base_model_name_or_path}; set {KEY}.path to it"
                )
        check_base(folder, self.base)


def prepare_adapter(
    config: ModelConfig, base: str, folder: Path, *, seed: int, checkpoint: Path | None = None
) -> StartAdapter:
    """The adapter that a run starts from: that of `lora_adapter_path`, else a fresh one, made in `folder`.

    A run that goes on from a checkpoint's adapter keeps its fresh one as it is.

    Raises:
        ConfigError: peft is missing, the named modules cannot have an adapter, an adapter does not fit, or that of
            `lora_adapter_path` has changed since it became the run's reference.
    """
    shape = AdapterShape(config, base)
    if checkpoint is not None:
        shape.check(str(checkpoint))
    if config.lora_adapter_path is None:
        if checkpoint is None or not folder.exists():
            shape.write_fresh(folder, seed)
        return shape.describe(str(folder))
    try:
        shape.check(config.lora_adapter_path)
    except ConfigError as error:
        raise ConfigError(f"{KEY}.lora_adapter_path={config.lora_adapter_path}: {error}") from None
    about = None if checkpoint is None else checkpoint / BASE_FILE
    reference = json.loads(about.read_text()).get("reference") if about is not None and about.exists() else None
    if reference not in (None, weights_fingerprint(config.lora_adapter_path)):
        raise ConfigError(
            f"{KEY}.lora_adapter_path={config.lora_adapter_path}: the adapter there is not the one that the run started from, "
            "which is its reference. Bring that one back, or start a new run."
        )
    return shape.describe(str(Path(config.lora_adapter_path).resolve()))


def check_base(folder: str | Path, base: str) -> None:
    """Compare the base's weights with those that an adapter was made for, where it says so.

    Raises:
        ConfigError: they are others; with them the adapter would mean another policy.
    """
    about = Path(folder) / BASE_FILE
    if about.exists() and json.loads(about.read_text())["weights"] != weights_fingerprint(base):
        raise ConfigError(
            f"{folder}: the adapter was made for a base with other weights than {base} holds. Name that base, or remove "
            f"{about} to use it on this one all the same."
        )


def base_of(folder: Path) -> Path:
    """The folder of the base that an adapter says it was made for."""
    return Path(json.loads((folder / CONFIG_FILE).read_text())["base_model_name_or_path"])


def _check_names(config: ModelConfig, model: nn.Module, linear: list[str]) -> None:
    """Every name, and an expression, must be that of a module: peft passes over the others without a word."""
    names = [name for name, _ in model.named_modules()]
    for key, wanted in (("target_modules", config.target_modules), ("exclude_modules", config.exclude_modules)):
        if isinstance(wanted, list):
            for one in wanted:
                if not any(name == one or name.endswith(f".{one}") for name in names):
                    raise _wrong_targets(config, linear, f"no module is named {one}", key=key)
        elif wanted and (key, wanted.lower()) != ("target_modules", "all-linear"):
            try:
                found = any(re.fullmatch(wanted, name) for name in names)
            except re.error as error:
                raise _wrong_targets(config, linear, f"is no regular expression: {error}", key=key) from None
            if not found:
                why = f"the expression must match a whole name, as {linear[0]} is, and matches none"
                raise _wrong_targets(config, linear, why, key=key)


def _linear_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]


def _wrong_targets(config: ModelConfig, linear: list[str], why: str, *, key: str = "target_modules") -> ConfigError:
    names = sorted({name.rsplit(".", 1)[-1] for name in linear})
    return ConfigError(
        f"{KEY}.{key}={getattr(config, key)}: {why}. The model's linear layers are {', '.join(names)}; name some of them, or "
        "use all-linear, which leaves out the output layer."
    )


def _as_written(modules: Any) -> Any:
    return sorted(modules) if isinstance(modules, set | list) else modules


# --- names and files -------------------------------------------------------------------------------------------------


def _name_in_file(name: str) -> str:
    return f"base_model.model.{name.replace(f'.{POLICY}.', '.')}"


def _name_in_model(key: str, adapter: str) -> str:
    stem, _, part = key.removeprefix("base_model.model.").rpartition(".")
    return f"{stem}.{adapter}.{part}"


def _write_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    tensors = {_name_in_file(name): value.contiguous() for name, value in weights.items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
