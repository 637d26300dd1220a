"""What is wrong with a configuration, as it is told to the user."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: full key, value, and the rule with its way out."""

    key: str
    value: Any  # None where there is none to show
    text: str

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.key}: {self.text}"
        value = shown(self.value)
        return f"{self.key}={value if len(value) <= 200 else f'{value[:199]}…'}: {self.text}"


def shown(value: Any) -> str:
    """A value as a user writes it in an override."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list():
            return f"[{','.join(map(shown, value))}]"
        case dict():
            return f"{{{','.join(f'{key}:{shown(item)}' for key, item in value.items())}}}"
        case _:
            return str(value)
