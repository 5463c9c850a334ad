"""What all sections of the configuration share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from zmqrl.errors import EndpointError
from zmqrl.transport import sockets

Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Mode = Literal["train", "eval"]


class Section(BaseModel):
    """A part of the configuration; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def checked_endpoint(value: str | None) -> str | None:
    """Refuse what is no endpoint, as pydantic wants it."""
    if value is not None:
        try:
            sockets.check_endpoint(value)
        except EndpointError as error:
            raise ValueError(str(error)) from None
    return value
