"""Publishing an exported student on the Hugging Face Hub, once it has passed the parity gate."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    get_token,
    validate_repo_id,
)

from linearize.convert.card import PLACEHOLDER, render_card
from linearize.convert.card_sections import FIGURES, REPORT
from linearize.convert.checkpoint import INDEX, weight_files
from linearize.convert.errors import ConversionError
from linearize.convert.export import PARITY, RECORD, SHIM
from linearize.convert.verify import Check, GateReport, verify_in_fresh_process

CARD = "README.md"
MAIN = "main"
_CONFIG = "config.json"
_LICENCES = ("LICENSE*", "NOTICE*", "USE_POLICY*")
_MEASURED = (REPORT, "evaluation.json", f"{FIGURES}/*.svg")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|" + re.escape(INDEX))
_KEPT = "what was sent is kept; push again to send the rest"
_INVALID_TOKEN = "log in with `hf auth login` or set HF_TOKEN to a token with write access"


@dataclass(frozen=True)
class PushResult:
    """What was uploaded, or with `dry_run` would have been.

    Attributes:
        url: the repository's page.
        files: name and size in bytes of every file of the student.
        revision: the branch.
        commit: the commit that holds the student; None after a dry run.
    """

    url: str
    files: list[tuple[str, int]]
    revision: str
    commit: str | None


def push(
    directory: str | Path,
    repo_id: str,
    private: bool = False,
    revision: str | None = None,
    dry_run: bool = False,
    force: bool = False,
    token: str | None = None,
) -> PushResult:
    """Upload an exported student in one commit. Run again after an interruption it sends what is missing.

    Only files that belong to a student are sent. If README.md is missing a card is made from the record; the
    folder itself is not changed.

    Args:
        directory: what `export` wrote.
        repo_id: `user/name`; created if it does not exist.
        private: create it as private.
        revision: branch to commit to, created if need be; default main.
        dry_run: do everything but touch the Hub.
        force: upload in spite of a failed parity gate, or over a repository that holds another model.
        token: default the one of HF_TOKEN or `hf auth login`.

    Raises:
        ConversionError: no exported student, a malformed id, a failed gate, a refusal by the Hub, no network.
    """
    folder, branch = Path(directory), revision or MAIN
    _check_repo_id(repo_id)
    record = _read_record(folder)
    names = _student_files(folder, record)
    api = HfApi(token=token)
    exists = False if dry_run else _check_repository(api, repo_id, private, force)
    gate = _run_gate(folder, force)
    card = _card(folder, record, gate).replace(PLACEHOLDER, repo_id).encode()
    files = sorted({**{name: (folder / name).stat().st_size for name in names}, CARD: len(card)}.items())
    if dry_run:
        return PushResult(f"{constants.ENDPOINT}/{repo_id}", files, branch, None)

    with _explained(repo_id), _bars_only_on_a_terminal():
        if not exists:
            api.create_repo(repo_id, private=private or None, exist_ok=True)
        if branch != MAIN:
            api.create_branch(repo_id, branch=branch, exist_ok=True)
        # Weights of an earlier upload would be loaded in place of the new ones if shards differ.
        stale = [name for name in api.list_repo_files(repo_id, revision=branch) if _WEIGHTS.fullmatch(name)]
        commit = api.create_commit(
            repo_id,
            [
                *(CommitOperationAdd(name, folder / name) for name in names),
                CommitOperationAdd(CARD, card),
                *(CommitOperationDelete(name) for name in stale if name not in names),
            ],
            commit_message="Upload a linearized student",
            commit_description=_gate_summary(gate),
            revision=branch,
        )
    return PushResult(f"{api.endpoint}/{repo_id}", files, branch, commit.oid)


# ---------------------------------------------------------------------- the folder


def _read_record(folder: Path) -> dict[str, Any]:
    """What a card is made from: the summary of the conversion if there is one, and at least the plan."""
    if not (folder / RECORD).is_file() or not (folder / _CONFIG).is_file():
        missing = RECORD if (folder / _CONFIG).is_file() else _CONFIG
        raise ConversionError(f"{folder} is not an exported student: it has no {missing}")
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        layers = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))["linearize"]["layers"]
        return {"plan": layers, **record, **(record.get("summary") or {})}
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConversionError(f"{folder} is not an exported student: damaged JSON ({reason})") from None


def _student_files(folder: Path, record: dict[str, Any]) -> list[str]:
    """Names of what belongs to the student, without the card."""
    names = {_CONFIG, RECORD, PARITY, SHIM, INDEX, *record.get("files", ())}
    names |= {file.name for file in weight_files(folder)}
    names |= {file.name for pattern in _LICENCES for file in folder.glob(pattern)}
    own = {name for name in names if Path(name).name == name and (folder / name).is_file()}
    measured = {file.relative_to(folder).as_posix() for pattern in _MEASURED for file in folder.glob(pattern)}
    return sorted(own | measured)


def _run_gate(folder: Path, force: bool) -> GateReport | None:
    """The gate's report; None if it could not run and `force` says to go on."""
    try:
        report = verify_in_fresh_process(folder)
    except ConversionError:
        if force:
            return None
        raise
    if (failed := _failed(report)) and not force:
        first = f"{failed[0].name} ({failed[0].value:.3g}, limit {failed[0].limit:.3g})"
        raise ConversionError(
            f"{folder} fails {len(failed)} of {len(report.checks)} checks of the parity gate, first {first}; "
            "nothing was uploaded. `linearize verify` shows all; --force uploads it all the same"
        )
    return report


def _failed(report: GateReport) -> list[Check]:
    return [check for check in report.checks if not check.passed]


def _gate_summary(report: GateReport | None) -> str:
    if report is None:
        return "The parity gate could not run"
    if failed := _failed(report):
        return f"Parity gate failed: {', '.join(check.name for check in failed)}"
    return f"Parity gate: {len(report.checks)} checks passed"


def _card(folder: Path, record: dict[str, Any], gate: GateReport | None) -> str:
    if (folder / CARD).is_file():
        return (folder / CARD).read_text(encoding="utf-8")
    return render_card({**record, "gate": gate.to_json()} if gate else record)


# ---------------------------------------------------------------------- the Hub


def _check_repo_id(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
        valid = repo_id.count("/") == 1
    except HFValidationError:
        valid = False
    if not valid:
        raise ConversionError(
            f"{repo_id!r} is not a Hub id of the form user/name (letters, digits, '-', '_', '.'; 96 at most)"
        )


def _check_repository(api: HfApi, repo_id: str, private: bool, force: bool) -> bool:
    """Whether the repository exists already. Refuses what cannot succeed before the gate takes its time."""
    if not api.token and not get_token():
        raise ConversionError(f"no Hub token to upload to {repo_id} with; {_INVALID_TOKEN}")
    with _explained(repo_id):
        try:
            info = api.model_info(repo_id)
        except RepositoryNotFoundError:
            return False
    if private and not info.private:
        raise ConversionError(f"{repo_id} exists and is public; choose another id or change its settings")
    names = {file.rfilename for file in info.siblings or ()}
    if _CONFIG in names and RECORD not in names and not force:
        raise ConversionError(f"{repo_id} holds another model; choose another id, or replace it with --force")
    return True


@contextmanager
def _bars_only_on_a_terminal() -> Iterator[None]:
    quiet = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        yield
    finally:
        if quiet:
            enable_progress_bars()


@contextmanager
def _explained(repo_id: str) -> Iterator[None]:
    """Turns whatever goes wrong on the way to the Hub into one line with cause and fix."""
    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise ConversionError(_explain(error, repo_id)) from error


def _explain(error: BaseException, repo_id: str) -> str:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (HTTPError, OfflineModeIsEnabled)):
        cause = cause.__cause__  # uploads wrap what went wrong
    if isinstance(cause, OfflineModeIsEnabled):
        return f"cannot upload to {repo_id}: HF_HUB_OFFLINE is set; unset it, or use --dry-run"
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        if status == 401:
            return f"the Hub does not accept the token for {repo_id} (401); {_INVALID_TOKEN}"
        if status == 403:
            owner = repo_id.split("/")[0]
            return f"the token may not write to {repo_id} (403); use one with write access to {owner}"
        advice = f"; {_KEPT}" if status == 429 or status >= 500 else ""
        return f"the Hub answered {status} for {repo_id}: {_one_line(cause.server_message or cause)}{advice}"
    if isinstance(cause, HTTPError):
        reason = f"{type(cause).__name__}: {_one_line(cause)}"
        return f"the Hub at {constants.ENDPOINT} cannot be reached ({reason}); {_KEPT}"
    return f"the upload to {repo_id} failed ({type(error).__name__}: {_one_line(error)})"


def _one_line(text: object) -> str:
    return textwrap.shorten(str(text), 300)
