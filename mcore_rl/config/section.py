"""The base of every config section."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Probability = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Frozen and closed: what is not declared is refused, and the string under a field documents it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, validate_default=True
    )
