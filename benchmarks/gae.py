"""Speed of `gae` of `algorithms/formulas` compared with a loop over time, at [2048, 8192] with holes.

    python benchmarks/gae.py

Prints the best of five alternating rounds: the loop that indexes columns, the loop over transposed contiguous copies,
and ppoctl's; their ratios; and the largest difference, relative to the scale of the result. Run it on an idle
machine: ppoctl's uses both cores, the loops one, and if another program occupies a core, every parallel region waits
for it ("ours on one core" is then more informative).
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from ppoctl.algorithms.formulas.generalized_advantages import gae

NUM_ROWS, NUM_COLUMNS = 2048, 8192
NUM_ROUNDS = 5
NUM_THREADS = 2
SETTINGS = ((1.0, 1.0), (1.0, 0.95), (0.99, 0.95), (0.9, 0.5), (1.0, 0.0), (0.0, 1.0))

Advantages = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]


def loop_over_columns(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Run the textbook loop: every step reads a column of row-major tensors."""
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        counts, value = mask[:, t], values[:, t]
        advantage = rewards[:, t] + gamma * next_value - value + gamma * lam * next_advantage
        next_value = torch.where(counts, value, next_value)
        next_advantage = torch.where(counts, advantage, next_advantage)
        advantages[:, t] = next_advantage
    return torch.where(mask, advantages, 0), torch.where(mask, advantages + values, 0)


def loop_over_transposed(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Run the same loop over contiguous copies with time first, including the copies."""
    rewards_by_time, values_by_time, mask_by_time = (x.t().contiguous() for x in (rewards, values, mask))
    advantages = torch.zeros_like(rewards_by_time)
    next_value = next_advantage = torch.zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        counts, value = mask_by_time[t], values_by_time[t]
        advantage = rewards_by_time[t] + gamma * next_value - value + gamma * lam * next_advantage
        next_value = torch.where(counts, value, next_value)
        next_advantage = torch.where(counts, advantage, next_advantage)
        advantages[t] = next_advantage
    by_row = advantages.t().contiguous()
    return torch.where(mask, by_row, 0), torch.where(mask, by_row + values, 0)


def ours(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    return gae(rewards, values, mask, gamma=gamma, lam=lam)


def ours_on_one_core(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    torch.set_num_threads(1)
    result = gae(rewards, values, mask, gamma=gamma, lam=lam)
    torch.set_num_threads(NUM_THREADS)
    return result


def grid() -> tuple[Tensor, Tensor, Tensor]:
    """Return rewards, values and a mask: responses of 1/8 to the full width, with spans of tool output masked out."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(NUM_ROWS, NUM_COLUMNS, generator=generator)
    values = torch.randn(NUM_ROWS, NUM_COLUMNS, generator=generator)
    lengths = torch.randint(NUM_COLUMNS // 8, NUM_COLUMNS + 1, (NUM_ROWS, 1), generator=generator)
    tool_output = torch.rand(NUM_ROWS, NUM_COLUMNS // 32, generator=generator) < 0.15
    mask = (torch.arange(NUM_COLUMNS) < lengths) & ~tool_output.repeat_interleave(32, dim=1)
    return rewards, values, mask


def main() -> None:
    torch.set_num_threads(NUM_THREADS)
    inputs = grid()
    programs: dict[str, Advantages] = {
        "loop over columns": loop_over_columns,
        "loop over transposed": loop_over_transposed,
        "ours": ours,
        "ours on one core": ours_on_one_core,
    }
    best_s = dict.fromkeys(programs, float("inf"))
    for _ in range(NUM_ROUNDS):
        for name, program in programs.items():
            start_s = time.perf_counter()
            program(*inputs, 1.0, 0.95)
            best_s[name] = min(best_s[name], time.perf_counter() - start_s)
    counted_frac = inputs[2].float().mean().item()
    print(f"[{NUM_ROWS}, {NUM_COLUMNS}], {counted_frac:.0%} counted, {NUM_THREADS} threads, best of {NUM_ROUNDS}")
    for name, seconds in best_s.items():
        print(f"{name:22} {seconds:7.3f} s   {seconds / best_s['ours']:5.1f} x ours")
    for gamma, lam in SETTINGS:
        differences = []
        for expected, found in zip(loop_over_transposed(*inputs, gamma, lam), ours(*inputs, gamma, lam), strict=True):
            differences.append(((expected - found).abs().max() / expected.abs().max()).item())
        print(f"gamma {gamma:4} lam {lam:4}   largest difference / scale {max(differences):.1e}")


if __name__ == "__main__":
    main()
