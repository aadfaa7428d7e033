"""Where a checkpoint's files come from: a folder or a Hub id. safetensors only, and headers before any tensor data."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

from eaglex.errors import CheckpointError
from eaglex.fields import read_json

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
_INDEX_BYTES = 64 * 2**20  # a target with thousands of experts names a hundred thousand tensors
_HUB_SECONDS = 20.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_ITEMSIZE = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor as its file's header describes it; nothing of its data has been read."""

    file: Path
    name: str
    dtype: str  # safetensors' spelling: BF16, F16, F32, I64, BOOL, F8_E4M3...
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of data (types below one byte count as one)."""
        return self.numel * _ITEMSIZE.get(self.dtype, 1)

    def __str__(self) -> str:
        return f"{self.file.name}: {self.name}"

    def read(self) -> torch.Tensor:
        """The tensor itself, on the CPU."""
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(self.name)
        return tensor


class Source:
    """The files of one checkpoint. `label` is what the user called it."""

    def __init__(self, label: str, names: frozenset[str]) -> None:
        self.label, self.names = label, names

    def path(self, name: str) -> Path:
        """The local path of one of `names`; a Hub source downloads it."""
        raise NotImplementedError

    def tensors(self) -> dict[str, TensorInfo]:
        """Name → header entry of every tensor, from the index's shards or the one safetensors file."""
        if INDEX in self.names:
            shards = self.index()
            found: dict[str, TensorInfo] = {}
            for shard in sorted(set(shards.values())):
                found |= _header(self.path(shard), {name for name, file in shards.items() if file == shard})
            return found
        return _header(self.path(self.weights_file()), None)

    def tensor(self, names: tuple[str, ...]) -> TensorInfo | None:
        """The first of `names` that is there; opens only the shard that holds it."""
        if INDEX in self.names:
            shards = self.index()
            for name in names:
                if name in shards:
                    return _header(self.path(shards[name]), None).get(name)
            return None
        present = _header(self.path(self.weights_file()), None)
        return next((present[name] for name in names if name in present), None)

    def index(self) -> dict[str, str]:
        """Tensor name → shard file, both checked: a shard is a plain file name of this checkpoint."""
        path = self.path(INDEX)
        shards = read_json(path, max_bytes=_INDEX_BYTES).child("weight_map")
        if shards is None or not shards.data:
            raise CheckpointError(f"{path}: weight_map: expected an object of tensor names, got none")
        checked: dict[str, str] = {}
        for name, file in shards.data.items():
            if not isinstance(file, str) or file not in self.names or not file.endswith(".safetensors"):
                raise CheckpointError(
                    f"{path}: weight_map[{name!r}]: expected a safetensors file of {self.label}, got {file!r}"
                )
            checked[name] = file
        return checked

    def weights_file(self) -> str:
        """`model.safetensors`, or the only safetensors file there is."""
        if "model.safetensors" in self.names:
            return "model.safetensors"
        found = sorted(name for name in self.names if name.endswith(".safetensors"))
        if len(found) == 1:
            return found[0]
        if found:
            raise CheckpointError(
                f"{self.label}: expected model.safetensors or {INDEX}, got {len(found)} others: {', '.join(found[:4])}"
            )
        pickles = sorted(name for name in self.names if name.endswith(_PICKLES))
        if pickles:
            raise CheckpointError(
                f"{self.label}: expected safetensors, got {pickles[0]}: a pickle can run code when it is opened, so "
                "eaglex never does. If you trust it, convert it once, in its folder: "
                'python -c "from torch import load; from safetensors.torch import save_file; '
                f"save_file({{k: v.contiguous() for k, v in load('{pickles[0]}', 'cpu', weights_only=True).items()}}, "
                f"'model.safetensors')\""
            )
        raise CheckpointError(
            f"{self.label}: expected model.safetensors, got {', '.join(sorted(self.names)[:8]) or 'no files'}"
        )


class Folder(Source):
    """A checkpoint in a local folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), frozenset(p.name for p in folder.iterdir() if p.is_file()))
        self.folder = folder

    def path(self, name: str) -> Path:
        return self.folder / name


class Hub(Source):
    """A checkpoint on the Hugging Face Hub, fetched file by file; HF_HUB_OFFLINE=1 reads the local cache alone."""

    def __init__(self, repo: str, revision: str | None) -> None:
        self.repo, self.revision = repo, revision
        super().__init__(repo, frozenset(self._list()))

    def _list(self) -> list[str]:
        from huggingface_hub import HfApi, constants, snapshot_download

        try:
            if constants.HF_HUB_OFFLINE:
                folder = Path(snapshot_download(self.repo, revision=self.revision, local_files_only=True))
                return [p.name for p in folder.iterdir() if p.is_file()]
            siblings = HfApi().model_info(self.repo, revision=self.revision, timeout=_HUB_SECONDS).siblings
            return [s.rfilename for s in siblings or []]
        except Exception as error:
            raise self._failed("a folder or a reachable Hub id", error) from error

    def path(self, name: str) -> Path:
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(self.repo, name, revision=self.revision))
        except Exception as error:
            raise self._failed(name, error) from error

    def _failed(self, expected: str, error: Exception) -> CheckpointError:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return CheckpointError(f"{self.repo}: expected {expected}, got {type(error).__name__}: {first}")


def open_source(path_or_hub_id: str | Path, revision: str | None = None) -> Source:
    """A folder if there is one of that name, else a Hub id `owner/name`; CheckpointError otherwise."""
    path = Path(path_or_hub_id).expanduser()
    if not str(path_or_hub_id):
        raise CheckpointError("path: expected a folder or a Hub id owner/name, got ''")
    if path.is_dir():
        return Folder(path)
    if path.exists():
        raise CheckpointError(f"{path}: expected a folder with {CONFIG} and safetensors, got a file")
    if isinstance(path_or_hub_id, str) and _HUB_ID.fullmatch(path_or_hub_id):
        return Hub(path_or_hub_id, revision)
    raise CheckpointError(f"{path}: expected a folder or a Hub id owner/name, got neither")


def _header(path: Path, expected: set[str] | None) -> dict[str, TensorInfo]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
            found = {
                name: TensorInfo(file=path, name=name, dtype=str(s.get_dtype()), shape=tuple(s.get_shape()))
                for name, s in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: expected a whole safetensors file, got {error}") from None
    if expected is not None and found.keys() != expected:
        name = min(found.keys() ^ expected)
        raise CheckpointError(
            f"{path}: {name}: expected exactly the tensors that {INDEX} names for this file, "
            f"got it {'unlisted' if name in found else 'missing'}"
        )
    return found
