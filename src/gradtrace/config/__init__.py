"""Every setting of a run, typed, with its meaning under it.

`gradtrace train KEY=VALUE …` overrides any of them by its path (`actor.optim.lr=1e-6`); a recipe
(`conf/NAME.yaml`, chosen with `recipe=NAME`) is a set of such values. `config_loader` composes them, and
`keys.check_fields` checks them: bounds and choices stand with each field, and `validate` of a class says what is wrong
only in combination.
"""

from __future__ import annotations

from gradtrace.config.algorithm import (
    AlgorithmConfig,
    DynamicSamplingConfig,
    LengthShapingConfig,
    OverlongConfig,
)
from gradtrace.config.findings import FindingsConfig
from gradtrace.config.instruments import (
    BlameConfig,
    EntropyProbeConfig,
    EntropyTraceConfig,
    FilesConfig,
    InfluenceTraceConfig,
    TraceConfig,
    TracinConfig,
)
from gradtrace.config.policy import (
    ActorConfig,
    CriticConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ReferenceConfig,
    RolloutConfig,
)
from gradtrace.config.run import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    TrainerConfig,
    ValidationConfig,
    WandbConfig,
)
from gradtrace.config.tasks import (
    ArithmeticConfig,
    CalculatorConfig,
    DataConfig,
    RewardConfig,
    TaskConfig,
    WarmStartConfig,
)

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "ArithmeticConfig",
    "BlameConfig",
    "CalculatorConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "DynamicSamplingConfig",
    "EntropyProbeConfig",
    "EntropyTraceConfig",
    "FilesConfig",
    "FindingsConfig",
    "InfluenceTraceConfig",
    "LengthShapingConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "OverlongConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RolloutConfig",
    "TaskConfig",
    "TraceConfig",
    "TracinConfig",
    "TrainerConfig",
    "ValidationConfig",
    "WandbConfig",
    "WarmStartConfig",
]
