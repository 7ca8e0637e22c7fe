"""The base of kconv's pydantic models; it loads pydantic, which `import kconv` does not."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """A model that refuses unknown keys, and whose values cannot change."""

    model_config = ConfigDict(extra="forbid", frozen=True)
