"""A folder with what is done of a calibration, so that it goes on after it was stopped."""

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from reparax._tree.paths import Names, is_array

Values = Mapping[Names, Any]


class Folder:
    """Files with the raw values of each group that is done; without a path nothing is kept."""

    def __init__(self, who: str, path: str | os.PathLike[str] | None, about: Mapping[str, Any]) -> None:
        """Begins, or goes on.

        Raises:
          ValueError: If the folder is that of another calibration.
        """
        self._path = None if path is None else Path(path)
        if self._path is None:
            return
        self._path.mkdir(parents=True, exist_ok=True)
        file, about_now = self._path / "calibration.json", json.loads(json.dumps(about))
        if not file.exists():
            _write_file(file, json.dumps(about_now).encode())
        about_on_file = json.loads(file.read_text())
        if differing := [name for name in about_now if about_on_file.get(name) != about_now[name]]:
            raise ValueError(
                f"{who} got folder={str(self._path)!r}, which holds a calibration with {' and '.join(differing)} other "
                f"than these. Give another folder, or the same arguments."
            )

    def read(self, number: int) -> dict[Names, Any] | None:
        """The raw values of a group; None if it is not done."""
        file = self._path and self._path / f"{number:05}.npz"
        if file is None or not file.exists():
            return None
        with np.load(file) as archive:
            entries = json.loads(bytes(archive["entries"]))
            return {
                tuple(place): jnp.asarray(np.frombuffer(archive[f"{i}"].tobytes(), jnp.dtype(dtype)).reshape(shape))
                for i, (place, dtype, shape) in enumerate(entries)
            }

    def write(self, number: int, values: Values) -> None:
        """Keeps the raw values of a group. A file that is there is whole."""
        if self._path is None:
            return
        arrays = {place: np.asarray(x) for place, x in values.items() if is_array(x)}
        entries = json.dumps([(place, str(x.dtype), x.shape) for place, x in arrays.items()])
        buffers: dict[str, Any] = {f"{i}": _bytes_of(x) for i, x in enumerate(arrays.values())}
        file = self._path / f"{number:05}.npz"
        part = file.with_suffix(".part")
        with part.open("wb") as stream:
            np.savez(stream, entries=_bytes_of(np.frombuffer(entries.encode(), np.uint8)), **buffers)
        os.replace(part, file)


def checksum(arrays: Iterable[Any]) -> int:
    """A number that tells arrays of other numbers apart."""
    crc = 0
    for x in arrays:
        crc = zlib.crc32(_bytes_of(np.asarray(x)).data, crc)
    return crc


def _bytes_of(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of an array in the order of its entries, as uint8."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _write_file(file: Path, text: bytes) -> None:
    """Writes a file under another name and renames it, so that a file that is there is whole."""
    part = file.with_suffix(".part")
    part.write_bytes(text)
    os.replace(part, file)


def describe_units(units: Sequence[tuple[Any, int | None]]) -> list[Any]:
    """The groups in words, to compare them."""
    return [[*group.paths, index] for group, index in units]
