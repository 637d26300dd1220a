"""Values that look like a secret. The configuration is written to disk, sent to trackers and shown by Ray: none may be in it."""

import re
from collections.abc import Iterator
from typing import Any

KEY = re.compile(
    r"(?:^|[_.-])(?:(?:api|access|private|secret|wandb)[_-]?key|(?:api|access|auth|bearer|hf|hub)[_-]?token|secret|password|passwd"
    r"|credentials?)$",
    re.IGNORECASE,
)
# Tokens of Hugging Face, OpenAI and its like, GitHub, Slack and AWS; a URL with a password.
VALUE = re.compile(
    r"hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{30,}|xox[a-z]-[\w-]{10,}|AKIA[0-9A-Z]{16}|[a-z][a-z0-9+.-]*://[^/\s:@]+:[^/\s@]+@.*"
)


def secrets_in(value: Any, key: str = "") -> Iterator[str]:
    """Keys, in nested dicts and lists, of texts that look like a secret by their key or by themselves."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from secrets_in(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for item in value:
            yield from secrets_in(item, key)
    elif isinstance(value, str) and value and (KEY.search(key) or VALUE.fullmatch(value)):
        yield key
