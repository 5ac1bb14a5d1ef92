"""The Hugging Face cache as the library's own scan sees it, and only what can be served from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir, try_to_load_from_cache

from ftlaunch.store import hf_cache
from tests.store import small_models

OTHER = "f" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(root))
    return root


def test_finds_what_the_library_finds(cache: Path, tmp_path: Path) -> None:
    model = small_models.write(tmp_path / "model", shards=2)
    snapshot = small_models.cache(cache, "org/name", model)
    assert hf_cache.find("org/name") == snapshot
    assert str(snapshot / "config.json") == try_to_load_from_cache("org/name", "config.json", cache_dir=cache)
    (repository,) = scan_cache_dir(cache).repos
    (found,) = hf_cache.models()
    assert (found.repo, found.revision) == (repository.repo_id, small_models.COMMIT)
    assert found.bytes == repository.size_on_disk


def test_revisions(cache: Path, tmp_path: Path) -> None:
    model = small_models.write(tmp_path / "model")
    snapshot = small_models.cache(cache, "org/name", model, main=False)
    assert hf_cache.find("org/name") is None
    assert hf_cache.find("org/name", small_models.COMMIT) == snapshot
    assert [item.path for item in hf_cache.models()] == [snapshot]
    newer = small_models.cache(cache, "org/name", model, revision=OTHER)
    assert hf_cache.find("org/name") == newer
    assert hf_cache.find("org/name", "main") == newer
    assert hf_cache.find("org/name", "no-such-branch") is None
    for hostile in ("../../../etc", "/etc/passwd", "a/../../b", "", "x" * 300, "a\0b"):
        assert hf_cache.find("org/name", hostile) in (None, newer if not hostile else None)


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json", "model-00002-of-00002.safetensors"])
def test_an_incomplete_snapshot_is_not_there(lost: str, cache: Path, tmp_path: Path) -> None:
    snapshot = small_models.cache(cache, "org/name", small_models.write(tmp_path / "model", shards=2))
    (snapshot / lost).resolve().unlink()
    assert hf_cache.find("org/name") is None
    assert hf_cache.models() == []


def test_pickles_and_links_out_of_the_cache_are_no_models(cache: Path, tmp_path: Path) -> None:
    model = small_models.write(tmp_path / "model")
    snapshot = small_models.cache(cache, "org/pickle", model)
    (snapshot / "model.safetensors").rename(snapshot / "pytorch_model.bin")
    snapshot = small_models.cache(cache, "org/link", model)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(model / "model.safetensors")
    assert hf_cache.models() == []


@pytest.mark.parametrize(
    "name", ["", "name", "org/", "/name", "../x", "org/../x", "a/b/c", "org/na me", "models--a--b"]
)
def test_names_that_are_none(name: str, cache: Path) -> None:
    cache.mkdir()
    assert hf_cache.find(name) is None


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hf_cache.root() == tmp_path / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert hf_cache.root() == Path("/xdg/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "/hf")
    assert hf_cache.root() == Path("/hf/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "/cache")
    assert hf_cache.root() == Path("/cache")
    assert hf_cache.models() == []
