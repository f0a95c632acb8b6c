"""A model's config.json from the Hugging Face Hub. huggingface_hub's cache, offline mode, HF_ENDPOINT and HF_TOKEN
apply.

Only `config.json` is fetched; code from a repository is never run.
"""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from memcalc.errors import InputError, one_line


class OutOfReach(InputError):
    """Raised if the Hub cannot be reached and the cache does not have the file. `why` is the reason, for people."""

    def __init__(self, repo_id: str, why: str) -> None:
        super().__init__(f"--model {repo_id}: {why}; give a path or a bundled name")
        self.why = why


def fetch_config(repo_id: str) -> Path:
    """Return the local path of the repository's config.json. Raises InputError that says what is missing: network,
    access, file or name."""
    try:
        with redirect_stdout(StringIO()):  # the library prints there what it could not import
            return _fetch(repo_id)
    except InputError:
        raise
    except Exception as error:  # a library's own failures (proxies, disk, a malformed endpoint) are one line as well
        raise InputError(f"--model {repo_id}: could not be fetched from the Hub ({one_line(error)})") from None


def _fetch(repo_id: str) -> Path:
    from huggingface_hub import (
        constants,
        get_hf_file_metadata,  # pyright: ignore[reportUnknownVariableType]
        hf_hub_download,  # pyright: ignore[reportUnknownVariableType]
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    def refused(why: str) -> InputError:
        return InputError(f"--model {repo_id}: {why}")

    endpoint = constants.ENDPOINT
    try:
        cached = try_to_load_from_cache(repo_id, "config.json")
    except HFValidationError as error:
        raise refused(f"not a Hub id ({one_line(error)})") from None
    if constants.HF_HUB_OFFLINE:
        if isinstance(cached, str):
            return Path(cached)
        raise OutOfReach(repo_id, "offline mode is on (HF_HUB_OFFLINE) and config.json is not in the cache")
    try:
        # One request without retries: a download of a missing file waits half a minute before it fails.
        get_hf_file_metadata(hf_hub_url(repo_id, "config.json"), timeout=10)
        return Path(hf_hub_download(repo_id, "config.json"))
    except GatedRepoError:
        raise refused("this Hub repository is gated; request access and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise refused(f"no such repository on {endpoint} (or it is private: set HF_TOKEN)") from None
    except EntryNotFoundError:
        raise refused("this Hub repository has no config.json") from None
    except HfHubHTTPError as error:
        raise refused(f"could not be fetched from {endpoint} ({one_line(error)})") from None
    except OSError as error:
        raise refused(f"could not be fetched from {endpoint} ({one_line(error)})") from None
    except Exception:  # the connection's own errors; their classes depend on the HTTP library in use
        if isinstance(cached, str):
            return Path(cached)
        raise OutOfReach(repo_id, f"{endpoint} cannot be reached and config.json is not in the cache") from None
