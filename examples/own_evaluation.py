"""The pool as the model of Stable-Baselines3's `evaluate_policy`. In two other terminals:

bin/start-broker --config config/local_pool.yaml
bin/start-rollout-worker --config config/local_pool.yaml --policy examples/balance.py:Balance
"""

import sys

import gymnasium
from stable_baselines3.common.evaluation import evaluate_policy

from zmqrl import PolicyClient


class Model:
    def __init__(self, client):
        self.client = client

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        mode = "eval" if deterministic else "train"
        return self.client.infer(observation, mode=mode)["actions"], state


with PolicyClient(sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5757") as client:
    env = gymnasium.make("CartPole-v1")
    mean, deviation = evaluate_policy(Model(client), env, n_eval_episodes=5, warn=False)
print(f"reward of an episode: {mean:.1f}, give or take {deviation:.1f}")
