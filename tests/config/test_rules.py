"""Each rule of the table: what breaks it, what it says, and that every way out it names is accepted."""

from __future__ import annotations

import functools
import shlex
from importlib import util
from pathlib import Path

import pytest

from titanyaml import machine
from titanyaml.config import rules, rules_data
from titanyaml.config.view import Unknown, View

BYTES = ["tokenizer=bytes", "tracker=none"]

SCHEDULE = f"parallel.pp_schedule_csv={Path(__file__).with_name('schedule.csv')}"  # 2 ranks, 2 microbatches

#: rule: (overrides that break it, what it says).
CASES = {
    "kv_heads_divide_heads": (["model.num_heads=8", "model.num_kv_heads=3"], "is 3, which does not divide"),
    "head_dim_is_even": (["model.dim=260", "model.num_heads=8"], "a width of 32.5"),
    "rope_bands_are_ordered": (["model=llama3_8b", "model.rope_scaling.low_freq_factor=8"],
                               "is 4, below low_freq_factor=8"),
    "sequence_fits_model": (["train.seq_len=513"], "is 513, longer than model.max_seq_len=512"),
    "recompute_reaches_a_block": (["ac=selective_layer", "ac.every=5"], "is 5, but the model has 4 blocks"),
    "budget_needs_the_compiler": (["ac=memory_budget", "compile=none"], "compile.mode=none compiles nothing here"),
    "chosen_recompute_has_a_limit": (["ac=auto"], "is null, and there is no GPU here"),
    "chosen_recompute_is_planned": (["ac=auto", "ac.memory_gib=8", "model=moe_debug"],
                                    "is not decided for mixtures of experts"),
    "chosen_recompute_has_a_backward": (["ac=auto", "runner=eval", "runner.checkpoint=."], "has no backward pass"),
    "chosen_recompute_has_its_plugin": (["ac=auto", "++pipeline.plugins.ac._target_=null"], "which would recompute"),
    "reserve_leaves_memory": (["hardware=h200", "hardware.reserve_gib=200"], "but the device has hardware.memory_gib"),
    "rates_are_below_their_peak": (["hardware=h200", "hardware.gemm_fp8_tflops=2500"],
                                   "is 2500 TFLOP/s sustained, above twice hardware.peak_bf16_tflops=989"),
    "compiled_loss_is_torchs": (["compile.loss=true", "runner=plan", "hardware=h200", "parallel=tp2"],
                                "computes the loss by a Triton kernel"),
    "compiled_optimizer_is_torchs": (["compile.optimizer=true", "kernels=fused", "runner=check"],
                                     "updates by a Triton kernel here"),
    "cuda_graphs_can_be_replayed": (
        ["compile.cuda_graphs=true", "compile=none", "compile.backend=aot_eager", "parallel=fsdp2", "launch.nproc=2",
         "runner=check"], "what 2 ranks gather and exchange has none; and compile.mode is none"),
    "backend_is_known": (["compile=block", "compile.backend=inductr"], "is inductr, which torch.compile does not know"),
    "degrees_are_sizes": (["parallel=single", "parallel.dp_shard=0"], "is 0"),
    "tensor_ranks_split_something": (["parallel=tp2", "++pipeline.plugins.tp._target_=null"],
                                     "is off, but 2 ranks are to share every matrix"),
    "tensor_ranks_share_heads": (["parallel=tp4", "model.num_heads=6", "model.num_kv_heads=2"],
                                 "is 6, which 4 tensor-parallel ranks cannot share evenly"),
    "tensor_ranks_share_kv_heads": (["parallel=tp4", "model.num_heads=8", "model.num_kv_heads=2"],
                                    "is 2, which 4 tensor-parallel ranks cannot share"),
    "tensor_ranks_share_features": (["parallel=fsdp2_tp4", "model.ffn_dim=1001"], "is 1001, which 4"),
    "tensor_ranks_share_vocabulary": (["parallel=tp2", "model.vocab_size=4097"], "is 4097, which 2"),
    "tensor_ranks_share_the_sequence": (["parallel=single", "parallel.tp=-1", "launch.nproc=4", "train.seq_len=510"],
                                        "is 510, which 4"),
    "context_ranks_split_something": (["parallel=cp2", "++pipeline.plugins.cp._target_=null"],
                                      "is off, but 2 ranks are to share every sequence"),
    "context_ranks_share_the_sequence": (["parallel=cp4_tp2", "train.seq_len=500"],
                                         "is 500, which 4 cp ranks of 2 tp ranks cannot share evenly"),
    "ulysses_shares_heads": (["parallel=cp4", "parallel.cp_method=ulysses", "model.num_kv_heads=2"],
                             "which deals heads to 4 ranks"),
    "ring_takes_no_mask": (["parallel=cp2", "parallel.cp_method=ring", "model.document_mask=true"],
                           "is ring, which is causal only"),
    "whole_model_is_one_graph": (["parallel=cp2", "compile=model"], "FSDP gathers weights over 2 ranks"),
    "async_tp_has_its_plugin": (["parallel=tp2", "compile=block", "compile.async_tp=true",
                                 "++pipeline.plugins.async_tp._target_=null"], "is off, but compile.async_tp is true"),
    "gathering_ahead_has_blocks": (["parallel=fsdp2", "parallel.fsdp_prefetch=4"], "is 4, but the model has 4 blocks"),
    "offload_has_a_device": (["parallel=fsdp2", "parallel.fsdp_cpu_offload=true"],
                             "is on, but there is no GPU here: all memory is host memory"),
    "freed_memory_is_a_devices": (["parallel=fsdp2", "parallel.fsdp_reuse_memory=true"],
                                  "is on, but there is no GPU here: a host has no streams"),
    "freed_memory_takes_whole_gradients": (
        ["parallel=fsdp2", "parallel.fsdp_reuse_memory=true", "optim.master=split", "train.compute_dtype=bfloat16",
         "runner=check"], "what is kept is the rounded sum"),
    "async_tp_has_ranks": (["compile.async_tp=true", "compile=block"], "is true, but parallel.tp is 1"),
    "async_tp_is_compiled": (["compile.async_tp=true", "parallel=tp2"], "is auto, which compiles on a GPU only"),
    "async_tp_splits_the_sequence": (["compile.async_tp=true", "compile=block", "parallel=tp2",
                                      "parallel.tp_sequence_parallel=false"], "is false: the tp ranks then send"),
    "async_tp_has_inductor": (["compile.async_tp=true", "compile=block", "parallel=tp2", "compile.backend=aot_eager"],
                              "is aot_eager, which does not know"),
    "async_tp_is_chosen_once": (["compile.async_tp=true", "compile=block", "parallel=tp2",
                                 "compile.async_tp_ops=[auto,all_gather]"], "has auto beside others"),
    "async_tp_overlaps_something": (["compile.async_tp=true", "compile=block", "parallel=tp2",
                                     "compile.async_tp_ops=[]"], "is empty"),
    "device_multiplies_in_float8": (
        ["quant=float8_rowwise", "quant.product=own", "quant.fast_accum=true", "quant.filter_fqns=[wo]"],
        "is float8_rowwise, but this machine has no GPU"),
    "own_products_are_emulated_on_a_cpu": (
        ["quant=float8_rowwise", "quant.product=own", "quant.grad_dtype=e5m2", "quant.emulate=true"],
        "emulates on a CPU only, and there is a GPU here"),
    "kept_float8_weights_are_not_compiled": (
        ["quant=float8_tensorwise", "quant.force_recompute_weight=false", "compile=block"],
        "is false, but with torchao's products a compiled graph casts each weight again"),
    "filters_name_modules": (["quant=float8_rowwise", "quant.filter_fqns=[wo,feed_foward]"],
                             "has 'feed_foward', which is in no module's name"),
    "float8_is_for_some_layer": (["quant=float8_rowwise", "quant.auto_filter_small_kn=true"],
                                 "but no layer can be converted: layers.3.attention.wo: 256 x 256: quant.auto"),
    "float8_gather_has_one_scale": (
        ["quant=float8_rowwise", "quant.fsdp_float8_all_gather=true", "quant.precompute_scale=true", "parallel=fsdp2"],
        "is true with float8_rowwise, which casts a weight along both",
    ),
    "float8_gather_has_shards": (
        ["quant=float8_tensorwise", "quant.fsdp_float8_all_gather=true", "parallel=auto", "launch.nproc=1"],
        "is true, but parallel.dp_shard is 1",
    ),
    "gathered_float8_is_not_kept_twice": (
        ["quant=float8_tensorwise", "quant.fsdp_float8_all_gather=true", "quant.force_recompute_weight=false"],
        "there is no copy to keep",
    ),
    "kept_float8_weights_have_one_scale": (
        ["quant=float8_rowwise", "quant.force_recompute_weight=false"], "is false with float8_rowwise, where torchao",
    ),
    "float8_is_not_float64": (
        ["quant=float8_rowwise", "train.param_dtype=float64", "train.compute_dtype=float64",
         "train.reduce_dtype=float64"], "is float8_rowwise, but train.compute_dtype is float64",
    ),
    "scales_per_row_take_bfloat16": (["quant=float8_rowwise", "train.compute_dtype=float32"],
                                     "a product in float8_rowwise comes out in bfloat16"),
    "tokens_fill_float8_products": (["quant=float8_rowwise", "train.seq_len=500", "train.local_batch=1"],
                                    "is 500; with train.local_batch=1 that is 500 tokens"),
    "narrow_moments_belong_to_float32": (
        ["optim=adamw_8bit", "train.param_dtype=float64", "train.compute_dtype=float64", "train.reduce_dtype=float64"],
        "is adamw_8bit, but train.param_dtype is float64",
    ),
    "split_masters_have_bfloat16_weights": (["optim.master=split", "parallel=fsdp2", "train.compute_dtype=float32"],
                                            "no weight is stored in bfloat16"),
    "split_masters_are_on_the_device": (["optim.master=split", "parallel=fsdp2", "parallel.fsdp_cpu_offload=true"],
                                        "weights and masters are in host memory"),
    "float8_gather_casts_float32_shards": (
        ["optim.master=split", "parallel=fsdp2", "quant=float8_tensorwise", "quant.fsdp_float8_all_gather=true",
         "quant.precompute_scale=true"], "the float32 shards are what is cast to float8"),
    "emulation_has_no_short_accumulator": (
        ["quant=float8_rowwise", "quant.emulate=true", "quant.product=own", "quant.fast_accum=true"],
        "is true, but quant.emulate=true multiplies in float32"),
    "own_float8_copies_stay_on_the_device": (
        ["quant=float8_tensorwise", "quant.product=own", "quant.fsdp_float8_all_gather=true", "parallel=fsdp2",
         "parallel.fsdp_cpu_offload=true"], "is own, whose float8 copies of the shards lie on the device"),
    "pipeline_keys_are_read": (["parallel=single", "parallel.pp_schedule=GPipe", "parallel.pp_stages=[2,2]"],
                               "is GPipe, but nothing reads it: parallel.pp is 1"),
    "pipeline_keys_agree": (["parallel=pp2", SCHEDULE, "parallel.pp_schedule=GPipe"],
                            "is GPipe, but nothing reads it: parallel.pp_schedule_csv is given"),
    "pipeline_ranks_split_something": (["parallel=pp2", "++pipeline.plugins.pp._target_=null"],
                                       "is off, but 2 ranks are to share the layers"),
    "pipeline_stages_fit_schedule": (["parallel=pp2", "parallel.pp_stages_per_rank=2"], "is 2, which 1F1B cannot run"),
    "pipeline_stages_have_layers": (["parallel=pp3", "parallel.pp_schedule=ZBVZeroBubble"],
                                    "is 4, fewer than the 6 stages of 3 pipeline ranks"),
    "pipeline_stages_share_the_layers": (["parallel=pp2", "parallel.pp_stages=[1,2]"],
                                         "is [1,2]: the stages have 3 layers, the model 4"),
    "pipeline_is_full": (["parallel=fsdp2_pp4", "train.local_batch=2", "train.global_batch=12"],
                         "is 12: 3 microbatches of 4 sequences do not fill 1F1B on 4 ranks"),
    "pipeline_file_has_the_microbatches": (["parallel=pp2", SCHEDULE, "train.local_batch=2", "train.global_batch=8"],
                                           "is 8, which is 4 microbatches"),
    "pipeline_file_comes_to_its_end": (["parallel=pp2", "parallel.pp_schedule_csv=no/such.csv"],
                                       "no/such.csv: cannot be read: No such file"),
    "pipeline_ends_share_a_weight": (["parallel=fsdp2_pp2", "parallel.pp_schedule=DualPipeV",
                                      "model.tie_embeddings=true"], "DualPipeV has the first and the last stage"),
    "compiled_blocks_have_one_backward": (["parallel=pp2", "parallel.pp_schedule=DualPipeV", "compile=block"],
                                          "is 'block', but the schedule runs each backward in two parts"),
    "stages_are_gathered_whole": (["parallel=fsdp2_pp2", "parallel.fsdp_prefetch=1"], "is 1, but a pipeline gathers"),
    "mixtures_have_one_backward": (["model=moe_debug", "parallel=pp2", "parallel.pp_schedule=ZBVZeroBubble"],
                                   "runs each backward in two parts, in which the routers"),
    "blocks_are_recomputed_once": (["parallel=pp2", "parallel.pp_schedule=ZBVZeroBubble", "ac=full"],
                                   "is full, but the schedule runs each backward in two parts"),
    "tensor_ranks_share_features_of_the_shared_expert": (
        ["model=moe_debug", "parallel=tp4", "model.moe.shared_ffn_dim=250"], "is 250, which 4"),
    "some_block_is_a_mixture": (["model=moe_debug", "model.moe.first_dense=3", "model.moe.every=5"],
                                "one block in 5 is a mixture: none of the 4 is"),
    "keys_of_experts_are_read": (["model.moe.top_k=3"], "is 3, but nothing reads it: the model has no experts"),
    "groups_divide_experts": (["model=moe_debug", "model.moe.num_groups=3"], "is 3, which does not divide"),
    "chosen_groups_exist": (["model=moe_debug", "model.moe.num_groups=2", "model.moe.top_groups=3"], "is 3, more than"),
    "chosen_experts_exist": (["model=moe_debug", "model.moe.num_groups=4", "model.moe.top_k=3"],
                             "is 3, more than the 2 experts in the model.moe.top_groups=1 groups of a token"),
    "router_learns": (["model=moe_debug", "model.moe.top_k=1"], "the router gets no gradient"),
    "balance_sees_whole_sequences": (["model=moe_debug", "model.moe.balance_loss=1e-3", "parallel=cp2"],
                                     "a loss of whole sequences, which 2 cp ranks split"),
    "chunks_are_whole": (["model.attention_chunk=128", "parallel=cp2"],
                         "is 128, and the 2 cp ranks share sequences of 512"),
    "expert_ranks_have_experts": (["parallel=ep2"], "is 2, but the model has no experts"),
    "expert_ranks_are_there": (["model=moe_debug", "parallel=fsdp6_ep4"],
                               "is 4, which does not divide the 6 ranks of dp_shard*cp*tp"),
    "expert_ranks_share_experts": (["model=moe_debug", "parallel=fsdp6_tp2_ep3"],
                                   "is 3, which does not divide model.moe.num_experts=8"),
    "copies_of_experts_are_cut_evenly": (["model=moe_debug", "parallel=fsdp12_ep4"],
                                         "is 4: the 3 ranks that hold the same experts cannot cut"),
    "copies_of_experts_share_gradients": (["model=moe_debug", "parallel=fsdp1_tp4_ep2"],
                                          "is 2 of 4 tp ranks: without data ranks nothing sums"),
    "expert_ranks_hold_their_own_tokens": (
        ["model=moe_debug", "parallel=ep2_tp2", "parallel.tp_sequence_parallel=false"],
        "tp ranks hold the same tokens"),
    "expert_ranks_split_something": (["model=moe_debug", "parallel=ep2", "++pipeline.plugins.ep._target_=null"],
                                     "is off, but 2 ranks are to share out the experts"),
    "temperature_has_blocks": (["model.attention_temperature=0.1"], "every block has rotary embedding"),
    "one_degree_is_derived": (["parallel=auto", "parallel.dp_replicate=-1"], "dp_replicate and dp_shard are -1"),
    "mesh_fits_ranks": (["parallel=fsdp4", "launch.nproc=3"], "the mesh needs 4 ranks, but 3 are started"),
    "global_batch_is_whole": (["parallel=hsdp2x2", "train.local_batch=3", "train.global_batch=30"],
                              "is 30, not a multiple of train.local_batch=3 * 4 data ranks"),
    "data_ranks_share_gradients": (["parallel=fsdp2", "pipeline.plugins.fsdp._target_=null"],
                                   "is off, but 2 ranks share the data"),
    "planned_device_has_rates": (["runner=plan"], "is null: runner=plan reckons with the rates of a device"),
    "planned_ranks_have_links": (["runner=plan", "hardware=h200", "cluster=none", "parallel=fsdp16"],
                                 "is null, but 16 ranks are planned"),
    "sample_runs_alone": (["runner=sample", "runner.checkpoint=.", "parallel=fsdp2", "launch.nproc=2"], "not 2"),
    "state_fits_memory": (["model=llama3_8b", "hardware=h100_sxm", "parallel=single"],
                          "need 119.7 GiB on each of 1 shard"),
    "schedule_fits_steps": (["schedule=wsd", "schedule.warmup_steps=9", "schedule.decay_steps=4", "train.steps=10"],
                            "warm-up of 9 steps and decay of 4 do not fit into train.steps=10"),
    "wsd_decays": (["schedule=wsd", "schedule.decay_steps=0"], "wsd without decay is constant"),
    "float64_is_everywhere": (["train.param_dtype=float64"], "is auto, but train.param_dtype is float64"),
    "reduction_is_as_wide_as_compute": (["train.reduce_dtype=bfloat16", "train.compute_dtype=float32"], "may round"),
    "fused_kernels_run_here": (["kernels=fused"], "is fused, but there is no GPU here"),
    "group_patterns_compile": (["optim.groups=[{pattern: 'a('}]"], "no regular expression"),
    "names_are_folders": (["run.name=a/b"], "is 'a/b', which is no name for a folder"),
    "run_has_a_folder": (["run.dir=''"], "is '', which is no folder for a run"),
    "evaluation_has_batches": (["runner=eval", "runner.checkpoint=.", "validation=none"],
                               "is 0: runner=eval measures the loss of that many batches"),
    "resume_path_exists": (["checkpoint.resume=no/such/folder"], "'no/such/folder' does not exist"),
    "runner_has_a_checkpoint": (["runner=eval"], "is required: runner=eval reads a model from it"),
    "snapshots_need_a_gpu": (["profile=memory"], "this machine has no GPU"),
    "profile_is_of_training": (["profile=trace", "runner=bench"], "runner=bench would disturb what it measures"),
    "profile_fits_steps": (["profile=trace", "train.steps=5", "profile.wait=3"], "a window of 6 steps"),
    "profiled_ranks_exist": (["profile=trace", "profile.ranks=[0,2]", "parallel=fsdp2"], "2 ranks has no rank 2"),
    "bench_fits_steps": (["runner=bench", "train.steps=17"], "is 17, but runner=bench takes 18"),
    "bench_only_trains": (["runner=bench", "validation=default"], "what runner=bench leaves out"),
    "benchmarks_calibrate": (["hardware.calibrate=true"], "runner=train measures no rates"),
    "entity_is_part_of_a_file_name": (["runner=bench", "runner.entity=my_lab"], "is 'my_lab'"),
    "vocabulary_fits_model": (["tokenizer=sentencepiece", "tokenizer.vocab_size=5000"],
                              "is 4096, fewer than the 5000 ids"),
    "trained_vocabulary_has_a_size": (["tokenizer=sentencepiece", "tokenizer.vocab_size=null"], "is null"),
    "hf_tokenizer_has_a_file": (["tokenizer=hf"], "tokenizer=hf reads a file"),
    "files_have_paths": (["data=files"], "is empty"),
    "dataset_has_a_name": (["data=hf"], "data=hf reads a dataset"),
    "stream_keeps_its_order": (["data=c4", "data.shuffle=true"], "a stream is read in its own order"),
    "aim_is_installed": (["tracker=aim"], "needs the package 'aim'; it is not installed"),
    "datasets_is_installed": (["data=hf", "data.dataset=x"], "needs the package 'datasets'"),
    "sentencepiece_is_installed": (["tokenizer=sentencepiece"], "needs the package 'sentencepiece'"),
    "tokenizers_is_installed": (["tokenizer=hf", "tokenizer.path=tokenizer.json"], "needs the package 'tokenizers'"),
}
#: What only a machine with a GPU can be asked.
ON_A_GPU = ("own_products_are_emulated_on_a_cpu",)
RULES = {rule.name: rule for rule in rules.RULES}


@pytest.mark.parametrize("override", ["checkpoint.resume=", "run.dir=' '", "run.dir=/"])
def test_an_empty_path_is_not_the_current_folder(report, override: str) -> None:
    problem, = report(*BYTES, override).problems
    assert problem.key == override.partition("=")[0]


def test_every_rule_has_a_case() -> None:
    assert set(CASES) == set(RULES)
    assert len(RULES) == len(rules.RULES), "two rules of one name"


@pytest.fixture
def ask(compose, monkeypatch):
    """The problem of one rule under overrides; this machine has no GPU and, for *_is_installed, no optional package."""
    monkeypatch.setattr(machine, "gpus", lambda: [])

    def asked(name: str, overrides: list[str], *, everything: bool = False):
        """everything: the keys of all that is wrong, by the schema or by any rule."""
        with monkeypatch.context() as patch:
            if name.endswith("_is_installed"):
                patch.setattr(rules_data, "find_spec", lambda package: None)
            if name in ON_A_GPU:
                patch.setattr(machine, "gpus", lambda: ["H200"])
            tree = inspected(tuple(overrides))
            if everything:
                return {problem.key for problem in tree.problems + rules.check_rules(tree.values)}
            return RULES[name].check(View(tree.values))

    inspected = functools.cache(lambda overrides: rules.inspect(compose(*overrides)))
    return asked


@pytest.mark.parametrize("name", CASES)
def test_rule(ask, name: str) -> None:
    overrides, text = CASES[name]
    base = [] if any(one.startswith(("tokenizer", "tracker", "data")) for one in overrides) else BYTES
    problem = ask(name, base + overrides)
    assert problem is not None
    assert text in problem.message
    assert any(problem.key == key or problem.key.startswith((f"{key}.", f"{key}[")) or key.startswith(f"{problem.key}.")
               for key in RULES[name].keys), "a rule speaks of a key that it reads"
    ways = [way for way in problem.hint.split(" or ") if way and "<" not in way]
    wrong = ask(name, base + overrides, everything=True)
    for way in ways:
        if not way.startswith("pip install"):
            assert ask(name, base + overrides + shlex.split(way)) is None, way
            assert ask(name, base + overrides + shlex.split(way), everything=True) <= wrong, f"{way} is refused"
    assert ways or name in ("runner_has_a_checkpoint", "group_patterns_compile")


@pytest.mark.parametrize(("overrides", "hint"), [
    (["quant=float8_rowwise", "quant.emulate=true", "quant.fast_accum=true"], "quant.fast_accum=null"),
    (["quant.fsdp_float8_all_gather=true"], "quant.fsdp_float8_all_gather=false"),
])
def test_a_value_that_a_rule_refuses_is_not_to_be_read(report, overrides: list[str], hint: str) -> None:
    """The schema offers what would make a key read; not where a rule refuses the key's value then."""
    unread, refused = report(*BYTES, *overrides).problems
    assert unread.key == refused.key and "nothing reads it" in unread.message
    assert unread.hint == hint and hint in refused.hint.split(" or ")
    assert report(*BYTES, *overrides, hint).problems == []


def test_a_check_of_split_masters_is_of_the_device_that_runs(ask, monkeypatch) -> None:
    name, split = "split_masters_have_bfloat16_weights", [*BYTES, "optim.master=split", "parallel=fsdp2"]
    for runner in ("train", "check"):
        assert "auto, which is float32 without a GPU" in ask(name, [*split, f"runner={runner}"]).message
    problem = ask(name, [*split, "runner=check"])
    assert problem.hint == "optim.master=float32 or train.compute_dtype=bfloat16 or hardware=h200"
    for way in problem.hint.split(" or "):
        assert ask(name, [*split, "runner=check", way], everything=True) == set()
    assert ask(name, [*split, "runner=plan", "hardware=h200"]) is None
    assert ask(name, [*split, "hardware=h200"]) is not None, "a training runs here, whatever is described"
    monkeypatch.setattr(machine, "gpus", lambda: ["H200"])
    assert ask(name, [*split, "runner=check"]) is None


def test_the_shipped_default_keeps_every_rule(compose) -> None:
    view = View(rules.inspect(compose()).values)
    assert [rule.name for rule in rules.RULES if rule.check(view) is not None] == []


@pytest.mark.parametrize(("overrides", "hint"), [
    (["model.num_heads=12", "model.num_kv_heads=5"], "model.num_kv_heads=4 or model.num_kv_heads=6"),
    (["model.num_heads=8", "model.num_kv_heads=16"], "model.num_kv_heads=8"),
])
def test_nearest_kv_heads_on_both_sides(ask, overrides: list[str], hint: str) -> None:
    assert ask("kv_heads_divide_heads", overrides).hint == hint


@pytest.mark.parametrize(("overrides", "hint"), [
    (["train.global_batch=7", "train.local_batch=2"], "train.global_batch=6 or train.global_batch=8"),
    (["train.global_batch=3", "train.local_batch=2", "parallel=fsdp2"], "train.global_batch=4"),
    # dp_shard derived
    (["train.global_batch=9", "train.local_batch=1", "launch.nproc=4"],
     "train.global_batch=8 or train.global_batch=12"),
])
def test_nearest_batches(ask, overrides: list[str], hint: str) -> None:
    assert ask("global_batch_is_whole", overrides).hint == hint


def test_derived_degree_takes_only_multiples(ask) -> None:
    overrides = ["parallel=auto", "parallel.dp_replicate=4", "launch.nproc=6"]
    problem = ask("mesh_fits_ranks", overrides)
    assert problem.key == "parallel.dp_shard"
    assert problem.hint == "launch.nproc=4 or launch.nproc=8"
    for way in problem.hint.split(" or "):
        assert ask("mesh_fits_ranks", [*overrides, way]) is None


def test_tensor_parallel_peers_share_no_data(ask) -> None:
    off = "++pipeline.plugins.fsdp._target_=null"
    assert ask("data_ranks_share_gradients", ["parallel=tp2", off]) is None
    assert "2 ranks share the data" in ask("data_ranks_share_gradients", ["parallel=fsdp2_tp2", off]).message


def test_the_whole_sequence_on_every_rank_need_not_divide(ask) -> None:
    overrides = ["parallel=tp4", "train.seq_len=510"]
    hint = "parallel.tp=2 or train.seq_len=508 or train.seq_len=512 or " \
           "parallel.tp_sequence_parallel=false"
    assert ask("tensor_ranks_share_the_sequence", overrides).hint == hint


@pytest.mark.parametrize(("name", "overrides", "text"), [
    ("gathering_ahead_has_blocks", ["parallel=tp2", "parallel.fsdp_prefetch=1"], "one rank gathers no weights"),
    ("offload_has_a_device", ["parallel=tp2", "parallel.fsdp_cpu_offload=true"], "one data rank has no FSDP"),
    ("freed_memory_is_a_devices", ["parallel=tp2", "parallel.fsdp_reuse_memory=true"], "one data rank has no FSDP"),
])
def test_options_of_fsdp_without_fsdp(ask, name: str, overrides: list[str], text: str) -> None:
    problem = ask(name, overrides)
    assert text in problem.message
    assert ask(name, [*overrides, problem.hint]) is None


@pytest.mark.parametrize(("overrides", "hint"), [
    # 6 heads, 3 key/value heads: the smallest degree that all sizes share
    (["model.num_heads=6", "model.num_kv_heads=3", "model.dim=192", "model.ffn_dim=768", "model.vocab_size=4098",
      "train.seq_len=510"], "parallel=tp3 or compile.async_tp=false"),
    (["model.num_kv_heads=1"], "compile.async_tp=false"),
    (["launch.nproc=1"], "parallel=tp2 launch.nproc=null or compile.async_tp=false"),
])
def test_async_tp_offers_a_degree_that_divides_the_model(ask, overrides: list[str], hint: str) -> None:
    assert ask("async_tp_has_ranks", [*BYTES, "compile.async_tp=true", *overrides]).hint == hint


def test_async_tp_is_compiled_where_a_gpu_is_or_a_mode_is_given(ask, monkeypatch) -> None:
    overrides = ["compile.async_tp=true", "parallel=tp2"]
    assert ask("async_tp_is_compiled", [*overrides, "compile=none"]).message.startswith("is none; async tensor")
    monkeypatch.setattr(machine, "gpus", lambda: ["0", "1"])
    assert ask("async_tp_is_compiled", overrides) is None


@pytest.mark.parametrize(("overrides", "key"), [
    (["optim=adamw_8bit"], "compile.optimizer"), (["optim.implementation=foreach"], "optim.implementation"),
])
def test_a_compiled_update_is_adamws_own(ask, overrides: list[str], key: str) -> None:
    problem = ask("compiled_optimizer_is_torchs", [*BYTES, "compile.optimizer=true", *overrides])
    assert problem.key == key
    for way in problem.hint.split(" or "):
        more = shlex.split(way)
        assert ask("compiled_optimizer_is_torchs", [*BYTES, "compile.optimizer=true", *overrides, *more]) is None


@pytest.mark.parametrize(("overrides", "hint"), [
    (["parallel=pp4", "parallel.pp_schedule=ZBVZeroBubble", "train.global_batch=16"], "train.global_batch=28"),
    (["parallel=pp2", "parallel.pp_schedule=Interleaved1F1B", "train.global_batch=28"],
     "train.global_batch=24 or train.global_batch=32"),
    (["parallel=single", "parallel.pp=-1", "launch.nproc=3", "train.global_batch=8"], "train.global_batch=12"),
])
def test_smallest_batch_that_fills_the_pipe(ask, overrides: list[str], hint: str) -> None:
    assert ask("pipeline_is_full", overrides).hint == hint


@pytest.mark.parametrize(("rows", "problem"), [
    ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1", "row 2 (rank 1): the backward 1B1 (or 1I1 and 1W1) is missing"),
    ("0F0,0F1,0B0,0B1\n1F0,1B0,1B1,1F1", "row 2 (rank 1), column 3: 1B1 comes before 1F1"),
    ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "row 1 (rank 0), column 2: deadlock: 0B0 waits for 1B0"),
    ("0F0,0B0\n1F0,1C0", "row 2 (rank 1), column 2: '1C0' is no action"),
])
def test_a_broken_schedule_is_refused_before_a_rank_starts(report, tmp_path, rows: str, problem: str) -> None:
    (tmp_path / "broken.csv").write_text(rows)
    found, = report(*BYTES, "parallel=pp2", f"parallel.pp_schedule_csv={tmp_path}/broken.csv").problems
    assert found.key == "parallel.pp_schedule_csv"
    assert problem in found.message


def test_a_schedule_brings_its_microbatches(compose) -> None:
    from titanyaml.config import dump
    from titanyaml.config.degrees import global_batch, resolve_degrees

    for overrides, expected in [([SCHEDULE], 8), (["parallel.pp_schedule=DualPipeV"], 16), ([], 8)]:
        config = dump.to_dataclass(compose(*BYTES, "parallel=pp2", "train.local_batch=4", *overrides))
        assert global_batch(config, resolve_degrees(config.parallel, world_size=2)) == expected


def test_a_mesh_without_nproc_brings_its_own_ranks(ask) -> None:
    assert ask("mesh_fits_ranks", ["parallel=hsdp2x4"]) is None


def test_torchrun_gives_the_ranks(ask, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    problem = ask("mesh_fits_ranks", ["launch=external", "parallel=fsdp2"])
    assert problem.message == "the mesh needs 2 ranks, but 3 are started"
    assert problem.hint == "parallel=auto"
    monkeypatch.delenv("WORLD_SIZE")
    assert ask("mesh_fits_ranks", ["launch=external", "parallel=fsdp2"]) is None


@pytest.mark.parametrize(("compute", "param", "reduced", "legal"), [
    ("float64", "float64", "float64", True), ("auto", "float32", "float32", True),
    ("float32", "float32", "float32", True), ("bfloat16", "float32", "bfloat16", True),
    ("bfloat16", "float32", "float32", True),
    ("float64", "float32", "float32", False), ("float64", "float64", "float32", False),
    ("float32", "float32", "float64", False), ("auto", "float32", "bfloat16", False),
])
def test_dtype_combinations(ask, compute: str, param: str, reduced: str, legal: bool) -> None:
    overrides = [f"train.compute_dtype={compute}", f"train.param_dtype={param}", f"train.reduce_dtype={reduced}"]
    found = [ask("float64_is_everywhere", overrides), ask("reduction_is_as_wide_as_compute", overrides)]
    assert (found == [None, None]) is legal


def test_byte_vocabulary_is_the_tokenizers() -> None:
    from titanyaml.tokenizer.byte import ByteTokenizer

    assert ByteTokenizer().vocab_size == rules_data.BYTE_VOCABULARY


@pytest.mark.parametrize("row", rules_data.PACKAGES, ids=lambda row: row[2])
def test_packages_are_installed_by_setup(row: tuple) -> None:
    assert util.find_spec(row[2]) is not None


def test_all_rules_are_asked_and_collected(compose) -> None:
    found = rules.check_rules(compose(*BYTES, "model.num_kv_heads=3", "train.seq_len=600", "schedule=wsd",
                                      "schedule.decay_steps=300"))
    assert [problem.key for problem in found] == ["model.num_kv_heads", "train.seq_len", "schedule.warmup_steps"]


def test_a_rule_is_not_asked_about_a_key_that_is_wrong_itself(compose) -> None:
    values = rules.inspect(compose(*BYTES, "model.num_kv_heads=3")).values
    del values["model"]["num_heads"]
    with pytest.raises(Unknown):
        RULES["kv_heads_divide_heads"].check(View(values))
    assert rules.check_rules(values) == []


def test_parameter_count_is_the_published_one(compose) -> None:
    from titanyaml.config.rules_mesh import num_parameters

    assert num_parameters(compose("model=llama3_8b").model) == pytest.approx(8_030_261_248, rel=1e-3)
    assert num_parameters(compose("model=llama3_1b").model) == pytest.approx(1_235_814_400, rel=1e-3)


@pytest.mark.parametrize(("overrides", "text"), [
    (["parallel=fsdp2_pp2"], "parallel.pp is above 1"),
    (["parallel=fsdp2", "parallel.fsdp_cpu_offload=true"], "gradients go to host memory"),
    (["parallel=fsdp2", "train.local_batch=2", "train.global_batch=8"], "takes several backward passes"),
])
def test_freed_memory_takes_whole_gradients_alone(ask, overrides, text) -> None:
    name, overrides = "freed_memory_takes_whole_gradients", [*overrides, "parallel.fsdp_reuse_memory=true"]
    problem = ask(name, overrides)
    assert text in problem.message
    assert ask(name, [*overrides, problem.hint]) is None
    assert ask(name, ["parallel=fsdp2", "train.local_batch=2", "train.global_batch=4",
                      "parallel.fsdp_reuse_memory=true"]) is None


def test_an_empty_text_filters_nothing(ask) -> None:
    problem = ask("filters_name_modules", [*BYTES, "quant=float8_rowwise", "quant.filter_fqns=['',wq]"])
    assert problem.message == "has an empty text, which names no layer"
    assert problem.hint == "'quant.filter_fqns=[wq]'"
