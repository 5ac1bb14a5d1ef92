"""A model folder in Hugging Face form, or a GGUF file: its configuration, its template and where its tensors lie.

Torch-free; the front, the command line and the engine all open models through it. Nothing in the folder is
executed: `auto_map` and other references to code are never looked at, pickle files are never opened.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from ftengine.errors import CheckpointError
from ftengine.weights.files import MEBIBYTE, FolderFiles, ModelFiles, locate, read_json_object
from ftengine.weights.gguf_model import SUFFIX as GGUF_SUFFIX
from ftengine.weights.gguf_model import GgufFiles, open_gguf
from ftengine.weights.header import TensorEntry, read_header

__all__ = ["Checkpoint", "TensorEntry"]

MAX_CONFIG_BYTES = 16 * MEBIBYTE
MAX_INDEX_BYTES = 64 * MEBIBYTE
MAX_TOKENIZER_BYTES = 128 * MEBIBYTE
MAX_TEMPLATE_BYTES = 4 * MEBIBYTE
MAX_COUNT = 1 << 31  # of positions, of vocabulary entries

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja")
VOCABULARY_FILES = (TOKENIZER_FILE, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


class Checkpoint:
    """What a model says about itself. Made by `open`; does not change. path: the folder, or the GGUF file."""

    def __init__(self, path: Path, config: dict[str, Any], files: ModelFiles) -> None:
        self.path = path
        self.config = config
        self._files = files
        self.architecture = _architecture(path, config)
        text_config = config.get("text_config", config)
        if not isinstance(text_config, dict):
            raise CheckpointError(f"text_config in {path / 'config.json'} is not an object")
        self.text_config: dict[str, Any] = text_config
        self.max_context = self._count("max_position_embeddings")
        self.vocab_size = self._count("vocab_size")
        self.generation_config = files.json("generation_config.json", MAX_CONFIG_BYTES) or {}
        self.tokenizer_config = files.json("tokenizer_config.json", MAX_CONFIG_BYTES) or {}
        self.chat_template = self._chat_template()

    @staticmethod
    def open(path: str | Path) -> Checkpoint:
        """Reads the folder's JSON files and template; weights are looked at by `tensors()` only. Of a GGUF file the
        header, which has all of that.

        Raises CheckpointError: no such folder, no config.json, or content that cannot be a model's.
        """
        folder = Path(path).absolute()
        if folder.name.lower().endswith(GGUF_SUFFIX) and not folder.is_dir():
            gguf = open_gguf(folder)
            return Checkpoint(folder, gguf.config, gguf)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder", "ft list")
        config = read_json_object(folder, "config.json", MAX_CONFIG_BYTES)
        if config is None:
            raise CheckpointError(f"{folder} holds no config.json, so it is not a model folder", "ft list")
        return Checkpoint(folder, config, FolderFiles(folder))

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids, from generation_config.json, else config.json; the tokenizer's own one comes last."""
        for source in (self.generation_config, self.text_config, self.config):
            ids = _token_ids(source.get("eos_token_id"))
            if ids:
                break
        own = self._tokenizer_eos()
        if own is not None and own not in ids:
            ids = (*ids, own)
        outside = [token for token in ids if not 0 <= token < self.vocab_size]
        if outside:
            raise CheckpointError(f"{self.path} names the end-of-sequence id {outside[0]}, outside its vocabulary")
        return ids

    def tokenizer(self) -> Path | bytes:
        """tokenizer.json: where it lies (or should), or its content where the model has it in another form."""
        if self.gguf is None:
            return self.path / TOKENIZER_FILE
        return self.gguf.content(TOKENIZER_FILE, MAX_TOKENIZER_BYTES) or b""

    def small_files(self) -> dict[str, bytes]:
        """Everything but the weights that serving needs, by name: what a conversion puts beside them."""
        limits = {
            **dict.fromkeys(CONFIG_FILES, MAX_CONFIG_BYTES),
            **dict.fromkeys(VOCABULARY_FILES, MAX_TOKENIZER_BYTES),
        }
        contents = {name: self._files.content(name, limit) for name, limit in limits.items()}
        return {name: content for name, content in contents.items() if content is not None}

    @property
    def gguf(self) -> GgufFiles | None:
        """The file's header and metadata if this is a GGUF file."""
        return self._files if isinstance(self._files, GgufFiles) else None

    def tensors(self) -> dict[str, TensorEntry]:
        """Every tensor of the checkpoint by its name on disk, headers checked. Raises CheckpointError."""
        return self._tensors

    def weight_bytes(self) -> int:
        """Size of all tensors on disk, in bytes."""
        return sum(entry.nbytes for entry in self._tensors.values())

    @cached_property
    def _tensors(self) -> dict[str, TensorEntry]:
        if self.gguf is not None:
            return {
                name: TensorEntry(name, tensor.type.name, tensor.shape, tensor.file, tensor.start, tensor.end)
                for name, tensor in self.gguf.header.tensors.items()
            }
        weight_map = self._weight_map()
        shards = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_FILE]
        tensors: dict[str, TensorEntry] = {}
        for shard in shards:
            for name, entry in read_header(self._shard(shard)).items():
                if name in tensors:
                    raise CheckpointError(f"the tensor {name} is in both {tensors[name].file.name} and {shard}")
                if weight_map is not None and weight_map.get(name, shard) != shard:
                    raise CheckpointError(f"the tensor {name} is in {shard}, not where {INDEX_FILE} says")
                tensors[name] = entry
        for name in weight_map or ():
            if name not in tensors:
                raise CheckpointError(f"the tensor {name} is listed in {INDEX_FILE} but is in no file")
        return tensors

    def _weight_map(self) -> dict[str, str] | None:
        index = read_json_object(self.path, INDEX_FILE, MAX_INDEX_BYTES)
        if index is None:
            return None
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self.path / INDEX_FILE} has no weight_map")
        for shard in weight_map.values():
            if not _plain_file_name(shard):
                raise CheckpointError(f"{self.path / INDEX_FILE} names the file {str(shard)[:80]!r}, which is refused")
        return weight_map

    def _shard(self, name: str) -> Path:
        found = locate(self.path, name)
        if found is not None:
            return found
        pickles = sorted(file.name for file in self.path.iterdir() if file.suffix in PICKLE_SUFFIXES)
        if pickles and not any(self.path.glob("*.safetensors")):
            raise CheckpointError(
                f"{self.path} has its weights in {pickles[0]} only, a pickle file, which may run code when it is read; "
                "safetensors are needed"
            )
        raise CheckpointError(f"{self.path} is incomplete: {name} is missing", "ft pull")

    def _chat_template(self) -> str | None:
        template: Any = self._files.text("chat_template.jinja", MAX_TEMPLATE_BYTES)
        if template is None:
            template = self.tokenizer_config.get("chat_template")
        if isinstance(template, list):  # an older form: several templates by name
            defaults = [item for item in template if isinstance(item, dict) and item.get("name") == "default"]
            template = defaults[0].get("template") if defaults else None
        if template is not None and not isinstance(template, str):
            raise CheckpointError(f"the chat template of {self.path} is not text")
        return template

    def _count(self, key: str) -> int:
        value = self.text_config.get(key, self.config.get(key))
        if type(value) is not int or not 0 < value <= MAX_COUNT:
            raise CheckpointError(f"{key} in {self.path / 'config.json'} is {str(value)[:40]}, not a usable number")
        return value

    def _tokenizer_eos(self) -> int | None:
        token = self.tokenizer_config.get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if not isinstance(token, str):
            return None
        decoder = self.tokenizer_config.get("added_tokens_decoder")
        for key, value in decoder.items() if isinstance(decoder, dict) else ():
            if isinstance(value, dict) and value.get("content") == token and key.isdecimal() and len(key) < 10:
                return int(key)
        if self.gguf is not None:  # its end tokens are ids already
            return None
        content = self._files.content(TOKENIZER_FILE, MAX_TOKENIZER_BYTES)
        if content is None:
            return None
        try:
            tokenizer = msgspec.json.decode(content, type=_AddedTokens)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointError(f"{self.path / 'tokenizer.json'} is not a tokenizer's: {error}") from None
        return next((added.id for added in tokenizer.added_tokens if added.content == token), None)


def _architecture(path: Path, config: dict[str, Any]) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise CheckpointError(f"{path / 'config.json'} does not name an architecture")
    return architectures[0]


def _token_ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(item for item in values if type(item) is int))


def _plain_file_name(name: Any) -> bool:
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and name.isprintable()
        and len(name) <= 255
        and not any(part in name for part in ("/", "\\", "..", ":"))
    )
