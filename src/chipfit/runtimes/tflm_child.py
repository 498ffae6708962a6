"""The child process of TensorFlow Lite Micro: it answers the requests of `chipfit.runtimes.child`."""

import runpy
from pathlib import Path

_ARENA = 1 << 30  #: address space for tensors [bytes]; only what is used becomes memory


class Interpreter:
    """A loaded file. Numbers of tensors are those of inputs and outputs."""

    def load(self, content, inputs, outputs, arena=0):
        """Load a file; return shapes, types and quantization of its inputs and outputs."""
        from tflite_micro.python.tflite_micro import runtime

        self.outputs = outputs
        self.tflm = runtime.Interpreter.from_bytes(content, arena_size=arena or _ARENA)
        details = [self.tflm.get_input_details(k) for k in range(inputs)]
        return details, [self.tflm.get_output_details(k) for k in range(outputs)]

    def run(self, inputs):
        """Run the network once; return all outputs."""
        for k, x in enumerate(inputs):
            self.tflm.set_input(x, k)
        self.tflm.invoke()
        return [self.tflm.get_output(k) for k in range(self.outputs)]

    def reset(self):
        """Bring variable tensors back to their first numbers."""
        self.tflm.reset()

    def loads(self, content, arena):
        """Return whether a file loads with an arena of so many bytes."""
        from tflite_micro.python.tflite_micro import runtime

        try:
            runtime.Interpreter.from_bytes(content, arena_size=arena)
        except RuntimeError:
            return False
        return True

    def print_allocations(self):
        """Print what the memory is used for."""
        self.tflm.print_allocations()


if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("serve.py")))["serve"](Interpreter())
