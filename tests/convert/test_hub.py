"""Pushing students: against a local stand-in for the Hub, with clients in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from linearize.convert import build_student, export
from tests.families import random_teacher
from tests.hub_server import USER, HubServer, Repository

NAME = f"{USER}/student"
VOCAB = 320
LINES = ["def scale(value):", "    return value * 2", "class Box:", "    '''A box of things.'''"] * 4
STRAY = {"optimizer.pt": b"moments", "notes.json": b"{}", "old.safetensors": b"junk", "runs/log": b"1"}

# Runs calls of push one after the other and prints what each returned or how it failed. The gate is replaced
# by a report that passes or fails where a test is not about the gate itself.
PUSHES = """
import dataclasses, json, os, sys
from huggingface_hub import constants
from linearize.convert import hub
from linearize.convert.errors import ConversionError
from linearize.convert.verify import Check, GateReport
real, usual = hub.verify_in_fresh_process, (constants.ENDPOINT, os.environ["HF_TOKEN"])
outcomes = []
for call in json.loads(sys.argv[1]):
    gate = call.pop("gate")
    constants.ENDPOINT = call.pop("endpoint", usual[0])
    constants.HF_HUB_OFFLINE = call.pop("offline", False)
    os.environ["HF_TOKEN"] = call.pop("environment_token", usual[1])
    def stand_in(folder):
        if gate == "cannot run":
            raise ConversionError("the parity gate could not run: no memory")
        return GateReport([Check("a check", {"passes": 0.0, "fails": 1.0}[gate], 0.5)])
    hub.verify_in_fresh_process = real if gate == "real" else stand_in
    try:
        outcomes.append(dataclasses.asdict(hub.push(**call)))
    except ConversionError as error:
        outcomes.append(str(error))
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported student with a tokenizer, a licence and, beside them, files that do not belong to it."""
    root = tmp_path_factory.mktemp("student")
    teacher = random_teacher("llama", vocab_size=VOCAB, num_hidden_layers=2)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    teacher.save_pretrained(root / "teacher")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(root / "teacher")
    (root / "teacher" / "LICENSE").write_text("Do as you like.\n")
    made = build_student(teacher, "swa", keep_softmax="0", window=16)
    record = {"command": "convert", "summary": {"teacher": "someone/teacher", "license": "mit"}}
    folder = export(made, root / "teacher", root / "out", record)
    for name, data in STRAY.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "server") as running:
        yield running


def environment(server: HubServer, tmp_path: Path) -> dict[str, str]:
    others = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return {**others, "OMP_NUM_THREADS": "1", **server.environment(tmp_path / "cache")}


def client(code: str, *arguments: str, env: dict[str, str], **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=env, text=True, **pipes, **options)


def run(code: str, *arguments: str, env: dict[str, str], **options: Any) -> tuple[Any, str]:
    """The JSON that a program prints in its last line, and its standard error."""
    process = client(code, *arguments, env=env, **options)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1]), errors


def pushes(server: HubServer, tmp_path: Path, *calls: dict[str, Any]) -> list[Any]:
    outcomes, errors = run(PUSHES, json.dumps(calls), env=environment(server, tmp_path))
    assert "%|" not in errors, "progress bars are for terminals"
    return outcomes


def call(directory: Path, repo_id: str = NAME, gate: str = "passes", **options: Any) -> dict[str, Any]:
    return {"directory": str(directory), "repo_id": repo_id, "gate": gate, **options}


def belonging(folder: Path) -> dict[str, bytes]:
    """What a push has to send, by looking at the folder and not at the record."""
    stray = set(STRAY) | {"README.md"}
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name not in stray}


def copy(student: Path, folder: Path) -> Path:
    return Path(shutil.copytree(student, folder))


# ---------------------------------------------------------------------- uploading and loading again

LOADS = """
import contextlib, io, json, pathlib, re, sys
import torch
if sys.argv[1] == "trust":
    options = {"trust_remote_code": True}
else:
    options = {}
    import linearize.convert
from transformers import AutoModelForCausalLM, AutoTokenizer
ids = torch.arange(3, 43)[None]
logits, texts = [], []
for name in sys.argv[2:4]:
    model = AutoModelForCausalLM.from_pretrained(name, **options)
    with torch.no_grad():
        logits.append(model(input_ids=ids).logits)
    texts.append(AutoTokenizer.from_pretrained(name, **options)("def scale(value):")["input_ids"])
card = ""
if sys.argv[1] == "import":
    from huggingface_hub import hf_hub_download
    text = pathlib.Path(hf_hub_download(sys.argv[2], "README.md")).read_text()
    code = re.search(r"```python\\n(.*?)```", text, re.S)[1]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code)
    card = printed.getvalue()
same = torch.equal(*logits) and texts[0] == texts[1] and logits[0].std().item() > 0.1
print(json.dumps({"same": same, "class": type(model).__name__, "card": card}))
"""


def test_a_push_sends_the_student_and_it_loads_from_the_hub_as_from_the_folder(student, server, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in student.rglob("*")}
    (done,) = pushes(server, tmp_path, call(student, gate="real", private=True))

    files = server.files(NAME)
    card = files.pop("README.md").decode()
    del files[".gitattributes"]
    assert files == belonging(student)
    assert {"model.safetensors", "tokenizer.json", "config.json", "LICENSE", "linearize.json"} < set(files)
    assert done["files"] == sorted([n, len(d)] for n, d in {**files, "README.md": card.encode()}.items())
    assert done["url"] == f"{server.url}/{NAME}" and done["revision"] == "main"
    repository = server.repositories[NAME]
    assert repository.private and done["commit"] == repository.branches["main"]
    assert len(repository.commits) == 2, "the repository's creation, and the whole student at once"
    assert "checks passed" in repository.messages[done["commit"]]
    assert "license: mit" in card and "base_model: someone/teacher" in card and f'name = "{NAME}"' in card
    assert "float32: reload = memory" in card and "**failed**" not in card
    assert {p: p.stat().st_mtime_ns for p in student.rglob("*")} == before, "the folder stays as it is"

    env = environment(server, tmp_path)
    for way in ("import", "trust"):
        loaded, _ = run(LOADS, way, NAME, str(student), env=env, cwd=tmp_path)
        assert loaded["same"] and loaded["class"] == "LinearizedLlamaForCausalLM"
        assert way == "trust" or len(loaded["card"].strip()) > 0, "the code in the card runs"


def test_a_second_push_replaces_what_changed(student, server, tmp_path):
    """Shards of an earlier upload go away, unchanged files are not sent again, the card one wrote is kept."""
    changed = copy(student, tmp_path / "changed")
    tensors = load_file(changed / "model.safetensors")
    names = sorted(tensors)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    (changed / "model.safetensors").unlink()
    for shard, members in shards.items():
        save_file({n: tensors[n] for n in members}, changed / shard, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: shard for shard, members in shards.items() for n in members}}
    (changed / "model.safetensors.index.json").write_text(json.dumps(index))
    (changed / "README.md").write_text('---\nlicense: mit\n---\nMine: load "path/to/this/model".\n')
    calls = [call(student), call(student), call(changed), call(student, revision="v/2")]
    first, again, sharded, branch = pushes(server, tmp_path, *calls)
    assert again["commit"] == first["commit"], "nothing changed, nothing committed"
    assert sharded["commit"] != first["commit"]
    files = server.files(NAME)
    assert files.pop("README.md").decode().endswith(f'Mine: load "{NAME}".\n')
    del files[".gitattributes"]
    assert files == belonging(changed) and not server.repositories[NAME].private
    assert branch["revision"] == "v/2" and server.repositories[NAME].branches["v/2"] == branch["commit"]
    assert "model.safetensors.index.json" not in server.files(NAME, "v/2")
    assert len(server.received) == len(set(server.received)) == 4, "model, parity, two shards: each once"


def test_an_interrupted_push_is_completed_by_the_next(student, server, tmp_path):
    server.stall_after = 1
    process = client(PUSHES, json.dumps([call(student)]), env=environment(server, tmp_path))
    assert server.stalled.wait(60), process.communicate()[1]
    while len(server.received) < 1:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    server.stall_after = None
    assert set(server.files(NAME)) == {".gitattributes"}, "half a student is never visible"
    (done,) = pushes(server, tmp_path, call(student))
    assert belonging(student).items() <= server.files(NAME).items()
    assert done["commit"] == server.repositories[NAME].branches["main"]
    assert len(server.received) == len(set(server.received)) == 2, "what had arrived was not sent again"


# ---------------------------------------------------------------------- refusals


def test_a_student_that_fails_the_gate_is_refused_unless_forced(student, server, tmp_path):
    broken = copy(student, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    forced_id, unknown_id = f"{USER}/forced", f"{USER}/unknown"
    refused, cannot, forced, unknown = pushes(
        server,
        tmp_path,
        call(broken, gate="real"),
        call(broken, gate="cannot run"),
        call(broken, forced_id, gate="fails", force=True),
        call(broken, unknown_id, gate="cannot run", force=True),
    )
    assert refused.startswith(f"{broken} fails ") and "\n" not in refused
    assert "bit for bit" in refused and "--force" in refused and "nothing was uploaded" in refused
    assert cannot == "the parity gate could not run: no memory"
    assert set(server.repositories) == {forced_id, unknown_id}
    cards = {repo_id: server.files(repo_id)["README.md"].decode() for repo_id in server.repositories}
    assert "This checkpoint failed the parity gate" in cards[forced_id]
    assert "failed: a check" in server.repositories[forced_id].messages[forced["commit"]]
    assert "Not recorded" in cards[unknown_id]
    assert "could not run" in server.repositories[unknown_id].messages[unknown["commit"]]


def test_dry_runs_and_errors_upload_nothing_and_errors_are_one_line(student, server, tmp_path):
    pickled = copy(student, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    damaged = copy(student, tmp_path / "damaged")
    (damaged / "linearize.json").write_text('{"files": ')
    empty = tmp_path / "empty"
    empty.mkdir()
    public, other = f"{USER}/public", f"{USER}/other"
    for repo_id, file in ((public, "linearize.json"), (other, "config.json")):
        server.repositories[repo_id] = Repository(private=False)
        server.repositories[repo_id].commit("main", {file: (server.store(b"{}"), False)}, "there before")
    unreachable = "http://127.0.0.1:9"
    cases = {
        "not a Hub id of the form user/name": call(student, "student"),
        "'some one/x' is not a Hub id": call(student, "some one/x"),
        "not an exported student: it has no config.json": call(empty),
        "not an exported student: it has no linearize.json": call(student.parent / "teacher"),
        "only as pickle": call(pickled),
        "damaged JSON": call(damaged),
        "(401); log in with `hf auth login`": call(student, token="hf_wrong"),
        "(403); use one with write access to acme": call(student, "acme/student"),
        "no Hub token to upload to": call(student, environment_token=""),
        "HF_HUB_OFFLINE is set; unset it": call(student, offline=True),
        f"the Hub at {unreachable} cannot be reached": call(student, endpoint=unreachable),
        "exists and is public; choose another id": call(student, public, private=True),
        "holds another model; choose another id": call(student, other),
    }
    rehearsal = call(student, dry_run=True, offline=True, environment_token="")
    plan, *errors = pushes(server, tmp_path, rehearsal, *cases.values())
    assert plan["commit"] is None
    sizes = {name: len(data) for name, data in belonging(student).items()}
    assert {name: n for name, n in plan["files"] if name != "README.md"} == sizes
    assert 1000 < dict(plan["files"])["README.md"] < 20000
    for message, error in zip(cases, errors, strict=True):
        assert message in error and "\n" not in error
    assert {name: len(found.commits) for name, found in server.repositories.items()} == {public: 1, other: 1}
    assert server.changes() == [("POST", "/api/repos/create")], "only where 403 is the answer"
