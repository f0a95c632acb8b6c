"""The options that Megatron-LM's arguments mean."""

from __future__ import annotations

import random
from typing import Any

import pytest

from memcalc import InputError, estimate, load_model
from memcalc.formats.found import REPLICAS
from memcalc.formats.megatron import arguments_of, read
from memcalc.formats.megatron_flags import KNOWN
from memcalc.inputs.options import check_options
from memcalc.megatron.schedules import layers_of_chunks

MODEL = (
    "--num-layers 8 --hidden-size 128 --num-attention-heads 8 --max-position-embeddings 256 --seq-length 128 --bf16 "
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --hidden-dropout 0 "
    "--attention-dropout 0 --micro-batch-size 2"
)
EXPERTS = "--num-experts 4 --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall"
ALWAYS = {
    "engine": "megatron", "micro_batch_size": 2, "seq_len": 128, "optimizer": "adamw", "clip_grad_norm": True,
    "precision": "bf16-mixed", "sequence_parallel": False,
}  # fmt: skip


def options_of(text: str) -> dict[str, Any]:
    return {name: value.value for name, value in read(*arguments_of(text)).options.items()}


def notes_of(text: str) -> tuple[str, ...]:
    return read(*arguments_of(f"{MODEL} {text}")).notes


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ("", {}),
        ("--tensor-model-parallel-size 4", {"tp": 4}),
        ("--tensor-model-parallel-size 4 --sequence-parallel", {"tp": 4, "sequence_parallel": True}),
        ("--sequence-parallel", {"sequence_parallel": False}),
        ("--context-parallel-size 2", {"cp": 2}),
        ("--context-parallel-size 2 --cp-comm-type a2a", {"cp": 2, "cp_comm_type": "a2a"}),
        ("--context-parallel-size 2 --cp-comm-type allgather allgather", {"cp": 2, "cp_comm_type": "all_gather"}),
        ("--cp-comm-type a2a", {}),
        (f"--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 {EXPERTS}", {"ep": 2, "etp": 1}),
        ("--expert-tensor-parallel-size 1", {}),
        ("--global-batch-size 64", {"global_batch_size": 64}),
        # dtypes
        ("--grad-reduce-in-bf16", {"grad_dtype": "bf16"}),
        ("--use-precision-aware-optimizer --main-grads-dtype bf16",
         {"grad_dtype": "bf16", "precision_aware_optimizer": True}),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8 --main-params-dtype fp16",
         {"precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8",
          "main_params_dtype": "fp16"}),
        ("--accumulate-allreduce-grads-in-fp32", {}),
        ("--fp8-format hybrid", {"fp8_recipe": "delayed"}),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", {"fp8_recipe": "mxfp8"}),
        ("--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather --use-distributed-optimizer",
         {"fp8_recipe": "tensorwise", "fp8_param_gather": True, "zero": 1}),
        ("--fp8-format hybrid --fp8-multi-head-attention", {"precision": "fp8-mixed"}),
        # the optimizer
        ("--use-distributed-optimizer", {"zero": 1}),
        ("--use-megatron-fsdp", {"zero": 3}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", {"zero": 2}),
        ("--use-torch-fsdp2", {"zero": 3}),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", {"zero": 2}),
        ("--optimizer adam", {}),
        ("--optimizer sgd", {"optimizer": "sgd-momentum"}),
        ("--optimizer sgd --sgd-momentum 0", {"optimizer": "sgd"}),
        ("--optimizer dist_muon", {"optimizer": "muon", "zero": 1}),
        ("--optimizer-cpu-offload", {"offload_optimizer": "cpu"}),
        ("--clip-grad 0", {"clip_grad_norm": False}),
        ("--clip-grad 0.5", {}),
        # activations
        ("--recompute-activations", {"recompute": "selective"}),
        ("--recompute-granularity selective", {"recompute": "selective"}),
        ("--recompute-granularity selective --recompute-modules moe_act layernorm", {}),
        (
            "--recompute-granularity selective --recompute-modules [core_attn,mlp]",
            {"recompute": "selective", "recompute_modules": "core_attn,mlp"},
        ),
        ("--fine-grained-activation-offloading --offload-modules moe_act attn_norm", {}),
        ("--offload-modules core_attn", {}),
        (
            "--fine-grained-activation-offloading --offload-modules [attn_proj,core_attn] --min-offloaded-tensor-size 1048576",
            {"offload_modules": "core_attn,attn_proj"},
        ),
        (
            "--recompute-granularity selective --recompute-modules moe_act layernorm mlp",
            {"recompute": "selective", "recompute_modules": "mlp"},
        ),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", {"recompute": "full"}),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 3",
         {"recompute": "full", "recompute_layers": 3}),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 8", {"recompute": "full"}),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 4 --pipeline-model-parallel-size 2",
         {"recompute": "full", "pp": 2}),
        ("--activations-checkpoint-method uniform", {"recompute": "full"}),
        # kernels
        ("--attention-backend auto", {}),
        ("--attention-backend flash", {"attention": "flash"}),
        ("--attention-backend fused", {"attention": "sdpa"}),
        ("--attention-backend unfused", {"attention": "unfused"}),
        ("--attention-backend local", {"attention": "eager"}),
        ("--transformer-impl local", {"attention": "eager"}),
        ("--use-flash-attn --transformer-impl transformer_engine", {}),
        ("--cross-entropy-loss-fusion", {"cross_entropy": "vocab-parallel-fused"}),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", {"cross_entropy": "fused"}),
        ("--cross-entropy-fusion-impl te", {}),
        ("--no-gradient-accumulation-fusion", {"gradient_accumulation_fusion": False}),
        ("--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
         {"cp": 4, "cp_comm_type": "a2a+p2p", "cp_exchange_size": 2}),
        ("--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 1",
         {"cp": 4, "cp_comm_type": "a2a"}),
        ("--no-create-attention-mask-in-dataloader", {"attention_mask_in_dataloader": False}),
        ("--dataloader-inter-document-masking", {"attention_mask_in_dataloader": False}),
        ("--perform-rl-step", {"task": "grpo"}),
        # Megatron-DeepSpeed
        ("--deepspeed --zero-stage 2 --checkpoint-activations",
         {"engine": "deepspeed", "zero": 2, "recompute": "full"}),
        ("--deepspeed --deepspeed-activation-checkpointing", {"engine": "deepspeed", "recompute": "full"}),
        ("--zero-stage 2", {}),
    ],
)  # fmt: skip
def test_options(more: str, options: dict[str, Any]) -> None:
    assert options_of(f"{MODEL} {more}") == {**ALWAYS, **options}


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ("", {}),
        ("--num-layers-per-virtual-pipeline-stage 1", {"schedule": "interleaved", "virtual_stages": 4}),
        ("--num-layers-per-virtual-pipeline-stage 4", {}),
        ("--num-virtual-stages-per-pipeline-rank 2", {"schedule": "interleaved", "virtual_stages": 2}),
        ("--num-virtual-stages-per-pipeline-rank 1", {}),
        ("--decoder-first-pipeline-num-layers 3", {"first_stage_layers": 3}),
        ("--decoder-last-pipeline-num-layers 2", {"last_stage_layers": 2}),
        ("--pipeline-model-parallel-layout E(t|)*7tL --num-layers 8", {"schedule": "interleaved", "virtual_stages": 4}),
        ("--pipeline-model-parallel-layout Ett,tttt|ttL", {"first_stage_layers": 6}),
        ("--pipeline-model-parallel-layout Et*4|t*4L", {}),
        (
            "--pipeline-model-parallel-layout Et*3|(t|)*4tL",
            {"schedule": "interleaved", "virtual_stages": 3, "stage_layers": "3,1,1,1,1,1"},
        ),
        ("--pipeline-model-parallel-layout Et*7|tmL --mtp-num-layers 1", {"first_stage_layers": 7}),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 4",
            {"schedule": "interleaved", "virtual_stages": 2, "microbatch_group_size": 4},
        ),
        ("--microbatch-group-size-per-virtual-pipeline-stage 4", {}),
        ("--defer-embedding-wgrad-compute", {"wgrad_deferral_limit": 0}),
        ("--defer-embedding-wgrad-compute --wgrad-deferral-limit 2", {"wgrad_deferral_limit": 2}),
        ("--wgrad-deferral-limit 2", {}),
        ("--pipeline-model-parallel-layout E|t|t|t|t|t|t|t|t|L", {"schedule": "interleaved", "virtual_stages": 5}),
    ],
)
def test_stages(more: str, options: dict[str, Any]) -> None:
    assert options_of(f"{MODEL} --pipeline-model-parallel-size 2 {more}") == {**ALWAYS, "pp": 2, **options}


def test_the_embedding_and_the_loss_that_count_as_layers() -> None:
    text = f"{MODEL.replace('--num-layers 8', '--num-layers 7')} --pipeline-model-parallel-size 4"
    embedding, loss = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
    assert options_of(f"{text} {embedding}")["first_stage_layers"] == 1
    assert not {"first_stage_layers", "last_stage_layers"} & options_of(f"{text} {loss}").keys()
    assert layers_of_chunks(7, 4) == [2, 2, 2, 1]  # by itself
    both = options_of(
        f"{MODEL.replace('--num-layers 8', '--num-layers 6')} --pipeline-model-parallel-size 4 {embedding} {loss}"
    )
    assert not {"first_stage_layers", "last_stage_layers"} & both.keys()
    chunks = options_of(
        f"{MODEL} --pipeline-model-parallel-size 5 {embedding} {loss} --num-layers-per-virtual-pipeline-stage 1"
    )
    assert chunks["virtual_stages"] == 2


def test_gpus_of_a_launcher() -> None:
    launcher = "torchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py"
    found = read(*arguments_of(f"{launcher} {MODEL}"))
    assert (found.options["gpus"].value, found.options["gpus_per_node"].value) == (32, 8)
    assert options_of(f"torchrun --nproc-per-node 8 --nnodes $N pretrain_gpt.py {MODEL}")["gpus_per_node"] == 8
    assert "gpus" not in options_of(f"torchrun --nproc-per-node 8 pretrain_gpt.py {MODEL}")
    assert "gpus_per_node" not in options_of(f"torchrun --nproc-per-node gpu --nnodes 4 pretrain_gpt.py {MODEL}")
    instances = "--use-distributed-optimizer --num-distributed-optimizer-instances 2 --tensor-model-parallel-size 2"
    assert options_of(f"{MODEL} {instances}")[REPLICAS] == 2
    with_gpus = estimate(megatron_args=f"{MODEL} {instances} --bf16", gpus=32)
    assert with_gpus.setup.shard_group == 8


def test_where_values_are_from_and_which_are_defaults() -> None:
    found = read("run.sh", arguments_of(f"{MODEL} --tensor-model-parallel-size 2")[1])
    assert found.options["tp"] == (2, "run.sh: --tensor-model-parallel-size", True)
    assert {name for name, value in found.options.items() if not value.is_given} == {
        "engine", "optimizer", "clip_grad_norm", "sequence_parallel",
    }  # fmt: skip
    assert found.model is not None
    assert found.model.where.startswith("run.sh: ")
    precision = read("", arguments_of(MODEL.replace("--bf16", ""))[1]).options["precision"]
    assert (precision.value, precision.is_given) == ("fp32", False)


def test_a_precision_that_may_be_among_what_is_not_read() -> None:
    text = f"{MODEL.replace('--bf16', '')} --vocab-size 1000 --swiglu $DTYPE_ARGS"
    assert "precision" not in options_of(text)
    assert options_of(text.replace("$DTYPE_ARGS", "$@"))["precision"] == "fp32"


def test_half_precisions() -> None:
    fp16 = MODEL.replace("--bf16", "--fp16")
    assert options_of(fp16)["precision"] == "fp16-mixed"
    assert options_of(f"{fp16} --accumulate-allreduce-grads-in-fp32")["grad_dtype"] == "fp32"
    with pytest.raises(InputError, match="--fp16"):
        options_of(f"{MODEL} --fp16")


def test_the_file_of_deepspeed() -> None:
    found = read(*arguments_of(f"{MODEL} --deepspeed --deepspeed_config ds.json --no-pipeline-parallel"))
    assert found.files["deepspeed"].value == "ds.json"
    assert found.notes == ()
    assert not read(*arguments_of(f"{MODEL} --deepspeed_config ds.json")).files


# --- notes


@pytest.mark.parametrize(
    ("more", "note"),
    [
        ("--tp-comm-overlap", "--tp-comm-overlap: "),
        ("--overlap-grad-reduce", "timed as exposed"),
        ("--deterministic-mode", "--deterministic-mode: on GPUs before Hopper"),
        ("--cuda-graph-impl local", "--cuda-graph-impl local: the memory of CUDA graphs is not counted"),
        (
            "--fine-grained-activation-offloading --offload-modules core_attn qkv_linear",
            "--offload-modules qkv_linear: what the projection and its norm save is counted on the GPU",
        ),
        ("--cpu-offloading-num-layers 2", "--cpu-offloading-num-layers 2: "),
        ("--fp32-residual-connection", "16 bits"),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --fp8-format hybrid", "--exp-avg-dtype bf16: "),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", "--recompute-num-layers 2: "),
        ("--rampup-batch-size 16 16 1000", "--rampup-batch-size 16 16 1000: "),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", "--use-megatron-fsdp: "),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.5", "--optimizer-offload-fraction 0.5: "),
        ("--no-bias-swiglu-fusion", "--no-bias-swiglu-fusion: counted as fused"),
        ("--transformer-impl local", "--transformer-impl local: "),
        ("--position-embedding-type none", "--position-embedding-type none: "),
        ("--num-experts 4", "--moe-token-dispatcher-type allgather, its default: "),
        ("--num-experts 4", "--moe-grouped-gemm is missing"),
        (f"{EXPERTS.replace('alltoall', 'flex')}", "--moe-token-dispatcher-type flex: "),
        (f"{EXPERTS} --moe-router-dtype fp32 --moe-aux-loss-coeff 1e-2", "--moe-router-dtype fp32, --moe-aux-loss-coeff 1e-2: "),
        (f"{EXPERTS} --moe-expert-capacity-factor 1.0", "--moe-expert-capacity-factor 1.0: "),
        (f"{EXPERTS} --moe-router-score-function sqrtsoftplus", "--moe-router-score-function sqrtsoftplus: "),
        ("--my-flag 3 --other", "--my-flag, --other: not in Megatron-LM's parser"),
        ("--swiglu $MORE", "$MORE: not constant in the file"),
        ("--swiglu more", "more: belongs to no option"),
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_noted(more: str, note: str) -> None:
    if "$MORE" in more:
        more += " --vocab-size 1000"
    assert any(note in one for one in notes_of(more)), notes_of(more)


@pytest.mark.parametrize(
    "more",
    [
        "", "--cuda-graph-impl none", "--cpu-offloading-num-layers 0", "--mtp-num-layers 0", "--softmax-type vanilla",
        f"{EXPERTS} --moe-aux-loss-coeff 0 --moe-router-load-balancing-type aux_loss", "--empty-unused-memory-level 0",
        "--log-interval 1 --save x --lr 1e-4 --train-iters 10 --seed 3 --use-mcore-models --distributed-backend nccl",
        "--overlap-param-gather false", "--window-size", "--transformer-impl transformer_engine --no-masked-softmax-fusion",
    ],
)  # fmt: skip
def test_what_changes_nothing_has_no_note(more: str) -> None:
    assert notes_of(more) == () or more == "--window-size"


# --- refusals


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--cp-comm-type a2a p2p --context-parallel-size 2", "--cp-comm-type"),
        ("--cp-comm-type a2a+p2p --context-parallel-size 2", "--cp-comm-type"),
        ("--cp-comm-type a2a+p2p --context-parallel-size 4 --hierarchical-context-parallel-sizes 2 4", "--hierarchical-context"),
        ("--cp-comm-type a2a+p2p --context-parallel-size 8 --hierarchical-context-parallel-sizes 2 2 2", "--hierarchical"),
        ("--optimizer soap", "--optimizer 'soap'"),
        ("--optimizer nonsense", "--optimizer 'nonsense'"),
        ("--attention-backend magic", "--attention-backend 'magic'"),
        ("--transformer-impl inference_optimized", "--transformer-impl"),
        ("--recompute-granularity full", "--recompute-granularity full: Megatron needs --recompute-method"),
        ("--recompute-granularity selective --recompute-modules attention", "--recompute-modules"),
        ("--fine-grained-activation-offloading", "Megatron needs --offload-modules with it"),
        ("--fine-grained-activation-offloading --offload-modules mlp", "--offload-modules"),
        (
            "--fine-grained-activation-offloading --offload-modules core_attn --min-offloaded-tensor-size 10",
            "--min-offloaded-tensor-size",
        ),
        ("--checkpoint-activations", "--checkpoint-activations: is no longer valid"),
        ("--batch-size 4", "--batch-size 4: is no longer valid"),
        ("--freeze-all-layers", "--freeze-all-layers"),
        ("--fp4-format e2m1", "--fp4-format e2m1"),
        ("--yaml-cfg a.yaml", "--yaml-cfg a.yaml"),
        ("--tensor-parallel-num-weight-shards 4", "--tensor-parallel-num-weight-shards 4"),
        ("--tensor-model-parallel-size", "--tensor-model-parallel-size ''"),
        ("--tensor-model-parallel-size $TP", "--tensor-model-parallel-size '$TP'"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size '0'"),
        ("--micro-batch-size {{mbs}}", "--micro-batch-size '{{mbs}}'"),
        ("--bf16 maybe", "belongs to no option"),
        ("--num-layers-per-virtual-pipeline-stage 3", "--num-layers-per-virtual-pipeline-stage '3'"),
        ("--num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 2", "-rank '2'"),
        ("--pipeline-model-parallel-layout Ettm|tL --pipeline-model-parallel-size 2", "--pipeline-model-parallel-layout"),
        ("--pipeline-model-parallel-layout Et|tL --pipeline-model-parallel-size 2", "it has 2 layers"),
        ("--pipeline-model-parallel-layout Et*4|t|tm|t*2L --pipeline-model-parallel-size 2", "it has 1 m, and"),
        ("--pipeline-model-parallel-layout ((t --pipeline-model-parallel-size 2", "--pipeline-model-parallel-layout"),
        ("--pipeline-model-parallel-layout (t|)*999999 --pipeline-model-parallel-size 2", "--pipeline-model-parallel-layout"),
    ],
)  # fmt: skip
def test_refusals_are_one_line_with_the_name(more: str, named: str) -> None:
    if "belongs" in named:
        assert any(named in note for note in notes_of(more))
        return
    with pytest.raises(InputError) as error:
        options_of(f"{MODEL} {more}")
    assert named in str(error.value)
    assert "\n" not in str(error.value)


_VALUES = (
    True, False, None, 0, 1, 2, -1, 10**30, 1.5, float("nan"), float("inf"), "", "x", "2", "1e3", "nan", "${X}", "$(ls)",
    "[1]*3", "([0]*9999+[1]*9999)*9999", [], ["a"], [1, None], {}, {"a": 1}, "true", "full", "selective", "block", "flash",
    "\x00\n", b"x", object(), "Et*3|(t|)*3L", "(((",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
def test_any_value_is_read_or_refused(seed: int) -> None:
    choice = random.Random(seed)
    base = dict(arguments_of(f"{MODEL} --num-experts 4")[1])
    names = [*sorted(KNOWN), "foo", "unread", "nnodes", "nproc_per_node", "deepspeed", "deepspeed_config", "zero_stage"]
    for name in names:
        for value in choice.sample(_VALUES, 1):
            arguments = {**(base if choice.random() < 0.8 else {}), name.replace("-", "_"): value}
            try:
                found = read("f", arguments_of(arguments)[1])
                check_options({key: one.value for key, one in found.options.items()})
                if found.model is not None:
                    load_model(found.model.value)
            except InputError as error:
                assert "\n" not in str(error)


def test_a_run_from_end_to_end() -> None:
    text = (
        f"torchrun --nproc-per-node 8 --nnodes 1 pretrain_gpt.py {MODEL} --tensor-model-parallel-size 2 --sequence-parallel "
        f"--use-distributed-optimizer --global-batch-size 32 {EXPERTS} --expert-model-parallel-size 4 "
        "--expert-tensor-parallel-size 1"
    )
    found = read(*arguments_of(text))
    assert found.model is not None
    assert found.notes == ()
    report = estimate(load_model(found.model.value), **{name: value.value for name, value in found.options.items()})
    setup = report.to_dict()["setup"]
    assert [setup[name] for name in ("gpus", "dp", "tp", "ep", "etp", "zero", "global_batch_size")] == [
        8,
        4,
        2,
        4,
        1,
        1,
        32,
    ]


@pytest.mark.parametrize(
    ("more", "workspaces"),
    [
        ("", None),
        ("--tp-comm-overlap --tensor-model-parallel-size 1", None),
        ("--tp-comm-overlap --tensor-model-parallel-size 2 --sequence-parallel", 4),
        (f"{EXPERTS} --tp-comm-overlap --tensor-model-parallel-size 2 --sequence-parallel", 8),
        ("--num-experts 4 --tp-comm-overlap --tensor-model-parallel-size 2 --sequence-parallel", 4),
        ("--tp-comm-overlap --tensor-model-parallel-size 2 --sequence-parallel --transformer-impl local", None),
        ("--num-experts 4", 1),
    ],
)
def test_workspaces_of_transformer_engine(more: str, workspaces: int | None) -> None:
    """Its get_cublas_workspace: one for all products, four for grouped ones, and one of three times the size for products with
    user buffers (transformer_engine/pytorch/cpp_extensions/gemm.py)."""
    assert options_of(f"{MODEL} {more}").get("te_workspaces") == workspaces


def test_user_buffers_need_sequence_parallelism() -> None:
    """Megatron-LM asserts it (megatron/training/arguments.py)."""
    with pytest.raises(InputError, match="--tp-comm-overlap: Megatron refuses it without sequence parallelism"):
        options_of(f"{MODEL} --tp-comm-overlap --tensor-model-parallel-size 2")
