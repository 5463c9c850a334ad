import sys

import numpy as np

from zmqrl import PolicyClient

hand, goal = np.zeros((4, 3)), np.random.default_rng(0).uniform(-1, 1, (4, 3))  # your simulators
with PolicyClient(sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5757") as policy:
    for _ in range(100):
        result = policy.infer({"achieved_goal": hand, "desired_goal": goal}, mode="eval")
        hand += 0.05 * result["actions"][:, :3]  # your simulators' step
print("distance to the goal:", np.linalg.norm(goal - hand, axis=1).round(3))
