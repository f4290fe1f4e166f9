"""Reading teachers and writing tensors: safetensors only, every tensor checked and accounted for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from linearize.convert.errors import ConversionError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARD_BYTES = 5 * 2**30
_PICKLE = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_DOWNLOADED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "LICENSE*", "NOTICE*", "*.md", "*.tiktoken"]


def resolve_source(source: str | Path, revision: str | None = None) -> Path:
    """The local folder of a teacher: the path itself, or the Hub snapshot (downloaded if need be).

    Raises:
        ConversionError: no such folder, no such repository, or no network.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    text = str(source)
    if path.exists():
        raise ConversionError(f"{text} is a file, not a model folder; give the folder that holds config.json")
    if text.startswith((".", "/", "~")) or text.count("/") != 1:
        raise ConversionError(f"{text} is not a model: no such folder, and not a Hub id of the form user/name")
    try:
        return Path(snapshot_download(text, revision=revision, allow_patterns=_DOWNLOADED))
    except HFValidationError as error:
        raise ConversionError(f"{text} is not a model: no such folder, and not a Hub id ({error})") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        if isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code < 500:
            raise ConversionError(
                f"{text}: the Hub answered {error.response.status_code}; check the id and your token"
            ) from None
        raise ConversionError(
            f"{text} is not a local folder and the Hub cannot be reached; download it first or give a local path"
        ) from None


def check_source(folder: Path) -> Any:
    """The configuration of a folder that can be converted; reads no tensor data.

    Raises:
        ConversionError: not a decoder language model, or its weights are missing, pickled or damaged.
    """
    if not (folder / "config.json").is_file():
        raise ConversionError(f"{folder} is not a model: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(folder)
    except ConversionError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ConversionError(f"{folder}/config.json is not understood: {reason}") from None
    if getattr(config, "linearize", None):
        raise ConversionError(f"{folder} is a linearized student already; convert its teacher instead")
    if config.is_encoder_decoder:
        raise ConversionError(
            f"{folder} is an encoder-decoder ({config.model_type}); only decoder language models convert"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConversionError(
            f"{folder} is no decoder language model: {config.model_type} has no causal language-model head in transformers"
        )
    for file in weight_files(folder):
        _check_safetensors(file)
    return config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, as its index names them."""
    if (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ConversionError(f"{folder}: the shard {missing[0]} that {INDEX} names is missing; download it again")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if any(next(folder.glob(pattern), None) for pattern in _PICKLE):
        raise ConversionError(
            f"{folder} has its weights only as pickle, which can run code on loading; "
            "save them with safe_serialization=True first"
        )
    raise ConversionError(f"{folder} has no {SINGLE}; it is not a complete checkpoint")


def tensor_names(file: Path) -> list[str]:
    """Names in a safetensors file; maps nothing that counts as memory."""
    with safe_open(file, framework="np") as handle:
        return list(handle.keys())


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def read_tensor(file: Path, name: str) -> torch.Tensor:
    """One tensor of a safetensors file, in memory of its own.

    The library maps the whole file into memory that may be written, which a limit on memory counts in full.
    """
    with open(file, "rb") as handle:
        size = int.from_bytes(handle.read(8), "little")
        entry = json.loads(handle.read(size))[name]
        begin, end = entry["data_offsets"]
        dtype = _DTYPES[entry["dtype"]]
        if begin == end:
            return torch.empty(entry["shape"], dtype=dtype)
        data = bytearray(end - begin)
        handle.seek(8 + size + begin)
        handle.readinto(data)
    return torch.frombuffer(data, dtype=dtype).view(entry["shape"])


def _check_safetensors(file: Path) -> None:
    try:
        tensor_names(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise ConversionError(f"{file} is truncated or no safetensors file ({error}); download it again") from None


def load_teacher(
    source: str | Path,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device = "cpu",
    revision: str | None = None,
) -> PreTrainedModel:
    """Load a decoder, checked: complete, finite, safetensors.

    Args:
        dtype: a torch dtype, or "auto" for the one in the checkpoint.

    Raises:
        ConversionError: see `resolve_source` and `check_source`; or a tensor is missing or not finite.
    """
    folder = resolve_source(source, revision)
    config = check_source(folder)
    # SDPA knows no softcap; a model that has one is only itself under eager attention.
    eager = getattr(config, "attn_logit_softcapping", None) is not None
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager" if eager else "sdpa",
        use_safetensors=True,
        output_loading_info=True,
    )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ConversionError(
            f"{folder}: {len(missing)} tensors are missing, the first {missing[0]}; download it again"
        )
    check_finite(model, str(folder))
    return model.to(device).eval()


def check_finite(model: torch.nn.Module, what: str) -> None:
    """Raise `ConversionError` if a parameter holds NaN or infinity."""
    for name, tensor in model.named_parameters():
        if not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise ConversionError(
                f"{what}: {name} holds {bad} values that are NaN or infinite; the checkpoint is damaged"
            )


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a model folder.

    Raises:
        ConversionError: there is none, or it does not load.
    """
    if not any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
    ):
        raise ConversionError(f"{folder} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ConversionError(f"the tokenizer in {folder} does not load: {reason}") from None


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors a checkpoint holds: tied ones once, under the name the model class ties them to."""
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = {}
    for name, tensor in model.state_dict().items():
        is_tied = name in tied and name in parameters
        if is_tied and any(
            parameters[name] is p for other, p in parameters.items() if other != name and other not in tied
        ):
            continue
        tensors[name] = tensor.detach()
    return tensors


def _write_file(
    file: Path, members: list[str], tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Tensor]
) -> None:
    """A safetensors file, one tensor in memory at a time: the header's length, the header, the tensors' bytes."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for member in members:
        tensor = shapes[member]
        begin, end = end, end + tensor.nbytes
        header[member] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of eight bytes
    with open(file, "wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        for member in members:
            data = tensors[member].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            handle.write(data.numpy().data)
        handle.flush()
        os.fsync(handle.fileno())


def write_tensors(
    tensors: Mapping[str, torch.Tensor],
    shapes: Mapping[str, torch.Tensor],
    folder: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Write tensors as safetensors, in shards with an index when they are larger than one; returns the file names.

    Args:
        tensors: each is looked up once, when it is written.
        shapes: the same names, shapes and dtypes; may stand on the meta device.
    """
    sizes = {name: tensor.nbytes for name, tensor in shapes.items()}
    shards: list[list[str]] = [[]]
    size = 0
    for name, nbytes in sizes.items():
        if shards[-1] and size + nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    single = len(shards) == 1
    names = [SINGLE if single else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, members in zip(names, shards, strict=True):
        _write_file(folder / file, members, tensors, shapes)
    if not single:
        weight_map = {member: file for file, members in zip(names, shards, strict=True) for member in members}
        (folder / INDEX).write_text(
            json.dumps({"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}, indent=1)
        )
    return names
