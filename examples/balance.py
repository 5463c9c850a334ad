class Balance:
    """A policy for the examples that balances CartPole, and needs no torch."""

    def infer(self, observation, eval_mask):
        return (observation[:, 2] + 0.5 * observation[:, 3] > 0).astype("int64")
