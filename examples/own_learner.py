"""A learner of one's own, in the style of a single-file PPO. In three other terminals:

bin/start-broker --config config/own_learner.yaml
bin/start-rollout-worker --config config/own_learner.yaml
bin/start-env-worker --config config/own_learner.yaml --mode train
"""

import sys

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from zmqrl.learner import Gate, Learner

GAMMA, LAMBDA, CLIP, EPOCHS, MINIBATCH = 0.98, 0.8, 0.2, 8, 128


class Agent(nn.Module):
    """What rollout workers serve, and what is learned."""

    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, observation, eval_mask):
        policy = Categorical(logits=self.actor(observation))
        actions = torch.where(eval_mask, policy.probs.argmax(-1), policy.sample())
        return {"actions": actions, "prev_logprobs": policy.log_prob(actions)}


def update(agent, optimizer, trajectory):
    observation, following = (
        torch.as_tensor(x, dtype=torch.float32)
        for x in (trajectory.observation, trajectory.next_observation())
    )
    done = trajectory.terminated | trajectory.truncated
    with torch.no_grad():
        values = agent.critic(observation).squeeze(-1).numpy()
        following_values = agent.critic(following).squeeze(-1).numpy()
    delta = trajectory.reward + GAMMA * following_values * ~trajectory.terminated - values
    advantage, last = np.zeros_like(delta), 0.0
    for t in reversed(range(len(delta))):
        advantage[t] = last = delta[t] + GAMMA * LAMBDA * ~done[t] * last
    old = torch.as_tensor(trajectory.policy["prev_logprobs"]).flatten()
    actions = torch.as_tensor(trajectory.actions).flatten()
    returns = torch.as_tensor(advantage + values, dtype=torch.float32).flatten()
    advantage = torch.as_tensor(advantage, dtype=torch.float32).flatten()
    observation = observation.flatten(0, 1)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(actions)).split(MINIBATCH):
            policy = Categorical(logits=agent.actor(observation[rows]))
            ratio = (policy.log_prob(actions[rows]) - old[rows]).exp()
            gain = (advantage[rows] - advantage[rows].mean()) / (advantage[rows].std() + 1e-8)
            clipped = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
            error = agent.critic(observation[rows]).squeeze(-1) - returns[rows]
            loss = 0.5 * error.square().mean() - clipped.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def main(endpoint="tcp://127.0.0.1:5759", updates=200):
    torch.manual_seed(0)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    with Learner(endpoint, gate=Gate(staleness_threshold=1)) as port:
        port.publish(agent.state_dict())
        episodes = steps = 0
        for number, trajectory in enumerate(port, 1):
            update(agent, optimizer, trajectory)
            version = port.publish(agent.state_dict())
            episodes += len(trajectory.final_index)
            steps += trajectory.env_steps
            if number % 20 == 0:
                print(
                    f"version {version}: episodes last {steps / max(1, episodes):.0f} steps", flush=True
                )
                episodes = steps = 0
            if number == updates:
                break


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
