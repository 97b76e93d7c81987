"""Objective under plain FSDP2 (one shard group, two processes over gloo) against the whole one. Run by test_two_processes.py.

accelerate refuses to do this on a CPU; what is tested is that the objective and the fused loss's gradients survive sharding.
"""

import torch
import torch.distributed as dist
from tiny_training import tiny_examples
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from specdraft.data.source import Online
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.testing import tiny_target
from specdraft.training.loop import set_weights
from specdraft.training.objective import Objective, ObjectiveConfig, Rows, denominators, supervised_counts

STEPS = 3


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    target = tiny_target()
    torch.manual_seed(0)
    drafter = new_drafter(target, DrafterConfig(), HeadConfig(rank=8, init="svd"))
    start = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    objective = Objective(drafter, target, ObjectiveConfig(steps=STEPS))
    examples = tiny_examples(8, seed=1)
    share = denominators(supervised_counts([example.loss_mask for example in examples], STEPS), "rows")

    def loss(part):
        batch = Online(target).batch(part)
        rows = Rows.from_masks([example.loss_mask for example in part], STEPS)
        return objective(batch.taps, batch.last, batch.input_ids, rows, share)[0]

    whole = loss(examples)
    whole.backward()
    expected = {name: parameter.grad for name, parameter in objective.named_parameters()}
    objective.zero_grad()
    fully_shard(objective, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
    for number, part in enumerate(([examples[:2], examples[2:4]], [examples[4:5], examples[5:]])[rank]):
        objective.set_requires_gradient_sync(number == 1)
        (2 * loss(part)).backward()
    for name, parameter in objective.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(loss(examples), whole.detach())
    # As the trainer does at its end: whole parameters again, to decode with and to save.
    objective.reshard()
    set_weights(drafter, {name: tensor + 1 for name, tensor in start.items()}, "cpu")
    for name, tensor in drafter.to(torch.bfloat16).state_dict().items():
        assert type(tensor) is torch.Tensor
        torch.testing.assert_close(tensor, (start[name] + 1).bfloat16())
    taps, ids = torch.zeros(1, 4, drafter.fc.in_features, dtype=torch.bfloat16), torch.ones(1, 4, dtype=torch.int64)
    assert drafter.unroll(taps, ids, ids[:, :1], STEPS).shape == (STEPS, 1, 1, 32)
    print(f"process {rank}: sharded gradients are the whole ones")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
