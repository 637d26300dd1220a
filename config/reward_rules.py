"""Rules of the reward: the user's function, which is looked up without running its file, and the reward model."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from config.faults import Fault
from config.schema import GovernorConfig


def reward_rules(config: GovernorConfig) -> Iterator[Fault]:
    """Rules of `reward`."""
    custom, model = config.reward.custom_reward_function, config.reward.reward_model
    if custom.path is not None:
        yield from _reward_function_faults(Path(custom.path), custom.name, batched=custom.batched)
    elif custom.batched:
        yield Fault("reward.custom_reward_function.batched", True, "needs reward.custom_reward_function.path")
    overlong, limit = config.reward.reward_kwargs.overlong_buffer_cfg, config.data.max_response_length
    key = "reward.reward_kwargs.overlong_buffer_cfg"
    if overlong.enable and config.reward.reward_manager.name != "dapo":
        yield Fault(f"{key}.enable", True, "needs reward.reward_manager.name=dapo")
    if overlong.enable and not (overlong.len and overlong.len <= limit):
        value = "null" if overlong.len is None else overlong.len
        yield Fault(f"{key}.len", value, f"must be from 1 to data.max_response_length={limit} tokens")
    if model.enable:
        yield from _reward_model_rules(config)


def _reward_model_rules(config: GovernorConfig) -> Iterator[Fault]:
    custom, model, key = config.reward.custom_reward_function, config.reward.reward_model, "reward.reward_model"
    if model.model_path is None or not (Path(model.model_path) / "config.json").is_file():
        yield Fault(
            f"{key}.model_path",
            model.model_path or "null",
            "must be the folder of a Hugging Face sequence-classification model (with a config.json); nothing is downloaded",
        )
    if model.combine == "replace" and custom.path is not None:
        yield Fault(
            f"{key}.combine",
            "replace",
            f"would leave reward.custom_reward_function.path={custom.path} without effect: set it to null, or combine=add",
        )
    if model.coef == 0 and model.combine == "replace":
        yield Fault(f"{key}.coef", 0, "leaves no reward with combine=replace")
    if model.fsdp_config.optimizer_offload:
        yield Fault(f"{key}.fsdp_config.optimizer_offload", True, "the reward model is never trained: set it to false")
    if model.use_dynamic_bsz and model.max_length and model.forward_max_token_len_per_gpu < model.max_length:
        yield Fault(
            f"{key}.forward_max_token_len_per_gpu",
            model.forward_max_token_len_per_gpu,
            f"must hold the longest conversation, reward.reward_model.max_length={model.max_length} tokens",
        )


def _reward_function_faults(path: Path, name: str, *, batched: bool) -> Iterator[Fault]:
    key = "reward.custom_reward_function"
    if not path.is_file():
        yield Fault(f"{key}.path", path, "no such file")
        return
    try:
        body = ast.parse(path.read_bytes()).body
        names = _module_names(body)
    except (SyntaxError, ValueError) as error:
        yield Fault(f"{key}.path", path, f"is not Python: {error}")
        return
    if name not in names and "*" not in names:
        functions = sorted(found for found, is_function in names.items() if is_function)
        yield Fault(f"{key}.name", name, f"{path} defines no such function; it has {', '.join(functions) or 'none'}")
    if batched and any(isinstance(node, ast.AsyncFunctionDef) and node.name == name for node in body):
        yield Fault(
            f"{key}.batched", True, f"{name} is an async def, which scores row by row: set it to false, or use def"
        )


def _module_names(body: Sequence[ast.stmt]) -> dict[str, bool]:
    """Names that a module's statements bind, those in `if`, `try` and `with` too, and whether each is a function."""
    names: dict[str, bool] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = True
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name): False for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id: False for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        else:
            inner = [getattr(node, field, []) for field in ("body", "orelse", "finalbody")]
            inner += [handler.body for handler in getattr(node, "handlers", [])]
            for statements in inner:
                names |= _module_names(statements)
    return names
