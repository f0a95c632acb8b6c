"""docs/references.md: every source that the package and the documents cite, with the version that was read.

Papers are found by their arXiv ids, files of other projects by their suffixes. A file belongs to the project whose pattern it
matches, or to that of the folder in which it is cited. PAPERS and PROJECTS are written by hand; what cites them is found.
"""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ARXIV = re.compile(r"arXiv[: ](\d{4}\.\d{4,5})", re.IGNORECASE)
FILE = re.compile(r"(?<![\w/.-])((?:[\w-]+/)*[\w-]+\.(?:py|cpp|cu|cuh|cc|h|yaml|toml|md))(?![\w/])")
EXAMPLE = re.compile(r"(^|/)([A-Z_]{4,}(writer)?\.py|(ds|sft|vgg16)\.yaml)$")
"""A name that stands for a file which a reader adds."""
GENERATED = {"references.md"}

PAPERS: dict[str, str] = {
    "1804.04235": "Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost",
    "1811.06965": "Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
    "1904.00962": "You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes (LAMB)",
    "1905.13727": "Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
    "1909.08053": "Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
    "1910.02054": "Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    "2001.08361": "Kaplan et al., Scaling Laws for Neural Language Models",
    "2005.14165": "Brown et al., Language Models are Few-Shot Learners (GPT-3)",
    "2006.09503": "Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (PipeDream-2BW)",
    "2006.16668": "Lepikhin et al., GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding",
    "2102.02888": "Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
    "2007.01045": "Fan et al., DAPPLE: A Pipelined Data Parallel Approach for Training Large Models",
    "2104.07857": "Rajbhandari et al., ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning",
    "2304.11277": "Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
    "2310.05914": "Jain et al., NEFTune: Noisy Embeddings Improve Instruction Finetuning",
    "2310.10537": "Rouhani et al., Microscaling Data Formats for Deep Learning",
    "2308.01320": "Yao et al., DeepSpeed-Chat: Easy, Fast and Affordable RLHF Training of ChatGPT-like Models at All Scales",
    "2402.03300": "Shao et al., DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
    "2104.05343": "Xu et al., Optimus: An Efficient 2D Method for Training Super-Large Deep Learning Models",
    "2105.14450": "Bian et al., Maximizing Parallelism in Distributed Training for Huge Neural Networks",
    "2105.14500": "Wang et al., Tesseract: 2.5-Dimensional Distributed Model Training",
    "2104.04473": "Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    "2104.06069": "Li et al., 1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training",
    "2106.09685": "Hu et al., LoRA: Low-Rank Adaptation of Large Language Models",
    "2107.06925": "Li and Hoefler, Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines",
    "2502.16982": "Liu et al., Muon is Scalable for LLM Training",
    "2110.02861": "Dettmers et al., 8-bit Optimizers via Block-wise Quantization",
    "2202.06009": "Lu et al., Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam",
    "2203.13474": "Nijkamp et al., CodeGen",
    "2204.02311": "Chowdhery et al., PaLM: Scaling Language Modeling with Pathways",
    "2205.00119": "Zhang et al., MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud",
    "2205.01068": "Zhang et al., OPT: Open Pre-trained Transformer Language Models",
    "2205.05198": "Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models",
    "2205.14135": "Dao et al., FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness",
    "2209.05433": "Micikevicius et al., FP8 Formats for Deep Learning",
    "2302.13971": "Touvron et al., LLaMA: Open and Efficient Foundation Language Models",
    "2303.06865": "Sheng et al., FlexGen: High-Throughput Generative Inference of Large Language Models with a Single GPU",
    "2305.14314": "Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs",
    "2305.13048": "Peng et al., RWKV: Reinventing RNNs for the Transformer Era",
    "2308.12950": "Rozière et al., Code Llama: Open Foundation Models for Code",
    "2309.06180": "Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention",
    "2309.14509": "Jacobs et al., DeepSpeed Ulysses",
    "2401.02385": "Zhang et al., TinyLlama: An Open-Source Small Language Model",
    "2306.10209": "Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training",
    "2307.08691": "Dao, FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
    "2401.10241": "Qi et al., Zero Bubble Pipeline Parallelism",
    "2403.08295": "Gemma Team, Gemma: Open Models Based on Gemini Research and Technology",
    "2404.14219": "Abdin et al., Phi-3 Technical Report",
    "2407.21783": "Llama Team, The Llama 3 Herd of Models",
    "2408.00118": "Gemma Team, Gemma 2: Improving Open Language Models at a Practical Size",
    "2412.19437": "DeepSeek-AI, DeepSeek-V3 Technical Report",
    "2502.02737": "Allal et al., SmolLM2",
    "2503.19786": "Gemma Team, Gemma 3 Technical Report",
    "2508.06471": "GLM-4.5 Team, GLM-4.5: Agentic, Reasoning, and Coding (ARC) Foundation Models",
    "2508.10925": "OpenAI, gpt-oss-120b & gpt-oss-20b Model Card",
}


class Project(NamedTuple):
    """A project whose files are cited; `package` names it in pyproject.toml, where the version is pinned."""

    name: str
    url: str
    files: str
    """A regular expression of the paths that are its."""
    folders: tuple[str, ...] = ()
    """Where a short name is a file of this project."""
    package: str = ""
    version: str = ""


PROJECTS = (
    Project("Colossal-AI", "github.com/hpcaitech/ColossalAI",
            r"(colossalai|parallel_[123]|[123]p?5?d/(layers|_op)|_operation|[123]D_tensor)",
            ("memcalc/layout/tensor_dims", "memcalc/setup/tensor_dims_checks"), version="0.5.0"),
    Project("titans", "github.com/hpcaitech/titans", r"titans/", version="0.0.7"),
    Project("PipeDream", "github.com/msr-fiddle/pipedream", r"runtime/optimizer\.py"),
    Project("Liger-Kernel", "github.com/linkedin/Liger-Kernel",
            r"(src/liger|liger_kernel/|ops/(rms|swiglu|geglu|rope|fused_lin|cross)|transformers/monkey)",
            ("memcalc/kernels/liger",), version="0.8.5"),
    Project("flash-attention", "github.com/Dao-AILab/flash-attention", r"(flash_attn/|hopper/|ops/triton/|losses/cross)",
            ("memcalc/kernels/flash_loss.py",), version="2.8.3"),
    Project("apex", "github.com/NVIDIA/apex", r"csrc/megatron/"),
    Project("Transformer Engine", "github.com/NVIDIA/TransformerEngine",
            r"(transformer_engine/|pytorch/|dot_product_attention/(b|u|c))",
            ("memcalc/megatron/context_parallel", "memcalc/kernels/unfused_attention.py"), "transformer-engine"),
    Project("DeepSpeed", "github.com/deepspeedai/DeepSpeed",
            r"(deepspeed/|runtime/|zero/(stage|part|config)|\.\./comm|moe/(utils|ep_)|ops/(adam|lamb|triton)|csrc/lamb|fp16/|stage3|stage_1|"
            r"partition(ed)?_|parameter_off|parallel_state_sp|utils/z3|module_inject|accelerator/|swiglu_triton|base_optim|"
            r"csrc/quantization|pt_binding|utils/groups|coalesced_coll)",
            ("memcalc/engines/deepspeed", "memcalc/layout/auto_ep"), "deepspeed"),
    Project("Megatron-DeepSpeed", "github.com/deepspeedai/Megatron-DeepSpeed", r"(megatron/model/|pretrain_gpt)"),
    Project("Megatron-Bridge", "github.com/NVIDIA-NeMo/Megatron-Bridge", r"megatron/bridge/", version="0.3.1"),
    Project("Megatron-LM and Megatron-Core", "github.com/NVIDIA/Megatron-LM",
            r"(megatron/|core/|tests/functional_tests|tensor_parallel/(map|cross|layers)|mappings|moe_utils|finalize|gpt_model|"
            r"fused_bias|gpt_builders)",
            ("memcalc/megatron", "memcalc/engines/megatron", "memcalc/formats/megatron", "memcalc/setup",
             "memcalc/kernels/megatron"), "megatron-core"),
    Project("torchtitan", "github.com/pytorch/torchtitan",
            r"(torchtitan/|benchmarks/llama3|train_configs|train\.py|distributed/(pipeline|activation))",
            ("memcalc/formats/torchtitan",), version="0.2.2"),
    Project("accelerate", "github.com/huggingface/accelerate",
            r"(accelerate/|utils/deepspeed|big_modeling|accelerator\.py|commands/|utils/dataclasses)",
            ("memcalc/formats/accelerate",), version="1.15.0"),
    Project("lomo-optim", "github.com/OpenLMLab/LOMO", r"lomo_optim/", package="lomo-optim"),
    Project("LLaMA-Factory", "github.com/hiyouga/LLaMA-Factory", r"(src/)?llamafactory/", ("memcalc/formats/llama_factory",),
            version="ff6d4d1"),
    Project("axolotl", "github.com/axolotl-ai-cloud/axolotl", r"(axolotl/|utils/schemas)", ("memcalc/formats/axolotl",),
            version="067b021"),
    Project("Lightning", "github.com/Lightning-AI/pytorch-lightning", r"(model_parallel|fabric/)"),
    Project("transformers", "github.com/huggingface/transformers",
            r"(models/|modeling_|integrations/|transformers/(dist|integr|train|masking|modeling|hf_arg)|run_clm|masking|loss/|utils/output|trainer|configuration_|activations|"
            r"cache_utils|generation/|quantizers|distributed/(tensor_p|mixin|config|expert|fsdp|utils)|expert_parallel|fsdp\.py)",
            ("memcalc/families", "memcalc/inputs", "memcalc/validate/experts"), "transformers"),
    Project("DualPipe", "github.com/deepseek-ai/DualPipe", r"(dualpipe/)?dualpipev?\.py"),
    Project("NCCL", "github.com/NVIDIA/nccl", r"(src/graph|tuning\.cc)", version="2.26"),
    Project("nccl-tests", "github.com/NVIDIA/nccl-tests", r"doc/PERF"),
    Project("peft", "github.com/huggingface/peft", r"(peft/|utils/(constants|transformers_weight))",
            ("memcalc/tuning/default_targets",), "peft"),
    Project("bitsandbytes", "github.com/bitsandbytes-foundation/bitsandbytes", r"bitsandbytes/",
            ("memcalc/quantized/four_bit", "memcalc/quantized/eight_bit"), "bitsandbytes"),
    Project("TRL", "github.com/huggingface/trl", r"(trl/|(sft|dpo|kto|grpo|ppo|model)_config\.py)", package="trl"),
    Project("lion-pytorch", "github.com/lucidrains/lion-pytorch", r"lion_pytorch/", package="lion-pytorch"),
    Project("vLLM", "github.com/vllm-project/vllm",
            r"(vllm/|v1/|engine/arg_utils|model_executor/(models|layers)|mamba_(utils|mixer2)|layers/rotary|platforms/|config/(cache|vllm))",
            version="0.33.0"),
    Project("SGLang", "github.com/sgl-project/sglang",
            r"(srt/|arg_groups/|mem_cache/|model_executor/pool|cuda_graph_hook|kv_cache_conf|configs/model_config)",
            version="0.5.23"),
    Project("compressed-tensors", "github.com/vllm-project/compressed-tensors", r"(compressors/|quantization/lifecycle)",
            version="0.20.0"),
    Project("optimum", "github.com/huggingface/optimum", r"gptq/quantizer", version="2.3.0"),
    Project("AutoAWQ", "github.com/casper-hansen/AutoAWQ", r"modules/linear/", version="0.2.9"),
    Project("ps-lite", "github.com/dmlc/ps-lite", r"(ps-lite/)?src/postoffice"),
    Project("PyTorch", "github.com/pytorch/pytorch",
            r"(torch/|distributed/tensor/|tools/|aten/|native/|c10|csrc/|nn/|functions/|autocast|derivatives|Functions|CUDACaching|Cublas|sdp_utils|Loss|"
            r"Grouped|input_buffer|default_hooks|powerSGD|_fsdp|_attention|schedules|stage\.py|distributed\.py|distributed/parallel|transformer\.h|tensor\.cpp)",
            ("memcalc/core", "memcalc/engines/fsdp2", "memcalc/engines/ddp.py", "memcalc/pipelining", "memcalc/device",
             "memcalc/optimizers", "memcalc/validate", "memcalc/layout", "memcalc/engines/fsdp1",
             "memcalc/engines/data_parallel", "docs/engines/fsdp1", "docs/engines/older-data-parallel"), "torch"),
)  # fmt: skip


class Cited(NamedTuple):
    """A file of another project, as it is cited, and where."""

    path: str
    place: Path


def texts() -> Iterator[tuple[Path, str]]:
    """Every source file of the package, every document, by its path from the root."""
    found = [*(ROOT / "memcalc").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    for path in sorted(found):
        if path.name not in GENERATED:
            yield path.relative_to(ROOT), path.read_text(encoding="utf-8")


@cache
def own() -> frozenset[str]:
    """The names of this repository's files, with every part of their folders: `b.py`, `a/b.py`, `memcalc/a/b.py`."""
    names: set[str] = set()
    for folder in ("memcalc", "tests", "docs", "benchmarks"):
        for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md"), *ROOT.glob("*.md")]:
            parts = path.relative_to(ROOT).parts
            names.update("/".join(parts[i:]) for i in range(len(parts)))
    return frozenset(names)


@cache
def arxiv_ids() -> tuple[str, ...]:
    """The arXiv ids that the package, its models' files and the documents cite."""
    specs = (path.read_text(encoding="utf-8") for path in (ROOT / "model_specs").glob("*.json"))
    found = {name for text in (*(text for _, text in texts()), *specs) for name in ARXIV.findall(text)}
    return tuple(sorted(found))


@cache
def cited_files() -> tuple[Cited, ...]:
    """Every citation of a file that is not this repository's."""
    found = {
        Cited(name, place)
        for place, text in texts()
        for name in FILE.findall(text)
        if name not in own() and not EXAMPLE.search(name)
    }
    return tuple(sorted(found))


def project_of(cited: Cited) -> Project | None:
    """The project that a file belongs to; None for one that no pattern knows."""
    for project in PROJECTS:
        if re.match(project.files, cited.path):
            return project
    place = cited.place.as_posix()
    return next((project for project in PROJECTS if place.startswith(project.folders or ("-",))), None)


def version_of(project: Project) -> str:
    """The version that was read: pinned in pyproject.toml, or as written here; '' where none is said."""
    if not project.package:
        return project.version
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    pins = dict(entry.split("==") for extra in extras.values() for entry in extra if "==" in entry)
    return pins[project.package]


@cache
def files_of(project: Project) -> tuple[str, ...]:
    """The project's files that are cited, by their longest names."""
    names = {cited.path for cited in cited_files() if project_of(cited) is project}
    return tuple(sorted(name for name in names if not any(other.endswith("/" + name) for other in names)))


HEAD = """# Sources

Written by `docs/generate.py`. Every paper, file, model card and data sheet that memcalc, its models and its documents cite. A
row of a report names its source in the same words (`memcalc estimate … --rows`, `source` in JSON).

## Papers

| arXiv | paper |
|---|---|
"""


def page() -> str:
    """The text of docs/references.md."""
    lines = [
        *HEAD.splitlines(),
        *(f"| [{name}](https://arxiv.org/abs/{name}) | {PAPERS[name]} |" for name in arxiv_ids()),
    ]
    lines += [
        "",
        "## Files of other projects",
        "",
        "Files are named as in the sources that cite them, by the end of their paths.",
        "",
    ]
    for project in PROJECTS:
        version = version_of(project)
        lines += [f"### {project.name}{' ' + version if version else ''}", "", f"<https://{project.url}>", ""]
        lines += [*_folded(files_of(project)), ""]
    lines += ["## Parameter counts of the bundled models", "", "| model | source |", "|---|---|", *_models(), ""]
    lines += [
        "## GPUs",
        "",
        "`memcalc gpus NAME` prints each number with its source.",
        "",
        "| GPU | sources |",
        "|---|---|",
        *_gpus(),
    ]
    return "\n".join(lines) + "\n"


def _folded(files: Iterable[str]) -> Iterator[str]:
    """A line for each folder: transformers has two files of every model."""
    folders: dict[str, list[str]] = {}
    for name in files:
        folder, _, file = name.rpartition("/")
        folders.setdefault(folder, []).append(file)
    for folder, names in folders.items():
        line = f"- {f'`{folder}/`: ' if folder else ''}{', '.join(f'`{name}`' for name in names)}"
        yield from textwrap.wrap(line, 120, subsequent_indent="  ", break_on_hyphens=False)


def _models() -> Iterator[str]:
    for path in sorted((ROOT / "model_specs").glob("*.json")):
        source = json.loads(path.read_text(encoding="utf-8")).get("published", {}).get("source")
        if source:
            yield f"| {path.stem} | {source} |"


def _gpus() -> Iterator[str]:
    for path in sorted((ROOT / "memcalc" / "hardware" / "gpus").glob("*.json")):
        yield f"| {path.stem} | {'; '.join(dict.fromkeys(_sources(json.loads(path.read_text(encoding='utf-8')))))} |"


def _sources(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, part in value.items():
            if key == "source":
                yield str(part)
            else:
                yield from _sources(part)
