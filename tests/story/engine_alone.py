"""An engine in a process that has no process group yet, then beside one: python -m story.engine_alone FOLDER.

FOLDER holds a model of `vllm_bench.write_model`. Prints `left clean` where nothing of an engine is left.
"""

import random
import sys
import warnings
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "engines" / "vllm"))
from vllm_bench import Bench, prompts, surroundings

from ppoctl.ports import SamplingParams

DRAW = SamplingParams(temperature=1.0, max_new_tokens=8)


def use(bench: Bench, *, has_group: bool) -> None:
    before = surroundings(), random.getstate()
    assert len(bench.draw(prompts(3), DRAW)) == 3
    bench.generator.close()
    assert (surroundings(), random.getstate()) == before
    assert dist.is_initialized() == has_group
    assert psutil.Process().children(recursive=True) == []


def main(folder: Path) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    bench = Bench.start(folder)
    use(bench, has_group=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0])
    use(bench, has_group=True)
    total = torch.ones(3)
    dist.all_reduce(total)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [1, 1, 1]
    dist.destroy_process_group()
    print("left clean")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
