"""The configuration: YAML in, typed sections out, and precise errors.

Keys that RLinf has keep their names and meaning, so that a configuration can be moved over.
"""

from zmqrl.config.env import DelayConfig, EnvConfig, EnvModeConfig, StallConfig
from zmqrl.config.policies import NamedPolicyConfig
from zmqrl.config.pool import BrokerConfig, ClusterConfig, PlacementConfig, RolloutConfig
from zmqrl.config.reading import dump, for_policy, load
from zmqrl.config.runner import LoggerConfig, RunnerConfig
from zmqrl.config.section import Mode, Section
from zmqrl.config.security import SecurityConfig
from zmqrl.config.training import ActorConfig, AlgorithmConfig, OptimConfig, RewardConfig
from zmqrl.config.whole import Config

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "BrokerConfig",
    "ClusterConfig",
    "Config",
    "DelayConfig",
    "EnvConfig",
    "EnvModeConfig",
    "LoggerConfig",
    "Mode",
    "NamedPolicyConfig",
    "OptimConfig",
    "PlacementConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunnerConfig",
    "Section",
    "SecurityConfig",
    "StallConfig",
    "dump",
    "for_policy",
    "load",
]
