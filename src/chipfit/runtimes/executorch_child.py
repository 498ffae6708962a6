"""The child process of ExecuTorch: it answers the requests of `chipfit.runtimes.child`."""

import runpy
from pathlib import Path


class Program:
    """A loaded file."""

    def load(self, content):
        """Load a file; return the shapes and types of its inputs, types by ExecuTorch's numbers."""
        import torch  # noqa: F401 -- the bindings need its libraries
        from executorch.extension.pybindings import _C

        self.content = content  # the module reads it
        self.module = _C._load_for_executorch_from_buffer(content)
        meta = self.module.method_meta("forward")
        inputs = [meta.input_tensor_meta(k) for k in range(meta.num_inputs())]
        return [(list(i.sizes()), int(i.dtype())) for i in inputs]

    def run(self, inputs):
        """Run the network once; return all outputs as arrays."""
        import torch

        results = self.module.forward([torch.from_numpy(x) for x in inputs])
        return [x.numpy().copy() for x in results]


if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("serve.py")))["serve"](Program())
