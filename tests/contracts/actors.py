"""Client actors that many tests share: to start one takes seconds, to give it another setup does not."""

import ray

from actors.placement import Placement
from actors.ray_executor import RayExecutor
from rayfl.rounds.setup import Setup


class SharedActors(RayExecutor):
    """A RayExecutor whose actors take one setup after another. They ask for no cores, so others can start beside it."""

    def __init__(self, setup: Setup, num_actors: int) -> None:
        super().__init__(ray.put(setup), Placement(num_actors, num_cpus=0.0, num_gpus=0.0))

    def take(self, setup: Setup) -> "SharedActors":
        """The same actors on another setup."""
        self.pool._setup = ray.put(setup)
        ray.get([actor.join.remote([self.pool._setup]) for actor in self.pool.ready])
        return self
