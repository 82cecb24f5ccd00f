"""What breaks each rule of the table, and what the rule says then."""

from __future__ import annotations

from pathlib import Path

BYTES = ["tokenizer=bytes", "tracker=none"]

SCHEDULE = f"parallel.pp_schedule_csv={Path(__file__).with_name('schedule.csv')}"  # 2 ranks, 2 microbatches

#: rule: (overrides that break it, what it says).
CASES = {
    "kv_heads_divide_heads": (["model.num_heads=8", "model.num_kv_heads=3"], "is 3, which does not divide"),
    "head_dim_is_even": (["model.dim=260", "model.num_heads=8"], "a width of 32.5"),
    "rope_scaling_factors_are_ordered": (
        ["model=llama3_8b", "model.rope_scaling.low_freq_factor=8"],
        "is 4, below low_freq_factor=8",
    ),
    "seq_len_fits_model": (["train.seq_len=513"], "is 513, longer than model.max_seq_len=512"),
    "ac_every_reaches_a_block": (["ac=selective_layer", "ac.every=5"], "is 5, but the model has 4 blocks"),
    "ac_budget_needs_compile": (["ac=memory_budget", "compile=none"], "compile.mode=none compiles nothing here"),
    "ac_auto_needs_a_memory_limit": (["ac=auto"], "is null, and there is no GPU here"),
    "ac_auto_needs_a_dense_model": (
        ["ac=auto", "ac.memory_gib=8", "model=moe_debug"],
        "is not decided for mixtures of experts",
    ),
    "ac_auto_needs_a_backward_pass": (["ac=auto", "runner=eval", "runner.checkpoint=."], "has no backward pass"),
    "ac_auto_needs_its_plugin": (["ac=auto", "++pipeline.plugins.ac._target_=null"], "which would recompute"),
    "reserve_is_below_device_memory": (
        ["hardware=h200", "hardware.reserve_gib=200"],
        "but the device has hardware.memory_gib",
    ),
    "rates_are_below_peak": (
        ["hardware=h200", "hardware.gemm_fp8_tflops=2500"],
        "is 2500 TFLOP/s sustained, above twice hardware.peak_bf16_tflops=989",
    ),
    "compiled_loss_needs_torch_kernels": (
        ["compile.loss=true", "runner=plan", "hardware=h200", "parallel=tp2"],
        "computes the loss by a Triton kernel",
    ),
    "compiled_optimizer_needs_torch_adamw": (
        ["compile.optimizer=true", "kernels=fused", "runner=check"],
        "updates by a Triton kernel here",
    ),
    "cuda_graphs_are_replayable": (
        [
            "compile.cuda_graphs=true",
            "compile=none",
            "compile.backend=aot_eager",
            "parallel=fsdp2",
            "launch.nproc=2",
            "runner=check",
        ],
        "what 2 ranks gather and exchange has none; and compile.mode is none",
    ),
    "compile_backend_exists": (
        ["compile=block", "compile.backend=inductr"],
        "is inductr, which torch.compile does not know",
    ),
    "degrees_are_not_zero": (["parallel=single", "parallel.dp_shard=0"], "is 0"),
    "tp_needs_its_plugin": (
        ["parallel=tp2", "++pipeline.plugins.tp._target_=null"],
        "is off, but 2 ranks are to share every matrix",
    ),
    "tp_divides_num_heads": (
        ["parallel=tp4", "model.num_heads=6", "model.num_kv_heads=2"],
        "is 6, which 4 tensor-parallel ranks cannot share evenly",
    ),
    "tp_divides_num_kv_heads": (
        ["parallel=tp4", "model.num_heads=8", "model.num_kv_heads=2"],
        "is 2, which 4 tensor-parallel ranks cannot share",
    ),
    "tp_divides_ffn_dim": (["parallel=fsdp2_tp4", "model.ffn_dim=1001"], "is 1001, which 4"),
    "tp_divides_vocab_size": (["parallel=tp2", "model.vocab_size=4097"], "is 4097, which 2"),
    "tp_divides_seq_len": (
        ["parallel=single", "parallel.tp=-1", "launch.nproc=4", "train.seq_len=510"],
        "is 510, which 4",
    ),
    "cp_needs_its_plugin": (
        ["parallel=cp2", "++pipeline.plugins.cp._target_=null"],
        "is off, but 2 ranks are to share every sequence",
    ),
    "cp_divides_seq_len": (
        ["parallel=cp4_tp2", "train.seq_len=500"],
        "is 500, which 4 cp ranks of 2 tp ranks cannot share evenly",
    ),
    "ulysses_divides_heads": (
        ["parallel=cp4", "parallel.cp_method=ulysses", "model.num_kv_heads=2"],
        "which deals heads to 4 ranks",
    ),
    "ring_needs_no_document_mask": (
        ["parallel=cp2", "parallel.cp_method=ring", "model.document_mask=true"],
        "is ring, which is causal only",
    ),
    "model_graph_needs_one_data_rank": (["parallel=cp2", "compile=model"], "FSDP gathers weights over 2 data ranks"),
    "model_graph_needs_one_stage": (["parallel=pp2", "compile=model"], "is model, but the model is cut into stages"),
    "async_tp_needs_its_plugin": (
        ["parallel=tp2", "compile=block", "compile.async_tp=true", "++pipeline.plugins.async_tp._target_=null"],
        "is off, but compile.async_tp is true",
    ),
    "fsdp_prefetch_has_blocks": (["parallel=fsdp2", "parallel.fsdp_prefetch=4"], "is 4, but the model has 4 blocks"),
    "cpu_offload_needs_gpu_and_fsdp": (
        ["parallel=fsdp2", "parallel.fsdp_cpu_offload=true"],
        "is on, but there is no GPU here: all memory is host memory",
    ),
    "reuse_memory_needs_gpu_and_fsdp": (
        ["parallel=fsdp2", "parallel.fsdp_reuse_memory=true"],
        "is on, but there is no GPU here: a host has no streams",
    ),
    "reuse_memory_needs_whole_gradients": (
        [
            "parallel=fsdp2",
            "parallel.fsdp_reuse_memory=true",
            "optim.master=split",
            "train.compute_dtype=bfloat16",
            "runner=check",
        ],
        "what is kept is the rounded sum",
    ),
    "async_tp_excludes_mxfp8": (
        ["parallel=tp2", "compile=block", "compile.async_tp=true", "quant=mxfp8", "quant.emulate=true"],
        "is true with quant.recipe=mxfp8",
    ),
    "async_tp_needs_tp": (["compile.async_tp=true", "compile=block"], "is true, but parallel.tp is 1"),
    "async_tp_needs_compile": (["compile.async_tp=true", "parallel=tp2"], "is auto, which compiles on a GPU only"),
    "async_tp_needs_sequence_parallel": (
        ["compile.async_tp=true", "compile=block", "parallel=tp2", "parallel.tp_sequence_parallel=false"],
        "is false: the tp ranks then send",
    ),
    "async_tp_needs_inductor": (
        ["compile.async_tp=true", "compile=block", "parallel=tp2", "compile.backend=aot_eager"],
        "is aot_eager, which does not know",
    ),
    "async_tp_ops_are_usable": (
        ["compile.async_tp=true", "compile=block", "parallel=tp2", "compile.async_tp_ops=[]"],
        "is empty",
    ),
    "quant_needs_a_device_that_multiplies": (
        ["quant=float8_rowwise", "quant.product=own", "quant.fast_accum=true", "quant.filter_fqns=[wo]"],
        "is float8_rowwise, but this machine, without a GPU, has no fast float8 matmuls",
    ),
    "own_emulation_needs_cpu": (
        ["quant=float8_rowwise", "quant.product=own", "quant.grad_dtype=e5m2", "quant.emulate=true"],
        "emulates on a CPU only, and there is a GPU here",
    ),
    "kept_float8_weights_exclude_compile": (
        ["quant=float8_tensorwise", "quant.force_recompute_weight=false", "compile=block"],
        "is false, but with torchao's products a compiled graph casts each weight again",
    ),
    "filter_fqns_name_modules": (
        ["quant=float8_rowwise", "quant.filter_fqns=[wo,feed_foward]"],
        "has 'feed_foward', which is in no module's name",
    ),
    "quant_converts_a_layer": (
        ["quant=float8_rowwise", "quant.auto_filter_small_kn=true"],
        "but no layer can be converted: layers.3.attention.wo: 256 x 256: quant.auto",
    ),
    "float8_gather_needs_tensorwise": (
        ["quant=float8_rowwise", "quant.fsdp_float8_all_gather=true", "quant.precompute_scale=true", "parallel=fsdp2"],
        "is true with float8_rowwise, which casts a weight along both",
    ),
    "float8_gather_needs_shards": (
        ["quant=float8_tensorwise", "quant.fsdp_float8_all_gather=true", "parallel=auto", "launch.nproc=1"],
        "is true, but parallel.dp_shard is 1",
    ),
    "float8_gather_keeps_no_copy": (
        ["quant=float8_tensorwise", "quant.fsdp_float8_all_gather=true", "quant.force_recompute_weight=false"],
        "there is no copy to keep",
    ),
    "kept_float8_weights_need_one_scale": (
        ["quant=float8_rowwise", "quant.force_recompute_weight=false"],
        "is false with float8_rowwise, where torchao",
    ),
    "quant_excludes_float64": (
        [
            "quant=float8_rowwise",
            "train.param_dtype=float64",
            "train.compute_dtype=float64",
            "train.reduce_dtype=float64",
        ],
        "is float8_rowwise, but train.compute_dtype is float64",
    ),
    "rowwise_matmuls_exclude_float32": (
        ["quant=float8_rowwise", "train.compute_dtype=float32"],
        "a product in float8_rowwise comes out in bfloat16",
    ),
    "tokens_are_aligned_for_float8": (
        ["quant=float8_rowwise", "train.seq_len=500", "train.local_batch=1"],
        "is 500; with train.local_batch=1 that is 500 tokens",
    ),
    "narrow_moments_need_float32_params": (
        ["optim=adamw_8bit", "train.param_dtype=float64", "train.compute_dtype=float64", "train.reduce_dtype=float64"],
        "is adamw_8bit, but train.param_dtype is float64",
    ),
    "split_master_needs_bfloat16_weights": (
        ["optim.master=split", "parallel=fsdp2", "train.compute_dtype=float32"],
        "no weight is stored in bfloat16",
    ),
    "split_master_excludes_cpu_offload": (
        ["optim.master=split", "parallel=fsdp2", "parallel.fsdp_cpu_offload=true"],
        "weights and masters are in host memory",
    ),
    "split_master_excludes_float8_gather": (
        [
            "optim.master=split",
            "parallel=fsdp2",
            "quant=float8_tensorwise",
            "quant.fsdp_float8_all_gather=true",
            "quant.precompute_scale=true",
        ],
        "the float32 shards are what is cast to float8",
    ),
    "emulation_excludes_fast_accum": (
        ["quant=float8_rowwise", "quant.emulate=true", "quant.product=own", "quant.fast_accum=true"],
        "is true, but quant.emulate=true multiplies in float32",
    ),
    "own_float8_gather_excludes_cpu_offload": (
        [
            "quant=float8_tensorwise",
            "quant.product=own",
            "quant.fsdp_float8_all_gather=true",
            "parallel=fsdp2",
            "parallel.fsdp_cpu_offload=true",
        ],
        "is own, whose float8 copies of the shards lie on the device",
    ),
    "pp_keys_need_pp": (
        ["parallel=single", "parallel.pp_schedule=GPipe", "parallel.pp_stages=[2,2]"],
        "is GPipe, but nothing reads it: parallel.pp is 1",
    ),
    "pp_keys_agree": (
        ["parallel=pp2", SCHEDULE, "parallel.pp_schedule=GPipe"],
        "is GPipe, but nothing reads it: parallel.pp_schedule_csv is given",
    ),
    "pp_needs_its_plugin": (
        ["parallel=pp2", "++pipeline.plugins.pp._target_=null"],
        "is off, but 2 ranks are to share the layers",
    ),
    "pp_schedule_runs_stages_per_rank": (
        ["parallel=pp2", "parallel.pp_stages_per_rank=2"],
        "is 2, which 1F1B cannot run",
    ),
    "pp_stages_have_layers": (
        ["parallel=pp3", "parallel.pp_schedule=ZBVZeroBubble"],
        "is 4, fewer than the 6 stages of 3 pipeline ranks",
    ),
    "pp_stages_add_up_to_layers": (
        ["parallel=pp2", "parallel.pp_stages=[1,2]"],
        "is [1,2]: the stages have 3 layers, the model 4",
    ),
    "microbatches_fill_pipeline": (
        ["parallel=fsdp2_pp4", "train.local_batch=2", "train.global_batch=12"],
        "is 12: 3 microbatches of 4 sequences do not fill 1F1B on 4 ranks",
    ),
    "pp_schedule_file_matches_microbatches": (
        ["parallel=pp2", SCHEDULE, "train.local_batch=2", "train.global_batch=8"],
        "is 8, which is 4 microbatches",
    ),
    "pp_schedule_file_is_runnable": (
        ["parallel=pp2", "parallel.pp_schedule_csv=no/such.csv"],
        "no/such.csv: cannot be read: No such file",
    ),
    "tied_embeddings_need_separate_ends": (
        ["parallel=fsdp2_pp2", "parallel.pp_schedule=DualPipeV", "model.tie_embeddings=true"],
        "DualPipeV has the first and the last stage",
    ),
    "split_backward_excludes_compile": (
        ["parallel=pp2", "parallel.pp_schedule=DualPipeV", "compile=block"],
        "is block, but the schedule runs each backward in two parts",
    ),
    "split_backward_excludes_moe": (
        ["model=moe_debug", "parallel=pp2", "parallel.pp_schedule=ZBVZeroBubble"],
        "runs each backward in two parts, in which the routers",
    ),
    "split_backward_excludes_ac": (
        ["parallel=pp2", "parallel.pp_schedule=ZBVZeroBubble", "ac=full"],
        "is full, but the schedule runs each backward in two parts",
    ),
    "tp_divides_shared_ffn_dim": (
        ["model=moe_debug", "parallel=tp4", "model.moe.shared_ffn_dim=250"],
        "is 250, which 4",
    ),
    "moe_reaches_a_block": (
        ["model=moe_debug", "model.moe.first_dense=3", "model.moe.every=5"],
        "one block in 5 is a mixture: none of the 4 is",
    ),
    "moe_keys_need_experts": (["model.moe.top_k=3"], "is 3, but nothing reads it: the model has no experts"),
    "groups_divide_experts": (["model=moe_debug", "model.moe.num_groups=3"], "is 3, which does not divide"),
    "top_groups_fit_num_groups": (
        ["model=moe_debug", "model.moe.num_groups=2", "model.moe.top_groups=3"],
        "is 3, more than",
    ),
    "top_k_fits_num_experts": (
        ["model=moe_debug", "model.moe.num_groups=4", "model.moe.top_k=3"],
        "is 3, more than the 2 experts in the model.moe.top_groups=1 groups of a token",
    ),
    "router_gets_a_gradient": (["model=moe_debug", "model.moe.top_k=1"], "the router gets no gradient"),
    "balance_loss_needs_whole_sequences": (
        ["model=moe_debug", "model.moe.balance_loss=1e-3", "parallel=cp2"],
        "a loss of whole sequences, which 2 cp ranks split",
    ),
    "attention_chunk_needs_one_cp_rank": (
        ["model.attention_chunk=128", "parallel=cp2"],
        "is 128, and the 2 cp ranks share sequences of 512",
    ),
    "ep_needs_experts": (["parallel=ep2"], "is 2, but the model has no experts"),
    "ep_divides_its_ranks": (
        ["model=moe_debug", "parallel=fsdp6_ep4"],
        "is 4, which does not divide the 6 ranks of dp_shard*cp*tp",
    ),
    "ep_divides_num_experts": (
        ["model=moe_debug", "parallel=fsdp6_tp2_ep3"],
        "is 3, which does not divide model.moe.num_experts=8",
    ),
    "expert_shards_are_equal": (
        ["model=moe_debug", "parallel=fsdp12_ep4"],
        "is 4: the 3 ranks that hold the same experts cannot cut",
    ),
    "expert_replicas_need_fsdp": (
        ["model=moe_debug", "parallel=fsdp1_tp4_ep2"],
        "is 2 of 4 tp ranks: without data ranks nothing sums",
    ),
    "ep_needs_sequence_parallel": (
        ["model=moe_debug", "parallel=ep2_tp2", "parallel.tp_sequence_parallel=false"],
        "tp ranks hold the same tokens",
    ),
    "ep_needs_its_plugin": (
        ["model=moe_debug", "parallel=ep2", "++pipeline.plugins.ep._target_=null"],
        "is off, but 2 ranks are to share out the experts",
    ),
    "attention_temperature_needs_nope_blocks": (
        ["model.attention_temperature=0.1"],
        "every block has rotary embedding",
    ),
    "only_one_degree_is_derived": (["parallel=auto", "parallel.dp_replicate=-1"], "dp_replicate and dp_shard are -1"),
    "mesh_fits_ranks": (["parallel=fsdp4", "launch.nproc=3"], "the mesh dp_shard(4) needs 4 ranks, but 3 are started"),
    "data_ranks_divide_global_batch": (
        ["parallel=hsdp2x2", "train.local_batch=3", "train.global_batch=30"],
        "is 30, not a multiple of train.local_batch=3 * 4 data ranks",
    ),
    "data_ranks_need_fsdp_plugin": (
        ["parallel=fsdp2", "pipeline.plugins.fsdp._target_=null"],
        "is off, but 2 ranks share the data",
    ),
    "plan_needs_device_rates": (["runner=plan"], "is null: runner=plan reckons with the rates of a device"),
    "plan_needs_link_rates": (
        ["runner=plan", "hardware=h200", "cluster=none", "parallel=fsdp16"],
        "is null, but 16 ranks are planned",
    ),
    "sample_needs_one_rank": (["runner=sample", "runner.checkpoint=.", "parallel=fsdp2", "launch.nproc=2"], "not 2"),
    "state_fits_memory": (
        ["model=llama3_8b", "hardware=h100_sxm", "parallel=single"],
        "need 119.7 GiB on each of 1 shard",
    ),
    "schedule_fits_steps": (
        ["schedule=wsd", "schedule.warmup_steps=9", "schedule.decay_steps=4", "train.steps=10"],
        "warm-up of 9 steps and decay of 4 do not fit into train.steps=10",
    ),
    "wsd_needs_decay_steps": (["schedule=wsd", "schedule.decay_steps=0"], "wsd without decay is constant"),
    "float64_dtypes_go_together": (["train.param_dtype=float64"], "is auto, but train.param_dtype is float64"),
    "reduce_dtype_is_as_wide_as_compute_dtype": (
        ["train.reduce_dtype=bfloat16", "train.compute_dtype=float32"],
        "may round",
    ),
    "fused_kernels_need_gpu": (["kernels=fused"], "is fused, but there is no GPU here"),
    "optim_group_patterns_are_valid": (["optim.groups=[{pattern: 'a('}]"], "no regular expression"),
    "run_names_are_folder_names": (["run.name=a/b"], "is 'a/b', which is no name for a folder"),
    "run_dir_is_a_folder": (["run.dir=''"], "is '', which is no folder for a run"),
    "eval_needs_batches": (
        ["runner=eval", "runner.checkpoint=.", "validation=none"],
        "is 0: runner=eval measures the loss of that many batches",
    ),
    "checkpoint_to_resume_exists": (["checkpoint.resume=no/such/folder"], "'no/such/folder' does not exist"),
    "runner_checkpoint_exists": (["runner=eval"], "is required: runner=eval reads a model from it"),
    "memory_profile_needs_gpu": (["profile=memory"], "this machine has no GPU"),
    "profile_needs_training": (["profile=trace", "runner=bench"], "runner=bench would disturb what it measures"),
    "profile_fits_steps": (["profile=trace", "train.steps=5", "profile.wait=3"], "a window of 6 steps"),
    "profile_ranks_exist": (["profile=trace", "profile.ranks=[0,2]", "parallel=fsdp2"], "2 ranks has no rank 2"),
    "bench_fits_steps": (["runner=bench", "train.steps=17"], "is 17, but runner=bench takes 18"),
    "bench_only_trains": (["runner=bench", "validation=default"], "what runner=bench leaves out"),
    "calibrate_needs_bench": (["hardware.calibrate=true"], "runner=train measures no rates"),
    "bench_entity_fits_file_name": (["runner=bench", "runner.entity=my_lab"], "is 'my_lab'"),
    "tokenizer_fits_vocab_size": (
        ["tokenizer=sentencepiece", "tokenizer.vocab_size=5000"],
        "is 4096, fewer than the 5000 ids",
    ),
    "trained_tokenizer_needs_vocab_size": (["tokenizer=sentencepiece", "tokenizer.vocab_size=null"], "is null"),
    "hf_tokenizer_needs_a_file": (["tokenizer=hf"], "tokenizer=hf reads a file"),
    "files_data_needs_paths": (["data=files"], "is empty"),
    "hf_data_needs_a_name": (["data=hf"], "data=hf reads a dataset"),
    "streaming_excludes_shuffle": (["data=c4", "data.shuffle=true"], "a stream is read in its own order"),
    "aim_is_installed": (["tracker=aim"], "needs the package 'aim'; it is not installed"),
    "datasets_is_installed": (["data=hf", "data.dataset=x"], "needs the package 'datasets'"),
    "sentencepiece_is_installed": (["tokenizer=sentencepiece"], "needs the package 'sentencepiece'"),
    "tokenizers_is_installed": (["tokenizer=hf", "tokenizer.path=tokenizer.json"], "needs the package 'tokenizers'"),
}
#: What only a machine with a GPU can be asked.
ON_A_GPU = ("own_emulation_needs_cpu",)
