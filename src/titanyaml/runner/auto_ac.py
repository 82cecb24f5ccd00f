"""``ac=auto`` becomes a concrete mode before anything is built.

config.yaml keeps ``auto``, so that a replay elsewhere decides anew. Its first line, ``status.json`` and the log name
the choice.
"""

import logging
from dataclasses import replace

import torch

from titanyaml import hardware
from titanyaml.config import schema
from titanyaml.config.schema import Config
from titanyaml.distributed import comm
from titanyaml.distributed.env import Env
from titanyaml.planner.model import devices, from_config
from titanyaml.planner.search import choose_ac
from titanyaml.planner.search.choose_ac import AcChoice
from titanyaml.planner.search.remedies import find_remedies
from titanyaml.rundir import RunDir, atomic_write

log = logging.getLogger("titanyaml")


def resolve(config: Config, env: Env) -> tuple[Config, AcChoice | None]:
    """``config`` with a concrete mode, and how it was chosen; ``config`` itself and None where ``ac.mode`` is not auto.

    Raises ConfigError where nothing fits, or neither the device's memory nor ``ac.memory_gib`` is known.
    """
    if config.ac.mode != "auto":
        return config, None
    device_rates, links = _device(config, env)
    device_gib = config.hardware.memory_gib
    # a check may be of another device than the one it runs on; a run has the memory that is there
    if env.device.type == "cuda" and (device_gib is None or config.runner.name != "check"):
        local_gib = torch.cuda.get_device_properties(env.device).total_memory / hardware.GIB
        device_gib = min(comm.gather_objects(local_gib, env))  # one decision for all ranks
    limit = choose_ac.memory_limit(config, device_gib=device_gib)
    job = from_config.job(_as_it_runs(config, env), hardware=device_rates, cluster=links)
    choice = choose_ac.choose(config, job, limit)
    resolved = choose_ac.concrete(config, choice)
    if not choice.fits:
        search = find_remedies(resolved, choice.plan, limit_gib=limit.gib, hardware=device_rates, cluster=links)
        raise choose_ac.refusal(choice, search.remedies)
    return resolved, choice


def announce(choice: AcChoice | None, run: RunDir, env: Env) -> None:
    """Log the choice, put it into status.json and above the first line of config.yaml."""
    if choice is None or not env.is_main:
        return
    log.info("%s", choice.sentence())
    run.write_status(ac=choice.record())
    path = run.path / "config.yaml"
    if path.exists():  # a comment: the keys of the file stay as they were typed
        atomic_write(path, f"# {choice.sentence()}\n{path.read_text(encoding='utf-8')}")


def _device(config: Config, env: Env) -> tuple[schema.Hardware, schema.Cluster]:
    """Rates and links to time the options with: as configured, else of the device here, else of an H200."""
    device_rates, links = config.hardware, config.cluster
    # an H200 will do for a device that is not known: only the order of the options counts, which it has too
    if device_rates.gemm_bf16_tflops is None:
        on_gpu = env.device.type == "cuda"
        option = hardware.detect(env.device) if device_rates.name == "auto" and on_gpu else None
        device_rates, shipped_links = devices.shipped_device(option or "h200")
        links = shipped_links if links.nvlink_gb_s is None else links
    elif links.nvlink_gb_s is None:
        links = devices.shipped_device("h200")[1]
    return device_rates, links


def _as_it_runs(config: Config, env: Env) -> Config:
    """``config`` with its ``auto`` values as they are meant on this device."""
    if env.device.type == "cuda":
        return config
    # a CPU compiles nothing unasked
    compile_mode = "none" if config.compile.mode == "auto" else config.compile.mode
    config = replace(config, compile=replace(config.compile, mode=compile_mode))
    if config.hardware.memory_gib is not None:  # a check of another device than this CPU
        return config
    dtype = "float32" if config.train.compute_dtype == "auto" else config.train.compute_dtype
    kernels = replace(config.kernels, name="torch")
    return replace(config, kernels=kernels, train=replace(config.train, compute_dtype=dtype))
