"""The base of kconv's pydantic models; it loads pydantic, which `import kconv` does not."""

from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter


class StrictModel(BaseModel):
    """A model that refuses unknown keys, and whose values cannot change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@cache
def adapter(kind: type) -> TypeAdapter[Any]:
    """Return what validates values as a dataclass; pydantic takes milliseconds to make it."""
    return TypeAdapter(kind)
