"""An asyncio program: several simulators, each at its own pace, on one client. In two other terminals:

bin/start-broker --config config/local_pool.yaml
bin/start-rollout-worker --config config/local_pool.yaml --policy zmqrl.demo:ReachPolicy
"""

import asyncio
import sys

import numpy as np

from zmqrl import AsyncPolicyClient


async def simulate(policy, number):
    hand, goal = np.zeros(3), np.random.default_rng(number).uniform(-1, 1, 3)  # your simulator
    for _ in range(100):
        result = await policy.infer_one({"achieved_goal": hand, "desired_goal": goal}, mode="eval")
        hand += 0.05 * result["actions"][:3]
        await asyncio.sleep(0.001 * number)  # your simulator's step
    print(f"simulator {number}: distance to the goal {np.linalg.norm(goal - hand):.3f}")


async def main(endpoint="tcp://127.0.0.1:5757"):
    async with AsyncPolicyClient(endpoint) as policy:
        await asyncio.gather(*(simulate(policy, number) for number in range(8)))


asyncio.run(main(*sys.argv[1:2]))
