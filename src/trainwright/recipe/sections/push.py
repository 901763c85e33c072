"""The section of the upload to the Hugging Face Hub."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from trainwright.recipe.sections.fields import Section


class PushSection(Section):
    """Upload of the finished model to the Hugging Face Hub. The token comes from HF_TOKEN or `hf auth login`."""

    repository: Annotated[str, StringConstraints(pattern=r"^[\w.-]+/[\w.-]+$")] = Field(
        description="Repository, owner/name; it is created if it does not exist."
    )
    private: bool = Field(True, description="Create the repository as private.")
    checkpoints: bool = Field(
        False,
        description="Also upload every checkpoint, to checkpoints/ in the repository, while the run goes on; if "
        "uploads take longer than the time between checkpoints, only the newest.",
    )
