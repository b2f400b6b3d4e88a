"""How many jobs there may be, how large the files of batches, and how long they are kept, as the configuration says it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field


class JobsConfig(BaseModel):
    """The part of `limits` that says so."""

    jobs_waiting: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=1000, description="Jobs that may wait; 0: no jobs are taken."
    )
    jobs_running: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=8, description="Jobs whose requests are sent at once; the others wait for them."
    )
    jobs_keep_s: Annotated[float, Field(gt=0, le=31_536_000)] = Field(
        default=86_400.0, description="How long a job that has ended is kept, with its result."
    )
    jobs_mib: Annotated[int, Field(ge=1, le=1 << 30)] = Field(
        default=1024,
        description="Disk for requests and results of jobs, and for the files of batches; the oldest results go first.",
    )
    files_mib: Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        default=200, description="Largest file of a batch (`POST /v1/files`), in MiB."
    )
    batch_lines: Annotated[int, Field(ge=1, le=10_000_000)] = Field(
        default=50_000, description="Requests that a batch may have."
    )
