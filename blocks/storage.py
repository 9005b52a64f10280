"""Where task results and the final artifacts go when workers do not share a folder, as a Prefect block."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import fsspec
from prefect.blocks.fields import SecretDict
from prefect.filesystems import WritableFileSystem
from pydantic import Field


class RunStorage(WritableFileSystem):
    """A shared folder or any fsspec path (s3://, gs://, file://), reachable by every worker."""

    _block_type_name = "Run Storage"
    _block_type_slug = "run-storage"
    _description = "Shared storage of task results and final artifacts: a folder or any fsspec path, reachable by every worker."
    _code_example = 'RunStorage(url="s3://team/eyas").save("team")'

    url: str = Field(description="Folder or fsspec URL, for instance /mnt/shared/eyas or s3://team/eyas.")
    options: SecretDict = Field(
        default=SecretDict({}), description="Arguments of the file system, for instance key and secret; kept secret."
    )

    async def read_path(self, path: str) -> bytes:
        """The bytes under `path`; raises `ValueError` if there is nothing."""
        return await asyncio.to_thread(self._read, path)

    async def write_path(self, path: str, content: bytes) -> None:
        """Write bytes under `path`; a reader sees the old bytes or the new."""
        await asyncio.to_thread(self._write, path, content)

    async def keep(self, files: dict[str, Path]) -> None:
        """Copy local files to the names given."""
        for name, path in files.items():
            await asyncio.to_thread(self._copy, name, path)

    def _read(self, path: str) -> bytes:
        system, root = self._system()
        try:
            content: bytes = system.cat_file(_inside(root, path))
        except FileNotFoundError as error:
            raise ValueError(f"{path} does not exist in {self.url}") from error
        return content

    def _write(self, path: str, content: bytes) -> None:
        system, root = self._system()
        address = _inside(root, path)
        system.makedirs(address.rpartition("/")[0], exist_ok=True)
        with system.transaction:
            system.pipe_file(address, content)

    def _copy(self, name: str, path: Path) -> None:
        system, root = self._system()
        address = _inside(root, name)
        system.makedirs(address.rpartition("/")[0], exist_ok=True)
        system.put_file(str(path), address)

    def _system(self) -> tuple[Any, str]:
        system, root = fsspec.core.url_to_fs(self.url, **self.options.get_secret_value())
        return system, root.rstrip("/")


def _inside(root: str, path: str) -> str:
    parts = [part for part in path.replace(root, "", 1).split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"{path} leaves the storage {root}")
    return "/".join([root, *parts])
