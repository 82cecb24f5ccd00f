"""The typed configuration: one dataclass per group, every default written once, here.

``key(...)`` attaches what the whole-tree check (``config/check.py``) enforces beyond the type: legal choices, the
range, and ``when``: the sibling key and the values for which this key is read at all. A key set to something other
than its default while its ``when`` does not hold is refused: nothing that was typed is ignored.

No tuples, no enums: OmegaConf 2.3 and 2.4 treat them differently.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MISSING = "???"
MAX_RANKS = 2**20


def key(
    default: Any,
    doc: str,
    *,
    choices: list | None = None,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    when: tuple[str, list] | None = None,
) -> Any:
    """A configuration key.

    Args:
        default: its default (lists and dicts are copied).
        doc: one line: meaning, unit, what the default does.
        choices: the only legal values.
        low, high: inclusive bounds. above, below: exclusive bounds.
        when: (sibling key, values of it for which this key is read).
    """
    metadata = {"doc": doc, "choices": choices, "low": low, "above": above, "high": high, "below": below, "when": when}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Run:
    """What this run is called and where it writes."""

    name: str = key("${model.name}", "name of the experiment: first folder under outputs/, Aim experiment")
    id: str = key("${now:%Y%m%d-%H%M%S-%f}", "identity of the run; the same id again resumes it")
    seed: int = key(0, "seed of initial weights, sample order and every random stream", low=0)
    dir: str = key("outputs/${run.name}/${run.id}", "folder that receives everything this run writes")
    deterministic: bool = key(False, "deterministic GPU kernels (slower); resume is then bit-exact on GPU too")


@dataclass
class RopeScaling:
    """Llama 3.1 frequency scaling."""

    factor: float = key(8.0, "how far low frequencies are stretched", above=0)
    low_freq_factor: float = key(1.0, "wavelengths above original/low are fully stretched", above=0)
    high_freq_factor: float = key(4.0, "wavelengths below original/high are kept", above=0)
    original_max_seq_len: int = key(8192, "context length of the unscaled model (tokens)", low=1)


@dataclass
class Model:
    """Sizes and variants of the one decoder."""

    name: str = key(MISSING, "name of the architecture")
    family: str = key("llama3", "naming and layout for Hugging Face import and export", choices=["llama3", "qwen3"])
    vocab_size: int = key(MISSING, "rows of the embedding (tokens)", low=1)
    dim: int = key(MISSING, "width of the residual stream", low=1)
    num_layers: int = key(MISSING, "decoder blocks", low=1)
    num_heads: int = key(MISSING, "query heads", low=1)
    num_kv_heads: int = key(MISSING, "key/value heads; must divide num_heads", low=1)
    head_dim: int | None = key(None, "width of a head; null: dim / num_heads", low=2)
    ffn_dim: int = key(MISSING, "inner width of the SwiGLU feed-forward", low=1)
    max_seq_len: int = key(MISSING, "longest sequence the model accepts (tokens)", low=1)
    norm_eps: float = key(1e-5, "epsilon of RMSNorm", above=0)
    rope_theta: float = key(500000.0, "base of the rotary frequencies", above=0)
    rope_scaling: RopeScaling | None = key(None, "Llama 3.1 frequency scaling; null: none")
    tie_embeddings: bool = key(False, "the output projection is the embedding's weight")
    qk_norm: bool = key(False, "RMSNorm on each query and key head (Qwen3)")
    attention_bias: bool = key(False, "bias on the four attention projections")
    document_mask: bool = key(False, "tokens attend only within their own document (block-causal)")
    init_std: float = key(0.02, "standard deviation of initial weights", above=0)


@dataclass
class Parallel:
    """Degrees of the device mesh. One of them may be -1: derived from the number of ranks."""

    dp_replicate: int = key(1, "copies of the sharded model (HSDP, DDP)", low=-1, high=MAX_RANKS)
    dp_shard: int = key(1, "ranks over which FSDP shards parameters, gradients and optimizer", low=-1, high=MAX_RANKS)
    cp: int = key(1, "ranks over which a sequence is split", low=-1, high=MAX_RANKS)
    tp: int = key(1, "ranks over which matrices are split", low=-1, high=MAX_RANKS)
    pp: int = key(1, "pipeline stages' ranks", low=-1, high=MAX_RANKS)
    ep: int = key(1, "ranks over which experts are split; reuses dp_shard*cp*tp", low=-1, high=MAX_RANKS)
    fsdp_reshard_after_forward: str = key(
        "auto",
        "free gathered weights after a block's forward; auto: all but the last block",
        choices=["auto", "always", "never"],
    )
    tp_sequence_parallel: bool = key(
        True, "tp ranks hold a slice of the sequence between the split matrices; false: the whole of it"
    )


@dataclass
class Data:
    """Where text comes from."""

    kind: str = key(
        MISSING,
        "stdlib: the Python standard library's sources; files; hf: a Hugging Face dataset; synthetic: random tokens",
        choices=["stdlib", "files", "hf", "synthetic"],
    )
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
        0.02, "share of documents held out for validation, chosen by a hash of their index", low=0, below=1,
        when=("kind", ["stdlib", "files", "hf"]),
    )
    shuffle: bool = key(True, "permute the samples anew in every epoch; a stream has its own order and needs false")
    prefetch: int = key(2, "batches prepared ahead by the loader's thread; 0: none", low=0)
    cache_dir: str = key("${oc.env:TITANYAML_CACHE,.cache/titanyaml}", "folder of tokenised corpora and tokenizers")


@dataclass
class Tokenizer:
    """How text becomes token ids."""

    kind: str = key(MISSING, "bytes, sentencepiece, or hf (a tokenizer.json)", choices=["bytes", "sentencepiece", "hf"])
    path: str | None = key(
        None, "an existing .model or tokenizer.json; null (sentencepiece only): trained on the corpus, then cached",
        when=("kind", ["sentencepiece", "hf"]),
    )
    vocab_size: int | None = key(
        None, "size of the trained vocabulary; null: as the file says", low=8, when=("kind", ["sentencepiece"])
    )
    model_type: str = key(
        "bpe", "sentencepiece algorithm", choices=["bpe", "unigram"], when=("kind", ["sentencepiece"])
    )
    train_bytes: int = key(
        8_000_000, "text read to train the vocabulary (bytes)", low=1000, when=("kind", ["sentencepiece"])
    )
    eos_token: str | None = key(
        None, "token that ends a document; null: as the file says", when=("kind", ["sentencepiece", "hf"])
    )


@dataclass
class ParamGroup:
    """Optimizer settings for the parameters whose name matches."""

    pattern: str = key(MISSING, "regular expression searched in the parameter name; the first match wins")
    lr_scale: float = key(1.0, "factor on the learning rate", low=0)
    weight_decay: float | None = key(None, "weight decay of the group; null: as the optimizer's", low=0)


@dataclass
class Optim:
    """AdamW."""

    name: str = key("adamw", "optimizer", choices=["adamw"])
    lr: float = key(3e-4, "peak learning rate", above=0)
    beta1: float = key(0.9, "decay of the first moment", low=0, below=1)
    beta2: float = key(0.95, "decay of the second moment", low=0, below=1)
    eps: float = key(1e-8, "added to the root of the second moment", above=0)
    weight_decay: float = key(0.1, "decoupled weight decay; never applied to norms and biases", low=0)
    implementation: str = key(
        "auto", "auto: fused on GPU, foreach on CPU", choices=["auto", "fused", "foreach", "loop"]
    )
    groups: list[ParamGroup] = key([], "per-name settings, first match wins")


@dataclass
class Schedule:
    """Learning rate as a pure function of the step."""

    kind: str = key("cosine", "shape after warm-up", choices=["cosine", "linear", "wsd", "constant"])
    warmup_steps: int = key(0, "steps of linear warm-up; step 1 already has a rate above zero", low=0)
    min_lr_ratio: float = key(
        0.1, "last rate over peak rate", low=0, high=1, when=("kind", ["cosine", "linear", "wsd"])
    )
    decay_steps: int = key(0, "steps of the final decay", low=0, when=("kind", ["wsd"]))


@dataclass
class Loss:
    """Cross-entropy over the vocabulary."""

    kind: str = key("cross_entropy", "loss", choices=["cross_entropy"])
    chunk_tokens: int = key(1024, "tokens whose logits exist at one time", low=1)


@dataclass
class Train:
    """The loop. Batches count sequences."""

    steps: int = key(200, "optimizer steps", low=1)
    seq_len: int = key("${titan.min:${model.max_seq_len},8192}", "tokens in a sequence", low=1)
    local_batch: int = key(4, "sequences per data rank and forward", low=1)
    global_batch: int | None = key(None, "sequences per step; null: no gradient accumulation", low=1)
    max_norm: float | None = key(1.0, "gradients are clipped to this norm; null: not", above=0)
    compute_dtype: str = key(
        "auto", "forward and backward; auto: bfloat16 on GPU, float32 on CPU",
        choices=["auto", "bfloat16", "float32", "float64"],
    )
    param_dtype: str = key("float32", "master parameters and optimizer state", choices=["float32", "float64"])
    reduce_dtype: str = key("float32", "gradient reduction", choices=["bfloat16", "float32", "float64"])
    log_every: int = key(1, "steps between records in metrics.jsonl", low=1)
    gc_every: int = key(50, "steps between manual garbage collections (the automatic one is off)", low=1)


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
class Hardware:
    """The device: peaks for MFU. Unknown stays null, and MFU is then null too."""

    name: str = key("auto", "auto: recognised by the device's own name")
    peak_bf16_tflops: float | None = key(None, "dense bf16 peak (TFLOP/s)", above=0)
    memory_gib: float | None = key(None, "device memory (GiB)", above=0)


@dataclass
class Launch:
    """How ranks are started."""

    kind: str = key("local", "local: ranks on this machine; external: join the group torchrun started",
                    choices=["local", "external"])
    nproc: int | None = key(
        None, "ranks on this machine; null: the mesh's product, else all local GPUs, else 1", low=1, high=MAX_RANKS,
        when=("kind", ["local"]),
    )
    startup_timeout_s: float = key(1800.0, "limit of a collective before the first step is done (seconds)", above=0)
    step_timeout_s: float = key(300.0, "limit of a collective after it (seconds)", above=0)
    shutdown_grace_s: float = key(
        120.0, "time between asking ranks to stop and killing them (seconds)", above=0, when=("kind", ["local"])
    )


@dataclass
class Sweep:
    """Multirun behaviour."""

    on_failure: str = key("continue", "what a failed job does to the rest", choices=["continue", "stop"])


@dataclass
class Runner:
    """What is done with the configuration."""

    name: str = key(MISSING, "check, train, eval or sample", choices=["check", "train", "eval", "sample"])
    _target_: str = key(MISSING, "function that does it")
    checkpoint: str | None = key(
        None, "run folder or checkpoint folder that is read", when=("name", ["eval", "sample"])
    )
    prompt: str = key("def ", "text to continue", when=("name", ["sample"]))
    max_new_tokens: int = key(128, "tokens to write", low=1, when=("name", ["sample"]))
    temperature: float = key(0.8, "0: the most likely token", low=0, when=("name", ["sample"]))
    top_k: int | None = key(50, "draw among this many; null: all", low=1, when=("name", ["sample"]))


@dataclass
class PluginNode:
    """A node of pipeline.plugins. ``_target_: null`` means off."""

    _target_: str | None = key(None, "class of the transform; null: off")
    _stage_: str | None = key(None, "overrides the class's stage")
    _after_: list[str] = key([], "nodes that must come before, where present")
    _before_: list[str] = key([], "nodes that must come after, where present")
    _requires_: list[str] = key([], "nodes that must be on")
    _conflicts_: list[str] = key([], "nodes that must be off")


@dataclass
class ActivationCheckpointing(PluginNode):
    """Recompute activations in the backward pass."""

    _target_: str | None = key("titanyaml.plugins.ac.ActivationCheckpointing", "class of the transform")
    mode: str = key("none", "what is recomputed", choices=["none", "full", "selective_op", "selective_layer"])
    every: int = key(2, "selective_layer: one block in this many is recomputed", low=1,
                     when=("mode", ["selective_layer"]))


@dataclass
class Compile(PluginNode):
    """torch.compile."""

    _target_: str | None = key("titanyaml.plugins.compile.Compile", "class of the transform")
    mode: str = key("auto", "none, block (each block by itself), model; auto: block on GPU, none on CPU",
                    choices=["auto", "none", "block", "model"])
    backend: str = key("inductor", "torch.compile backend", when=("mode", ["auto", "block", "model"]))


@dataclass
class Pipeline:
    """The transforms between the model and the loop."""

    plugins: dict[str, Any] = key({}, "node name to plugin node; built-ins are references such as ${ac}")


@dataclass
class Config:
    """The whole tree. Closed: an unknown key anywhere is an error; ``user`` is free."""

    run: Run = key(Run, "identity and folder of the run")
    runner: Runner = key(Runner, "what is done")
    model: Model = key(Model, "the decoder")
    parallel: Parallel = key(Parallel, "the device mesh")
    ac: ActivationCheckpointing = key(ActivationCheckpointing, "activation checkpointing")
    compile: Compile = key(Compile, "compilation")
    data: Data = key(Data, "text")
    tokenizer: Tokenizer = key(Tokenizer, "text to ids")
    optim: Optim = key(Optim, "optimizer")
    schedule: Schedule = key(Schedule, "learning rate over steps")
    loss: Loss = key(Loss, "loss")
    train: Train = key(Train, "the loop")
    validation: Validation = key(Validation, "held-out loss")
    checkpoint: Checkpoint = key(Checkpoint, "saving and resuming")
    tracker: Tracker = key(Tracker, "experiment tracking")
    hardware: Hardware = key(Hardware, "the device")
    launch: Launch = key(Launch, "starting ranks")
    sweep: Sweep = key(Sweep, "multirun")
    pipeline: Pipeline = key(Pipeline, "model transforms")
    user: dict[str, Any] = key({}, "free section for your own files")
