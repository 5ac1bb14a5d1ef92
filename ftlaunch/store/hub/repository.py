"""What a repository of the Hub holds at one commit: asked through huggingface_hub, believed where it makes sense."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftlaunch.store.hub.errors import HubError, Passing, check_patience, no_access, seconds
from ftlaunch.store.hub.limits import ASK_SECONDS, Limits

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_SIZE = 1 << 50


@dataclass(frozen=True)
class RemoteFile:
    path: str  # in the repository, as it was told
    size: int  # bytes
    sha256: str  # of an LFS file, else empty
    blob: str  # git's id of any other file: SHA-1 over "blob <size>\\0" and the content

    @property
    def key(self) -> str:
        """Names the content: two files with one key are equal."""
        return self.sha256 or f"git-{self.blob}"


@dataclass(frozen=True)
class Repository:
    name: str  # org/name
    commit: str
    requested: str  # branch, tag or commit
    endpoint: str
    files: tuple[RemoteFile, ...]


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def is_offline() -> bool:
    """By the same variables, and the same words for yes, as the Hub's own client."""
    chosen = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return chosen.upper() in ("1", "ON", "YES", "TRUE")


def token() -> str | None:
    """HF_TOKEN, or what `hf auth login` has kept."""
    from huggingface_hub import get_token

    return get_token()


def look_up(name: str, revision: str, limits: Limits, say: Callable[[str], None]) -> Repository:
    """The files of `name` at the commit that `revision` means now. Raises HubError."""
    for attempt in range(1, limits.attempts + 1):
        try:
            return _believe(_ask(name, revision), name, revision)
        except Passing as trouble:
            check_patience(trouble.retry_after, "the Hub")
            if attempt == limits.attempts:
                raise HubError(
                    f"the Hub at {endpoint()} cannot be asked about {name}: {trouble} ({attempt} attempts)",
                    "try later; HF_ENDPOINT names another Hub, HF_HUB_OFFLINE=1 uses what is on this machine",
                ) from None
            wait = trouble.retry_after or limits.wait(attempt)
            say(f"The Hub does not answer as it should ({trouble}); next attempt in {wait:.0f} s")
            time.sleep(wait)
    raise AssertionError("unreachable")


def _ask(name: str, revision: str) -> ModelInfo:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        api = HfApi(endpoint=endpoint(), token=token())
        return api.model_info(name, revision=revision, files_metadata=True, timeout=ASK_SECONDS)
    except GatedRepoError:
        raise no_access(name, endpoint(), True, token() is not None) from None
    except RepositoryNotFoundError:
        raise no_access(name, endpoint(), False, token() is not None) from None
    except RevisionNotFoundError:
        raise HubError(f"{name} has no revision {revision[:80]!a}", f"ft pull {name}") from None
    except HFValidationError:
        raise HubError(f"{name} cannot be a model's name on the Hub", "ft list") from None
    except OfflineModeIsEnabled:
        raise HubError("HF_HUB_OFFLINE is set, so the Hub is not asked", "unset HF_HUB_OFFLINE") from None
    except HubError:
        raise
    except Exception as error:  # the client's transport changed between its releases, and its errors with it
        raise _judge(error, name) from None


def _judge(error: Exception, name: str) -> Exception:
    response: Any = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if status in (401, 403):
        return no_access(name, endpoint(), False, token() is not None)
    if status == 404:
        return HubError(f"the Hub at {endpoint()} has no model {name}", "check the name")
    if status is not None and 400 <= status < 500 and status not in (408, 429):
        return HubError(f"the Hub refuses to tell about {name} (HTTP {status})", "try later")
    if status is not None:
        return Passing(f"HTTP {status}", seconds(response.headers.get("Retry-After")))
    lines = str(error).strip().splitlines()
    return Passing(lines[0][:200] if lines else type(error).__name__)


def _believe(info: ModelInfo, name: str, revision: str) -> Repository:
    commit = str(info.sha)
    if not COMMIT.fullmatch(commit):
        raise Passing("it names no commit")
    if COMMIT.fullmatch(revision) and revision != commit:
        raise HubError(f"the Hub answers with another commit than {revision[:12]}", f"ft pull {name}")
    files = []
    for sibling in info.siblings or []:
        path, size, blob = str(sibling.rfilename), sibling.size, str(sibling.blob_id or "")
        sha256 = str(sibling.lfs.sha256).lower() if sibling.lfs is not None else ""
        hashed = SHA256.fullmatch(sha256) if sibling.lfs is not None else COMMIT.fullmatch(blob)
        if type(size) is not int or not 0 <= size < MAX_SIZE or not hashed:
            raise Passing("it gives a file no usable size or hash")
        files.append(RemoteFile(path, size, sha256, "" if sha256 else blob))
    return Repository(name, commit, revision, endpoint(), tuple(files))
