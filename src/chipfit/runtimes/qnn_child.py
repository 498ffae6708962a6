"""The child process of Qualcomm's QNN: it answers the requests of `chipfit.runtimes.child`."""

import runpy
from pathlib import Path

_NAME = "QNNExecutionProvider"


class Sessions:
    """Sessions of a file, one for each batch size: the graphs of an NPU have fixed sizes."""

    def load(self, content):
        """Keep a file and register the library that runs it."""
        import onnx
        import onnxruntime
        import onnxruntime_qnn

        self.content, self.sessions = content, {}
        onnxruntime.set_default_logger_severity(4)
        onnxruntime.register_execution_provider_library(_NAME, onnxruntime_qnn.get_library_path())
        self.device = next(d for d in onnxruntime.get_ep_devices() if d.ep_name == _NAME)
        self.options = {"backend_path": onnxruntime_qnn.get_qnn_htp_path(), "soc_model": "57"}
        graph = onnx.load_model_from_string(content).graph
        self.inputs = [i.name for i in graph.input]
        self.free = {d.dim_param for i in graph.input for d in i.type.tensor_type.shape.dim[:1] if d.dim_param}
        return self.inputs

    def _session(self, batch):
        import onnxruntime

        if batch not in self.sessions:
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
            for name in self.free:
                options.add_free_dimension_override_by_name(name, batch)
            options.add_provider_for_devices([self.device], self.options)
            self.sessions[batch] = onnxruntime.InferenceSession(self.content, options)
        return self.sessions[batch]

    def run(self, inputs):
        """Run one batch; return all outputs by name."""
        session = self._session(len(inputs[0]))
        names = [o.name for o in session.get_outputs()]
        return dict(zip(names, session.run(names, dict(zip(self.inputs, inputs)))))

    def executed(self):
        """Return the kinds of nodes and the provider that runs them, in order, for one sample."""
        info = self._session(1).get_provider_graph_assignment_info()
        return [(n.op_type, s.ep_name) for s in info for n in s.get_nodes()]


if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("serve.py")))["serve"](Sessions(), silent=True)
