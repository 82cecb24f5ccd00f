"""The typed configuration: one dataclass per group, every default written once, here and in the files beside this one.

How a key is written: ``config/keys.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titanyaml.config.keys import MAX_RANKS, MISSING, key
from titanyaml.config.schema.hardware import Cluster, Hardware
from titanyaml.config.schema.model import Model
from titanyaml.config.schema.plugins import ActivationCheckpointingConfig, CompileConfig, Pipeline, Quant
from titanyaml.pipeline_schedule.kinds import SCHEDULE_KINDS

_RESHARD = ["auto", "always", "never"]
_CP_METHOD = (
    "how queries meet keys of other ranks: gather all, pass them around (ring), trade sequence for heads (ulysses)"
)


def _degree(doc: str) -> Any:
    # a resumed run may have another mesh as long as a step sees equally many sequences
    return key(1, doc, low=-1, high=MAX_RANKS, resume="equal_batch")


@dataclass
class Parallel:
    """Degrees of the device mesh. One of them may be -1: derived from the number of ranks."""

    dp_replicate: int = _degree("copies of the sharded model (HSDP, DDP)")
    dp_shard: int = _degree("ranks over which FSDP shards parameters, gradients and optimizer")
    cp: int = _degree("ranks over which a sequence is split")
    tp: int = _degree("ranks over which matrices are split")
    pp: int = _degree("pipeline stages' ranks")
    ep: int = _degree("ranks over which experts are split; reuses dp_shard*cp*tp")
    # the backward pass begins with the last block, so that freeing its weights would gather them at once again
    fsdp_reshard_after_forward: str = key(
        "auto", "free gathered weights after a block's forward; auto: all but the last", choices=_RESHARD, resume="free"
    )
    fsdp_prefetch: int | None = key(
        None, "blocks whose weights are gathered ahead; null: FSDP's own order, one as soon as it can", low=1
    )
    fsdp_cpu_offload: bool = key(False, "keep weights, gradients and optimizer state in host memory; needs a GPU")
    fsdp_reuse_memory: bool = key(
        False,
        "put reduced gradients where the backward pass has freed activations; needs a GPU and one such pass a step",
        resume="free",
    )
    cp_method: str = key("allgather", _CP_METHOD, choices=["allgather", "ring", "ulysses"])
    # true: less memory for activations, and the same bytes sent
    tp_sequence_parallel: bool = key(
        True, "tp ranks hold a slice of the sequence between the split matrices; false: the whole of it"
    )
    pp_schedule: str = key("1F1B", "order of forwards and backwards on the pipeline", choices=list(SCHEDULE_KINDS))
    pp_schedule_csv: str | None = key(
        None, "file with a schedule of your own in place of pp_schedule: a row a rank, cells such as 0F0, 1B3, 1I3, 1W3"
    )
    # null, not 1: the fewest stages differ by schedule
    pp_stages_per_rank: int | None = key(
        None, "stages on a rank; null: 2 for schedules with several, else 1; a file brings its own", low=1
    )
    pp_stages: list[str] = key(
        [], "layers of each stage, or the first layer of each (layers.0, ...); empty: stages of balanced cost"
    )
    pp_first_stage_less_layers: int | None = key(
        None, "layers by which the first stage falls short of an even share; null: by cost", low=0
    )
    pp_last_stage_less_layers: int | None = key(
        None, "layers by which the last stage falls short of an even share; null: by cost", low=0
    )


_SOURCE = "stdlib: the Python standard library's sources; files; hf: a Hugging Face dataset; synthetic: random tokens"
_TEXT = ("kind", ["stdlib", "files", "hf"])
_TRAINED, _FILE = ("kind", ["sentencepiece"]), ("kind", ["sentencepiece", "hf"])


@dataclass
class Data:
    """Where text comes from."""

    kind: str = key(MISSING, _SOURCE, choices=["stdlib", "files", "hf", "synthetic"])
    paths: list[str] = key([], "text, .jsonl or .parquet files, folders or globs", when=("kind", ["files"]))
    max_files: int | None = key(None, "use only the first files; null: all", low=1, when=("kind", ["stdlib", "files"]))
    dataset: str | None = key(None, "dataset name on the hub, or a local folder of it", when=("kind", ["hf"]))
    subset: str | None = key(None, "configuration name of the dataset", when=("kind", ["hf"]))
    split: str = key("train", "split that is trained on", when=("kind", ["hf"]))
    validation_split: str | None = key(None, "split for validation; null: held out of split", when=("kind", ["hf"]))
    streaming: bool = key(False, "read the dataset as a stream, in its own order", when=("kind", ["hf"]))
    revision: str | None = key(None, "git revision of the dataset", when=("kind", ["hf"]))
    text_field: str = key("text", "field that holds the text", when=("kind", ["files", "hf"]))
    validation_fraction: float = key(
        0.02, "share of documents held out for validation, by a hash of their index", low=0, below=1, when=_TEXT
    )
    shuffle: bool = key(True, "permute the samples anew in every epoch; a stream has its own order and needs false")
    # free: how far the loader reads ahead is not part of its position
    prefetch: int = key(2, "batches prepared ahead by the loader's thread; 0: none", low=0, resume="free")
    cache_dir: str = key(
        "${oc.env:TITANYAML_CACHE,.cache/titanyaml}", "folder of tokenised corpora and tokenizers", resume="free"
    )


@dataclass
class TokenizerConfig:
    """How text becomes token ids."""

    kind: str = key(MISSING, "bytes, sentencepiece, or hf (a tokenizer.json)", choices=["bytes", "sentencepiece", "hf"])
    path: str | None = key(
        None, "a .model or tokenizer.json; null (sentencepiece only): trained on the corpus, then cached", when=_FILE
    )
    vocab_size: int | None = key(None, "trained vocabulary (ids); null: as the file says", low=8, when=_TRAINED)
    model_type: str = key("bpe", "sentencepiece algorithm", choices=["bpe", "unigram"], when=_TRAINED)
    train_bytes: int = key(8_000_000, "text read to train the vocabulary (bytes)", low=1000, when=_TRAINED)
    eos_token: str | None = key(None, "token that ends a document; null: as the file says", when=_FILE)


_ON = ["trace", "memory", "both"]


@dataclass
class Profile:
    """Traces and memory snapshots of chosen steps. A window is wait + warmup + active steps."""

    kind: str = key("none", "trace: kernels over time; memory: CUDA allocations", choices=["none", *_ON])
    # compilation and the allocator's growth lie in the first steps
    wait: int = key(4, "steps of a window that are left alone", low=0, when=("kind", _ON))
    warmup: int = key(1, "steps after them in which the profiler runs and records nothing", low=0, when=("kind", _ON))
    active: int = key(2, "steps after these that are recorded, in one file per rank", low=1, when=("kind", _ON))
    repeat: int = key(1, "windows; 0: as many as there are steps for", low=0, when=("kind", _ON))
    ranks: list[int] = key([0], "ranks that record", when=("kind", _ON))
    shapes: bool = key(False, "record the operators' input shapes", when=("kind", ["trace", "both"]))
    stacks: bool = key(False, "record the Python lines that called them (slow)", when=("kind", ["trace", "both"]))
    max_allocations: int = key(
        200_000, "newest allocations and frees that a snapshot keeps", low=1, when=("kind", ["memory", "both"])
    )


_DTYPES = ["bfloat16", "float32", "float64"]
_FALLING = ["cosine", "linear", "wsd"]
_MOMENTS = "moments of AdamW: adamw in float32, adamw_bf16 in bfloat16, adamw_8bit in 8 bits by blocks"
_MASTER = (
    "float32 value of a weight that is stored in bfloat16: float32 beside it, or split between it and a "
    "16-bit remainder (same value, 2 bytes less)"
)
_RUNNERS = ["check", "plan", "train", "bench", "eval", "sample"]
# when keys are read: (sibling, its values)
_LOCAL, _BENCH, _PLAN = ("kind", ["local"]), ("name", ["bench"]), ("name", ["plan"])


@dataclass
class Run:
    """What this run is called and where it writes."""

    name: str = key("${model.name}", "name of the experiment: first folder under outputs/, Aim experiment")
    id: str = key("${now:%Y%m%d-%H%M%S-%f}", "identity of the run; the same id again resumes it")
    seed: int = key(0, "seed of initial weights, sample order and every random stream", low=0)
    dir: str = key("outputs/${run.name}/${run.id}", "folder that receives everything this run writes")
    deterministic: bool = key(False, "deterministic GPU kernels (slower); resume is then bit-exact on GPU too")


@dataclass
class ParamGroup:
    """Optimizer settings for the parameters whose name matches."""

    pattern: str = key(MISSING, "regular expression searched in the parameter name; the first match wins")
    lr_scale: float = key(1.0, "factor on the learning rate", low=0)
    weight_decay: float | None = key(None, "weight decay of the group; null: as the optimizer's", low=0)


@dataclass
class Optim:
    """AdamW."""

    name: str = key("adamw", _MOMENTS, choices=["adamw", "adamw_bf16", "adamw_8bit"])
    lr: float = key(3e-4, "peak learning rate", above=0)
    beta1: float = key(0.9, "decay of the first moment", low=0, below=1)
    beta2: float = key(0.95, "decay of the second moment", low=0, below=1)
    eps: float = key(1e-8, "added to the root of the second moment", above=0)
    weight_decay: float = key(0.1, "decoupled weight decay; never applied to norms and biases", low=0)
    implementation: str = key(
        "auto",
        "auto: fused on GPU, foreach on CPU",
        choices=["auto", "fused", "foreach", "loop"],
        when=("name", ["adamw"]),
    )
    # not split by default: its stored weights are rounded with ties away, not to even
    master: str = key("float32", _MASTER, choices=["float32", "split"], resume="free")
    groups: list[ParamGroup] = key([], "per-name settings, first match wins")


@dataclass
class Schedule:
    """Learning rate as a pure function of the step."""

    kind: str = key("cosine", "shape after warm-up", choices=["cosine", "linear", "wsd", "constant"])
    warmup_steps: int = key(0, "steps of linear warm-up; step 1 already has a rate above zero", low=0)
    # a constant rate has no last one
    min_lr_ratio: float = key(0.1, "last rate over peak rate", low=0, high=1, when=("kind", _FALLING))
    decay_steps: int = key(0, "steps of the final decay", low=0, when=("kind", ["wsd"]))


@dataclass
class Loss:
    """Cross-entropy over the vocabulary."""

    kind: str = key("cross_entropy", "loss", choices=["cross_entropy"])
    chunk_tokens: int | None = key(
        None, "tokens whose logits exist at one time; null: 4096 with fused kernels, else 1024", low=1, resume="free"
    )


@dataclass
class Kernels:
    """Operators of our own."""

    name: str = key(
        "auto",
        "auto: fused on a GPU with triton, else torch; torch: plain PyTorch; fused: Triton kernels",
        choices=["auto", "torch", "fused"],
    )


@dataclass
class Train:
    """The loop. Batches count sequences."""

    steps: int = key(200, "optimizer steps", low=1, resume="free")
    # the longest context of a model (131,072 for Llama 3.1) rarely fits into memory
    seq_len: int = key("${titan.min:${model.max_seq_len},8192}", "tokens in a sequence", low=1, resume="fixed")
    local_batch: int = key(4, "sequences per data rank and forward", low=1, resume="equal_batch")
    global_batch: int | None = key(
        None, "sequences per step; null: no gradient accumulation", low=1, resume="equal_batch"
    )
    max_norm: float | None = key(1.0, "gradients are clipped to this norm; null: not", above=0)
    compute_dtype: str = key(
        "auto", "forward and backward; auto: bfloat16 on GPU, float32 on CPU", choices=["auto", *_DTYPES]
    )
    param_dtype: str = key("float32", "master parameters and optimizer state", choices=["float32", "float64"])
    reduce_dtype: str = key("float32", "gradient reduction", choices=_DTYPES)
    log_every: int = key(1, "steps between records in metrics.jsonl", low=1, resume="free")
    # automatic collections stop each rank at another moment, and all ranks wait for the last
    gc_every: int = key(50, "steps between manual garbage collections (the automatic one is off)", low=1, resume="free")


@dataclass
class Validation:
    """Loss on held-out text."""

    interval: int = key(100, "steps between validations; 0: only at the end", low=0)
    batches: int = key(8, "global batches per validation; 0: off", low=0)


@dataclass
class Checkpoint:
    """What is saved, and where a run starts."""

    enabled: bool = key(True, "save at all")
    interval: int = key(100, "steps between checkpoints; 0: only at the end", low=0, when=("enabled", [True]))
    keep: int = key(2, "newest checkpoints kept", low=1, when=("enabled", [True]))
    # the same run.id again is a resume: a job that is restarted after a failure needs no other command
    resume: str = key("auto", "auto: the newest good checkpoint of this run; none: step 0; or a checkpoint's folder")
    accept_changes: list[str] = key(
        [], "keys, or groups of keys, in which a resumed run may differ from how it was begun"
    )


@dataclass
class Tracker:
    """Where metrics go besides metrics.jsonl."""

    kind: str = key("none", "aim or none", choices=["aim", "none"])
    repo: str = key("outputs", "folder of the Aim repository (.aim lies in it)", when=("kind", ["aim"]))


@dataclass
class Launch:
    """How ranks are started."""

    kind: str = key(
        "local",
        "local: ranks on this machine; external: join the group torchrun started",
        choices=["local", "external"],
    )
    nproc: int | None = key(
        None,
        "ranks on this machine; null: the mesh's product, else all local GPUs, else 1",
        low=1,
        high=MAX_RANKS,
        when=_LOCAL,
    )
    # the first step compiles
    startup_timeout_s: float = key(1800.0, "limit of a collective before the first step is done (seconds)", above=0)
    step_timeout_s: float = key(300.0, "limit of a collective after it (seconds)", above=0)
    # ranks that are asked to stop finish their step and save
    shutdown_grace_s: float = key(
        120.0, "time between asking ranks to stop and killing them (seconds)", above=0, when=_LOCAL
    )


@dataclass
class Sweep:
    """Multirun behaviour."""

    on_failure: str = key("continue", "what a failed job does to the rest", choices=["continue", "stop"])


@dataclass
class Runner:
    """What is done with the configuration."""

    name: str = key(MISSING, ", ".join(_RUNNERS), choices=_RUNNERS)
    _target_: str = key(MISSING, "function that does it")
    checkpoint: str | None = key(
        None, "run folder or checkpoint folder that is read", when=("name", ["eval", "sample"])
    )
    prompt: str = key("def ", "text to continue", when=("name", ["sample"]))
    max_new_tokens: int = key(128, "tokens to write", low=1, when=("name", ["sample"]))
    temperature: float = key(0.8, "0: the most likely token", low=0, when=("name", ["sample"]))
    top_k: int | None = key(50, "draw among this many; null: all", low=1, when=("name", ["sample"]))
    skipped_steps: int = key(5, "steps before the first measured one: warm-up, compilation", low=1, when=_BENCH)
    measured_steps: int = key(10, "steps whose median counts", low=2, when=_BENCH)
    profiled_steps: int = key(2, "steps after these under the profiler, for the breakdown; 0: none", low=0, when=_BENCH)
    entity: str = key("local", "who measures: last part of the report's file name", when=_BENCH)
    interconnect: str | None = key(None, "what links the devices, for the report", when=_BENCH)
    notes: str | None = key(None, "what else helps to reproduce the figures, for the report", when=_BENCH)
    token_budget: float | None = key(
        None,
        "tokens of the whole training, for days, device-hours and cost; null: those of train.steps",
        above=0,
        when=_PLAN,
    )
    trace: bool = key(False, "run on fake tensors and compare matmuls and collectives with the plan's", when=_PLAN)


@dataclass
class Config:
    """The whole tree. Closed: an unknown key anywhere is an error; ``user`` is free."""

    run: Run = key(Run, "identity and folder of the run")
    runner: Runner = key(Runner, "what is done")
    model: Model = key(Model, "the decoder")
    parallel: Parallel = key(Parallel, "the device mesh")
    quant: Quant = key(Quant, "float8 training")
    ac: ActivationCheckpointingConfig = key(ActivationCheckpointingConfig, "activation checkpointing", resume="free")
    compile: CompileConfig = key(CompileConfig, "compilation")
    data: Data = key(Data, "text")
    tokenizer: TokenizerConfig = key(TokenizerConfig, "text to ids")
    optim: Optim = key(Optim, "optimizer")
    schedule: Schedule = key(Schedule, "learning rate over steps")
    loss: Loss = key(Loss, "loss")
    kernels: Kernels = key(Kernels, "operators of our own")
    train: Train = key(Train, "the loop")
    validation: Validation = key(Validation, "held-out loss", resume="free")
    checkpoint: Checkpoint = key(Checkpoint, "saving and resuming", resume="free")
    tracker: Tracker = key(Tracker, "experiment tracking", resume="free")
    profile: Profile = key(Profile, "traces and memory snapshots", resume="free")
    hardware: Hardware = key(Hardware, "the device", resume="free")
    cluster: Cluster = key(Cluster, "links between devices")
    launch: Launch = key(Launch, "starting ranks", resume="free")
    sweep: Sweep = key(Sweep, "multirun", resume="free")
    pipeline: Pipeline = key(Pipeline, "model transforms")
    user: dict[str, Any] = key({}, "free section for your own files", resume="free")
