"""A model's config.json from the Hugging Face Hub: cache, offline mode, HF_ENDPOINT and HF_TOKEN as huggingface_hub has them.

Only `config.json` is fetched; code from a repository is never run.
"""

from __future__ import annotations

from pathlib import Path

from memcalc.errors import InputError, one_line


def fetch_config(repo_id: str) -> Path:
    """The local path of the repository's config.json. InputError says what is missing: network, access, file or name."""
    from huggingface_hub import (
        constants,
        hf_hub_download,  # pyright: ignore[reportUnknownVariableType]
    )
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        return Path(hf_hub_download(repo_id, "config.json"))
    except GatedRepoError:
        raise InputError(f"--model {repo_id}: this Hub repository is gated; request access and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise InputError(
            f"--model {repo_id}: no such repository on {constants.ENDPOINT} (or it is private: set HF_TOKEN)"
        ) from None
    except HFValidationError as error:
        raise InputError(f"--model {one_line(repo_id)}: not a Hub id ({one_line(error)})") from None
    except OfflineModeIsEnabled:
        raise InputError(
            f"--model {repo_id}: offline mode is on (HF_HUB_OFFLINE) and config.json is not in the cache"
        ) from None
    except LocalEntryNotFoundError:
        offline = (
            "offline mode is on (HF_HUB_OFFLINE)"
            if constants.HF_HUB_OFFLINE
            else f"{constants.ENDPOINT} cannot be reached"
        )
        raise InputError(
            f"--model {repo_id}: {offline} and config.json is not in the cache; give a path or a bundled name"
        ) from None
    except EntryNotFoundError:
        raise InputError(f"--model {repo_id}: this Hub repository has no config.json") from None
    except Exception as error:  # a library's own failures (HTTP, disk, proxies) are still one line for the user
        raise InputError(
            f"--model {repo_id}: could not be fetched from {constants.ENDPOINT} ({one_line(error)})"
        ) from None
