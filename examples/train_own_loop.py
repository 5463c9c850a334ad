"""A simulator's own loop that trains. In another terminal:

bin/train --config config/local_training.yaml --own-loop
"""

import sys

import gymnasium

from zmqrl import PolicyClient
from zmqrl.errors import TrainingEnded

BROKER, LEARNER = (
    sys.argv[1:3] if len(sys.argv) > 2 else ("tcp://127.0.0.1:5757", "tcp://127.0.0.1:5759")
)
STEPS = int(sys.argv[3]) if len(sys.argv) > 3 else 10_000

envs = gymnasium.make_vec("CartPole-v1", num_envs=32)
observation, info = envs.reset(seed=0)
episodes = done = 0
with PolicyClient(BROKER, learner=LEARNER, envs=envs, timeout=60) as policy:
    for step in range(1, STEPS + 1):
        try:
            result = policy.infer(observation)
        except TrainingEnded:
            break
        observation, reward, terminated, truncated, info = envs.step(result["actions"])
        policy.record(reward, terminated, truncated)
        episodes += (terminated | truncated).sum()
        if step % 250 == 0:
            print(f"step {step}: episodes last {250 * len(reward) / max(1, episodes - done):.0f} steps")
            done = episodes
