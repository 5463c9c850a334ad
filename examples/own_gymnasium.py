"""A Gymnasium script that asks a pool for its actions. In two other terminals:

bin/start-broker --config config/local_pool.yaml
bin/start-rollout-worker --config config/local_pool.yaml --policy examples/balance.py:Balance
"""

import sys

import gymnasium

from zmqrl import PolicyClient

env = gymnasium.make("CartPole-v1")
with PolicyClient(sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5757") as policy:
    for episode in range(5):
        observation, info = env.reset(seed=episode)
        steps = over = 0
        while not over:
            result = policy.infer_one(observation, mode="eval")
            observation, reward, terminated, truncated, info = env.step(result["actions"])
            steps, over = steps + 1, terminated or truncated
        print(f"episode {episode}: {steps} steps")
