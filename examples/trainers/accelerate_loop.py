"""A loop on Accelerate, profiled: accelerate launch accelerate_loop.py profile.yaml."""

import sys

import torch
from accelerate import Accelerator

from rankscope import DistProfiler, ProfileController, annotate


def main(config, steps=6):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.DataLoader(torch.randn(128, 8), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    # After Accelerator(): rank and world size come from its process group.
    profiler = DistProfiler(config, role="trainer", total_steps=steps)
    batches = iter(data)
    with ProfileController(config, workers=[profiler], total_steps=steps) as controller:
        for n in range(1, steps + 1):
            with controller.step(n), annotate("train_step", scheduled=True):
                for j in range(accelerator.gradient_accumulation_steps):
                    with accelerator.accumulate(model), annotate(f"micro_batch{j}"):
                        accelerator.backward(model(next(batches)).square().mean())
                        optimizer.step()
                        optimizer.zero_grad()
                profiler.step()
    profiler.close()
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
