"""Two processes on half batches, as `torchrun` starts them, train what one does on the whole batch."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import chipfit
from tests.build import quantized
from tests.training.small import DATA, LABELS

SCRIPT = """
import datetime, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
import chipfit

def sharded(model):
    for layer in model.children() if LAYERS else ():
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)

def whole(state):
    return {k: x.full_tensor() if hasattr(x, "full_tensor") else x for k, x in state.items()}

def train(model, x, y, steps):
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=200))
    rank = dist.get_rank()
    x, y = torch.load(f"{sys.argv[1]}/data")
    half = slice(4 * rank, 4 * rank + 4)
    for how in sys.argv[2:]:
        folder, LAYERS = f"{sys.argv[1]}/{how}", how == "fsdp of layers"
        for sync in (True, False):
            training = {"weights": "lsq", "activations": "lsq(use_grad_scaling=False)", "bn_fold": 4, "bn_sync": sync}
            # in single precision, sums in another order let numbers round to the other side
            result = chipfit.load(f"{sys.argv[1]}/result").trains(training)
            model = result.model.double()
            parallel = nn.parallel.DistributedDataParallel(model) if how == "ddp" else sharded(model)
            for steps in (1, 4):
                train(parallel, x[half].double(), y[half], steps)
                torch.save(whole(model.state_dict()), f"{folder}/{sync}{rank}{steps}")
            trained = result.trained()
            if rank == 0:
                trained.save(f"{folder}/trained{sync}")
    for apart in (False, True):  # a policy of short floats is for weights alone
        result = chipfit.load(f"{sys.argv[1]}/result").trains("lsq")
        if apart:
            fully_shard(result.model.quant)
        fully_shard(result.model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        try:
            train(result.model, x[half], y[half], 1)
        except chipfit.errors.ConfigError as e:
            assert not apart and "fully_shard(model.quant)" in str(e)
        else:
            assert apart and result.trained().plan.tensors
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # a thread of torch that still runs would abort the end of the interpreter
"""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.bn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.body, self.bn2 = nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = torch.relu(self.bn1(self.stem(x)))
        return self.head(torch.relu(self.bn2(self.body(x)) + x).mean((2, 3)))


WAYS = "ddp", "fsdp", "fsdp of layers"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What two processes have trained in each way, as files in a folder, and what one process trains."""
    folder = tmp_path_factory.mktemp("ranks")
    plain = quantized(Net(), DATA)
    plain.save(folder / "result")
    torch.save((DATA[0], LABELS), folder / "data")
    (folder / "ranks.py").write_text(SCRIPT)
    for how in WAYS:
        (folder / how).mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(folder / "ranks.py"), str(folder), *WAYS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    namespace, states = {"__name__": "one"}, []
    exec(SCRIPT, namespace)
    one = plain.trains({"weights": "lsq", "activations": "lsq(use_grad_scaling=False)", "bn_fold": 4})
    one.model.double()
    for steps in (1, 4):
        start = {k: v.clone() for k, v in one.model.state_dict().items()}
        namespace["train"](one.model, DATA[0].double(), LABELS, steps)
        states.append((steps, start, {k: v.clone() for k, v in one.model.state_dict().items()}))
    return folder, states, one.trained()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("how", WAYS)
def test_two_processes_train_what_one_does_on_the_whole_batch(trained, how):
    folder, states, one = trained
    for steps, start, after in states:
        both, apart = (
            [torch.load(folder / how / f"{sync}{rank}{steps}") for rank in range(2)] for sync in (True, False)
        )
        for name, expected in after.items():
            assert torch.equal(both[0][name], both[1][name]), name
            way, off, other = ((x[name] - expected).abs().max() for x in (start, both[0], apart[0]))
            assert off <= 1e-4 * way, name
            if steps == 1 and name in ("stem.weight", "body.weight", "bn1.weight"):
                assert other > 0.3 * way > 0, name  # where each trains with what its own half shows
    both = chipfit.load(folder / how / "trainedTrue")
    for name, t in one.plan.tensors.items():
        if t.stored is not None:
            torch.testing.assert_close(both.plan[name].scale, t.stored.scale, rtol=1e-5, atol=0)
    assert both.verify(DATA).exact
