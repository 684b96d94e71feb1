"""A Ray driver: ``python nsys_ray_driver.py CONFIG``; its actors run under nsys as the plan says."""

from __future__ import annotations

import json
import sys

import ray
from nsys_ray_worker import Worker

from rankscope.integrations.ray import runtime_env


def main(config: str) -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    environments = [runtime_env(config, roles=["actor"], rank=rank, world_size=2) for rank in range(2)]
    workers = [
        ray.remote(Worker).options(num_cpus=1, runtime_env=environment or None).remote(config, rank)
        for rank, environment in enumerate(environments)
    ]
    results = []
    for step in (1, 2):
        results = ray.get([worker.step.remote(step, step == 2) for worker in workers], timeout=120)
    for worker in workers:
        worker.leave.remote()
    print("RESULTS " + json.dumps(results))
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
