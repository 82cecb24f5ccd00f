"""The typed configuration: one dataclass per group, every default written once. ``root.py`` holds the whole tree.

How a key is written: ``config/keys.py``.
"""

from titanyaml.config.schema.hardware import Cluster as Cluster
from titanyaml.config.schema.hardware import Hardware as Hardware
from titanyaml.config.schema.model import Model as Model
from titanyaml.config.schema.model import MoE as MoE
from titanyaml.config.schema.model import RopeScaling as RopeScaling
from titanyaml.config.schema.plugins import ActivationCheckpointingConfig as ActivationCheckpointingConfig
from titanyaml.config.schema.plugins import CompileConfig as CompileConfig
from titanyaml.config.schema.plugins import Pipeline as Pipeline
from titanyaml.config.schema.plugins import PluginNode as PluginNode
from titanyaml.config.schema.plugins import Quant as Quant
from titanyaml.config.schema.root import Checkpoint as Checkpoint
from titanyaml.config.schema.root import Config as Config
from titanyaml.config.schema.root import Data as Data
from titanyaml.config.schema.root import Kernels as Kernels
from titanyaml.config.schema.root import Launch as Launch
from titanyaml.config.schema.root import Loss as Loss
from titanyaml.config.schema.root import Optim as Optim
from titanyaml.config.schema.root import Parallel as Parallel
from titanyaml.config.schema.root import ParamGroup as ParamGroup
from titanyaml.config.schema.root import Profile as Profile
from titanyaml.config.schema.root import Run as Run
from titanyaml.config.schema.root import Runner as Runner
from titanyaml.config.schema.root import Schedule as Schedule
from titanyaml.config.schema.root import Sweep as Sweep
from titanyaml.config.schema.root import TokenizerConfig as TokenizerConfig
from titanyaml.config.schema.root import Tracker as Tracker
from titanyaml.config.schema.root import Train as Train
from titanyaml.config.schema.root import Validation as Validation
