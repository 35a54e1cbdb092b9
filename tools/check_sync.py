"""Weight sync in place, family by family: does vLLM compute with the new weights? `python
tools/check_sync.py [NAME ...]`

For each family, two tiny random models are written the way a trainer writes checkpoints. A vLLM
engine is started with the first and given the second, once through vLLM's own `reload_weights` and
once through ours; each time it is checked against the canary, and its weights are compared with the
files. Printed: the canary's largest difference in nats (above 1e-3 is wrong), how many elements
differ, and how many were compared. "no head" is the same checkpoint without the copy of tied
embeddings as lm_head.weight.
"""

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "TQDM_DISABLE": "1"}

import torch
import transformers
from safetensors.torch import load_file, save_file

from ttrl.configs import TrainingConfig
from ttrl.records import CANARY_FILE, Canary
from ttrl.server.connection import ServerConnection
from ttrl.tiny_model import make_tiny_model
from ttrl.training.checkpoints import save_checkpoint
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.policy.loading import load_policy
from ttrl.weights.canary import check_canary

HERE = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
_WIDTHS = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen2-tied": ("Qwen2", _TIED),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
    "qwen3-tied": ("Qwen3", {"head_dim": 32, **_TIED}),
    "llama": ("Llama", {"rope_parameters": _LLAMA3_ROPE}),
    "llama-tied": ("Llama", _TIED),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": 100}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma2": ("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 100}),
    "gemma3": ("Gemma3Text", {"head_dim": 32, "sliding_window": 100}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "phi": ("Phi", {"num_key_value_heads": 2}),
}


def write_checkpoints(name: str, folder: Path) -> tuple[Path, Path]:
    """Two models of that family, as the trainer writes them."""
    family, settings = VARIANTS[name]
    made = []
    for seed in (1, 2):
        start = make_tiny_model(folder / f"start{seed}")  # for its tokenizer
        (start / "model.safetensors").unlink()
        torch.manual_seed(seed)
        config = getattr(transformers, f"{family}Config")(**{**_WIDTHS, **settings})
        model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        model.save_pretrained(start)
        policy = load_policy(
            TrainingConfig(model=str(start), output_dir="", dtype="fp32", device="cpu"), HERE
        )
        save_checkpoint(folder / f"checkpoint{seed}", policy, start, HERE)
        made.append(folder / f"checkpoint{seed}")
    return made[0], made[1]


def without_head(checkpoint: Path) -> Path | None:
    """The same without lm_head.weight; None where it is not tied, or has none."""
    tensors = load_file(checkpoint / "model.safetensors")
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    if not config.tie_word_embeddings or tensors.pop("lm_head.weight", None) is None:
        return None
    target = Path(shutil.copytree(checkpoint, checkpoint.with_name(checkpoint.name + "-no-head")))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


class Engine(ServerConnection):
    """vLLM in this process, asked as a server is."""

    def __init__(self, model: Path) -> None:
        super().__init__(served_model_name="policy", dtype="float32", api_key="")
        from vllm import LLM

        self.llm = LLM(
            str(model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            worker_extension_cls="ttrl.vllm_worker.WeightSync",
            max_num_seqs=4,
        )

    def request(
        self, method: str, path: str, body: Any = None, timeout: float = 0.0, headers: Any = None
    ) -> Any:
        """A completion, which is all that a canary asks for."""
        from vllm import SamplingParams

        options = {
            name: body[name]
            for name in ("max_tokens", "temperature", "logprobs", "prompt_logprobs")
            if name in body
        }
        [out] = self.llm.generate(
            {"prompt_token_ids": body["prompt"]},
            SamplingParams(**options, ignore_eos=True),
            use_tqdm=False,
        )
        choice: dict[str, Any] = {"token_ids": list(out.outputs[0].token_ids)}
        if out.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [
                None
                if entry is None
                else {str(token): {"logprob": value.logprob} for token, value in entry.items()}
                for entry in out.prompt_logprobs
            ]
        if out.outputs[0].logprobs is not None:
            pairs = zip(choice["token_ids"], out.outputs[0].logprobs, strict=True)
            choice["logprobs"] = {
                "token_logprobs": [entry[token].logprob for token, entry in pairs]
            }
        return {"choices": [choice]}

    def held_to(self, checkpoint: Path) -> dict[str, Any]:
        """What canary and comparison say."""
        canary = Canary.load(checkpoint)
        self.llm.reset_prefix_cache()
        [compared] = self.llm.collective_rpc("ttrl_compare_weights", args=(str(checkpoint),))
        other = [
            name for name, value in compared["tensors"].items() if canary.weights.get(name) != value
        ]
        return {
            "canary": check_canary(self, canary).max_difference,
            "problems": compared["problems"] + [f"{name}: other bytes" for name in other],
            "compared": compared["compared"],
            "unchecked": compared["unchecked"],
        }


def measure(first: Path, second: Path) -> dict[str, Any]:
    """By way: what the engine was held to after each."""
    engine = Engine(first)
    found = {"start": engine.held_to(first)}
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
    found["vLLM's reload"] = engine.held_to(second)
    engine.llm.collective_rpc("ttrl_load_weights", args=(str(first),))
    engine.llm.collective_rpc("ttrl_load_weights", args=(str(second),))
    return found | {"ours": engine.held_to(second)}


def in_a_process_of_its_own(first: Path, second: Path) -> dict[str, Any] | None:
    """A fork: imports are there already, and an engine leaves global state behind."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writing, json.dumps(measure(first, second)).encode())
        except Exception:  # noqa: BLE001 - said, and the parent goes on with the next family
            traceback.print_exc()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def main() -> int:
    """Measures and prints; exit status 1 where our way is wrong."""
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"families, out of {', '.join(VARIANTS)}; all unless given",
    )
    names = parser.parse_args().names or list(VARIANTS)
    torch.set_num_threads(1)
    import vllm

    wrong = False
    print(f"vLLM {vllm.__version__}")
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            first, second = write_checkpoints(name, Path(temporary))
            pairs = {name: (first, second)}
            if (bare := without_head(second)) is not None:
                pairs[f"{name}, no head"] = (without_head(first) or first, bare)
            for label, pair in pairs.items():
                assert (pair[1] / CANARY_FILE).is_file()
                found = in_a_process_of_its_own(*pair)
                if found is None:
                    print(f"{label:24} vLLM does not serve it here", flush=True)
                    continue
                for way, held in found.items():
                    problems = "; ".join(held["problems"]) or "none"
                    counts = f"compared {held['compared']}, unchecked {held['unchecked']}"
                    print(
                        f"{label:24} {way:14} canary {held['canary']:.1e}  {counts}, differ: "
                        f"{problems[:150]}",
                        flush=True,
                    )
                wrong |= not found["ours"]["canary"] < 1e-3 or bool(found["ours"]["problems"])
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
