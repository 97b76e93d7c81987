"""Publishes a drafter folder on the Hugging Face Hub, and fetches one from there.

All files go up in one commit: a repository holds the whole folder or nothing new, and whoever publishes is told which. Tokens
are the client's business (HF_TOKEN, or `hf auth login`): none is read, passed on or printed here. What a folder holds is not known here.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from huggingface_hub import HfApi, get_token, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from specdraft.config import UserError

FILES = ["*.json", "*.safetensors", "*.bin", "README.md"]
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def require_repository(name: str) -> None:
    """Raises UserError for what cannot be the name of a repository: owner/name."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"repo {name!r}: {' '.join(str(error).split())}") from None
    if not REPOSITORY.fullmatch(name):
        raise UserError(f"repo {name!r}: allowed: owner/name, such as my-org/my-drafter")


def publish(
    folder: Path, repo: str, *, revision: str = "main", private: bool = False, message: str = "Add drafter"
) -> str:
    """Upload all files of `folder` as one commit to the branch `revision`, made where it is missing, and return the commit's URL.
    `private` is for a repository that is made here: one that exists keeps its visibility.

    Raises:
        UserError: no login, refused, conflict, server or connection failed; and what state the repository is in then.
    """
    require_repository(repo)
    if not sys.stderr.isatty():
        disable_progress_bars()  # a broken one would share its line with the error
    api, step, state, head = HfApi(), "log in", "nothing was changed", None
    try:
        api.whoami()
        step = "look for the repository"
        existed = api.repo_exists(repo)
        step = "create the repository"
        if not existed:
            state = "the repository may have been created; it has no files"
            api.create_repo(repo, private=private, exist_ok=True)
            state = "the repository was created and has no files yet"
        if revision != "main":
            step = "create the branch"
            state = f"the branch {revision} may have been made, no file was changed" if existed else state
            api.create_branch(repo, branch=revision, exist_ok=True)
        step = "read the branch"
        head = api.model_info(repo, revision=revision).sha
        step = "upload"
        if existed and revision == "main":
            state = "its files are as they were"
        return api.upload_folder(folder_path=folder, repo_id=repo, revision=revision, commit_message=message).commit_url
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"publish {repo}: stopped while it was to {step}; {state}, if that had not ended"
        ) from None
    except Exception as error:  # the client raises its own errors, those of two HTTP libraries, and OSError
        if step == "upload":
            state = state_after_upload(api, repo, revision, head, state)
        raise UserError(f"publish {repo}: could not {step}: {explain(error)}; {state}") from None


def state_after_upload(api: HfApi, repo: str, revision: str, head: str | None, state: str) -> str:
    """What the branch holds after an upload that failed: a commit whose answer was lost may have arrived, whatever was answered to the
    client's next try."""
    try:
        now = api.model_info(repo, revision=revision).sha
    except Exception:
        return f"it is not known whether the files arrived: look at {api.endpoint}/{repo} before you try again"
    if now == head:
        return f"nothing was published, {state}"
    return f"but the branch {revision} moved to {now}: the files may have arrived; look at {api.endpoint}/{repo} before you try again"


def root(error: BaseException) -> BaseException:
    """The Hub's answer where an error was raised from one, else the error itself."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, HfHubHTTPError):
        found = found.__cause__
    return found or error


def explain(error: Exception) -> str:
    """One line, without the token should a server send it back."""
    error = root(error)
    if isinstance(error, LocalTokenNotFoundError):
        return "no token: run `hf auth login`, or set HF_TOKEN"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set: unset it"
    if not isinstance(error, HfHubHTTPError):
        return without_token(f"the connection failed ({type(error).__name__}: {error})")
    status = error.response.status_code
    said = without_token(error.server_message or "")
    return f"the Hub answered {status}{f' ({said})' if said else ''}: {ADVICE.get(status, 'try again later')}"


def without_token(text: str, limit: int = 200) -> str:
    text, token = " ".join(text.split()), get_token()
    text = text.replace(token, "***") if token else text
    return text if len(text) <= limit else text[:limit] + "..."


ADVICE = {
    400: "the Hub does not take these files; read its reason",
    401: "the token is missing, wrong or expired; run `hf auth login`, or set HF_TOKEN",
    403: "the token may not write there; give one with write access, or another owner",
    404: "no such repository or branch, or the token may not see it",
    409: "somebody else changes the repository at this moment; look at it, and try again",
    412: "the branch moved meanwhile; try again",
    413: "too large for the Hub",
    429: "too many requests; wait some minutes",
}


def fetch(source: str, revision: str | None = None) -> Path:
    """A drafter's folder: `source` itself where it is one, else the files of that Hub repository. Code is not fetched.

    Raises:
        UserError: no such folder, and the Hub does not have it or cannot be reached.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if not REPOSITORY.fullmatch(source):
        raise UserError(f"drafter {source}: no such folder; give a folder, or owner/name of a Hub repository")
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=FILES))
    except Exception as error:
        raise UserError(
            f"drafter {source}: no such folder, and the Hub does not have it or cannot be reached: {explain(error)}"
        ) from None
